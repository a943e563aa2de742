//! What a memory is made with (seeds `000` and `004`): its limits, and how it keeps what is idle.

use std::time::{Duration, Instant};

/// How memory is kept and given back. [`Policy::Elastic`] is what this crate is for; the others
/// are there to be compared with it, and for hosts where it does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Caches sized by their working set; the surplus is lent.
    #[default]
    Elastic,
    /// Caches grow freely and are all purged when memory has run out.
    LastResortOnly,
    /// No caches, and pools that keep nothing once their requests are done: every block comes from
    /// the slabs and goes back to them.
    Uncached,
    /// Idle memory stays wired until a sign of pressure, which returns it: what Linux's xen-blkback
    /// does (seed `000`). Nothing is lent.
    Told,
    /// What the load once took stays wired, whatever the pressure; only the ceiling makes some of
    /// it go, when other memory is wanted. Nothing is lent.
    Static,
}

impl Policy {
    /// Whether idle memory stays wired where it lies.
    pub(crate) fn keeps(self) -> bool {
        matches!(self, Policy::Told | Policy::Static)
    }
}

/// What a [`Memory`] is made with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of address space to reserve, rounded up to 2 MiB. Costs nothing until used; a few
    /// times the ceiling keeps fragmentation from mattering.
    pub reserve_bytes: usize,
    /// Bytes of address space reserved for blocks on huge pages ([`crate::Worker::alloc_huge`]).
    pub huge_bytes: usize,
    /// Most bytes wired at a time. Tie it to the machine: a share of its RAM or of the limit of
    /// the control group.
    pub ceiling_bytes: usize,
    /// Most owners that can be registered at a time (1 to 65,535). Room for them is made as they come.
    pub owners: u16,
    /// A zone that has not run out of cache for so long returns a quarter of what it never
    /// needed, at each period of the estimator (one second).
    pub idle_after: Duration,
    /// Lend idle memory to the kernel (`MADV_FREE`) if it can do that and the policy keeps none
    /// wired; else it is returned.
    pub lend: bool,
    /// How memory is kept.
    pub policy: Policy,
    /// The time from which this memory counts.
    pub started: Instant,
}

impl Options {
    /// Defaults for a ceiling of `ceiling_bytes`: four times as much address space, 65,535 owners.
    pub fn new(ceiling_bytes: usize, started: Instant) -> Options {
        Options {
            reserve_bytes: ceiling_bytes.saturating_mul(4).max(64 << 20),
            huge_bytes: ceiling_bytes,
            ceiling_bytes,
            owners: u16::MAX,
            idle_after: Duration::from_secs(60),
            lend: true,
            policy: Policy::Elastic,
            started,
        }
    }
}
