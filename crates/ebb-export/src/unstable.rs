//! Writes of a guest that were acknowledged from memory (`cache = "writeback"`) and that no flush has covered.
//!
//! A kill of the daemon loses them, while the guest runs on: a successor's next flush would succeed although
//! they are lost. So it is recorded, where a successor finds it, that there are such writes; a successor that finds this
//! fails the guest's writes and flushes, as after a failed flush.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backing::Backing;

/// Where a successor finds what one ring has recorded.
pub trait UnstableRecord: Send + Sync {
    /// Records whether there are writes that were acknowledged from memory and that no flush has covered.
    fn note_unstable(&self, unstable: bool);

    /// Records that acknowledged writes are lost.
    fn note_lost(&self);

    /// Records the volume and store that the ring's requests are for.
    fn note_backing(&self, backing: &Backing);
}

/// The unstable writes of one disk; its rings may be on several workers.
#[derive(Debug)]
pub struct UnstableWrites<R> {
    acknowledged: AtomicU64,
    records: Mutex<BTreeMap<usize, Arc<R>>>,
}

impl<R> Default for UnstableWrites<R> {
    fn default() -> UnstableWrites<R> {
        UnstableWrites { acknowledged: AtomicU64::new(0), records: Mutex::default() }
    }
}

impl<R: UnstableRecord> UnstableWrites<R> {
    fn records(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<R>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the record of a ring that is about to be served, in the place of one that the ring had before.
    pub fn add(&self, ring: usize, record: &Arc<R>) {
        self.records().insert(ring, record.clone());
    }

    /// Notes that there are unstable writes of this volume already, from an earlier connection: the next flush covers them.
    pub fn note_earlier(&self) {
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a write is about to be acknowledged.
    #[inline]
    pub fn note(&self, record: &R) {
        // Counted first: a flush that clears the record checks the count afterwards.
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
        record.note_unstable(true);
    }

    /// The count of writes that a flush beginning now covers.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Notes that a flush that began at `mark` succeeded. If there were writes since, the record stays.
    pub fn cover(&self, mark: u64) {
        if mark == 0 || self.mark() != mark {
            return;
        }
        let records = self.records();
        records.values().for_each(|record| record.note_unstable(false));
        fence(Ordering::SeqCst);
        if self.mark() != mark {
            records.values().for_each(|record| record.note_unstable(true));
        }
    }

    /// Notes that acknowledged writes are lost: a successor fails the guest's writes.
    pub fn note_lost(&self) {
        self.records().values().for_each(|record| record.note_lost());
    }

    /// Notes that the volume has other layers, or another size.
    pub fn note_backing(&self, backing: &Backing) {
        self.records().values().for_each(|record| record.note_backing(backing));
    }

    /// Notes that everything is stable and that there are no further writes.
    pub fn settle(&self) {
        self.records().values().for_each(|record| record.note_unstable(false));
    }
}
