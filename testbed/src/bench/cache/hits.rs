//! 4 KiB random reads that the cache has, beside servers that have everything in memory.

use super::rig::{Daemon, MIB, Rig, WARM, fill};
use super::{Error, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::fio::{Load, Outcome, Until};
use crate::bench::process;
use crate::bench::server::Server;

/// Figures with 64 requests in flight on each of 4 connections.
pub const DEEP: [&str; 3] = [
    "cache_hit_4k_qd64x4_iops_to_memory",
    "cache_hit_4k_qd64x4_iops_to_filter",
    "cache_hit_4k_qd64x4_cpu_us_per_hit",
];
/// Figures with one request in flight.
pub const SINGLE: [&str; 3] = [
    "cache_hit_4k_qd1_iops_to_memory",
    "cache_hit_4k_qd1_iops_to_filter",
    "cache_hit_4k_qd1_cpu_us_per_hit",
];

/// The working set: larger than any processor's cache, read whole within a second or two.
const WORKING_SET: u64 = 256 * MIB;
/// Runs until one must have found everything.
const TRIES: usize = 5;

/// Many requests in flight.
///
/// # Errors
/// [`Error`] when a server or fio fails to run, or reads miss.
pub fn deep(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    measure(rig, DEEP, Load { pattern: "randread", block: 4096, depth: 64, connections: 4 })
}

/// One request in flight.
///
/// # Errors
/// As [`deep`].
pub fn single(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    measure(rig, SINGLE, Load { pattern: "randread", block: 4096, depth: 1, connections: 1 })
}

/// Runs a load on the first `bytes` of the daemon's volume `disk`, and again if reads missed.
///
/// # Errors
/// [`Error::Failed`] when the cache does not keep what is read.
pub fn all_hits(
    rig: &Rig<'_>,
    daemon: &Daemon,
    bytes: u64,
    load: impl Fn() -> Result<Outcome, Error>,
) -> Result<(Outcome, f64), Error> {
    let mut percent = 0.0;
    for _ in 0..TRIES {
        let (before, used) = (daemon.stat()?.reads("disk")?, process::cpu_us(daemon.server.pid())?);
        let outcome = load()?;
        let used = process::cpu_us(daemon.server.pid())? - used;
        percent = daemon.stat()?.reads("disk")?.since(before).hit_percent()?;
        if percent >= WARM {
            return Ok((outcome, used / outcome.requests as f64));
        }
        let events = daemon.stat()?.pressure_events();
        log(format_args!("{percent:.2} % hit, {events} signs of memory pressure so far: again"));
        rig.warm(daemon, bytes)?;
    }
    let what = format!("the working set did not stay in the cache: {percent:.2} % of reads hit");
    Err(Error::Failed { program: "ebbd".into(), what })
}

fn measure(rig: &Rig<'_>, names: [&str; 3], load: Load) -> Result<Vec<Figure>, Error> {
    let size = format!("{WORKING_SET}");
    let store = rig.nbdkit("store", &["memory", &size])?;
    let memory = rig.nbdkit("memory", &["memory", &size])?;
    let filter =
        rig.nbdkit("filter", &["--filter=cache", "memory", &size, "cache-on-read=true"])?;
    let daemon = rig.ebbd("cached", &[("disk", &store, "cache=writethrough")], &[])?;
    for server in [&store, &memory, &filter] {
        fill(server, WORKING_SET, rig.random(0))?;
    }
    let servers: [&Server; 3] = [&daemon.server, &memory, &filter];
    rig.warm(&daemon, WORKING_SET)?;
    rig.pass(&memory, WORKING_SET)?;
    rig.pass(&filter, WORKING_SET)?;
    let mut rates = vec![Vec::new(); servers.len()];
    let mut costs = rates.clone();
    let until = Until::Seconds(rig.options().seconds);
    for order in rig.orders(servers.len()) {
        for place in order {
            let server = servers[place];
            let run = || rig.fio(server, load, WORKING_SET, until);
            let (outcome, cost) = if place == 0 {
                all_hits(rig, &daemon, WORKING_SET, run)?
            } else {
                let before = process::cpu_us(server.pid())?;
                let outcome = run()?;
                let used = process::cpu_us(server.pid())? - before;
                (outcome, used / outcome.requests as f64)
            };
            let name = ["ebbd", "nbdkit memory", "nbdkit --filter=cache"][place];
            log(format_args!(
                "hits, {} x {} in flight, {name}: {:.0} IOPS, {:.1} us, {cost:.2} us CPU per hit",
                load.connections, load.depth, outcome.iops, outcome.latency_us
            ));
            rates[place].push(outcome.iops);
            costs[place].push(cost);
        }
    }
    let kept = daemon.stat()?.cache("rewire_kept_bytes")?;
    log(format_args!("{} MiB of the hits were on lent memory", kept / MIB));
    let [ours, memory, filter] = [&rates[0], &rates[1], &rates[2]].map(Clone::clone);
    let to_memory = [ours.clone(), memory];
    let to_filter = [ours, filter];
    let (higher, lower) = (Better::Higher, Better::Lower);
    let figures = [
        Figure::from_rounds(names[0], &to_memory, higher, Bar::AtLeastRatio(1.1)),
        Figure::from_rounds(names[1], &to_filter, higher, Bar::AtLeastRatio(1.5)),
        Figure::from_rounds(names[2], &costs, lower, Bar::AtMostRatio(0.6)),
    ];
    Ok(figures.into_iter().flatten().collect())
}
