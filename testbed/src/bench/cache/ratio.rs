//! What scans and greedy neighbours cost a hot set, in points of its hit ratio.
//!
//! The store is `nbdkit pattern`: any size, no memory. Reads are counted, one after the other, by a
//! seeded client; only the greedy neighbour runs beside it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::rig::{Daemon, MIB, Rig};
use super::{Error, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::server::Server;
use crate::harness::nbd::Client;
use crate::harness::pattern::Random;

/// Figure: points lost by a hot set that is not being read during a scan.
pub const SCAN_ALONE: &str = "cache_scan_alone_lost_points";
/// Figure: points lost by a hot set in use while a scan goes through.
pub const SCAN_BESIDE_LOAD: &str = "cache_scan_beside_load_lost_points";
/// Figure: points lost by a volume whose neighbour reads many times the cache.
pub const NOISY_NEIGHBOUR: &str = "cache_noisy_neighbour_lost_points";

const CACHE: u64 = 64 * MIB;
/// Three quarters of the cache: what a scan takes, the hot set loses.
const HOT: u64 = 48 * MIB;
const PAGE: u64 = 4096;
/// The scan reads so much, from beyond the hot set on.
const SCAN: u64 = 10 * CACHE;
const SCAN_PIECE: u32 = 128 << 10;
/// Hot pages read for each piece of the scan that runs beside them.
const HOT_PER_PIECE: u64 = 4;

/// Most passes over the hot set until it is cached.
const PASSES: usize = 40;

/// Less than its share of the cache.
const QUIET: u64 = 24 * MIB;
const NOISY: u64 = 16 * CACHE;
/// Between two reads of the quiet volume.
const PAUSE: Duration = Duration::from_micros(500);
/// Reads of the quiet volume: each page several times.
const QUIET_READS: u64 = 5 * QUIET / PAGE;
const NOISY_CLIENTS: u64 = 2;

/// A scan while the hot set is idle.
///
/// # Errors
/// [`Error`] when a server fails.
pub fn scan_alone(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    scan(rig, SCAN_ALONE, 0)
}

/// A scan beside reads of the hot set.
///
/// # Errors
/// [`Error`] when a server fails.
pub fn scan_beside_load(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    scan(rig, SCAN_BESIDE_LOAD, HOT_PER_PIECE)
}

/// The pages of the first `bytes` in random order.
fn shuffled(bytes: u64, random: &mut Random) -> Vec<u64> {
    let mut pages: Vec<u64> = (0..bytes / PAGE).collect();
    for last in (1..pages.len()).rev() {
        let other = usize::try_from(random.below(last as u64 + 1)).unwrap_or(0);
        pages.swap(last, other);
    }
    pages
}

/// Reads each hot page once, in random order: their hit ratio, in per cent.
fn hot_ratio(daemon: &Daemon, client: &mut Client, random: &mut Random) -> Result<f64, Error> {
    let before = daemon.stat()?.reads("disk")?;
    for page in shuffled(HOT, random) {
        client.read(page * PAGE, 4096)?;
    }
    daemon.stat()?.reads("disk")?.since(before).hit_percent()
}

fn scan(rig: &Rig<'_>, name: &str, beside: u64) -> Result<Vec<Figure>, Error> {
    let store = rig.nbdkit("store", &["pattern", &format!("{}", HOT + SCAN)])?;
    let mut lost = Vec::new();
    for round in 0..rig.options().rounds {
        lost.push(rig.undisturbed(|| {
            let mut random = rig.random(u64::from(round));
            let daemon = one_volume(rig, &store)?;
            let mut client = daemon.client("disk")?;
            let before = warm(&daemon, &mut client, &mut random)?;
            let events = daemon.stat()?.pressure_events();
            for piece in 0..SCAN / u64::from(SCAN_PIECE) {
                client.read(HOT + piece * u64::from(SCAN_PIECE), SCAN_PIECE)?;
                for _ in 0..beside {
                    client.read(random.below(HOT / PAGE) * PAGE, 4096)?;
                }
            }
            let after = hot_ratio(&daemon, &mut client, &mut random)?;
            log(format_args!("{name}: {before:.2} % of hot reads hit before, {after:.2} % after"));
            let events = daemon.stat()?.pressure_events() - events;
            client.disconnect()?;
            daemon.server.stop()?;
            Ok((before - after, events))
        })?);
    }
    let bar = Bar::AtMost(5.0);
    Ok(Figure::from_rounds(name, &[lost], Better::Lower, bar).into_iter().collect())
}

fn one_volume(rig: &Rig<'_>, store: &Server) -> Result<Daemon, Error> {
    let limit = format!("{CACHE}");
    let volume = [("disk", store, "cache=writethrough,read-only=true")];
    rig.ebbd("cached", &volume, &["--cache-max", &limit, "--cache-min", &limit])
}

/// Reads the hot set until it is cached, and twice at least. Returns its hit ratio, in per cent.
fn warm(daemon: &Daemon, client: &mut Client, random: &mut Random) -> Result<f64, Error> {
    hot_ratio(daemon, client, random)?;
    let mut best = 0.0_f64;
    for pass in 1..PASSES {
        let now = hot_ratio(daemon, client, random)?;
        best = best.max(now);
        // Later passes differ little: what does not fit after this many never will.
        if (pass >= 2 && now >= 99.0) || pass >= PASSES / 2 && now >= best - 0.1 {
            return Ok(now);
        }
    }
    Ok(best)
}

/// Two volumes: one reads its small hot set at a modest pace, the other many times the cache, at
/// random and in sequence, as fast as it may.
///
/// # Errors
/// [`Error`] when a server fails.
pub fn noisy_neighbour(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let store = rig.nbdkit("store", &["pattern", &format!("{NOISY}")])?;
    let mut lost = Vec::new();
    for round in 0..rig.options().rounds {
        lost.push(rig.undisturbed(|| beside_greed(rig, &store, u64::from(round)))?);
    }
    let bar = Bar::AtMost(10.0);
    Ok(Figure::from_rounds(NOISY_NEIGHBOUR, &[lost], Better::Lower, bar).into_iter().collect())
}

/// Points lost beside the neighbour, and the signs of memory pressure meanwhile.
fn beside_greed(rig: &Rig<'_>, store: &Server, round: u64) -> Result<(f64, u64), Error> {
    let mut random = rig.random(round);
    let limit = format!("{CACHE}");
    let options = "cache=writethrough,read-only=true";
    let volumes = [("quiet", store, options), ("noisy", store, options)];
    let daemon = rig.ebbd("cached", &volumes, &["--cache-max", &limit, "--cache-min", &limit])?;
    let before = quiet_ratio(&daemon, &mut random)?.max(quiet_ratio(&daemon, &mut random)?);
    let events = daemon.stat()?.pressure_events();
    let stop = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        let greedy: Vec<_> = (0..NOISY_CLIENTS)
            .map(|number| {
                let random = rig.random(round << 8 | (number + 1));
                let (daemon, stop) = (&daemon, &stop);
                scope.spawn(move || greed(daemon, random, number % 2 == 0, stop))
            })
            .collect();
        let beside = quiet_ratio(&daemon, &mut random);
        stop.store(true, Ordering::Relaxed);
        let read = greedy.into_iter().map(|thread| thread.join().unwrap_or(Ok(0)));
        let read = read.sum::<Result<u64, Error>>()?;
        log(format_args!("the neighbour read {} MiB meanwhile", read / MIB));
        if read < 2 * CACHE {
            let what = format!("the neighbour read only {read} bytes: the host is too busy");
            return Err(Error::Failed { program: "the NBD client".into(), what });
        }
        beside
    })?;
    log(format_args!("{NOISY_NEIGHBOUR}: {before:.2} % alone, {beside:.2} % beside"));
    let events = daemon.stat()?.pressure_events() - events;
    daemon.server.stop()?;
    Ok((before - beside, events))
}

/// Reads the quiet volume's hot set at random and gives its hit ratio, in per cent.
fn quiet_ratio(daemon: &Daemon, random: &mut Random) -> Result<f64, Error> {
    let mut client = daemon.client("quiet")?;
    let before = daemon.stat()?.reads("quiet")?;
    for _ in 0..QUIET_READS {
        client.read(random.below(QUIET / PAGE) * PAGE, 4096)?;
        std::thread::sleep(PAUSE);
    }
    let ratio = daemon.stat()?.reads("quiet")?.since(before).hit_percent();
    client.disconnect()?;
    ratio
}

/// Reads until stopped, at random or in sequence. Returns the bytes read.
fn greed(
    daemon: &Daemon,
    mut random: Random,
    in_sequence: bool,
    stop: &AtomicBool,
) -> Result<u64, Error> {
    let mut client = daemon.client("noisy")?;
    let mut read = 0;
    while !stop.load(Ordering::Relaxed) {
        let (offset, length) = match in_sequence {
            true => (read % NOISY, SCAN_PIECE),
            false => (random.below(NOISY / PAGE) * PAGE, 4096),
        };
        client.read(offset, length)?;
        read += u64::from(length);
    }
    client.disconnect()?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_read_once() {
        let mut pages = shuffled(1 << 20, &mut Random::new(1));
        assert_ne!(pages[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        pages.sort_unstable();
        assert!(pages.into_iter().eq(0..256));
    }
}
