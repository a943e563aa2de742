//! What a guest beyond the limit of persistent grants costs its neighbour: `bench-cap`,
//! over shared memory, on one processor whose clock counts instructions.
//!
//! It runs in dom0 of a machine without guests, since time is instructions there: a figure repeats
//! whatever else the host does, which a 99th percentile on a busy host does not.

use crate::Result;
use crate::bench::figure::{Bar, Figure};
use crate::harness::binary;
use crate::xen::Machine;
use std::time::Duration;

/// A guest's first pass through its pages takes some 0.3 s: it has ended before anything counts.
const JOB: &str = "bench-cap 2 2 >/out/cap 2>/out/cap.log";
/// Of the neighbour's 99th percentile.
const SLOWER_MOST: f64 = 1.2;

/// Runs it and returns its figures: microseconds of the neighbour's reads, next to a guest that
/// goes through all its grants, and next to one within the limit.
///
/// # Errors
/// The machine cannot be booted; the error shows its console.
pub fn cap() -> Result<Vec<Figure>> {
    let outcome = Machine::new(JOB)
        .program(binary::release("library-benches", "bench-cap")?)
        .limit(Duration::from_secs(1200))
        .ok()?;
    let figure = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, ours, peer, ..] = words[..] else { return None };
        let bar = if name.contains("p99") { Bar::AtMostRatio(SLOWER_MOST) } else { Bar::None };
        let (ours, peer) = (ours.parse().ok()?, peer.parse().ok()?);
        Some(Figure { name: name.replace("_shm_", "_icount_"), ours, peer: Some(peer), bar })
    };
    let figures: Vec<Figure> = outcome.text("cap").lines().filter_map(figure).collect();
    match figures.is_empty() {
        true => Err(outcome.unexpected("figures of bench-cap")),
        false => Ok(figures),
    }
}
