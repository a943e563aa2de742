//! Checks the cache's accounting: `bufspace` against resident memory, and `bufwiredspace` against
//! the memory manager's own counters, after minutes of random load, scans, injected pressure, and a
//! kernel that discards lent pages.
//!
//! Every few seconds the load pauses, and a second later (the time the cache needs to notice
//! discarded pages) both sides are read. Memory of the arena that is not the cache's is subtracted:
//! its wired part is known, but not how many of its lent free blocks are still resident. Therefore:
//! - In the first half of the run no lent memory is discarded, and all of it is resident except for
//!   what `LazyFree` shows as missing.
//! - In the second half the kernel discards all lent memory just after the load paused (and parts
//!   of it under load), so that none of it is resident. What was still wired is lent after that.
//!
//! The remaining uncertainty makes the measured size an interval, whose width is a figure of its
//! own.

use std::ops::RangeInclusive;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::rig::{Daemon, MIB, Rig, fill};
use super::stat::Stat;
use super::{Error, log, reclaim, smaps};
use crate::bench::figure::{Bar, Figure};
use crate::harness::nbd::wire;
use crate::harness::pattern::Random;

/// Figures: error of `bufspace` at the end, and the worst on the way; how exactly it is known; error
/// of `bufwiredspace`, the worst of all.
pub const FIGURES: [&str; 4] = [
    "cache_bufspace_error_percent",
    "cache_bufspace_worst_error_percent",
    "cache_bufspace_unknown_percent",
    "cache_bufwiredspace_worst_error_bytes",
];

const CACHE: u64 = 384 * MIB;
const SCANNED: u64 = 4 * CACHE;
const WRITTEN: u64 = 128 * MIB;
/// What the random reads go to: most of the cache, so that there is something to lose.
const HOT: u64 = 320 * MIB;
/// The time between two readings.
const PERIOD: Duration = Duration::from_secs(6);
/// After the load paused.
const SETTLE: Duration = Duration::from_millis(1200);
/// Attempts to read both sides without a change in between, and the time between them.
const TRIES: usize = 20;
const RETRY: Duration = Duration::from_millis(250);

/// Both sides at one moment, bytes.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    bufspace: u64,
    /// Memory behind the cache: at least, at most.
    resident: RangeInclusive<u64>,
    wired: u64,
    /// Wired as the memory's accounts have it.
    accounted: u64,
}

impl Sample {
    fn error_percent(&self) -> f64 {
        let (low, high) = (*self.resident.start(), *self.resident.end());
        let off = self.bufspace.saturating_sub(high).max(low.saturating_sub(self.bufspace));
        percent(off, high)
    }

    fn unknown_percent(&self) -> f64 {
        percent(self.resident.end() - self.resident.start(), *self.resident.end())
    }
}

fn percent(part: u64, all: u64) -> f64 {
    part as f64 * 100.0 / all.max(1) as f64
}

/// Runs the load for the configured minutes.
///
/// # Errors
/// [`Error`] when a server fails, or the daemon's counters do not become stable.
pub fn measure(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let pattern = rig.nbdkit("store", &["pattern", &format!("{SCANNED}")])?;
    let memory = rig.nbdkit("memory", &["memory", &format!("{WRITTEN}")])?;
    fill(&memory, WRITTEN, rig.random(0))?;
    let volumes = [
        ("read", &pattern, "cache=writethrough,read-only=true"),
        ("write", &memory, "cache=writethrough"),
    ];
    // A floor, so that there is something to measure whatever the host's own pressure does.
    let limit = format!("{CACHE}");
    let daemon = rig.ebbd("cached", &volumes, &["--cache-max", &limit, "--cache-min", "64M"])?;
    let (gate, stop, taking) = (RwLock::new(()), AtomicBool::new(false), AtomicBool::new(false));
    let load = Load { daemon: &daemon, gate: &gate, stop: &stop, taking: &taking };
    let samples = std::thread::scope(|scope| {
        let threads = [
            scope.spawn(|| load.read_at_random(rig.random(1))),
            scope.spawn(|| load.scan(rig.random(2))),
            scope.spawn(|| load.write(rig.random(3))),
            scope.spawn(|| load.press(rig.random(4))),
        ];
        let samples = samples(rig, &daemon, &gate, &threads, &taking);
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap_or_else(|_| {
                Err(Error::Failed { program: "the load".into(), what: "panicked".into() })
            })?;
        }
        samples
    })?;
    daemon.server.stop()?;
    figures(&samples)
}

fn figures(samples: &[Sample]) -> Result<Vec<Figure>, Error> {
    let nothing = || Error::Failed { program: "the load".into(), what: "left no sample".into() };
    let last = samples.last().ok_or_else(nothing)?;
    let worst = |value: fn(&Sample) -> f64| samples.iter().map(value).fold(0.0, f64::max);
    let values = [
        (last.error_percent(), Bar::AtMost(1.0)),
        (worst(Sample::error_percent), Bar::AtMost(1.0)),
        (worst(Sample::unknown_percent), Bar::None),
        (worst(|sample| sample.wired.abs_diff(sample.accounted) as f64), Bar::AtMost(0.0)),
    ];
    let figure =
        |(name, (ours, bar)): (&&str, _)| Figure { name: (*name).into(), ours, peer: None, bar };
    Ok(FIGURES.iter().zip(values).map(figure).collect())
}

type Thread<'scope> = std::thread::ScopedJoinHandle<'scope, Result<(), Error>>;

fn samples(
    rig: &Rig<'_>,
    daemon: &Daemon,
    gate: &RwLock<()>,
    threads: &[Thread<'_>],
    taking: &AtomicBool,
) -> Result<Vec<Sample>, Error> {
    let half = Duration::from_secs(30) * rig.options().minutes;
    let (middle, end) = (Instant::now() + half, Instant::now() + 2 * half);
    let mut samples = Vec::new();
    while Instant::now() < end && !threads.iter().any(Thread::is_finished) {
        std::thread::sleep(PERIOD);
        let _quiet = gate.write();
        let mut gone = None;
        if Instant::now() >= middle && take_all(daemon)? {
            taking.store(true, Ordering::Relaxed);
            gone = Some(free_and_lent(&daemon.stat()?)?);
        }
        std::thread::sleep(SETTLE);
        let sample = at_rest(daemon, gone)?;
        log(format_args!(
            "{}: bufspace {} KiB, there {} to {} KiB ({:.3} %); wired {} KiB, accounted {} KiB",
            if gone.is_some() { "lent pages taken" } else { "nothing taken" },
            sample.bufspace / 1024,
            sample.resident.start() / 1024,
            sample.resident.end() / 1024,
            sample.error_percent(),
            sample.wired / 1024,
            sample.accounted / 1024,
        ));
        samples.push(sample);
    }
    Ok(samples)
}

/// Has the kernel take everything that is lent. Returns whether that is permitted.
fn take_all(daemon: &Daemon) -> Result<bool, Error> {
    let pid = daemon.server.pid();
    for (start, bytes) in smaps::arena(pid)?.ranges {
        if !reclaim::take(pid, start, bytes)? {
            log("may not have the kernel take lent pages (CAP_SYS_NICE): measured without");
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads both sides until nothing changed in between. `gone` is what was free and lent when the
/// kernel discarded it, if it did.
fn at_rest(daemon: &Daemon, gone: Option<u64>) -> Result<Sample, Error> {
    for _ in 0..TRIES {
        let before = look(daemon, gone)?;
        if look(daemon, gone)? == before {
            return Ok(before);
        }
        std::thread::sleep(RETRY);
    }
    Err(Error::Failed { program: "ebbd".into(), what: "does not come to rest without load".into() })
}

/// What the accounts of the cache's volumes say, wired and lent.
fn cache_owners(stat: &Stat) -> Result<(u64, u64), Error> {
    let owners = stat.owners()?;
    let caches = owners.iter().filter(|owner| owner.is_cache);
    Ok(caches.fold((0, 0), |sum, owner| (sum.0 + owner.wired, sum.1 + owner.unwired)))
}

/// Lent memory that is not the cache's, there or not.
fn free_and_lent(stat: &Stat) -> Result<u64, Error> {
    Ok(stat.memory("lent_bytes")?.saturating_sub(cache_owners(stat)?.1))
}

fn look(daemon: &Daemon, gone: Option<u64>) -> Result<Sample, Error> {
    let arena = smaps::arena(daemon.server.pid())?;
    let stat = daemon.stat()?;
    let (accounted, _) = cache_owners(&stat)?;
    let free = free_and_lent(&stat)?;
    let free_there = match gone {
        // What was lent since then is there.
        Some(gone) => 0..=free.saturating_sub(gone),
        None => {
            let missing = stat.memory("lent_bytes")?.saturating_sub(arena.lent);
            free.saturating_sub(missing)..=free
        }
    };
    let most = arena.resident.saturating_sub(stat.memory("wired_bytes")?.saturating_sub(accounted));
    let less = |bytes: &u64| most.saturating_sub(*bytes);
    Ok(Sample {
        bufspace: stat.cache("bufspace_bytes")?,
        resident: less(free_there.end())..=less(free_there.start()),
        wired: stat.cache("bufwiredspace_bytes")?,
        accounted,
    })
}

/// Runs until it is stopped, and pauses while the gate is shut.
struct Load<'a> {
    daemon: &'a Daemon,
    gate: &'a RwLock<()>,
    stop: &'a AtomicBool,
    /// Whether lent pages may be discarded.
    taking: &'a AtomicBool,
}

impl Load<'_> {
    /// Calls `step` again and again.
    fn repeat(&self, mut step: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
        while !self.stop.load(Ordering::Relaxed) {
            let _open = self.gate.read();
            step()?;
        }
        Ok(())
    }

    fn read_at_random(&self, mut random: Random) -> Result<(), Error> {
        let mut client = self.daemon.client("read")?;
        self.repeat(|| {
            let length = 4096 << random.below(5);
            let offset = random.below(HOT / 4096 - 16) * 4096;
            Ok(client.read(offset, length).map(drop)?)
        })
    }

    fn scan(&self, mut random: Random) -> Result<(), Error> {
        let mut client = self.daemon.client("read")?;
        let mut offset = 0;
        self.repeat(|| {
            client.read(offset, 128 << 10)?;
            offset += 128 << 10;
            if offset >= SCANNED || random.below(2000) == 0 {
                offset = random.below(SCANNED / MIB) * MIB;
            }
            Ok(())
        })
    }

    fn write(&self, mut random: Random) -> Result<(), Error> {
        let mut client = self.daemon.client("write")?;
        let mut data = vec![0; 64 << 10];
        data.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_ne_bytes()));
        self.repeat(|| {
            let sectors = u8::try_from(1 + random.below(128)).unwrap_or(1);
            let (length, part) = (512 * u32::from(sectors), 512 * usize::from(sectors));
            let offset = random.below(WRITTEN / 512 - 128) * 512;
            match random.below(8) {
                0 => client.command(wire::CMD_TRIM, 0, offset, length)?,
                1 => client.command(wire::CMD_WRITE_ZEROES, 0, offset, length)?,
                2..5 => client.write(offset, &data[..part], 0)?,
                _ => drop(client.read(offset, length)?),
            }
            Ok(())
        })
    }

    /// Signs of pressure, and the kernel taking lent pages.
    fn press(&self, mut random: Random) -> Result<(), Error> {
        self.repeat(|| {
            match random.below(100) {
                0 => self.daemon.pressure("L3")?,
                1..4 => self.daemon.pressure("L2")?,
                4..12 => self.daemon.pressure("L1")?,
                12..40 => self.take_lent(&mut random)?,
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        })
    }

    /// Has the kernel take what is lent in a part of the arena.
    fn take_lent(&self, random: &mut Random) -> Result<(), Error> {
        let pid = self.daemon.server.pid();
        let ranges = smaps::arena(pid)?.ranges;
        let place = usize::try_from(random.below(ranges.len() as u64)).unwrap_or(0);
        let taking = self.taking.load(Ordering::Relaxed);
        let Some(&(start, bytes)) = ranges.get(place).filter(|_| taking) else { return Ok(()) };
        let pages = bytes / 4096;
        let first = random.below(pages);
        let part = (1 + random.below(pages - first)).min(16 * MIB / 4096);
        reclaim::take(pid, start + first * 4096, part * 4096).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_way_to_the_interval() {
        let sample =
            |bufspace, accounted| Sample { bufspace, resident: 900..=1000, wired: 4096, accounted };
        for (bufspace, error) in [(890, 1.0), (900, 0.0), (1000, 0.0), (1020, 2.0)] {
            assert!((sample(bufspace, 4096).error_percent() - error).abs() < 1e-9, "{bufspace}");
        }
        let lines = figures(&[sample(1020, 0), sample(950, 4096)]).unwrap();
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        assert_eq!(lines[0], "cache_bufspace_error_percent 0.0000 - - <=1.00 ok");
        assert!(lines[1].ends_with("short") && lines[3].ends_with("short"), "{lines:?}");
        assert!(figures(&[]).is_err());
    }
}
