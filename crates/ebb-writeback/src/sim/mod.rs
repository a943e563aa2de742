//! A simulator around the controller: seeded devices, writers and flushers, hours in seconds.
//!
//! The controller runs as in the daemon, through its public functions only. Everything else is simulated:
//! devices that stall, complete in batches, seek and die ([`device`]), writers like those of `fio`
//! ([`world`]), and a flusher that follows [`crate::FlushPlan`]. [`scenario`] has the scenarios T1 to T12,
//! [`real`] those that also run on real devices, [`figure`] their figures and bars, [`report`] the table and
//! [`plot`] the curves.
//!
//! Invariants: the same seed gives the same run, to the byte, on any machine: integers decide everything that
//! happens, and floating point only describes it.

pub mod device;
pub mod figure;
pub mod plot;
mod random;
pub mod real;
pub mod report;
pub mod scenario;
pub mod world;

use crate::Law;

/// The laws that are compared, the default one last.
pub const LAWS: [Law; 5] = [
    Law::LinuxOld { shift: 2 },
    Law::LinuxOld { shift: 0 },
    Law::LinuxOld { shift: -1 },
    Law::Linux,
    Law::Horizon,
];

/// A law's name in tables.
#[must_use]
pub fn name(law: Law) -> String {
    match law {
        Law::LinuxOld { shift } => format!("linux-old {shift:+}"),
        Law::Linux => "linux".to_owned(),
        Law::Horizon => "ours".to_owned(),
    }
}
