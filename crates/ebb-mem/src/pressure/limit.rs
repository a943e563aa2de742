//! How much memory this process may use, and how much is available to it now.

use std::path::PathBuf;

use super::cgroup::{Names, levels};
use super::files::{Roots, SMALL, read};
use super::host::total_and_available;
use super::parse;
use super::report::SourceKind;

/// The origin of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitSource {
    /// The host's memory.
    Ram,
    /// The host's commit limit (`vm.overcommit_memory=2`).
    Commit,
    /// A limit of the cgroup in this directory, version 1 or 2.
    Cgroup(PathBuf),
}

/// The memory limit that applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// Its origin.
    pub source: LimitSource,
}

/// The memory limit that applies: the least of the host's memory, its commit limit where overcommit is
/// strict, and the limits (`high`, `max`, version 1's limit) of the process's cgroup and those above it.
/// `None` if the size of the host's memory cannot be read. Reads files: not for the hot path.
#[must_use]
pub fn limit(roots: &Roots) -> Option<Limit> {
    let (total, _) = total_and_available(roots)?;
    let mut limit = Limit { bytes: total, source: LimitSource::Ram };
    let promises = crate::overcommit::commit_limit(&roots.proc);
    if let Some(bytes) = promises.filter(|bytes| *bytes < limit.bytes) {
        limit = Limit { bytes, source: LimitSource::Commit };
    }
    for (kind, dir) in levels(roots) {
        if let Some(bytes) = Names::of(kind).limit(&dir).filter(|bytes| *bytes < limit.bytes) {
            limit = Limit { bytes, source: LimitSource::Cgroup(dir) };
        }
    }
    Some(limit)
}

/// Bytes that this process could still use without swapping: the least of the memory available on the host
/// and of what each cgroup limit leaves, where inactive file pages (and with them lent pages) count as
/// available. `None` if the host's figures cannot be read. Reads files: not for the hot path.
#[must_use]
pub fn available(roots: &Roots) -> Option<u64> {
    let (_, available) = total_and_available(roots)?;
    let mut least = available?;
    for (kind, dir) in levels(roots) {
        let names = Names::of(kind);
        let (Some(limit), Some(used)) = (names.limit(&dir), names.used(&dir)) else {
            continue;
        };
        let key =
            if kind == SourceKind::CgroupV1 { "total_inactive_file" } else { "inactive_file" };
        let inactive = read(&dir.join("memory.stat"), SMALL)
            .ok()
            .and_then(|text| parse::flat(&text, key))
            .unwrap_or(0);
        least = least.min(limit.saturating_sub(used.saturating_sub(inactive)));
    }
    Some(least)
}
