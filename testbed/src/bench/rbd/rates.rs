//! Rates through the daemon, beside those of fio's `rbd` engine and of a file volume.

use std::fs::File;
use std::io::Write;

use super::rig::{IMAGE_BYTES, Rig};
use super::{Error, log};
use crate::bench::cache::rig::{Daemon, WARM};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::fio::{Load, Outcome, Target, Until};
use crate::bench::io_context;

/// Figures without a cache, in the order of [`LOADS`].
pub const UNCACHED: [&str; 6] = [
    "rbd_read_4k_qd1_iops",
    "rbd_write_4k_qd1_iops",
    "rbd_read_4k_qd32_iops",
    "rbd_write_4k_qd32_iops",
    "rbd_read_1m_seq_mbps",
    "rbd_write_1m_seq_mbps",
];
/// Figure: writes with writeback, beside fio's `rbd` engine.
pub const WRITEBACK: &str = "rbd_writeback_write_4k_qd1_iops";
/// Figure: hits of the cache, beside those of a file volume of the same daemon.
pub const HITS: &str = "rbd_hit_4k_qd32_iops_to_file";

const LOADS: [Load; 6] = [
    Load { pattern: "randread", block: 4096, depth: 1, connections: 1 },
    Load { pattern: "randwrite", block: 4096, depth: 1, connections: 1 },
    Load { pattern: "randread", block: 4096, depth: 32, connections: 1 },
    Load { pattern: "randwrite", block: 4096, depth: 32, connections: 1 },
    Load { pattern: "read", block: 1 << 20, depth: 4, connections: 1 },
    Load { pattern: "write", block: 1 << 20, depth: 4, connections: 1 },
];
/// The floor of the cache while it is warmed.
const FLOOR: &str = "700M";
/// Passes until everything must be cached, and runs until one must have found everything.
const PASSES: usize = 60;
const TRIES: usize = 5;

/// Random and sequential requests without a cache.
///
/// # Errors
/// [`Error`] when the daemon or fio fails.
pub fn uncached(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let wanted = |name: &str| rig.options().wants(name);
    let loads = UNCACHED.iter().zip(LOADS).filter(|(name, _)| wanted(name));
    let loads: Vec<(&str, Load)> = loads.map(|(name, load)| (*name, load)).collect();
    compare(rig, "none", &loads, Bar::AtLeastRatio(0.95))
}

/// Random writes with writeback, one in flight.
///
/// # Errors
/// As [`uncached`].
pub fn writeback(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    compare(rig, "writeback", &[(WRITEBACK, LOADS[1])], Bar::AtLeastRatio(5.0))
}

fn compare(
    rig: &Rig<'_>,
    cache: &str,
    loads: &[(&str, Load)],
    bar: Bar,
) -> Result<Vec<Figure>, Error> {
    for image in ["ours", "peer"] {
        rig.full_image(image)?;
    }
    let daemon = rig.ebbd("disk", &[rig.volume("disk", "ours", cache)], &["disk"])?;
    let targets = [Target::Nbd(daemon.server.socket()), Target::Rbd("peer")];
    let until = Until::Seconds(rig.options().seconds);
    let mut figures = Vec::new();
    for (name, load) in loads {
        let mut rates = vec![Vec::new(); targets.len()];
        for order in rig.orders(targets.len()) {
            for at in order {
                let outcome = rig.fio(targets[at], *load, until)?;
                let rate = if name.ends_with("mbps") { outcome.megabytes } else { outcome.iops };
                let side = ["ebbd", "fio rbd"][at];
                log(format_args!("{name}, {side}: {rate:.1}, {:.0} us", outcome.latency_us));
                rates[at].push(rate);
                // What is dirty is not written beside the peer's run.
                daemon.client("disk")?.flush()?;
            }
        }
        figures.extend(Figure::from_rounds(*name, &rates, Better::Higher, bar));
    }
    daemon.server.stop()?;
    rig.remove_images(&["ours", "peer"])?;
    Ok(figures)
}

/// Random reads that the cache has: of an image, and of a file.
///
/// # Errors
/// [`Error`] when the daemon or fio fails, or the cache does not keep what is read.
pub fn hits(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    rig.full_image("ours")?;
    let file = rig.path("file.img");
    // Not sparse, as the image is not.
    let block = vec![0x5a; 1 << 20];
    File::create(&file)
        .and_then(|mut file| (0..IMAGE_BYTES >> 20).try_for_each(|_| file.write_all(&block)))
        .map_err(io_context("making a file"))?;
    // fio asks for the export `disk`: each volume is in a daemon of its own.
    let file = format!("disk=file:{},cache=writethrough", file.display());
    let sides = [
        rig.ebbd("image", &[rig.volume("disk", "ours", "writethrough")], &["disk"])?,
        rig.ebbd("file", &[file], &["disk"])?,
    ];
    for side in &sides {
        warm(rig, side)?;
    }
    let mut rates = vec![Vec::new(); sides.len()];
    for order in rig.orders(sides.len()) {
        for at in order {
            let rate = all_hits(rig, &sides[at])?.iops;
            log(format_args!("hits, {}: {rate:.0} reads/s", ["image", "file"][at]));
            rates[at].push(rate);
        }
    }
    for side in sides {
        side.server.stop()?;
    }
    rig.remove_images(&["ours"])?;
    let bar = Bar::AtLeastRatio(0.95);
    Ok(Figure::from_rounds(HITS, &rates, Better::Higher, bar).into_iter().collect())
}

/// One run, and the share of its reads that hit, in per cent.
fn counted(rig: &Rig<'_>, side: &Daemon, until: Until) -> Result<(Outcome, f64), Error> {
    let before = side.stat()?.reads("disk")?;
    let outcome = rig.fio(Target::Nbd(side.server.socket()), LOADS[2], until)?;
    Ok((outcome, side.stat()?.reads("disk")?.since(before).hit_percent()?))
}

fn warm(rig: &Rig<'_>, side: &Daemon) -> Result<(), Error> {
    side.set("cache_min", FLOOR)?;
    for _ in 0..PASSES {
        if counted(rig, side, Until::EachBlockOnce)?.1 >= WARM {
            return side.set("cache_min", "0");
        }
    }
    Err(cold(side)?)
}

fn all_hits(rig: &Rig<'_>, side: &Daemon) -> Result<Outcome, Error> {
    for _ in 0..TRIES {
        let (outcome, percent) = counted(rig, side, Until::Seconds(rig.options().seconds))?;
        if percent >= WARM {
            return Ok(outcome);
        }
        log(format_args!("{percent:.2} % hit: again"));
        warm(rig, side)?;
    }
    Err(cold(side)?)
}

fn cold(side: &Daemon) -> Result<Error, Error> {
    let events = side.stat()?.pressure_events();
    let what = format!("the cache does not keep what is read; {events} signs of memory pressure");
    Ok(Error::Failed { program: "ebbd".into(), what })
}
