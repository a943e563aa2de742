//! What the ladder is told at one look: plain values, no files behind them.

use std::time::Duration;

use super::Level;

/// Time that tasks stalled on memory since the last look, as pressure stall information counts it.
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

/// The host's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// All memory the kernel manages.
    pub total: u64,
    /// Free memory.
    pub free: u64,
    /// Memory available without swapping, if the look included it (a cheap one does not).
    pub available: Option<u64>,
    /// The watermarks, if known.
    pub watermarks: Option<Watermarks>,
}

/// The own memory cgroup. Counters are what was added since the last look, sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Memory charged to the cgroup, caches included.
    pub used: Option<u64>,
    /// The lowest limit that throttles or reclaims: `memory.high` or, where unset, the hard limit.
    pub limit: Option<u64>,
    /// Times `high` or the hard limit was met and the kernel reclaimed on our behalf.
    pub reclaims: u64,
    /// Times the cgroup ran out of memory.
    pub out_of_memory: u64,
    /// The cgroup is out of memory at this moment (version 1 tells so).
    pub under_oom: bool,
}

/// All that was seen since the last look. A default value says: nothing seen, nothing known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// A level asked for by hand; it takes effect as it is, lower levels included.
    pub injected: Option<Level>,
    /// Triggers and notifications that fired.
    pub notices: u32,
    /// Stalls of the host.
    pub host_stall: Stall,
    /// Stalls of the own cgroup.
    pub own_stall: Stall,
    /// The host's memory, if it was looked at.
    pub host: Option<Host>,
    /// The own memory cgroup, if there is one.
    pub cgroup: Option<Cgroup>,
}
