//! A simulator around the controller of `ebb-writeback`: seeded devices, writers and flushers, hours
//! in seconds.
//!
//! The controller runs as in the daemon, through its public functions only; for comparison, one with
//! the laws of Linux (`linux`) can take its place. Everything else is simulated:
//! devices that stall, complete in batches, seek and die ([`device`]), writers like those of `fio`
//! ([`world`]), and a flusher that follows [`ebb_writeback::FlushPlan`]. [`scenario`] has the
//! scenarios T1 to T12, [`real`] those that also run on real devices, [`figure`] their figures and
//! bars, [`report`] the table and [`plot`] the curves.
//!
//! Invariants: the same seed gives the same run, to the byte, on any machine: integers decide everything that
//! happens, and floating point only describes it.

mod control;
pub mod device;
pub mod figure;
pub mod law;
mod linux;
pub mod plot;
mod random;
pub mod real;
pub mod report;
pub mod scenario;
pub mod world;

use ebb_writeback::units::{Nanos, SECOND, mul_div};

/// The time that `bytes` take at `rate` bytes per second; a rate of 0 counts as 1.
fn time_of(bytes: u64, rate: u64) -> Nanos {
    mul_div(bytes, SECOND, rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_saturate() {
        assert_eq!(time_of(100, 50), 2 * SECOND);
        assert_eq!(time_of(1, 0), SECOND);
        assert_eq!(time_of(u64::MAX, 1), u64::MAX);
    }
}
