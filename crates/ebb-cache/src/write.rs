//! Writethrough writes, discards and write-zeroes: first the store, then the cached pages. In writeback mode
//! the dirty data of the range is written to the store before the request begins (`writeback.rs`).
//!
//! In this module an *in-flight write* is any of the three requests. The shards it touches know of it from
//! before it is submitted to the store until the cache is up to date (`inflight.rs`). A write that fails,
//! whose future is dropped, or that overlaps another one leaves none of its pages in the cache.

use std::ops::Range;
use std::sync::atomic::Ordering;

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, ErrorKind, Extent, Io, Operation, Wanted, ZeroFlags,
};
use ebb_mem::WorkerMemory;

use crate::inflight::Wakers;
use crate::pages::{FramePart, each, mask, parts, sectors, touched};
use crate::shard::{COLD, FreeBatch, SHARDS, shard_of};
use crate::stats::Mode;
use crate::volume::{FrameWalk, StoreCache, VolumeCache};

/// Writes of this many bytes count as one-pass data.
const LARGE: usize = 256 << 10;

/// Lock acquisitions, of up to 64 frames each, before the task yields.
const LOCKS_PER_YIELD: u32 = 8;
/// Frames of a request that are copied before the task yields: a MiB.
const FRAMES_AT_ONCE: usize = 16;

/// Whether the task yields before it copies this frame of a request, counted from 0.
#[inline]
pub(crate) fn yields_before(frame: usize) -> bool {
    frame > 0 && frame.is_multiple_of(FRAMES_AT_ONCE)
}

/// How an in-flight write ended: what becomes of the cached data of its pages, unless another write
/// overlapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeOutcome {
    /// The cache is up to date.
    Kept,
    /// The store has other data than the cache.
    Dropped,
    /// The store may have anything. Pages that are not stable there are kept, and written again.
    Failed,
}

impl ChangeOutcome {
    /// The outcome of a request that changes the store without the cache.
    fn of_change<T>(result: &Result<T, BlockError>) -> ChangeOutcome {
        match result {
            Ok(_) => ChangeOutcome::Dropped,
            // A fast zero that the store rejects has changed nothing.
            Err(error) if error.kind == ErrorKind::Unsupported => ChangeOutcome::Kept,
            Err(_) => ChangeOutcome::Failed,
        }
    }

    fn walk(self, pages: &Range<u64>) -> FrameWalk {
        match self {
            ChangeOutcome::Failed => FrameWalk::after_failure(pages),
            ChangeOutcome::Kept | ChangeOutcome::Dropped => FrameWalk::new(pages),
        }
    }
}

/// A write in flight. If it is dropped before it has completed, the shards keep its entry, since the store
/// may still carry it out.
pub(crate) struct InflightWrite<'a> {
    volume: &'a VolumeCache,
    pub(crate) id: u64,
    pages: Range<u64>,
    shards: u16,
    open: bool,
}

impl<'a> InflightWrite<'a> {
    pub(crate) fn begin(volume: &'a VolumeCache, offset: u64, length: u64) -> InflightWrite<'a> {
        let (pages, sectors) = (touched(offset, length), sectors(offset, length));
        let (id, shards) = (volume.new_write_id(), VolumeCache::shards_of(&pages));
        for shard in each(shards) {
            volume.lock(shard).inflight.begin_write(id, sectors.clone());
        }
        InflightWrite { volume, id, pages, shards, open: true }
    }

    /// As [`InflightWrite::begin`], once nothing of the range is dirty or under writeback.
    pub(crate) async fn begin_clean(
        volume: &'a StoreCache,
        io: &Io,
        offset: u64,
        length: u64,
    ) -> Result<InflightWrite<'a>, BlockError> {
        if volume.mode() != Mode::Writeback {
            return Ok(InflightWrite::begin(volume, offset, length));
        }
        let (pages, sectors) = (touched(offset, length), sectors(offset, length));
        let (id, shards) = (volume.new_write_id(), VolumeCache::shards_of(&pages));
        // Not abandoned if it never begins: nothing was submitted to the store yet.
        let mut write = InflightWrite { volume, id, pages, shards: 0, open: true };
        for shard in each(shards) {
            if shards == u16::MAX {
                // A long range may have many entries to check in each shard.
                io.yield_now().await;
            }
            loop {
                {
                    let mut locked = volume.lock(shard);
                    if !locked.has_unsaved(&write.pages, shard) {
                        locked.inflight.begin_write(id, sectors.clone());
                        write.shards |= mask(shard, 1);
                        break;
                    }
                }
                if let Err(error) = Box::pin(volume.clean(io, &write.pages)).await {
                    write.end(io.pool().worker(), ChangeOutcome::Kept);
                    return Err(error);
                }
            }
        }
        Ok(write)
    }

    /// Ends it.
    pub(crate) fn end(mut self, worker: &WorkerMemory, outcome: ChangeOutcome) {
        for number in each(self.shards) {
            let mut walk = outcome.walk(&self.pages);
            while !self.end_step(worker, number, &mut walk, outcome) {}
        }
        self.open = false;
    }

    /// As [`InflightWrite::end`], for long ranges: yields to other tasks of the worker.
    pub(crate) async fn end_in_steps(mut self, io: &Io, outcome: ChangeOutcome) {
        let mut steps = 0;
        for number in each(self.shards) {
            let mut walk = outcome.walk(&self.pages);
            while !self.end_step(io.pool().worker(), number, &mut walk, outcome) {
                steps += 1;
                if steps % LOCKS_PER_YIELD == 0 {
                    io.yield_now().await;
                }
            }
        }
        self.open = false;
    }

    /// One acquisition of a shard's lock. True once the write has ended in that shard.
    fn end_step(
        &mut self,
        worker: &WorkerMemory,
        number: usize,
        walk: &mut FrameWalk,
        outcome: ChangeOutcome,
    ) -> bool {
        let mut batch = FreeBatch::new();
        let mut wakers = Wakers::default();
        let mut shard = self.volume.lock(number);
        let is_clash = shard.inflight.has_clash(self.id);
        if is_clash && outcome == ChangeOutcome::Failed {
            walk.drop_unstable();
        }
        let discard = outcome != ChangeOutcome::Kept || is_clash;
        let done = !discard || walk.step(&mut shard, number, &mut batch);
        if walk.has_kept {
            // Under the lock: a flush that marks these pages as stable sees it.
            self.volume.writeback.doubts.fetch_add(1, Ordering::SeqCst);
            walk.has_kept = false;
        }
        if done {
            shard.inflight.end_write(self.id, &mut wakers);
            self.shards &= !mask(number, 1);
        }
        drop(shard);
        batch.free(worker, false);
        done
    }
}

impl Drop for InflightWrite<'_> {
    fn drop(&mut self) {
        if self.open {
            let worker = self.volume.memory.worker(|| ());
            for shard in each(self.shards) {
                let mut wakers = Wakers::default();
                self.volume.lock(shard).inflight.abandon(self.id, &mut wakers);
                self.volume.drop_pages(shard, &self.pages, &worker);
            }
        }
    }
}

impl StoreCache {
    /// Writes the whole buffer at `offset`; with `fua` the data is stable on return.
    pub async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        if self.is_written_back() {
            return self.write_back(io, buf, offset, fua).await;
        }
        self.write_through(io, buf, offset, fua).await
    }

    /// Writes to the store first, then updates the cache.
    pub(crate) async fn write_through(
        &self,
        io: &Io,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> BufResult {
        let length = buf.len() as u64;
        let write = match InflightWrite::begin_clean(self, io, offset, length).await {
            Ok(write) => write,
            Err(error) => return (Err(error), buf),
        };
        self.uses.fetch_add(1, Ordering::Relaxed);
        let losses = self.store.losses();
        let (mut result, buf) = self.store.write(io, buf, offset, fua).await;
        if result.is_ok() && !fua {
            result = self.check_bypass(losses, offset, length);
        } else if result.is_ok() {
            self.note_stable(offset, length);
        }
        let worker = io.pool().worker();
        if result.is_err() {
            self.note_failed(offset, length);
        } else {
            for (number, part) in parts(offset, buf.len()).enumerate() {
                if yields_before(number) {
                    io.yield_now().await;
                }
                self.keep_written(worker, write.id, &part, &buf);
            }
        }
        let outcome = if result.is_ok() { ChangeOutcome::Kept } else { ChangeOutcome::Failed };
        write.end(worker, outcome);
        (result, buf)
    }

    /// In writeback mode a write that bypassed memory cannot be written again if a flush fails. If a flush
    /// has failed in the meantime, its data may be lost already.
    fn check_bypass(&self, losses: u64, offset: u64, length: u64) -> Result<(), BlockError> {
        if self.mode() != Mode::Writeback || self.note_bypass(losses, (offset, length)) {
            return Ok(());
        }
        Err(BlockError::new(ErrorKind::Lost, Operation::Write, offset, length))
    }

    /// Updates one frame with the data of a write.
    pub(crate) fn keep_written(
        &self,
        worker: &WorkerMemory,
        id: u64,
        part: &FramePart,
        buf: &[u8],
    ) {
        let number = shard_of(part.frame);
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let whole = part.covered(self.size());
        let data = &buf[part.range()];
        let fresh = {
            let mut shard = self.lock(number);
            if shard.inflight.has_clash(id) {
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
            if !shard.inflight.has_clash(id) {
                // Including pages that gained a buffer since the check above.
                shard.update(worker, part, part.touched(), whole, data);
                let kind = if buf.len() >= LARGE { COLD } else { 0 };
                prepared.attach(&mut shard, part.frame, kind, tick);
            }
        }
        prepared.finish(&self.cache, worker);
    }

    /// Makes all acknowledged writes stable; the name of the store's file is the caller's business.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        if self.mode() == Mode::Writeback {
            return Box::pin(self.write_back_and_flush(io)).await;
        }
        let flushed = self.store.flush_content(io).await;
        let losses = self.store.losses();
        if self.writeback.losses.load(Ordering::SeqCst) != losses {
            Box::pin(self.forget_lost(io)).await;
            self.writeback.losses.store(losses, Ordering::SeqCst);
        }
        flushed
    }

    /// Drops everything that is cached after the store may have lost some of it: reads return what
    /// the store has.
    async fn forget_lost(&self, io: &Io) {
        let pages = self.existing(&(0..u64::MAX));
        let worker = io.pool().worker();
        for number in 0..SHARDS {
            {
                let mut shard = self.lock(number);
                shard.inflight.poison(&pages);
                shard.inflight.mark_clash(&sectors(0, self.size()));
            }
            let mut walk = FrameWalk::new(&pages);
            loop {
                let mut batch = FreeBatch::new();
                let done = walk.step(&mut self.lock(number), number, &mut batch);
                batch.free(worker, false);
                if done {
                    break;
                }
                io.yield_now().await;
            }
        }
    }

    /// Frees the space of a range if the store can.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn discard(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        // Parts of pages stay as they are: freeing sectors of a page that may be written again
        // frees nothing, and zeroing them in memory would make the page dirty.
        let [_, range, _] = self.store_and_memory(offset, length);
        if range.is_empty() {
            return Ok(());
        }
        self.discard_store(io, range.start, range.end - range.start).await
    }

    async fn discard_store(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let write = InflightWrite::begin_clean(self, io, offset, length).await?;
        let result = self.store.discard(io, offset, length).await;
        if result.is_ok() && self.mode() == Mode::Writeback {
            // Any content is valid there afterwards.
            let whole = self.whole(offset, length);
            for shard in each(VolumeCache::shards_of(&whole)) {
                self.lock(shard).forget_unstable(&whole);
            }
        }
        write.end_in_steps(io, ChangeOutcome::of_change(&result)).await;
        result
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn write_zeroes(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<(), BlockError> {
        self.write_zeroes_while(io, offset, length, flags, &|| true).await
    }

    /// See [`Store::write_zeroes_while`].
    ///
    /// # Errors
    /// Those of the store.
    pub async fn write_zeroes_while(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let [head, body, tail] = self.store_and_memory(offset, length);
        for (in_memory, range) in [(false, body), (true, head), (true, tail)] {
            if range.is_empty() {
                continue;
            }
            if !in_memory || !Box::pin(self.zero_in_memory(io, range.clone())).await {
                // One call for all: a task is as large as its largest future.
                let range = (range.start, range.end - range.start);
                self.zero_store(io, range, flags, wanted).await?;
            }
        }
        Ok(())
    }

    /// The part of a request for zeroes or a discard that is for the store, between two parts of
    /// pages, which may have to be written again: they are zeroed in memory, or not discarded.
    fn store_and_memory(&self, offset: u64, length: u64) -> [Range<u64>; 3] {
        match self.is_written_back() {
            true => self.divide(offset, length),
            false => [offset..offset, offset..offset + length, offset..offset],
        }
    }

    /// Makes a range of the store read as zeroes.
    async fn zero_store(
        &self,
        io: &Io,
        (offset, length): (u64, u64),
        flags: ZeroFlags,
        wanted: Wanted<'_>,
    ) -> Result<(), BlockError> {
        let write = InflightWrite::begin_clean(self, io, offset, length).await?;
        let losses = self.store.losses();
        let mut result = self.store.write_zeroes_while(io, offset, length, flags, wanted).await;
        if result.is_ok() && self.mode() == Mode::Writeback {
            let noted = (write.id, losses);
            if !self.note_zeroes(noted, (offset, length), flags.may_unmap) {
                let (kind, operation) = (ErrorKind::Lost, Operation::WriteZeroes);
                result = Err(BlockError::new(kind, operation, offset, length));
            }
        }
        write.end_in_steps(io, ChangeOutcome::of_change(&result)).await;
        result
    }

    /// The runs of data and holes in a range, in order and without gaps, at most `limit` of them.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        if self.mode() == Mode::Writeback {
            Box::pin(self.clean(io, &touched(offset, length))).await?;
        }
        self.store.extents(io, offset, length, limit).await
    }

    /// Announces that a range will be read soon.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        self.store.prefetch(io, offset, length).await?;
        if self.cache.has_room_ahead() {
            let most = self.cache.limit_bytes() / 4;
            self.load(io, touched(offset, length.min(most))).await;
        }
        Ok(())
    }
}
