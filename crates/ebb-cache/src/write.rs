//! Changing: the store first, then what is cached of it (writethrough). What is dirty of a range goes to
//! the store before any of this begins (`back.rs`).
//!
//! A change is known to the shards it touches from before the store is asked until the cache is up to
//! date (`inflight.rs`). A change that fails, or whose future is dropped, or that meets another one,
//! leaves nothing of its pages in the cache.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_mem::Worker;
use ebb_store::{
    BlockError, Buf, BufResult, ErrorKind, Extent, Io, Operation, Store, Wanted, ZeroFlags,
};

use crate::inflight::Wakers;
use crate::pages::{PAGE, Part, each, mask, parts, sectors, touched};
use crate::shard::{Batch, COLD};
use crate::stats::Mode;
use crate::volume::{VolumeCache, Walk};

/// Writes of so many bytes are taken for one-pass data.
const LARGE: usize = 256 << 10;

/// Holds of a lock, of up to 64 frames each, between two looks at other tasks.
const STEPS: u32 = 8;
/// Frames of a request that are copied between two looks at other tasks: a MiB.
pub(crate) const FRAMES_AT_ONCE: usize = 16;

/// A change under way. Dropped before its end it stays with the shards, since the store may still carry
/// it out.
pub(crate) struct Change<'a> {
    volume: &'a VolumeCache,
    pub(crate) id: u64,
    pages: Range<u64>,
    shards: u16,
    open: bool,
}

impl<'a> Change<'a> {
    pub(crate) fn begin(volume: &'a VolumeCache, offset: u64, length: u64) -> Change<'a> {
        let (pages, sectors) = (touched(offset, length), sectors(offset, length));
        let (id, shards) = (volume.new_change(), VolumeCache::shards_of(&pages));
        for shard in each(shards) {
            volume.lock(shard).flights.begin_change(id, sectors.clone());
        }
        Change { volume, id, pages, shards, open: true }
    }

    /// As [`Change::begin`], once nothing of the range is dirty or on its way.
    pub(crate) async fn begin_clean(
        volume: &'a Arc<VolumeCache>,
        (io, store): (&Io, &Store),
        offset: u64,
        length: u64,
    ) -> Result<Change<'a>, BlockError> {
        if volume.mode() != Mode::Writeback {
            return Ok(Change::begin(volume, offset, length));
        }
        let (pages, sectors) = (touched(offset, length), sectors(offset, length));
        let (id, shards) = (volume.new_change(), VolumeCache::shards_of(&pages));
        // Not abandoned if it never begins: nothing was asked of the store yet.
        let mut change = Change { volume, id, pages, shards: 0, open: true };
        for shard in each(shards) {
            if shards == u16::MAX {
                // A long range: there may be much to look at in each.
                io.yield_now().await;
            }
            loop {
                {
                    let mut locked = volume.lock(shard);
                    if !locked.has_unsaved(&change.pages, shard) {
                        locked.flights.begin_change(id, sectors.clone());
                        change.shards |= mask(shard, 1);
                        break;
                    }
                }
                if let Err(error) = Box::pin(volume.clean(io, store, &change.pages)).await {
                    change.end(io.pool().worker(), true);
                    return Err(error);
                }
            }
        }
        Ok(change)
    }

    /// Ends it; with `keep` what is cached of its pages stays, unless another change has met it.
    pub(crate) fn end(mut self, worker: &Worker, keep: bool) {
        for number in each(self.shards) {
            let mut walk = Walk::new(&self.pages);
            while !self.end_some(worker, number, &mut walk, keep) {}
        }
        self.open = false;
    }

    /// As [`Change::end`], for long ranges: some at a time, and others on this worker come in between.
    pub(crate) async fn end_by_and_by(mut self, io: &Io, keep: bool) {
        let mut steps = 0;
        for number in each(self.shards) {
            let mut walk = Walk::new(&self.pages);
            while !self.end_some(io.pool().worker(), number, &mut walk, keep) {
                steps += 1;
                if steps % STEPS == 0 {
                    io.yield_now().await;
                }
            }
        }
        self.open = false;
    }

    /// One hold of a shard's lock. True once the change has ended there.
    fn end_some(&mut self, worker: &Worker, number: usize, walk: &mut Walk, keep: bool) -> bool {
        let mut batch = Batch::new();
        let mut wakers = Wakers::default();
        let mut shard = self.volume.lock(number);
        let spoilt = !keep || shard.flights.has_clash(self.id);
        let done = !spoilt || walk.step(&mut shard, number, &mut batch);
        if done {
            shard.flights.end_change(self.id, &mut wakers);
            self.shards &= !mask(number, 1);
        }
        drop(shard);
        batch.free(worker, false);
        done
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if self.open {
            let worker = self.volume.memory.worker(|| ());
            for shard in each(self.shards) {
                let mut wakers = Wakers::default();
                self.volume.lock(shard).flights.abandon(self.id, &mut wakers);
                self.volume.drop_pages(shard, &self.pages, &worker);
            }
        }
    }
}

impl VolumeCache {
    /// Writes the whole buffer at `offset`; with `fua` it is stable on return.
    pub async fn write(
        self: &Arc<Self>,
        io: &Io,
        store: &Arc<Store>,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> BufResult {
        if self.is_written_back() {
            return self.write_back(io, store, buf, offset, fua).await;
        }
        self.write_through(io, store, buf, offset, fua).await
    }

    /// The store first.
    pub(crate) async fn write_through(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> BufResult {
        let length = buf.len() as u64;
        let change = match Change::begin_clean(self, (io, store), offset, length).await {
            Ok(change) => change,
            Err(error) => return (Err(error), buf),
        };
        self.uses.fetch_add(1, Ordering::Relaxed);
        let losses = store.losses();
        let (mut result, buf) = store.write(io, buf, offset, fua).await;
        if result.is_ok() && !fua {
            result = self.bypassed(store, losses, offset, length);
        } else if result.is_ok() {
            self.note_stable(offset, length);
        }
        let worker = io.pool().worker();
        if result.is_ok() {
            for (number, part) in parts(offset, buf.len()).enumerate() {
                if number > 0 && number % FRAMES_AT_ONCE == 0 {
                    io.yield_now().await;
                }
                self.keep_written(worker, change.id, &part, &buf);
            }
        }
        change.end(worker, result.is_ok());
        (result, buf)
    }

    /// In writeback mode a change has gone past memory: if a flush fails it cannot be written again. If
    /// one has failed meanwhile it may be lost already.
    fn bypassed(
        &self,
        store: &Store,
        losses: u64,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        if self.mode() != Mode::Writeback || self.note_bypass(store, losses, offset) {
            return Ok(());
        }
        Err(BlockError::new(ErrorKind::Lost, Operation::Write, offset, length))
    }

    /// Brings one frame up to date with a write.
    pub(crate) fn keep_written(&self, worker: &Worker, id: u64, part: &Part, buf: &[u8]) {
        let number = VolumeCache::shard_of(part.frame);
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let whole = part.covered(self.size());
        let data = &buf[part.range()];
        let fresh = {
            let mut shard = self.lock(number);
            if shard.flights.has_clash(id) {
                return;
            }
            let fresh = whole & !shard.covered(part.frame);
            if fresh == 0 || !self.cache.admits() {
                shard.update(worker, part, part.touched() & !fresh, whole, data);
                return;
            }
            fresh
        };
        let mut prepared = self.prepare(worker, part, fresh, data);
        {
            let mut shard = self.lock(number);
            if !shard.flights.has_clash(id) {
                // Also the pages that another had no buffer for a moment ago.
                shard.update(worker, part, part.touched(), whole, data);
                let kind = if buf.len() >= LARGE { COLD } else { 0 };
                prepared.attach(&mut shard, part.frame, kind, tick);
            }
        }
        prepared.finish(&self.cache, worker);
    }

    /// Makes all acknowledged writes stable.
    ///
    /// # Errors
    /// The store's.
    pub async fn flush(self: &Arc<Self>, io: &Io, store: &Store) -> Result<(), BlockError> {
        if self.mode() == Mode::Writeback {
            return Box::pin(self.write_back_and_flush(io, store)).await;
        }
        store.flush(io).await
    }

    /// Gives the space of a range back if the store can.
    ///
    /// # Errors
    /// The store's.
    pub async fn discard(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        let change = Change::begin_clean(self, (io, store), offset, length).await?;
        let result = store.discard(io, offset, length).await;
        if result.is_ok() && self.mode() == Mode::Writeback {
            // Whatever is found there is right.
            let whole = offset.div_ceil(PAGE)..(offset + length) / PAGE;
            for shard in each(VolumeCache::shards_of(&whole)) {
                self.lock(shard).forget_unstable(&whole);
            }
        }
        change.end_by_and_by(io, false).await;
        result
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// The store's.
    pub async fn write_zeroes(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<(), BlockError> {
        self.write_zeroes_while(io, store, offset, length, flags, &|| true).await
    }

    /// See [`Store::write_zeroes_while`].
    ///
    /// # Errors
    /// The store's.
    pub async fn write_zeroes_while(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let change = Change::begin_clean(self, (io, store), offset, length).await?;
        let losses = store.losses();
        let mut result = store.write_zeroes_while(io, offset, length, flags, wanted).await;
        if result.is_ok() && self.mode() == Mode::Writeback {
            let noted = (change.id, losses);
            if !self.note_zeroes(store, noted, (offset, length), flags.may_unmap) {
                let (kind, operation) = (ErrorKind::Lost, Operation::WriteZeroes);
                result = Err(BlockError::new(kind, operation, offset, length));
            }
        }
        change.end_by_and_by(io, false).await;
        result
    }

    /// The runs of data and holes in a range, in order and without gaps, at most `limit` of them.
    ///
    /// # Errors
    /// The store's.
    pub async fn extents(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        if self.mode() == Mode::Writeback {
            Box::pin(self.clean(io, store, &touched(offset, length))).await?;
        }
        store.extents(io, offset, length, limit).await
    }

    /// Tells that a range will be read soon.
    ///
    /// # Errors
    /// The store's.
    pub async fn prefetch(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        offset: u64,
        length: u64,
    ) -> Result<(), BlockError> {
        store.prefetch(io, offset, length).await?;
        if self.cache.has_room_ahead() {
            let most = self.cache.limit_bytes() / 4;
            self.load(io, store, touched(offset, length.min(most))).await;
        }
        Ok(())
    }
}
