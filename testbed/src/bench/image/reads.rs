//! Reads of 4 KiB through overlays, compared with those of the base itself. The peer is the same daemon, in a process of
//! its own that serves the base alone.

use std::time::Duration;

use super::client::{Client, Image, Load, choose};
use super::rig::{BASE, OVERLAY, Rig};
use super::{Error, log};
use crate::bench::cache::rig::{Daemon, WARM};
use crate::bench::figure::{Bar, Better, Figure};
use crate::harness::pattern::Random;

/// Figure: an empty overlay with a cache, of which every read finds its data.
pub const CACHED: &str = "image_base_read_4k_qd32_cached_iops";
/// Figure: an empty overlay without a cache.
pub const UNCACHED: &str = "image_base_read_4k_qd32_uncached_iops";
/// Figure: a chain of eight layers without a cache, of which each holds some of the blocks.
pub const CHAIN: &str = "image_chain8_read_4k_qd32_iops";

/// Deltas of the chain.
const DELTAS: u32 = 7;
/// Most blocks that are read of a cached disk: 256 MiB, more than any processor's cache.
const CACHED_BLOCKS: u32 = 1 << 16;
/// What the cache keeps while it is warmed, in spite of signs of memory pressure on a busy host.
const FLOOR: &str = "1G";
/// Passes over the blocks until they must be cached.
const PASSES: usize = 60;
/// Runs until one must have found everything.
const TRIES: usize = 5;

/// A daemon, the export that is read, and what it holds.
struct Side<'a> {
    daemon: Daemon,
    export: &'a str,
    image: Image,
}

impl Side<'_> {
    fn read(&mut self, places: &[u32], seconds: Option<u32>) -> Result<f64, Error> {
        let mut client = Client::open(self.daemon.server.socket(), self.export)?;
        let rate = client.run(&mut self.image, Load::single(places, false, seconds))?;
        client.disconnect()?;
        Ok(rate)
    }

    /// Reads, and how much of it the cache had, in per cent.
    fn counted(&mut self, places: &[u32], seconds: Option<u32>) -> Result<(f64, f64), Error> {
        let before = self.daemon.stat()?.all_reads()?;
        let rate = self.read(places, seconds)?;
        Ok((rate, self.daemon.stat()?.all_reads()?.since(before).hit_percent()?))
    }

    fn warm(&mut self, places: &[u32]) -> Result<(), Error> {
        self.daemon.set("cache_min", FLOOR)?;
        for _ in 0..PASSES {
            if self.counted(places, None)?.1 >= WARM {
                return self.daemon.set("cache_min", "0");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(cold("after many passes", self.daemon.stat()?.pressure_events()))
    }

    /// A run in which the cache has everything.
    fn hits(&mut self, places: &[u32], seconds: Option<u32>) -> Result<f64, Error> {
        for _ in 0..TRIES {
            let (rate, percent) = self.counted(places, seconds)?;
            if percent >= WARM {
                return Ok(rate);
            }
            log(format_args!("{}: {percent:.2} % hit: again", self.export));
            self.warm(places)?;
        }
        Err(cold("during a run", self.daemon.stat()?.pressure_events()))
    }
}

fn cold(when: &str, events: u64) -> Error {
    let what =
        format!("the cache does not have what was read {when}; {events} signs of memory pressure");
    Error::Failed { program: "ebbd".into(), what }
}

/// An empty overlay, with a cache.
///
/// # Errors
/// [`Error`] when a daemon fails, returns wrong data, or its cache does not keep what is read.
pub fn cached(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let cache = "cache = \"writethrough\"\n";
    let mut sides = empty_overlay_and_base(rig, cache)?;
    let places = choose(rig.blocks().min(CACHED_BLOCKS), CACHED_BLOCKS, &mut Random::new(5));
    for side in &mut sides {
        side.warm(&places)?;
    }
    compare(rig, CACHED, 0.95, &mut sides, |side, seconds| side.hits(&places, seconds))
}

/// An empty overlay, without a cache.
///
/// # Errors
/// [`Error`] when a daemon fails or returns wrong data.
pub fn uncached(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let mut sides = empty_overlay_and_base(rig, "")?;
    let places = choose(rig.blocks(), rig.blocks(), &mut Random::new(6));
    compare(rig, UNCACHED, 0.95, &mut sides, |side, seconds| side.read(&places, seconds))
}

/// An overlay that was never written and the base, each in a daemon of its own; all volumes have these lines.
fn empty_overlay_and_base<'a>(rig: &Rig<'_>, lines: &str) -> Result<[Side<'a>; 2], Error> {
    let base = rig.base_volume(lines)?;
    rig.remove(&format!("{OVERLAY}.delta"))?;
    let overlay = rig.overlay_volume(&format!("create = true\n{lines}"));
    let overlay = rig.ebbd("overlay", &format!("{base}{overlay}"), &[OVERLAY])?;
    let base = rig.ebbd("base", &base, &[BASE])?;
    Ok([
        Side { daemon: overlay, export: OVERLAY, image: rig.image() },
        Side { daemon: base, export: BASE, image: rig.image() },
    ])
}

/// A chain of eight layers, each delta written by a daemon of its own before it became a base.
///
/// # Errors
/// As [`uncached`].
pub fn chain(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let names: Vec<String> = (1..=DELTAS).map(|number| format!("layer{number}")).collect();
    let base = rig.base_volume("")?;
    let (mut config, mut below, mut image) = (base.clone(), BASE, rig.image());
    let mut top = String::new();
    for (name, number) in names.iter().zip(1..) {
        rig.remove(&format!("{name}.delta"))?;
        let new = format!("{config}{}", rig.delta_volume(name, below, "create = true"));
        let daemon = rig.ebbd("layer", &new, &[name])?;
        let mut client = Client::open(daemon.server.socket(), name)?;
        let places = choose(rig.blocks(), rig.blocks() / 16, &mut Random::new(100 + number));
        client.run(&mut image, Load::single(&places, true, None))?;
        client.flush()?;
        client.disconnect()?;
        daemon.server.stop()?;
        top = format!("{config}{}", rig.delta_volume(name, below, ""));
        config += &rig.delta_volume(name, below, "read_only = true");
        below = name;
    }
    let chain = rig.ebbd("overlay", &top, &[below])?;
    let base = rig.ebbd("base", &base, &[BASE])?;
    let mut sides = [
        Side { daemon: chain, export: below, image },
        Side { daemon: base, export: BASE, image: rig.image() },
    ];
    let places = choose(rig.blocks(), rig.blocks(), &mut Random::new(7));
    compare(rig, CHAIN, 0.8, &mut sides, |side, seconds| side.read(&places, seconds))
}

/// Rates of both sides in each round, ours first in `sides`.
fn compare(
    rig: &Rig<'_>,
    name: &str,
    least: f64,
    sides: &mut [Side<'_>; 2],
    read: impl Fn(&mut Side<'_>, Option<u32>) -> Result<f64, Error>,
) -> Result<Vec<Figure>, Error> {
    let mut rates = vec![Vec::new(); sides.len()];
    for order in rig.orders(sides.len()) {
        for at in order {
            let rate = read(&mut sides[at], Some(rig.options().common.seconds))?;
            log(format_args!("{name}, {}: {rate:.0} reads/s", sides[at].export));
            rates[at].push(rate);
        }
    }
    let bar = Bar::AtLeastRatio(least);
    Ok(Figure::from_rounds(name, &rates, Better::Higher, bar).into_iter().collect())
}
