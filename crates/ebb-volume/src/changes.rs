//! Counts the changes of a volume, so that its owner can tell whether a flush covers all of them, and can
//! give the volume up exactly then.
//!
//! # Invariants
//! - A change is counted before it is acknowledged, and a change that is counted after [`ChangeCount::seal`]
//!   returned true is not acknowledged.
//! - When `seal` returns true, all changes that were acknowledged are covered by a successful flush. One
//!   atomic word holds the count and the sealed bit, so no change can be acknowledged between the check and
//!   the sealing. Model-checked with shuttle (`--features shuttle`).

#[cfg(all(test, feature = "shuttle"))]
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(all(test, feature = "shuttle")))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SEALED: u64 = 1 << 63;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct ChangeCount {
    /// Requests that changed data or may have changed it, and completed; and [`SEALED`].
    completed: AtomicU64,
    /// The count when the last successful flush began.
    flushed: AtomicU64,
    /// How many of those failed. Each is counted here first.
    failed: AtomicU64,
    /// Changes that succeeded before the last successful flush began, or fewer.
    acknowledged_flushed: AtomicU64,
    /// A flush has succeeded.
    has_flushed: AtomicBool,
}

/// The changes that have completed at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedChanges {
    all: u64,
    succeeded: u64,
}

impl ChangeCount {
    /// Counts a change that has completed and may have succeeded. False if it must not be
    /// acknowledged.
    #[inline]
    pub(crate) fn complete(&self) -> bool {
        self.completed.fetch_add(1, Ordering::SeqCst) & SEALED == 0
    }

    /// As [`ChangeCount::complete`], of a change that succeeded or failed.
    #[inline]
    pub(crate) fn complete_with(&self, success: bool) -> bool {
        if !success {
            self.failed.fetch_add(1, Ordering::SeqCst);
        }
        self.complete()
    }

    /// The changes until now, for [`ChangeCount::note_flushed`]: to be called before a flush
    /// begins.
    pub(crate) fn count(&self) -> CompletedChanges {
        let all = self.completed.load(Ordering::SeqCst) & !SEALED;
        // Read later, and counted earlier: the difference is never too large.
        let succeeded = all.saturating_sub(self.failed.load(Ordering::SeqCst));
        CompletedChanges { all, succeeded }
    }

    /// Notes that a flush has succeeded that began after [`ChangeCount::count`] had returned
    /// `before`.
    pub(crate) fn note_flushed(&self, before: CompletedChanges) {
        self.flushed.fetch_max(before.all, Ordering::SeqCst);
        self.acknowledged_flushed.fetch_max(before.succeeded, Ordering::SeqCst);
        self.has_flushed.store(true, Ordering::SeqCst);
    }

    /// Returns true if a flush covers all changes that succeeded. Exact without requests in flight.
    pub(crate) fn acknowledged_are_flushed(&self) -> bool {
        self.count().succeeded <= self.acknowledged_flushed.load(Ordering::SeqCst)
    }

    /// Returns true once a flush has succeeded: it also covers the data of earlier processes.
    pub(crate) fn has_flushed(&self) -> bool {
        self.has_flushed.load(Ordering::SeqCst)
    }

    /// Whether all changes that were acknowledged are covered by a flush.
    pub(crate) fn are_flushed(&self) -> bool {
        let completed = self.completed.load(Ordering::SeqCst);
        completed & SEALED != 0 || completed == self.flushed.load(Ordering::SeqCst)
    }

    /// If all changes that were acknowledged are covered by a flush, refuses to acknowledge more, and returns
    /// true.
    pub(crate) fn seal(&self) -> bool {
        let flushed = self.flushed.load(Ordering::SeqCst);
        let (to, order) = (flushed | SEALED, Ordering::SeqCst);
        match self.completed.compare_exchange(flushed, to, order, order) {
            Ok(_) => true,
            Err(completed) => completed & SEALED != 0,
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_flushed_can_be_sealed_and_nothing_is_acknowledged_after_that() {
        let changes = ChangeCount::default();
        assert!(changes.are_flushed() && changes.complete() && !changes.are_flushed());
        assert!(!changes.seal() && !changes.has_flushed());
        let before = changes.count();
        assert!(changes.complete());
        changes.note_flushed(before);
        assert!(!changes.seal(), "one change completed after the flush began");
        changes.note_flushed(changes.count());
        assert!(changes.are_flushed() && changes.has_flushed() && changes.seal());
        assert!(!changes.complete());
        assert!(changes.are_flushed() && changes.seal(), "it stays sealed");
    }

    #[test]
    fn failed_changes_are_not_acknowledged() {
        let changes = ChangeCount::default();
        assert!(changes.complete());
        changes.note_flushed(changes.count());
        assert!(changes.complete_with(false));
        assert!(!changes.are_flushed() && changes.acknowledged_are_flushed());
        assert!(changes.complete());
        assert!(!changes.acknowledged_are_flushed());
        // A flush that began between the two counts of a failure covers no later change.
        changes.failed.fetch_add(1, Ordering::SeqCst);
        changes.note_flushed(changes.count());
        assert!(changes.complete() && !changes.acknowledged_are_flushed());
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod models {
    use super::*;
    use shuttle::sync::Arc;
    use shuttle::thread;

    /// Two threads change and acknowledge, one flushes, one seals: if sealing succeeds, every change that is
    /// ever acknowledged is covered by a flush.
    #[test]
    fn what_is_sealed_has_no_acknowledged_change_without_a_flush() {
        shuttle::check_random(
            || {
                let changes = Arc::new(ChangeCount::default());
                // Changes that were acknowledged, and those of them that a flush covers.
                let counts = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
                let writers: Vec<_> = (0..2)
                    .map(|_| {
                        let (changes, counts) = (changes.clone(), counts.clone());
                        thread::spawn(move || {
                            for _ in 0..2 {
                                if changes.complete() {
                                    counts.0.fetch_add(1, Ordering::SeqCst);
                                }
                            }
                        })
                    })
                    .collect();
                let flusher = {
                    let (changes, counts) = (changes.clone(), counts.clone());
                    thread::spawn(move || {
                        for _ in 0..2 {
                            let count = changes.count();
                            counts.1.fetch_max(count.succeeded, Ordering::SeqCst);
                            changes.note_flushed(count);
                        }
                    })
                };
                let sealed = changes.seal();
                writers.into_iter().for_each(|writer| writer.join().unwrap());
                flusher.join().unwrap();
                if sealed {
                    let acknowledged = counts.0.load(Ordering::SeqCst);
                    assert!(acknowledged <= counts.1.load(Ordering::SeqCst));
                }
            },
            20_000,
        );
    }
}
