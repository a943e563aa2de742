//! Another size for a volume whose cache is in use.
//!
//! # Invariants
//! - The cache knows a larger size before anybody else, and a smaller one once nobody asks for what lies
//!   beyond: a page within the volume is never dropped while it is dirty.
//! - The page that the old or the new end lies in, if it is no multiple of a page, is held clean while
//!   the size changes, and read anew afterwards: beyond the end its bytes were zeroes of the cache's own.
//! - While the store is cut nothing is on its way to it beyond the new end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_store::{BlockError, Io, Store};

use crate::pages::{FRAME_PAGES, PAGE, sectors};
use crate::read::Wait;
use crate::stats::Mode;
use crate::volume::{SHARDS, VolumeCache, Walk};
use crate::write::Change;

/// The page that an end lies in, held clean: nobody makes it dirty until this is given back. Give it
/// back with [`VolumeCache::grow`], [`VolumeCache::cut`] or [`VolumeCache::keep_size`]; dropped, its
/// page is never cached again.
#[must_use]
pub struct Edge<'a>(Option<Change<'a>>);

impl VolumeCache {
    /// Those of `pages` that the volume has.
    pub(crate) fn existing(&self, pages: &std::ops::Range<u64>) -> std::ops::Range<u64> {
        pages.start..pages.end.min(self.size().div_ceil(PAGE))
    }

    /// Writes what is dirty below `end`, in writeback mode.
    ///
    /// # Errors
    /// The store's; the data is kept.
    pub async fn write_below(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        end: u64,
    ) -> Result<(), BlockError> {
        match self.mode() {
            Mode::Writeback => self.clean(io, store, &(0..end.div_ceil(PAGE))).await,
            _ => Ok(()),
        }
    }

    /// Holds the page that `end` lies in; a multiple of a page lies in none.
    ///
    /// # Errors
    /// The store's: the page is dirty and could not be written.
    pub async fn hold_edge(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        end: u64,
    ) -> Result<Edge<'_>, BlockError> {
        if end.is_multiple_of(PAGE) {
            return Ok(Edge(None));
        }
        let start = end / PAGE * PAGE;
        Ok(Edge(Some(Change::begin_clean(self, (io, store), start, PAGE).await?)))
    }

    /// The volume has grown to `size`, on its store, and nobody was told yet; `edge` is that of the old end.
    pub fn grow(&self, io: &Io, size: u64, edge: Edge<'_>) {
        self.size.fetch_max(size, Ordering::SeqCst);
        edge.0.into_iter().for_each(|change| change.end(io.pool().worker(), false));
    }

    /// From now on nothing at or beyond `size` is sent to the store, and on return nothing is on its
    /// way. What is dirty there stays, until it is [cut](VolumeCache::cut) or [kept](VolumeCache::keep_size).
    pub async fn seal(&self, size: u64) {
        self.size.store(size, Ordering::SeqCst);
        let beyond = size / PAGE..u64::MAX;
        for shard in 0..SHARDS {
            loop {
                let sent = self.lock(shard).flights.cleaned_in(&beyond);
                let Some(fill) = sent else { break };
                Wait { volume: self, shard, fill, waiter: None }.await;
            }
        }
    }

    /// The store was cut at `size`: forgets what lies beyond. What was dirty there is given back to
    /// the [`WritebackControl`](crate::WritebackControl). Some at a time: others on this worker come between.
    pub async fn cut(&self, io: &Io, size: u64, edge: Edge<'_>) {
        let pages = size.div_ceil(PAGE)..u64::MAX - FRAME_PAGES;
        let worker = io.pool().worker();
        for shard in 0..SHARDS {
            {
                let mut shard = self.lock(shard);
                shard.flights.poison(&pages);
                shard.flights.mark_clash(&sectors(size, u64::MAX - size));
            }
            let mut walk = Walk::beyond(&pages);
            loop {
                let mut batch = crate::shard::Batch::new();
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
        edge.0.into_iter().for_each(|change| change.end(worker, false));
        self.ask_again();
    }

    /// The volume keeps the size it had: nothing came of it.
    pub fn keep_size(&self, io: &Io, size: u64, edge: Edge<'_>) {
        self.size.store(size, Ordering::SeqCst);
        edge.0.into_iter().for_each(|change| change.end(io.pool().worker(), true));
        self.ask_again();
    }
}

impl Default for Edge<'_> {
    /// Of an end at a multiple of a page.
    fn default() -> Self {
        Edge(None)
    }
}
