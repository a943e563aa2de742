//! Writes of a guest that were acknowledged from memory (`cache = "writeback"`) and that no flush has covered.
//!
//! A kill of the daemon loses them, while the guest runs on: a successor's next flush would succeed although
//! they are lost. So the journals record that there are such writes, and a successor that finds this fails the
//! guest's writes (the field `broken` of `DeviceShared`), as after a failed flush.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::journal::Journal;
use ebb_guest_ring::full_barrier;

/// The unstable writes of one device; its rings may be on several workers.
#[derive(Debug, Default)]
pub(crate) struct Unstable {
    acknowledged: AtomicU64,
    journals: Mutex<Vec<Arc<Journal>>>,
}

impl Unstable {
    fn journals(&self) -> MutexGuard<'_, Vec<Arc<Journal>>> {
        self.journals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the journal of a ring that is about to be served.
    pub(crate) fn add(&self, journal: &Arc<Journal>) {
        self.journals().push(journal.clone());
    }

    /// Notes that a write is about to be acknowledged.
    #[inline]
    pub(crate) fn note(&self, journal: &Journal) {
        // Counted first: a flush that clears the record checks the count afterwards.
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
        journal.note_unstable(true);
    }

    /// The count of writes that a flush beginning now covers.
    pub(crate) fn mark(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Notes that a flush that began at `mark` succeeded. If there were writes since, the record stays.
    pub(crate) fn cover(&self, mark: u64) {
        if mark == 0 || self.mark() != mark {
            return;
        }
        let journals = self.journals();
        journals.iter().for_each(|journal| journal.note_unstable(false));
        full_barrier();
        if self.mark() != mark {
            journals.iter().for_each(|journal| journal.note_unstable(true));
        }
    }

    /// Notes that acknowledged writes are lost: a successor fails the guest's writes.
    pub(crate) fn note_lost(&self) {
        self.journals().iter().for_each(|journal| journal.note_broken());
    }

    /// Notes that everything is stable and that there are no further writes.
    pub(crate) fn settle(&self) {
        self.journals().iter().for_each(|journal| journal.note_unstable(false));
    }
}
