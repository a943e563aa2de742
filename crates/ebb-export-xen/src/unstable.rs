//! Writes of a guest that were acknowledged from memory (`cache = "writeback"`) and that no flush has covered.
//!
//! A kill of the daemon loses them, and the guest lives on, connected: to its next flush a successor would say OK over
//! the loss. So the journals say that there are some, and a successor that finds it so fails the guest's writes
//! ([`Disk::broken`](crate::device_shared::Disk::broken)), as after a flush that failed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::guest_memory::full_barrier;
use crate::journal::Journal;

/// Those of one device; its rings may be on several workers.
#[derive(Debug, Default)]
pub(crate) struct Unstable {
    acknowledged: AtomicU64,
    journals: Mutex<Vec<Arc<Journal>>>,
}

impl Unstable {
    fn journals(&self) -> MutexGuard<'_, Vec<Arc<Journal>>> {
        self.journals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ring with this journal is about to be served.
    pub(crate) fn add(&self, journal: &Arc<Journal>) {
        self.journals().push(journal.clone());
    }

    /// A write is about to be acknowledged.
    #[inline]
    pub(crate) fn note(&self, journal: &Journal) {
        // First: a flush that takes the note back looks at this afterwards.
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
        journal.note_unstable(true);
    }

    /// What a flush that begins now covers.
    pub(crate) fn mark(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// A flush that began at `mark` succeeded. With writes since then the notes stay.
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

    /// Everything is stable, and nothing begins any more.
    pub(crate) fn settle(&self) {
        self.journals().iter().for_each(|journal| journal.note_unstable(false));
    }
}
