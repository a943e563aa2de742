//! Writes of a guest that were acknowledged from memory (`cache = "writeback"`) and that no flush has covered.
//!
//! A kill of the daemon loses them, while the guest runs on: a successor's next flush would succeed although
//! they are lost. So it is recorded, where a successor finds it, that there are such writes; a successor that finds this
//! fails the guest's writes and flushes, as after a failed flush.
//!
//! The same holds for a store that reports lost writes to the daemon that sent them alone
//! (`lost-writes=report`).
//!
//! Otherwise a kill leaves acknowledged writes to the kernel, which reports their loss
//! once. If the successor's last flush before it ends receives that report, its own successor's
//! flushes succeed, so the loss is recorded for each guest that may have such writes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_volume::Volume;

use crate::backing::Backing;

/// Where a successor finds what one ring has recorded.
pub trait UnstableRecord: Send + Sync {
    /// Records whether there are writes that were acknowledged from memory and that no flush has covered.
    fn note_unstable(&self, unstable: bool);

    /// Records that acknowledged writes are lost.
    fn note_lost(&self);

    /// Records that the volume was closed with all acknowledged writes stable.
    fn note_settled(&self);

    /// Records the volume and store that the ring's requests are for.
    fn note_backing(&self, backing: &Backing);

    /// As [`UnstableRecord::note_backing`], but keeps the size that the peer was told, unless the
    /// volume is smaller or is about to be.
    fn note_layers(&self, backing: &Backing);
}

/// The writes and losses before a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushMark {
    acknowledged: u64,
    losses: u64,
}

/// The unstable writes of one disk; its rings may be on several workers.
#[derive(Debug)]
pub struct UnstableWrites<R> {
    acknowledged: AtomicU64,
    losses: AtomicU64,
    records: Mutex<BTreeMap<usize, Arc<R>>>,
    /// Writes of earlier daemons may not be stable.
    inherited: AtomicBool,
    /// Held from when a backing is looked at until it is recorded: the last one that is recorded is
    /// the last one.
    noting: Mutex<()>,
}

impl<R> Default for UnstableWrites<R> {
    fn default() -> UnstableWrites<R> {
        UnstableWrites {
            acknowledged: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            records: Mutex::default(),
            inherited: AtomicBool::new(false),
            noting: Mutex::default(),
        }
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

    /// Notes that a ring was served before, and that its volume was not settled then: a daemon that
    /// was killed may have left writes to the kernel.
    pub fn note_inherited(&self) {
        self.inherited.store(true, Ordering::SeqCst);
    }

    /// Notes that a write is about to be acknowledged.
    #[inline]
    pub fn note(&self, record: &R) {
        // Counted first: a flush that clears the record checks the count afterwards.
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
        record.note_unstable(true);
    }

    /// To be called before a flush begins.
    #[must_use]
    pub fn mark(&self) -> FlushMark {
        FlushMark {
            acknowledged: self.acknowledged.load(Ordering::SeqCst),
            losses: self.losses.load(Ordering::SeqCst),
        }
    }

    /// Notes that a flush that began at `mark` succeeded. If there were writes since, or some were
    /// lost, the record stays.
    pub fn cover(&self, mark: FlushMark) {
        if mark.acknowledged == 0 || self.mark() != mark {
            return;
        }
        let records = self.records();
        // A loss is noted under this lock, and is not taken back below.
        if self.mark() != mark {
            return;
        }
        records.values().for_each(|record| record.note_unstable(false));
        fence(Ordering::SeqCst);
        if self.mark() != mark {
            records.values().for_each(|record| record.note_unstable(true));
        }
    }

    /// Notes that acknowledged writes are lost: a successor fails the guest's writes.
    pub fn note_lost(&self) {
        let records = self.records();
        self.losses.fetch_add(1, Ordering::SeqCst);
        records.values().for_each(|record| record.note_lost());
    }

    /// Notes that writes which earlier daemons left to the kernel may be lost: if this guest may
    /// have sent such writes, a successor fails its writes.
    pub fn note_inherited_lost(&self) {
        if self.inherited.load(Ordering::SeqCst) {
            self.note_lost();
        }
    }

    /// Notes that the volume has other layers, or is about to have, or another size.
    pub fn note_backing(&self, volume: &Volume) {
        self.note_each(volume, R::note_backing);
    }

    /// Notes the layers of the volume, after records were added: its layers may have been exchanged
    /// since the records were made.
    pub fn note_layers(&self, volume: &Volume) {
        self.note_each(volume, R::note_layers);
    }

    fn note_each(&self, volume: &Volume, note: impl Fn(&R, &Backing)) {
        let _noting = self.noting.lock().unwrap_or_else(PoisonError::into_inner);
        let backing = Backing::to_record(volume);
        self.records().values().for_each(|record| note(record, &backing));
    }

    /// Notes that everything is stable that this daemon has acknowledged, and that there are no
    /// further writes. If it `has_flushed`, the writes of earlier daemons are stable as well.
    pub fn settle(&self, has_flushed: bool) {
        let all = has_flushed || !self.inherited.load(Ordering::SeqCst);
        for record in self.records().values() {
            record.note_unstable(false);
            if all {
                record.note_settled();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Writes {
        Stable,
        Unstable,
        Lost,
    }

    struct Record(Mutex<Writes>);

    impl Record {
        fn writes(&self) -> Writes {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn set(&self, writes: Writes) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = writes;
        }
    }

    impl UnstableRecord for Record {
        fn note_unstable(&self, unstable: bool) {
            self.set(if unstable { Writes::Unstable } else { Writes::Stable });
        }

        fn note_lost(&self) {
            self.set(Writes::Lost);
        }

        fn note_settled(&self) {}

        fn note_backing(&self, _: &Backing) {}

        fn note_layers(&self, _: &Backing) {}
    }

    fn unstable() -> (UnstableWrites<Record>, Arc<Record>) {
        let (unstable, record) = (UnstableWrites::default(), Record(Mutex::new(Writes::Stable)));
        let record = Arc::new(record);
        unstable.add(0, &record);
        unstable.note(&record);
        (unstable, record)
    }

    #[test]
    fn flush_covers_what_was_acknowledged_before_it() {
        let (unstable, record) = unstable();
        let earlier = unstable.mark();
        unstable.note(&record);
        unstable.cover(earlier);
        assert_eq!(record.writes(), Writes::Unstable);
        unstable.cover(unstable.mark());
        assert_eq!(record.writes(), Writes::Stable);
    }

    /// Writes that a kill does not lose are not counted, and a flush can lose them.
    #[test]
    fn flush_takes_back_no_loss_that_was_noted_since_it_began() {
        let (unstable, record) = unstable();
        let earlier = unstable.mark();
        unstable.note_lost();
        unstable.cover(earlier);
        assert_eq!(record.writes(), Writes::Lost);
        // One that begins later succeeds only after everything was written again.
        unstable.cover(unstable.mark());
        assert_eq!(record.writes(), Writes::Stable);
    }
}
