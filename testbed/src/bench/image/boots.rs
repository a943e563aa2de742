//! Many guests that boot from clones of one base, over a store that takes a millisecond for each read.
//!
//! A boot is the recording in `boot.trace`: bursts of reads, with time in between in which the guest computes. The
//! recorded guest was emulated, so that this time is divided by [`FASTER`]; places beyond the end of the base begin again
//! at its start.

use std::time::{Duration, Instant};

use super::client::{Client, Load};
use super::rig::{BASE, Rig, volume};
use super::{Error, log};
use crate::bench::cache::rig::Daemon;
use crate::bench::figure::{Bar, Figure};
use crate::bench::server::Server;

/// Figure: seconds of a boot among ten at the same time, a hundred in all; its peer is one alone, after the first.
pub const BOOTS: &str = "image_boots100_seconds";

const GUESTS: usize = 100;
const TOGETHER: usize = 10;
/// How much faster a guest computes than the recorded one.
const FASTER: u32 = 5;
const TRACE: &str = include_str!("boot.trace");

/// Reads that a guest has in flight together.
struct Burst {
    /// Since the burst before ended.
    after: Duration,
    /// The first block of each read, and blocks.
    reads: Vec<(u32, u32)>,
}

/// The recording, on a base of so many blocks; `None` if it is damaged.
fn trace(blocks: u32) -> Option<Vec<Burst>> {
    let read = |text: &str| {
        let (start, count) = text.split_once('+')?;
        let (start, count) = (start.parse::<u32>().ok()?, count.parse::<u32>().ok()?);
        Some((start % blocks.checked_sub(count)?.max(1), count))
    };
    let burst = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let after = Duration::from_micros(words.next()?.parse().ok()?) / FASTER;
        Some(Burst { after, reads: words.map(read).collect::<Option<_>>()? })
    };
    TRACE.lines().filter(|line| !line.starts_with('#')).map(burst).collect()
}

/// Seconds of one boot.
fn boot(rig: &Rig<'_>, daemon: &Daemon, name: &str, trace: &[Burst]) -> Result<f64, Error> {
    let (mut client, mut image) = (Client::open(daemon.server.socket(), name)?, rig.image());
    let began = Instant::now();
    for burst in trace {
        std::thread::sleep(burst.after);
        // A run has reads of one length.
        for reads in burst.reads.chunk_by(|one, next| one.1 == next.1) {
            let places: Vec<u32> = reads.iter().map(|(start, _)| *start).collect();
            let (places, blocks) = (&places[..], reads[0].1);
            client.run(&mut image, Load { places, blocks, depth: 4, write: false, time: None })?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    client.disconnect()?;
    Ok(seconds)
}

/// Boots one guest alone, another one alone, and then a hundred, ten at a time.
///
/// # Errors
/// [`Error`] when a server fails or returns wrong data.
pub fn boots(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let socket = rig.path("slow.sock");
    let mut nbdkit = std::process::Command::new("nbdkit");
    nbdkit.args(["--foreground", "--filter=delay", "--unix"]).arg(&socket);
    nbdkit.arg("file").arg(rig.base()?).arg("rdelay=1ms");
    let store = Server::start("nbdkit", nbdkit, socket, rig.path("slow.log"), ["disk"])?;
    let uri = format!("nbd+unix:///disk?socket={}", store.socket().display());
    let mut config = format!("cache_min = \"{}\"\n", rig.bytes() / 4);
    config += &volume(BASE, &uri, "read_only = true");
    let names: Vec<String> = (0..GUESTS + 2).map(|number| format!("guest{number}")).collect();
    for name in &names {
        rig.remove(&format!("{name}.delta"))?;
        config += &rig.delta_volume(name, BASE, "create = true");
    }
    let served: Vec<&str> = names.iter().map(String::as_str).collect();
    let daemon = rig.ebbd("boots", &config, &served)?;
    let damaged = || Error::Failed { program: "boot.trace".into(), what: "is damaged".into() };
    let trace = trace(rig.blocks()).ok_or_else(damaged)?;
    let first = boot(rig, &daemon, &names[0], &trace)?;
    let alone = boot(rig, &daemon, &names[1], &trace)?;
    let mut seconds = Vec::new();
    for together in names[2..].chunks(TOGETHER) {
        let times: Result<Vec<f64>, Error> = std::thread::scope(|scope| {
            let boots =
                together.iter().map(|name| scope.spawn(|| boot(rig, &daemon, name, &trace)));
            let panicked = || Error::Failed { program: "a guest".into(), what: "panicked".into() };
            let boots: Vec<_> = boots.collect();
            boots.into_iter().map(|boot| boot.join().map_err(|_| panicked())?).collect()
        });
        seconds.extend(times?);
    }
    let mean = seconds.iter().sum::<f64>() / GUESTS as f64;
    log(format_args!("{BOOTS}: first {first:.2} s, alone {alone:.2} s, of a hundred {mean:.2} s"));
    daemon.server.stop()?;
    store.stop()?;
    let bar = Bar::AtMostRatio(1.2);
    Ok(vec![Figure { name: BOOTS.to_owned(), ours: mean, peer: Some(alone), bar }])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recorded_boot_stays_within_the_base() {
        let bursts = trace(1 << 16).expect("a recording that can be read");
        let reads: Vec<(u32, u32)> = bursts.iter().flat_map(|burst| burst.reads.clone()).collect();
        assert!(reads.iter().all(|(start, count)| *count > 0 && start + count <= 1 << 16));
        let blocks: u32 = reads.iter().map(|(_, count)| count).sum();
        assert!((4096..65536).contains(&blocks), "{blocks} blocks");
        let computes: Duration = bursts.iter().map(|burst| burst.after).sum();
        assert!(computes < Duration::from_secs(10), "{computes:?}");
    }
}
