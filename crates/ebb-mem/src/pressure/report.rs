//! The sources that a monitor uses and those it does not, for the log.

use std::fmt;
use std::path::PathBuf;

/// A kind of source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SourceKind {
    /// Free and available memory of the host.
    HostMemory,
    /// The zones' watermarks.
    Watermarks,
    /// A trigger on a pressure file of the host.
    HostTrigger,
    /// The polled total of the host's pressure file.
    HostStall,
    /// A trigger on the own cgroup's pressure file.
    CgroupTrigger,
    /// The polled total of the own cgroup's pressure file.
    CgroupStall,
    /// Files of the own cgroup, version 2.
    CgroupV2,
    /// Files of the own cgroup, version 1.
    CgroupV1,
    /// Version 1's pressure notification.
    CgroupV1Pressure,
    /// systemd's `MEMORY_PRESSURE_WATCH`.
    Systemd,
}

impl SourceKind {
    /// The kind in words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HostMemory => "host memory",
            Self::Watermarks => "zone watermarks",
            Self::HostTrigger => "host pressure trigger",
            Self::HostStall => "host stall total",
            Self::CgroupTrigger => "cgroup pressure trigger",
            Self::CgroupStall => "cgroup stall total",
            Self::CgroupV2 => "cgroup v2",
            Self::CgroupV1 => "cgroup v1",
            Self::CgroupV1Pressure => "cgroup v1 pressure level",
            Self::Systemd => "MEMORY_PRESSURE_WATCH",
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One source, found or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbedSource {
    /// The kind of source.
    pub kind: SourceKind,
    /// The file or socket, where there is one.
    pub path: Option<PathBuf>,
    /// How the source is used, or why it is not.
    pub detail: String,
}

impl fmt::Display for ProbedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{} ({}): {}", self.kind, path.display(), self.detail),
            None => write!(f, "{}: {}", self.kind, self.detail),
        }
    }
}

/// The sources that a monitor uses, those it does not use and why, and notes for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceReport {
    /// Sources in use.
    pub listening: Vec<ProbedSource>,
    /// Sources not in use, with the reason.
    pub missing: Vec<ProbedSource>,
    /// Settings of the host that weaken the response to pressure, with the remedy.
    pub notes: Vec<String>,
}

impl SourceReport {
    pub(super) fn found(&mut self, kind: SourceKind, path: Option<PathBuf>, detail: String) {
        self.listening.push(ProbedSource { kind, path, detail });
    }

    pub(super) fn missing(&mut self, kind: SourceKind, path: Option<PathBuf>, detail: String) {
        self.missing.push(ProbedSource { kind, path, detail });
    }
}
