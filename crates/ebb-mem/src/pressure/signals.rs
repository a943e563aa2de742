//! The input of the ladder at one step: plain values, independent of the files they come from.

use std::time::Duration;

use super::Level;

/// Time that tasks stalled on memory since the last sample, as pressure stall information counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stall {
    /// At least one task stalled.
    pub some: Duration,
    /// All tasks stalled at once.
    pub full: Duration,
}

/// The kernel's watermarks, summed over the zones, in bytes. Below `low` its background reclaim
/// wakes and works until `high` is free; below `min` allocations reclaim for themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Direct reclaim below this.
    pub min: u64,
    /// Background reclaim starts below this.
    pub low: u64,
    /// The target of background reclaim.
    pub high: u64,
}

/// A sample of the host's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSample {
    /// All memory the kernel manages.
    pub total: u64,
    /// Free memory.
    pub free: u64,
    /// Memory available without swapping, if the sample includes it (a cheap one does not).
    pub available: Option<u64>,
    /// The watermarks, if known.
    pub watermarks: Option<Watermarks>,
}

/// The process's memory cgroup. Counters are increments since the last sample; sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Memory charged to the cgroup, caches included.
    pub used: Option<u64>,
    /// The lowest limit that throttles or reclaims: `memory.high` or, where unset, the hard limit.
    pub limit: Option<u64>,
    /// Memory that the limit leaves without swapping: page cache, and with it lent pages, counts as
    /// free. Less than that where little of the limit is in use.
    pub available: Option<u64>,
    /// As `available`, of the hard limit where another one is lower; `u64::MAX` where there is no
    /// hard limit.
    pub available_to_max: Option<u64>,
    /// How often `high` or the hard limit was reached and the kernel reclaimed from the cgroup.
    pub reclaims: u64,
    /// How often the cgroup ran out of memory.
    pub out_of_memory: u64,
    /// The cgroup is out of memory now (reported by version 1 only).
    pub under_oom: bool,
}

/// Everything observed since the last step. The default value means: nothing observed, nothing known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// A level requested by hand; it takes effect as it is, including a lower one.
    pub injected: Option<Level>,
    /// Triggers and notifications that fired.
    pub notices: u32,
    /// Stalls of the host.
    pub host_stall: Stall,
    /// Stalls of the process's cgroup.
    pub own_stall: Stall,
    /// The host's memory, if it was sampled.
    pub host: Option<HostSample>,
    /// The process's memory cgroup, if there is one.
    pub cgroup: Option<Cgroup>,
}
