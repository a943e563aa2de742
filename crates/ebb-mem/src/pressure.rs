//! Memory pressure: one value with a time, computed in one place, told to every owner of memory.
//!
//! Three parts, usable one without the other:
//! - [`Pressure`] is the value: level, cause, times and a sequence number. Reading it costs three
//!   atomic loads and never waits. Only the one [`Publisher`] changes it; [`Pressure::subscribe`]
//!   wakes owners that are idle and would not look by themselves.
//! - [`Ladder`] decides. It is a state machine without I/O and without a clock: [`Signals`] and a
//!   time in, at most one [`Event`] out, so that a simulation can run it through hours.
//! - [`Monitor`] is the thread that listens: it waits on whatever the host offers, samples the
//!   rest, runs the ladder and publishes.
//!
//! # The levels
//! | level | sign | what an owner of memory answers |
//! |---|---|---|
//! | [`Level::L0`] calm | time passes | idle stock decays slowly, at each [`Cause::Decay`] |
//! | [`Level::L1`] squeeze | first stall, free memory near its target, cgroup near `high` | pools to 0 for a moment, zones to their working set, clean idle memory unwired |
//! | [`Level::L2`] drain | it goes on, or full stalls | zones to 0, cold clean buffers returned at once |
//! | [`Level::L3`] last resort | next to no free memory | every worker once: its caches purged; caching off until calm |
//!
//! An owner acts once per *event*, which is a new sequence number with [`Cause::is_event`]; a level
//! that merely falls ([`Cause::Easing`]) asks for nothing.
//!
//! # What the sources see
//! Every source is optional and probed at the start; the [`Report`] says which were found and why
//! others were not. Pressure stall information (trigger and polled total, of the host and of the
//! own cgroup), cgroup v2 and v1 files, systemd's `MEMORY_PRESSURE_WATCH`, and free memory
//! against the zones' watermarks.
//!
//! # Invariants
//! - One publisher: the type is not cloneable, and nothing else stores into the value.
//! - A notification alone (a trigger, a FIFO: anybody's stall, or nobody's) never leads past L1.
//!   Level 2 and 3 need something measured.
//! - Reading never waits, and publishing neither allocates nor waits for a reader.
//! - Nothing read from a file may panic or allocate without bound: reads are capped, and text that
//!   is not understood counts as no information.

mod cgroup;
mod files;
mod host;
mod ladder;
mod limit;
mod look;
mod monitor;
mod parse;
mod parts;
mod psi;
mod report;
mod rooms;
mod sampler;
mod shared;
mod signals;
mod source;
mod systemd;
mod thresholds;

pub use files::Roots;
pub use ladder::{Event, Ladder};
pub use limit::{Limit, LimitSource, available, limit};
pub use look::{HostLook, Room};
pub use monitor::{Handle, Monitor, OnLostSource, Options, StartError};
pub use report::{Finding, Report, SourceKind};
pub use rooms::Rooms;
pub use shared::{Pressure, Publisher, State, Subscription};
pub use signals::{Cgroup, Host, Signals, Stall, Watermarks};
pub use systemd::Watch;
pub use thresholds::{Thresholds, ThresholdsError};

/// How hard the host wants memory back. Ordered: a higher level asks for all that a lower one does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Calm: idle stock decays slowly.
    #[default]
    L0,
    /// Squeeze: the first sign was seen.
    L1,
    /// Drain: it goes on, or everything stalls.
    L2,
    /// Last resort: next to no free memory.
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

    /// What the level asks for, in a word: `calm`, `squeeze`, `drain` or `last resort`.
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
    /// Calm, and time has passed: idle stock may decay by one step.
    Decay,
    /// Signs have ceased and the level fell. Nothing to give back.
    Easing,
    /// Somebody asked for the level by hand.
    Injected,
    /// A pressure trigger of the kernel or of systemd fired; by itself anybody's stall.
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

    /// Whether owners of memory are asked to act. False for [`Cause::Start`] and [`Cause::Easing`].
    #[must_use]
    pub const fn is_event(self) -> bool {
        !matches!(self, Self::Start | Self::Easing)
    }

    /// The cause in words, for a log line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Decay => "voluntary decay",
            Self::Easing => "signs have ceased",
            Self::Injected => "asked for by hand",
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
