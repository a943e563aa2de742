//! Commit accounting: under strict overcommit (`vm.overcommit_memory=2`) and under `RLIMIT_DATA` the kernel
//! charges for writable memory, whether it is touched or not.
//!
//! Where that is so, elastic memory must leave some to the heap of this process and to other processes:
//! their allocations would fail otherwise. Checked when address space is made accessible, a few MiB at a
//! time, and only where the kernel charges.

use std::path::Path;

use ebb_sandbox::threads;

use crate::class::PAGE_BYTES;
use crate::sys;

/// One part in `HOST_RESERVE` of the host's commit limit is left to other processes, and one part in
/// `DATA_RESERVE` of `RLIMIT_DATA` to the heap of this process.
const HOST_RESERVE: u64 = 32;
const DATA_RESERVE: u64 = 8;

/// Which limits apply here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overcommit {
    strict: bool,
    data: bool,
}

impl Overcommit {
    /// The limits that apply now.
    pub(crate) fn now() -> Overcommit {
        // A host where this cannot be read may be strict.
        let strict = is_strict(Path::new("/proc")).unwrap_or(true);
        Overcommit { strict, data: sys::data_limit().is_some() }
    }

    /// Whether closing unused address space reduces a charge.
    pub(crate) fn is_any(self) -> bool {
        self.strict || self.data
    }

    /// Whether `bytes` more may be charged without using the reserves. A worker may not read that itself; without a thread
    /// for it nothing more may be charged.
    pub(crate) fn allows(self, bytes: usize) -> bool {
        threads::call(move || self.leaves_reserves(bytes)).unwrap_or(false)
    }

    fn leaves_reserves(self, bytes: usize) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let host = if self.strict { commit(Path::new("/proc")) } else { None };
        // Read each time: another process may change it.
        let data = if self.data { sys::data_limit().zip(data_used()) } else { None };
        fits(bytes, host, HOST_RESERVE) && fits(bytes, data, DATA_RESERVE)
    }
}

/// Whether `bytes` more leave the reserve of (limit, used).
fn fits(bytes: u64, room: Option<(u64, u64)>, reserve: u64) -> bool {
    room.is_none_or(|(limit, used)| {
        used.saturating_add(bytes) <= limit.saturating_sub(limit / reserve)
    })
}

/// Whether the host's overcommit is strict; `None` if that cannot be read.
fn is_strict(proc: &Path) -> Option<bool> {
    let mode = std::fs::read_to_string(proc.join("sys/vm/overcommit_memory")).ok()?;
    Some(mode.trim() == "2")
}

/// The host's commit limit and what is committed, in bytes.
fn commit(proc: &Path) -> Option<(u64, u64)> {
    let text = std::fs::read_to_string(proc.join("meminfo")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((field("CommitLimit:")?, field("Committed_AS:")?))
}

/// The commit limit, if the host's overcommit is strict: an upper bound for the ceiling.
pub(crate) fn commit_limit(proc: &Path) -> Option<u64> {
    is_strict(proc).filter(|strict| *strict)?;
    commit(proc).map(|(limit, _)| limit)
}

/// Bytes of this process that count against `RLIMIT_DATA`.
fn data_used() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(5)?.parse().ok()?;
    pages.checked_mul(PAGE_BYTES as u64)
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn a_charge_leaves_the_reserve() {
        assert!(fits(u64::MAX, None, 8));
        assert!(fits(7, Some((80, 63)), 8) && !fits(8, Some((80, 63)), 8));
        assert!(!fits(1, Some((80, u64::MAX)), 8) && !fits(u64::MAX, Some((80, 0)), 8));
        assert!(!fits(1, Some((0, 0)), 8));
    }

    #[test]
    fn the_commit_limit_is_read_from_proc() {
        let dir = tempfile::tempdir().unwrap();
        let say = |mode: &str, meminfo: &str| {
            std::fs::create_dir_all(dir.path().join("sys/vm")).unwrap();
            std::fs::write(dir.path().join("sys/vm/overcommit_memory"), mode).unwrap();
            std::fs::write(dir.path().join("meminfo"), meminfo).unwrap();
            commit_limit(dir.path())
        };
        let text = "MemTotal: 9 kB\nCommitLimit:      100 kB\nCommitted_AS:      30 kB\n";
        assert_eq!(say("2\n", text), Some(100 << 10));
        assert_eq!(commit(dir.path()), Some((100 << 10, 30 << 10)));
        assert_eq!(say("0\n", text), None);
        assert_eq!(say("2\n", "CommitLimit: 18446744073709551615 kB\nCommitted_AS: x"), None);
        assert_eq!(is_strict(Path::new("/nowhere")), None);
        assert!(data_used().unwrap() > 0 && commit(Path::new("/proc")).is_some());
    }
}
