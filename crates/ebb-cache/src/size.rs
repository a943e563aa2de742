//! Resizing a volume whose cache is in use.
//!
//! # Invariants
//! - The cache adopts a larger size before requests may use it, and a smaller one after the last request
//!   beyond the new end: a page within the volume is never dropped while it is dirty.
//! - If the old or new end is not a multiple of a page, the page at that end is stable, and kept
//!   clean during the change and read again afterwards: the cache had filled its bytes beyond the
//!   end with zeroes. If it cannot be made stable, the resize fails, and a later flush repairs the
//!   loss.
//! - While the store is truncated, no writeback beyond the new end is in flight.
//! - Nothing that was submitted for a range beyond an end is sent to the store after the end has changed, also not
//!   after a flush has failed.

use std::sync::atomic::Ordering;

use ebb_block::{BlockError, Io};

use crate::pages::{FRAME, FRAME_PAGES, PAGE, sectors, within};
use crate::read::InflightWait;
use crate::shard::{SHARDS, shard_of};
use crate::stats::Mode;
use crate::volume::{FrameWalk, StoreCache, VolumeCache};
use crate::write::{ChangeOutcome, InflightWrite};

/// Flushes of a store, at most, before a page at the end that is written meanwhile is held.
const STABLE_TRIES: usize = 8;

/// The page at the end of a volume, kept clean: it cannot become dirty until this is passed to
/// [`VolumeCache::grow`], [`VolumeCache::cut`] or [`VolumeCache::keep_size`]. If it is dropped instead, the
/// page is never cached again.
#[must_use]
pub(crate) struct Edge<'a>(Option<InflightWrite<'a>>);

impl VolumeCache {
    /// The part of `pages` that lies within the volume.
    pub(crate) fn existing(&self, pages: &std::ops::Range<u64>) -> std::ops::Range<u64> {
        pages.start..pages.end.min(self.size().div_ceil(PAGE))
    }
}

impl StoreCache {
    /// Writes back what is dirty below `end`, in writeback mode.
    ///
    /// # Errors
    /// Those of the store; the data is kept.
    pub(crate) async fn write_below(&self, io: &Io, end: u64) -> Result<(), BlockError> {
        match self.mode() {
            Mode::Writeback => self.clean(io, &(0..end.div_ceil(PAGE))).await,
            _ => Ok(()),
        }
    }

    /// Holds the page that contains `end`; there is none if `end` is a multiple of a page. The page
    /// is stable first: after the resize it could not be written again.
    ///
    /// # Errors
    /// Those of the store: the page is dirty and could not be written, or is not stable and the
    /// store could not be flushed.
    pub(crate) async fn hold_edge(&self, io: &Io, end: u64) -> Result<Edge<'_>, BlockError> {
        if end.is_multiple_of(PAGE) {
            return Ok(Edge(None));
        }
        let start = end / PAGE * PAGE;
        for _ in 0..STABLE_TRIES {
            let held = InflightWrite::begin_clean(self, io, start, PAGE).await?;
            if self.is_lost() || self.is_stable(start / PAGE) {
                return Ok(Edge(Some(held)));
            }
            held.end(io.pool().worker(), ChangeOutcome::Kept);
            Box::pin(self.stabilize(io)).await?;
        }
        // It is written all the time.
        Ok(Edge(Some(InflightWrite::begin_clean(self, io, start, PAGE).await?)))
    }

    /// Returns true if no part of a page would have to be written again after a loss.
    fn is_stable(&self, page: u64) -> bool {
        let frame = page / FRAME_PAGES;
        let shard = self.lock(shard_of(frame));
        (shard.unstable(frame) | shard.zeroed(frame)) & within(frame, &(page..page + 1)) == 0
    }
}

impl VolumeCache {
    /// The store has grown to `size`, and no request uses it yet; `edge` is that of the old end.
    pub(crate) fn grow(&self, io: &Io, size: u64, edge: Edge<'_>) {
        let before = self.size.fetch_max(size, Ordering::SeqCst);
        if !before.is_multiple_of(PAGE) {
            // Zeroes of the short last page would be repeated over what follows it now.
            let (page, number) = (before / PAGE, shard_of(before / FRAME));
            self.lock(number).note_written_over(number, &(page..page + 1), &(0..0));
        }
        edge.0.into_iter().for_each(|write| write.end(io.pool().worker(), ChangeOutcome::Dropped));
    }

    /// From now on nothing at or beyond `size` is sent to the store; on return no writeback of it is in
    /// flight. Dirty data there stays until the volume is [cut](VolumeCache::cut) or [keeps its
    /// size](VolumeCache::keep_size).
    pub async fn seal(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
        let beyond = size / PAGE..u64::MAX;
        for shard in 0..SHARDS {
            loop {
                let sent = self.lock(shard).inflight.cleaned_in(&beyond);
                let Some(fill) = sent else { break };
                InflightWait { volume: self, shard, fill, waiter: None }.await;
            }
        }
    }

    /// The store was truncated at `size`: drops what lies beyond, and returns its dirty bytes to the
    /// [`WritebackControl`](crate::WritebackControl). Yields to other tasks of the worker.
    pub(crate) async fn cut(&self, io: &Io, size: u64, edge: Edge<'_>) {
        let pages = size.div_ceil(PAGE)..u64::MAX - FRAME_PAGES;
        let touched = size / PAGE..pages.end;
        let worker = io.pool().worker();
        for shard in 0..SHARDS {
            {
                let mut state = self.lock(shard);
                state.inflight.poison(&pages);
                state.inflight.mark_clash(&sectors(size, u64::MAX - size));
                // Zeroes that may be lost are not repeated beyond the end: the store may have other data there when it
                // has grown again.
                state.note_written_over(shard, &touched, &pages);
            }
            let mut walk = FrameWalk::beyond(&pages);
            loop {
                let mut batch = crate::shard::FreeBatch::new();
                let done = walk.step(&mut self.lock(shard), shard, &mut batch);
                batch.free(worker, false);
                let dropped = std::mem::take(&mut walk.dropped) * PAGE;
                if dropped > 0 {
                    self.control().unused(dropped);
                }
                if done {
                    break;
                }
                io.yield_now().await;
            }
        }
        edge.0.into_iter().for_each(|write| write.end(worker, ChangeOutcome::Dropped));
        self.retry_reservation();
    }

    /// The resize failed or was cancelled: the volume keeps its size.
    pub(crate) fn keep_size(&self, io: &Io, size: u64, edge: Edge<'_>) {
        self.size.store(size, Ordering::SeqCst);
        edge.0.into_iter().for_each(|write| write.end(io.pool().worker(), ChangeOutcome::Kept));
        self.retry_reservation();
    }
}
