//! How much memory this process may use, and how much is available to it now.

use std::path::{Path, PathBuf};

use super::cgroup::{Names, levels, levels_of};
use super::files::{Roots, SMALL, read};
use super::host::total_and_available;
use super::report::SourceKind;

/// The origin of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitSource {
    /// The host's memory.
    Ram,
    /// The host's commit limit (`vm.overcommit_memory=2`).
    Commit,
    /// A limit of a cgroup, version 1 or 2.
    Cgroup {
        /// The cgroup's directory.
        dir: PathBuf,
        /// The file with the limit in it: `memory.max`, `memory.high` or `memory.limit_in_bytes`.
        file: &'static str,
    },
}

impl LimitSource {
    /// The setting of systemd that raises this limit; `None` if it is not a cgroup's.
    #[must_use]
    pub fn setting(&self) -> Option<&'static str> {
        match self {
            LimitSource::Cgroup { file: "memory.high", .. } => Some("MemoryHigh"),
            LimitSource::Cgroup { .. } => Some("MemoryMax"),
            LimitSource::Ram | LimitSource::Commit => None,
        }
    }
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
    limit_among(roots, levels(roots))
}

/// As [`limit`], for another process.
#[must_use]
pub fn limit_of_process(roots: &Roots, pid: u32) -> Option<Limit> {
    limit_among(roots, levels_of(roots, &pid.to_string()))
}

fn limit_among(roots: &Roots, levels: Vec<(SourceKind, PathBuf)>) -> Option<Limit> {
    let (total, _) = total_and_available(roots)?;
    let mut limit = Limit { bytes: total, source: LimitSource::Ram };
    let promises = crate::overcommit::commit_limit(&roots.proc);
    if let Some(bytes) = promises.filter(|bytes| *bytes < limit.bytes) {
        limit = Limit { bytes, source: LimitSource::Commit };
    }
    for (kind, dir) in levels {
        let found = Names::of(kind).limit_and_file(&dir);
        if let Some((bytes, file)) = found.filter(|(bytes, _)| *bytes < limit.bytes) {
            limit = Limit { bytes, source: LimitSource::Cgroup { dir, file } };
        }
    }
    Some(limit)
}

/// The memory that the control groups of this process leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRoom {
    /// Bytes that the process could still use. Page cache (and with it lent pages) and reclaimable
    /// slab count as available.
    pub left: u64,
    /// The limit of the group that leaves the least.
    pub limit: Limit,
}

/// Returns the memory that the control groups leave; `None` without a limit. Reads files: not for
/// the hot path.
#[must_use]
pub fn group_room(roots: &Roots) -> Option<GroupRoom> {
    let rooms = levels(roots).into_iter().filter_map(|(kind, dir)| {
        let names = Names::of(kind);
        let ((bytes, file), left) = (names.limit_and_file(&dir)?, left_in(names, &dir)?);
        let limit = Limit { bytes, source: LimitSource::Cgroup { dir, file } };
        Some(GroupRoom { left, limit })
    });
    rooms.min_by_key(|room| room.left)
}

/// Bytes that a group leaves of its limit, if it has one.
fn left_in(names: &Names, dir: &Path) -> Option<u64> {
    let (limit, used) = (names.limit(dir)?, names.used(dir)?);
    let stat = read(&dir.join("memory.stat"), SMALL).ok();
    let reclaimable = stat.and_then(|text| names.reclaimable(&text)).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

/// Bytes that this process could still use without swapping: the least of the memory available on
/// the host and of what each cgroup limit leaves, where page cache (and with it lent pages) and
/// reclaimable slab count as available. `None` if the host's figures cannot be read. Reads files:
/// not for the hot path.
#[must_use]
pub fn available(roots: &Roots) -> Option<u64> {
    let (_, available) = total_and_available(roots)?;
    let mut least = available?;
    for (kind, dir) in levels(roots) {
        let left = left_in(Names::of(kind), &dir);
        least = left.map_or(least, |left| least.min(left));
    }
    Some(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn page_cache_and_slab_of_a_full_group_count_as_available() {
        const MIB: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 921600 kB\n");
        put("proc/self/cgroup", "0::/a\n");
        put("cgroup/cgroup.controllers", "memory\n");
        put("cgroup/a/memory.max", &(100 * MIB).to_string());
        put("cgroup/a/memory.current", &(99 * MIB).to_string());
        let stat = format!(
            "inactive_file {}\nactive_file {}\nslab_reclaimable {}\n",
            20 * MIB,
            50 * MIB,
            9 * MIB
        );
        put("cgroup/a/memory.stat", &stat);
        let roots = Roots { proc: dir.path().join("proc"), cgroup: dir.path().join("cgroup") };
        assert_eq!(available(&roots), Some(80 * MIB));
        let room = group_room(&roots).unwrap();
        assert_eq!((room.left, room.limit.bytes), (80 * MIB, 100 * MIB));
        assert_eq!(room.limit.source.setting(), Some("MemoryMax"));
    }
}
