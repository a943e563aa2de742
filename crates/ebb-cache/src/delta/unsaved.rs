//! Blocks of a delta whose bits are not saved: what a kill of the daemon loses, and what a store may have lost.

use std::sync::atomic::Ordering;

use ebb_block::{BlockError, BlockStore, Io, Loss};
use ebb_image::BLOCK;

use super::Delta;
use crate::cached_store::CachedStore;
use crate::stats::Mode;

impl Delta {
    /// Returns true if a kill of the daemon loses acknowledged blocks: their bits are in memory only.
    #[inline]
    pub(crate) fn has_pending(&self) -> bool {
        self.has_pending.load(Ordering::Acquire)
    }

    /// Bytes of the blocks that a kill of the daemon loses.
    pub(crate) fn pending_bytes(&self) -> u64 {
        if !self.has_pending() {
            return 0;
        }
        self.pending.lock().blocks().saturating_mul(BLOCK)
    }

    /// The loss of pending blocks, if their data may be lost.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss.lock().clone()
    }

    /// Flushes the store. If that fails, and the store does not get the data again from the cache, the data of pending blocks
    /// is in doubt.
    pub(super) async fn flush_store(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        let flushed = store.flush(io).await;
        if let Err(error) = &flushed
            && store.mode() != Mode::Writeback
            && self.has_pending()
        {
            let loss = || Loss { since: ebb_io::clock::now(), error: error.to_string() };
            self.loss.lock().get_or_insert_with(loss);
        }
        flushed
    }

    /// Notes that it holds `count` blocks from `first` on, whose data was written. Returns the bytes of memory for blocks
    /// whose bits are not stable.
    pub(crate) fn note_held(&self, first: u64, count: u64) -> usize {
        let mut pending = self.pending.lock();
        pending.add(first, count);
        self.has_pending.store(true, Ordering::Release);
        pending.bytes()
    }

    /// Saves blocks whose bits are not stable because they are many. A failure is reported by the next flush.
    pub(crate) async fn save_many(&self, io: &Io, store: &CachedStore) {
        if let Err(error) = self.save(io, store).await {
            self.report_later(error);
        }
    }

    /// Has the next flush report a failure of one that no client had asked for.
    pub(crate) fn report_later(&self, error: BlockError) {
        self.unreported.lock().get_or_insert(error);
    }
}
