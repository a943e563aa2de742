//! Memory pressure: one published value, computed in one place and read by every owner of memory.
//!
//! Three parts, each usable by itself:
//! - [`Pressure`] is the value: level, cause, times and a sequence number. Reading it takes three atomic
//!   loads and never waits. Only the [`Publisher`] changes it; [`Pressure::subscribe`] notifies owners
//!   that are idle and would not read it by themselves.
//! - [`Ladder`] decides. It is a state machine without I/O and without a clock: it takes [`Signals`] and a
//!   time and returns at most one [`LadderEvent`], so that a simulation can run it through hours.
//! - [`Monitor`] is the thread that waits for notifications, samples the other sources, runs the ladder
//!   and publishes.
//!
//! # The levels
//! | level | sign | response of an owner of memory |
//! |---|---|---|
//! | [`Level::L0`] calm | none | idle cached memory decays slowly, at each [`Cause::Decay`] |
//! | [`Level::L1`] squeeze | first stall, free memory near its target, cgroup near `high` | empties its pools for a short time, trims zones to their working set, unwires clean idle memory |
//! | [`Level::L2`] drain | pressure continues, or full stalls | empties zones, returns cold clean buffers at once |
//! | [`Level::L3`] last resort | almost no free memory | purges every worker's caches once; caching is off until calm |
//!
//! An owner acts once per *event*, which is a new sequence number with [`Cause::is_event`]. A level that
//! falls ([`Cause::Easing`]) requires no action.
//!
//! # Sources
//! Every source is optional and probed at the start; the [`SourceReport`] lists which were found, and why
//! other sources were not. The sources are pressure stall information (triggers and polled totals of the
//! host and of the process's cgroup), cgroup v2 and v1 files, systemd's `MEMORY_PRESSURE_WATCH`, and free
//! memory compared with the zones' watermarks.
//!
//! # Invariants
//! - One publisher: the type is not cloneable, and nothing else stores to the value.
//! - A notification alone (a trigger or a FIFO, which cannot tell which task stalled) never leads past L1.
//!   L2 and L3 need a measurement.
//! - Reading never waits, and publishing neither allocates nor waits for a reader.
//! - Nothing read from a file may panic or allocate without bound: reads are capped, and text that
//!   cannot be parsed counts as no information.

mod cgroup;
mod files;
mod host;
mod ladder;
mod limit;
mod monitor;
mod parse;
mod parts;
mod psi;
mod report;
mod room;
mod rooms;
mod sampler;
mod shared;
mod signals;
mod source;
mod systemd;
mod thresholds;

pub use files::Roots;
pub use ladder::{Ladder, LadderEvent};
pub use limit::{GroupRoom, Limit, LimitSource, available, group_room, limit, limit_of_process};
pub use monitor::{Handle, Monitor, MonitorOptions, MonitorStartError, OnLostSource};
pub use report::{ProbedSource, SourceKind, SourceReport};
pub use room::{HostMemoryReader, Room};
pub use rooms::Rooms;
pub use shared::{Pressure, PressureState, Publisher, Subscription};
pub use signals::{Cgroup, HostSample, Signals, Stall, Watermarks};
pub use systemd::Watch;
pub use thresholds::{Thresholds, ThresholdsError};

/// How much memory the host needs. Ordered: a higher level includes the actions of the lower ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Calm: idle cached memory decays slowly.
    #[default]
    L0,
    /// Squeeze: the first sign was seen.
    L1,
    /// Drain: pressure continues, or all tasks stall.
    L2,
    /// Last resort: almost no free memory.
    L3,
}

impl Level {
    /// All levels, from calm to last resort.
    pub const ALL: [Self; 4] = [Self::L0, Self::L1, Self::L2, Self::L3];

    /// The level as a number, 0 to 3.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::L0 => 0,
            Self::L1 => 1,
            Self::L2 => 2,
            Self::L3 => 3,
        }
    }

    /// The level of a number; `None` above 3.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::L0),
            1 => Some(Self::L1),
            2 => Some(Self::L2),
            3 => Some(Self::L3),
            _ => None,
        }
    }

    /// The name of the level: `calm`, `squeeze`, `drain` or `last resort`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::L0 => "calm",
            Self::L1 => "squeeze",
            Self::L2 => "drain",
            Self::L3 => "last resort",
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::L0 => 0,
            Self::L1 => 1,
            Self::L2 => 2,
            Self::L3 => 3,
        }
    }

    const fn below(self) -> Self {
        match self {
            Self::L0 | Self::L1 => Self::L0,
            Self::L2 => Self::L1,
            Self::L3 => Self::L2,
        }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "L{} ({})", self.number(), self.as_str())
    }
}

/// Why a state was published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Nothing was published yet.
    #[default]
    Start,
    /// Calm, and a decay period has passed: idle cached memory may decay by one step.
    Decay,
    /// Signs have ceased and the level fell. Nothing to release.
    Easing,
    /// An operator or a test requested the level.
    Injected,
    /// A pressure trigger of the kernel or of systemd fired. It cannot tell which task stalled.
    Notice,
    /// Tasks stalled on memory.
    Stall,
    /// All tasks of the host or of the cgroup stalled on memory at once.
    FullStall,
    /// Free memory came near the kernel's target (its high watermark).
    FreeNearTarget,
    /// Little memory is available without swapping.
    AvailableLow,
    /// The cgroup is near, at or above its `high` or `max`.
    CgroupNearLimit,
    /// The cgroup ran out of memory.
    CgroupOutOfMemory,
}

impl Cause {
    const ALL: [Self; 11] = [
        Self::Start,
        Self::Decay,
        Self::Easing,
        Self::Injected,
        Self::Notice,
        Self::Stall,
        Self::FullStall,
        Self::FreeNearTarget,
        Self::AvailableLow,
        Self::CgroupNearLimit,
        Self::CgroupOutOfMemory,
    ];

    /// Whether owners of memory must act. False for [`Cause::Start`] and [`Cause::Easing`].
    #[must_use]
    pub const fn is_event(self) -> bool {
        !matches!(self, Self::Start | Self::Easing)
    }

    /// The cause in words, for a log line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Decay => "no sign of pressure, unused memory is returned",
            Self::Easing => "signs have ceased",
            Self::Injected => "requested by hand",
            Self::Notice => "pressure notification",
            Self::Stall => "stalls on memory",
            Self::FullStall => "all tasks stalled on memory",
            Self::FreeNearTarget => "free memory near the kernel's target",
            Self::AvailableLow => "little memory available",
            Self::CgroupNearLimit => "cgroup at its memory limit",
            Self::CgroupOutOfMemory => "cgroup out of memory",
        }
    }

    fn number(self) -> u8 {
        u8::try_from(Self::ALL.iter().position(|c| *c == self).unwrap_or(0)).unwrap_or(0)
    }

    fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}
