//! The options of a [`Memory`](crate::Memory): its limits, and what it does with idle memory.

use std::time::{Duration, Instant};

/// What happens to idle memory. [`IdlePolicy::Elastic`] is the default; the other policies serve for
/// comparison, and for hosts where lending does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Caches sized by their working set; the surplus is lent.
    #[default]
    Elastic,
    /// No caches, and pools that keep nothing once their requests have completed: every block is
    /// allocated from the slabs and freed to them.
    Uncached,
    /// Idle memory stays wired until memory pressure is reported, and is then returned: what Linux's
    /// xen-blkback does. Nothing is lent.
    UntilPressure,
    /// Memory that the load once used stays wired, whatever the pressure; some of it is released only
    /// where the ceiling leaves no room for another size. Nothing is lent.
    Static,
}

impl IdlePolicy {
    /// Whether idle memory stays wired.
    pub(crate) fn keeps(self) -> bool {
        matches!(self, IdlePolicy::UntilPressure | IdlePolicy::Static)
    }
}

/// The options of a [`Memory`](crate::Memory).
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Bytes of address space to reserve, rounded up to 2 MiB. Unused address space costs nothing; a
    /// few times the ceiling makes fragmentation harmless.
    pub reserve_bytes: usize,
    /// Limit on wired memory, in bytes. Derive it from the machine: a share of its RAM or of the limit
    /// of the control group.
    pub ceiling_bytes: usize,
    /// How many owners can be registered at a time (1 to 65,535). Their gauges are allocated when they
    /// are registered.
    pub owners: u16,
    /// A zone that has not run out of cached blocks for this long returns a quarter of what it never
    /// needed in each period of the estimator (one second).
    pub idle_after: Duration,
    /// Lend idle memory to the kernel (`MADV_FREE`) where the kernel supports it and the policy does not
    /// keep idle memory wired; otherwise idle memory is returned.
    pub lend: bool,
    /// What happens to idle memory.
    pub policy: IdlePolicy,
    /// The epoch of this memory's times.
    pub started: Instant,
}

impl MemoryOptions {
    /// Defaults for a ceiling of `ceiling_bytes`: four times as much address space, 65,535 owners.
    pub fn new(ceiling_bytes: usize, started: Instant) -> MemoryOptions {
        MemoryOptions {
            reserve_bytes: ceiling_bytes.saturating_mul(4).max(64 << 20),
            ceiling_bytes,
            owners: u16::MAX,
            idle_after: Duration::from_secs(60),
            lend: true,
            policy: IdlePolicy::Elastic,
            started,
        }
    }
}
