//! Snapshots and clones of a volume of 100 GiB while 32 random writes are in flight: how long the commands take, how long
//! new writes wait, and the slowest write beside that of a run without snapshots.
//!
//! The command of a snapshot ends when all that was acknowledged before is stable: what is dirty is written first.

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::client::{BLOCK, Client, Image, Load, choose};
use super::rig::{BASE, OVERLAY, Rig, volume};
use super::{Error, log};
use crate::bench::cache::rig::Daemon;
use crate::bench::figure::{Bar, Figure, median};
use crate::bench::io_context;
use crate::harness::pattern::Random;

/// Figures: the longest wait of new writes at a snapshot; the median time of the commands `volume snapshot` and `volume
/// add`; and the slowest write, whose peer is the slowest one of a run of the same length without them.
pub const FIGURES: [&str; 4] = [
    "image_snapshot_writes_wait_ms_longest",
    "image_snapshot_command_ms",
    "image_clone_command_ms",
    "image_snapshot_slowest_write_ms",
];

const SIZE: u64 = 100 << 30;
/// Blocks that are written: 64 MiB, which a store writes back within the pause between two snapshots.
const PLACES: u32 = 1 << 14;
/// Snapshots of a round: the depth of a chain allows no more.
const SNAPSHOTS: u32 = 5;
/// How long requests are sent before it is seen whether that is enough.
const RUN: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(700);
/// What the log says of the wait, after this.
const WAIT: &str = "milliseconds=";

/// Times of one run, in milliseconds.
#[derive(Debug, Default)]
struct Times {
    snapshots: Vec<f64>,
    clones: Vec<f64>,
    waits: Vec<f64>,
    slowest: f64,
    slowest_alone: f64,
}

/// Snapshots and clones under load.
///
/// # Errors
/// [`Error`] when the daemon fails, or refuses a snapshot or a clone.
pub fn snapshots(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let mut times = Times::default();
    for _ in 0..rig.options().common.rounds {
        round(rig, &mut times)?;
    }
    let longest = times.waits.iter().copied().fold(0.0, f64::max);
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    let figure = |name: &str, ours, peer, bar| Figure { name: name.into(), ours, peer, bar };
    let [wait, snapshot, clone, slowest] = FIGURES;
    Ok(vec![
        figure(wait, longest, None, Bar::AtMost(10.0)),
        figure(snapshot, middle(&times.snapshots), None, Bar::AtMost(10.0)),
        figure(clone, middle(&times.clones), None, Bar::AtMost(10.0)),
        figure(slowest, times.slowest, Some(times.slowest_alone), Bar::AtMost(50.0)),
    ])
}

fn round(rig: &Rig<'_>, times: &mut Times) -> Result<(), Error> {
    let base = rig.path("large.raw");
    let making = || io_context(format!("making {}", base.display()));
    File::create(&base).and_then(|file| file.set_len(SIZE)).map_err(making())?;
    rig.remove(&format!("{OVERLAY}.delta"))?;
    for number in 0..SNAPSHOTS {
        rig.remove(&format!("{OVERLAY}.delta@s{number}"))?;
        rig.remove(&format!("{}.delta", clone_name(number)))?;
    }
    let config = volume(BASE, &format!("file:{}", base.display()), "read_only = true");
    let overlay = rig.overlay_volume("create = true\ncache = \"writeback\"");
    let daemon = rig.ebbd("snapshots", &format!("{config}{overlay}"), &[OVERLAY])?;
    daemon.set("log", "info")?;
    let blocks = u32::try_from(SIZE / BLOCK as u64).unwrap_or(u32::MAX);
    let (mut image, mut random) = (Image::new(blocks), Random::new(9));
    let places = choose(blocks, PLACES, &mut random);
    let write = |image: &mut Image, enough: &dyn Fn() -> bool| -> Result<f64, Error> {
        let mut client = Client::open(daemon.server.socket(), OVERLAY)?;
        let load = Load { places: &places, blocks: 1, depth: 32, write: true, time: Some(RUN) };
        while !enough() {
            client.run(image, load)?;
        }
        let slowest = milliseconds(client.slowest());
        client.disconnect()?;
        Ok(slowest)
    };
    let until = |end: Instant| move || Instant::now() >= end;
    // The first writes make the map.
    write(&mut image, &until(Instant::now() + 4 * PAUSE))?;
    let begun = Instant::now();
    let done = AtomicBool::new(false);
    let slowest = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&mut image, &|| done.load(Ordering::Relaxed)));
        let made = (0..SNAPSHOTS).try_for_each(|number| snapshot(rig, &daemon, number, times));
        done.store(true, Ordering::Relaxed);
        let panicked = || Error::Failed { program: "a writer".into(), what: "panicked".into() };
        let slowest = writer.join().map_err(|_| panicked())?;
        made.and(slowest)
    })?;
    let alone = write(&mut image, &until(Instant::now() + begun.elapsed()))?;
    let text =
        fs::read_to_string(rig.path("snapshots.log")).map_err(io_context("reading a log"))?;
    let waits = text.lines().filter(|line| line.contains("layers were exchanged"));
    let waits = waits.filter_map(|line| line.split_once(WAIT)?.1.split_whitespace().next());
    let waits: Vec<f64> = waits.filter_map(|number| number.parse().ok()).collect();
    if waits.len() != SNAPSHOTS as usize {
        let what = format!("the log has {} waits of {SNAPSHOTS} snapshots", waits.len());
        return Err(Error::Failed { program: "ebbd".into(), what });
    }
    log(format_args!(
        "snapshots: writes waited {waits:.2?} ms, slowest {slowest:.1}, {alone:.1} without"
    ));
    times.waits.extend(waits);
    times.slowest = times.slowest.max(slowest);
    times.slowest_alone = times.slowest_alone.max(alone);
    daemon.server.stop()
}

fn clone_name(number: u32) -> String {
    format!("clone{number}")
}

/// One snapshot, and a clone above it.
fn snapshot(rig: &Rig<'_>, daemon: &Daemon, number: u32, times: &mut Times) -> Result<(), Error> {
    std::thread::sleep(PAUSE);
    let (name, clone) = (format!("s{number}"), clone_name(number));
    let begun = Instant::now();
    daemon.run(&["volume", "snapshot", "--wait", OVERLAY, &name])?;
    let took = milliseconds(begun.elapsed());
    let store = format!("file:{}", rig.path(&format!("{clone}.delta")).display());
    let begun = Instant::now();
    let base = format!("{OVERLAY}@{name}");
    daemon.run(&["volume", "add", "--create", "--base", &base, &clone, &store])?;
    let took_clone = milliseconds(begun.elapsed());
    log(format_args!("snapshot {took:.1} ms, clone {took_clone:.1} ms"));
    times.snapshots.push(took);
    times.clones.push(took_clone);
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
