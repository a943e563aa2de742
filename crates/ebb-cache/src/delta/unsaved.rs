//! Blocks of a delta whose bits are not saved: what a kill of the daemon loses, and what a store may have lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_block::{BlockError, Io, Loss};
use ebb_image::{BLOCK, PendingBlocks};

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

    /// Returns true if the data of blocks that were pending may be lost.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.loss.lock().is_some()
    }

    /// Notes that writes go to `above` from now on, and that it has to be flushed once.
    pub(crate) fn freeze(&self, above: &Arc<Delta>) {
        *self.above.lock() = Arc::downgrade(above);
        self.is_unflushed.store(true, Ordering::SeqCst);
    }

    /// Whether it was the top layer, and is not stable since.
    pub fn is_unflushed(&self) -> bool {
        self.is_unflushed.load(Ordering::SeqCst)
    }

    /// Flushes the store, whether or not the name of its file is stable. If that fails, and the
    /// store does not get the data again from the cache, the data of pending blocks is in doubt.
    pub(crate) async fn flush_store(&self, io: &Io, store: &CachedStore) -> Result<(), BlockError> {
        let flushed = store.flush_content(io).await;
        if let Err(error) = &flushed
            && (store.mode() != Mode::Writeback || store.is_lost())
            && !store.store().lost_nothing(error)
        {
            let losses = store.store().losses();
            let is_new = self.reported_losses.swap(losses, Ordering::SeqCst) != losses;
            // What was written after a loss that is known is not lost with it.
            if self.has_pending() && (is_new || store.mode() == Mode::Writeback) {
                self.lose_pending(error);
            }
        }
        flushed
    }

    /// Forgets the pending blocks, whose data may be lost: no flush succeeds until the delta is
    /// reopened. The store may have zeroes there, also in sectors that were not written, and a
    /// reopened delta would not find the blocks either. From now on reads return the data of the
    /// layers below. The same holds for the delta above: it may have copies of these blocks.
    fn lose_pending(&self, error: &BlockError) {
        {
            let mut pending = self.pending.lock();
            let mut loss = self.loss.lock();
            if loss.is_some() {
                return;
            }
            *loss = Some(Loss { since: ebb_io::clock::now(), error: error.to_string() });
            *pending = PendingBlocks::default();
            self.has_pending.store(false, Ordering::Release);
        }
        let above = self.above.lock().upgrade();
        if let Some(above) = above {
            above.lose_pending(error);
        }
    }

    /// Makes a header stable, which is not in the cache: only a flush that the cache does not
    /// repeat after a loss covers it. Not its name: a volume whose folder cannot be flushed is
    /// served, and its flushes fail.
    pub(super) async fn flush_header(
        &self,
        io: &Io,
        store: &CachedStore,
    ) -> Result<(), BlockError> {
        match store.mode() {
            Mode::Writeback => store.store().flush_content(io).await,
            Mode::None | Mode::Writethrough => self.flush_store(io, store).await,
        }
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
