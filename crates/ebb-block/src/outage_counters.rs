//! Health counters of a store, from which outages are detected: requests that it has not completed
//! for long, and requests that failed. They cost each request two additions, in a slot of its worker.
//!
//! Requests are counted in two generations. A check reads whether the older generation has
//! completed; if so, the younger becomes the older, and new requests are counted in the other cell.
//! What remains of the older generation has waited at least since the generations last changed, and
//! no request needs a time stamp.
//!
//! A store without requests can be put to rest: the next request wakes it, and the check need not look at it before.
//! Both are bits of one byte, which a request reads in any case.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ebb_io::{PerWorker, WorkerCount, WorkerSlot};

use crate::error::{BlockError, ErrorKind, Operation};

/// The bit of [`StoreHealth::state`] that is set while new requests are counted in the second generation.
const SECOND_IS_YOUNGER: u8 = 1;
/// The bit that is set while the store is at rest.
const AT_REST: u8 = 2;

/// How often a store of this process was woken.
static WOKEN: AtomicU64 = AtomicU64::new(0);

/// The kinds of failures with a remedy.
const REMEDIED: [ErrorKind; 5] = [
    ErrorKind::NoSpace,
    ErrorKind::Short,
    ErrorKind::Lost,
    ErrorKind::Offline,
    ErrorKind::Misaligned,
];

/// See the module.
#[derive(Debug, Default)]
pub struct StoreHealth {
    /// Requests in flight of each generation, counted where they began.
    generations: PerWorker<[WorkerCount; 2]>,
    /// [`SECOND_IS_YOUNGER`] and [`AT_REST`].
    state: AtomicU8,
    failed: [FailureCount; FailedKind::ALL.len()],
    /// The place of the last failure's kind in [`REMEDIED`], plus 1; 0 for other kinds.
    remedied: AtomicUsize,
}

#[derive(Debug, Default)]
struct FailureCount {
    count: AtomicU64,
    /// The text of the first failure since it was last fetched, or an earlier one.
    text: Mutex<Option<String>>,
    /// Set with `text`, so that many failures format only one text.
    has_text: AtomicBool,
}

/// The kind of request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedKind {
    /// A read or a block status request.
    Read,
    /// A write, write-zeroes or discard.
    Write,
    /// A flush.
    Flush,
}

impl FailedKind {
    /// All kinds, in the order of [`StoreHealth::failures`].
    pub const ALL: [FailedKind; 3] = [FailedKind::Read, FailedKind::Write, FailedKind::Flush];

    fn of(operation: Operation) -> FailedKind {
        match operation {
            Operation::Read | Operation::Extents | Operation::Prefetch => FailedKind::Read,
            Operation::Write | Operation::Discard | Operation::WriteZeroes => FailedKind::Write,
            Operation::Flush => FailedKind::Flush,
        }
    }

    fn index(self) -> usize {
        match self {
            FailedKind::Read => 0,
            FailedKind::Write => 1,
            FailedKind::Flush => 2,
        }
    }
}

/// A request in flight; it completes when this is dropped.
#[derive(Debug)]
pub(crate) struct InFlightRequest<'a> {
    pub(crate) health: &'a StoreHealth,
    slot: WorkerSlot,
    second: bool,
}

impl Drop for InFlightRequest<'_> {
    #[inline]
    fn drop(&mut self) {
        let count = &self.health.generations[self.slot][usize::from(self.second)];
        count.add(self.slot, 1u64.wrapping_neg());
    }
}

impl StoreHealth {
    #[inline]
    pub(crate) fn begin(&self, slot: WorkerSlot) -> InFlightRequest<'_> {
        let state = self.state.load(Ordering::Relaxed);
        let second = state & SECOND_IS_YOUNGER != 0;
        self.generations[slot][usize::from(second)].add(slot, 1);
        if state & AT_REST != 0 {
            self.wake();
        }
        InFlightRequest { health: self, slot, second }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        self.state.fetch_and(!AT_REST, Ordering::Relaxed);
        WOKEN.fetch_add(1, Ordering::Release);
    }

    /// Counts a failure. Unsupported operations and aborted requests are not failures of the store.
    pub(crate) fn note(&self, error: &BlockError) {
        // Of these the store is not the cause.
        if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::Closing | ErrorKind::Memory) {
            return;
        }
        let failed = &self.failed[FailedKind::of(error.operation).index()];
        if !failed.has_text.swap(true, Ordering::AcqRel) {
            let cause = error.source.as_ref().map(|cause| format!(" ({cause})"));
            let text = format!("{error}{}", cause.unwrap_or_default());
            *failed.text.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        }
        let place = REMEDIED.iter().position(|kind| *kind == error.kind);
        self.remedied.store(place.map_or(0, |place| place + 1), Ordering::Relaxed);
        // Counted last: a reader of the count finds the text and the kind.
        failed.count.fetch_add(1, Ordering::Release);
    }

    /// How many requests of each kind have failed since the store was opened.
    pub fn failures(&self) -> [u64; 3] {
        FailedKind::ALL.map(|kind| self.failed[kind.index()].count.load(Ordering::Acquire))
    }

    /// Returns the remedy of the last failure, if its kind has one.
    pub fn remedy(&self) -> Option<&'static str> {
        let place = self.remedied.load(Ordering::Relaxed).checked_sub(1)?;
        REMEDIED.get(place)?.remedy()
    }

    /// The text of the first failure of a kind since the last call, or of an earlier one if there
    /// was none: several volumes may have this store as a layer.
    pub fn recent_error(&self, kind: FailedKind) -> Option<String> {
        let failed = &self.failed[kind.index()];
        let text = failed.text.lock().unwrap_or_else(PoisonError::into_inner).clone();
        failed.has_text.store(false, Ordering::Release);
        text
    }

    /// For one periodic check: how many requests have been in flight since the last call that
    /// returned 0, or longer. A call that returns 0 begins a new generation, so only one task may call this.
    pub fn check_unanswered(&self) -> u64 {
        let second = self.state.load(Ordering::Relaxed) & SECOND_IS_YOUNGER != 0;
        let older = usize::from(!second);
        let left = self.generations.iter().map(|count| count[older].get()).sum();
        if left == 0 {
            self.state.fetch_xor(SECOND_IS_YOUNGER, Ordering::Relaxed);
        }
        left
    }

    /// For the same task: puts the store to rest if no request is in flight. True if it is at rest since an earlier
    /// call: it need not be checked until [`StoreHealth::woken`] changes. Not at once, since a request that begins at
    /// the same time may not have seen it.
    pub fn rest(&self) -> bool {
        let in_flight = |count: &[WorkerCount; 2]| count[0].get().wrapping_add(count[1].get());
        if self.generations.iter().map(in_flight).fold(0, u64::wrapping_add) != 0 {
            return false;
        }
        self.state.fetch_or(AT_REST, Ordering::Relaxed) & AT_REST != 0
    }

    /// A number that changes when a request of a store at rest of this process begins.
    pub fn woken() -> u64 {
        WOKEN.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request of any worker.
    fn begin(health: &StoreHealth) -> InFlightRequest<'_> {
        static WORKER: AtomicU64 = AtomicU64::new(0);
        health.begin(WorkerSlot::of(WORKER.fetch_add(1, Ordering::Relaxed)))
    }

    #[test]
    fn a_stuck_request_is_found_among_many_that_complete() {
        let health = StoreHealth::default();
        assert_eq!(health.check_unanswered(), 0);
        let stuck = begin(&health);
        drop(begin(&health));
        assert_eq!(health.check_unanswered(), 0, "it may have begun just now");
        for _ in 0..10 {
            drop(begin(&health));
            let _quick = begin(&health);
            assert_eq!(health.check_unanswered(), 1);
        }
        drop(stuck);
        assert_eq!(health.check_unanswered(), 0);
        assert_eq!(health.check_unanswered(), 0);
    }

    #[test]
    fn a_request_wakes_a_store_at_rest() {
        let health = StoreHealth::default();
        let request = begin(&health);
        assert!(!health.rest() && !health.rest(), "a request is in flight");
        drop(request);
        assert_eq!((health.rest(), health.rest()), (false, true));
        let woken = StoreHealth::woken();
        let request = begin(&health);
        assert_ne!(StoreHealth::woken(), woken);
        assert!(!health.rest());
        assert_eq!(health.check_unanswered(), 0);
        assert_eq!(health.check_unanswered(), 1, "it is found as of any store");
        drop(request);
        assert_eq!((health.rest(), health.rest()), (false, true));
    }

    #[test]
    fn failures_are_counted_by_kind_and_the_first_is_reported() {
        let health = StoreHealth::default();
        let fail = |operation, code| {
            let source = std::io::Error::from_raw_os_error(code);
            health.note(&BlockError::from_io(source, operation, 4096, 512));
        };
        fail(Operation::Write, libc::EIO);
        fail(Operation::WriteZeroes, libc::ENOSPC);
        fail(Operation::Flush, libc::EIO);
        fail(Operation::WriteZeroes, libc::EOPNOTSUPP);
        health.note(&BlockError::new(ErrorKind::Closing, Operation::Read, 0, 512));
        assert_eq!(health.failures(), [0, 2, 1]);
        let text = health.recent_error(FailedKind::Write).unwrap();
        assert!(
            text.contains("write of 512 bytes at 4096") && text.contains("os error 5"),
            "{text}"
        );
        assert_eq!(health.recent_error(FailedKind::Write), Some(text));
        fail(Operation::Read, libc::EIO);
        assert!(health.recent_error(FailedKind::Read).unwrap().contains("read of 512 bytes"));
    }

    #[test]
    fn remedy_is_the_one_of_the_last_failure() {
        let health = StoreHealth::default();
        assert_eq!(health.remedy(), None);
        for kind in REMEDIED {
            health.note(&BlockError::new(kind, Operation::Write, 0, 512));
            assert!(health.remedy().is_some() && health.remedy() == kind.remedy(), "{kind:?}");
        }
        health.note(&BlockError::new(ErrorKind::Io, Operation::Write, 0, 512));
        assert_eq!(health.remedy(), None);
    }
}
