//! A store that takes 1 ms for everything: the daemon with a cache compared with itself without
//! one.

use super::hits::all_hits;
use super::rig::{Daemon, MIB, Rig, fill};
use super::{Error, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::fio::{Load, Until};
use crate::bench::server::Server;

/// Figure: random reads of the working set, one in flight. The bar is on this one: it is what the
/// delay itself makes of a read.
pub const SINGLE: &str = "cache_slow_4k_qd1_iops";
/// Figure: the same, 64 in flight on each of 4 connections. A store with many threads hides its
/// delay here, and what is compared are two servers at full load.
pub const DEEP: &str = "cache_slow_4k_qd64x4_iops";
/// Figure: sequential reads of 128 KiB, one in flight, of data not read before.
pub const READ_AHEAD: &str = "cache_slow_seqread_128k_qd1_MBps";

const WORKING_SET: u64 = 128 * MIB;
/// More than can be read within a run.
const LONG: u64 = 1 << 36;
const DELAYS: [&str; 2] = ["rdelay=1ms", "wdelay=1ms"];

/// One request in flight.
///
/// # Errors
/// [`Error`] when a server or fio fails to run, or reads of the warm cache miss.
pub fn single(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let load = Load { pattern: "randread", block: 4096, depth: 1, connections: 1 };
    working_set(rig, SINGLE, load, Bar::AtLeastRatio(20.0))
}

/// Many requests in flight.
///
/// # Errors
/// As [`single`].
pub fn deep(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let load = Load { pattern: "randread", block: 4096, depth: 64, connections: 4 };
    working_set(rig, DEEP, load, Bar::None)
}

/// Daemons with and without a cache, with these options of the volume and arguments.
fn pair(
    rig: &Rig<'_>,
    store: &Server,
    options: &str,
    arguments: &[&str],
) -> Result<[Daemon; 2], Error> {
    Ok([
        rig.ebbd("cached", &[("disk", store, &format!("cache=writethrough{options}"))], arguments)?,
        rig.ebbd("uncached", &[("disk", store, &format!("cache=none{options}"))], arguments)?,
    ])
}

fn working_set(rig: &Rig<'_>, name: &str, load: Load, bar: Bar) -> Result<Vec<Figure>, Error> {
    let size = format!("{WORKING_SET}");
    let arguments = [&["--filter=delay", "memory", &size], &DELAYS[..]].concat();
    let store = rig.nbdkit("store", &arguments)?;
    fill(&store, WORKING_SET, rig.random(0))?;
    let daemons = pair(rig, &store, "", &[])?;
    rig.warm(&daemons[0], WORKING_SET)?;
    let mut rates = vec![Vec::new(); daemons.len()];
    let until = Until::Seconds(rig.options().seconds);
    for order in rig.orders(daemons.len()) {
        for place in order {
            let daemon = &daemons[place];
            let run = || rig.fio(&daemon.server, load, WORKING_SET, until);
            let outcome = match place {
                0 => all_hits(rig, daemon, WORKING_SET, run)?.0,
                _ => run()?,
            };
            let how = ["with", "without"][place];
            log(format_args!("{name} {how} a cache: {:.0} IOPS", outcome.iops));
            rates[place].push(outcome.iops);
        }
    }
    Ok(Figure::from_rounds(name, &rates, Better::Higher, bar).into_iter().collect())
}

/// What read-ahead makes of a sequential read. The daemons are fresh in every round.
///
/// # Errors
/// [`Error`] when a server or fio fails to run.
pub fn read_ahead(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let size = format!("{LONG}");
    let arguments = [&["--filter=delay", "pattern", &size], &DELAYS[..1]].concat();
    let store = rig.nbdkit("store", &arguments)?;
    let load = Load { pattern: "read", block: 128 << 10, depth: 1, connections: 1 };
    let mut rates = vec![Vec::new(); 2];
    let until = Until::Seconds(rig.options().seconds);
    for order in rig.orders(2) {
        // What was read once is not wanted again: a small cache does, and the host stays free.
        let daemons =
            pair(rig, &store, ",read-only=true", &["--cache-max", "256M", "--cache-min", "256M"])?;
        for place in order {
            let outcome = rig.fio(&daemons[place].server, load, LONG, until)?;
            let how = ["with", "without"][place];
            log(format_args!("{READ_AHEAD} {how} a cache: {:.1} MB/s", outcome.megabytes));
            rates[place].push(outcome.megabytes);
        }
        for daemon in daemons {
            daemon.server.stop()?;
        }
    }
    Ok(Figure::from_rounds(READ_AHEAD, &rates, Better::Higher, Bar::None).into_iter().collect())
}
