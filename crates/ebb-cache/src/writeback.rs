//! Writeback: writes are acknowledged from memory and reach the store later.
//!
//! # Invariants
//! - A dirty page is wired and stays in memory until the store has it; after a failed write it is still
//!   dirty.
//! - At most one copy of a page is under writeback.
//! - A page is dirty or part of an [`InflightWrite`](crate::write::InflightWrite), never both; a request for
//!   the other state waits.
//! - A page becomes dirty only under a [`DirtyReservation`]; a page that is dirty already needs none, and its
//!   writer does not wait.
//! - Data on the store is kept in memory until it is stable there (`writeback/stable.rs`).
//! - The flusher has its buffer before anything is dirty: writeback never waits for memory.
//!
//! A [`WritebackControl`] decides how much is written when, and how long writers are throttled.

mod flusher;
mod frames;
mod stable;
mod zeroes;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_block::{BlockError, Buf, BufResult, ErrorKind, Io, Operation};

use crate::pages::{FRAME_PAGES, FramePart, PAGE, each, index, parts, runs, touched};
use crate::read::InflightWait;
use crate::shard::shard_of;
use crate::stats::Mode;
use crate::volume::{PreparedBuffers, StoreCache, VolumeCache};
use crate::write::yields_before;
use crate::writeback_state::{BEFORE, CLUSTER_MAX, WritebackControl};

/// Size of the flusher's reserved buffer.
const RESERVE: usize = 64 << 10;
/// Frames that a cluster may touch.
const FRAMES: usize = CLUSTER_MAX / 65536 + 1;
/// Attempts of a write to enter the cache before it goes through to the store.
const TRIES: usize = 3;

/// The store has been full for longer than the control's patience.
struct StoreFull;

/// Permission to make this many bytes dirty; the unused part is returned when it is dropped.
struct DirtyReservation<'a> {
    volume: &'a VolumeCache,
    bytes: u64,
}

impl DirtyReservation<'_> {
    /// Whether it covers fewer pages than these.
    fn is_short_of(&self, pages: u16) -> bool {
        u64::from(pages.count_ones()) * PAGE > self.bytes
    }
}

impl Drop for DirtyReservation<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.volume.control().unused(self.bytes);
        }
    }
}

impl VolumeCache {
    /// The control. Nothing is dirty before it is set, so the default is never consulted.
    pub(crate) fn control(&self) -> &dyn WritebackControl {
        self.writeback.control.get().map_or(&BEFORE, |control| &**control)
    }

    /// Sets the control. Until then nothing becomes dirty: writes go to the store first. Only the first call
    /// has an effect, whether or not writes came before it.
    pub fn set_control(&self, control: Arc<dyn WritebackControl>) {
        let _ = self.writeback.control.set(control);
    }

    /// Whether a write may stay in memory.
    pub(crate) fn is_written_back(&self) -> bool {
        self.mode() == Mode::Writeback && self.writeback.control.get().is_some()
    }
}

impl StoreCache {
    /// Writes into memory. Parts that find no room there go through to the store.
    pub(crate) async fn write_back(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let length = buf.len() as u64;
        for (number, part) in parts(offset, buf.len()).enumerate() {
            if yields_before(number) {
                io.yield_now().await;
            }
            match self.dirty_part(io, &part, &buf[part.range()]).await {
                Ok(true) => {}
                Ok(false) => return self.write_through(io, buf, offset, fua).await,
                Err(_) => {
                    let error =
                        BlockError::new(ErrorKind::NoSpace, Operation::Write, offset, length);
                    return (Err(error), buf);
                }
            }
        }
        if fua {
            // First, since a failure of this is no loss.
            if let Err(error) = self.store.make_name_stable(io).await {
                return (Err(error), buf);
            }
            let pages = touched(offset, length);
            let saved = match Box::pin(self.clean(io, &pages)).await {
                Ok(()) => Box::pin(self.stabilize(io)).await,
                failed => failed,
            };
            return (saved, buf);
        }
        (Ok(()), buf)
    }

    /// Waits for permission to make these pages dirty. Pages that are dirty already need none.
    /// `None` if another volume has filled its store and the limit that both share: this one's
    /// store may have room.
    async fn reservation(
        &self,
        io: &Io,
        pages: u16,
    ) -> Result<Option<DirtyReservation<'_>>, StoreFull> {
        let bytes = u64::from(pages.count_ones()) * PAGE;
        if bytes == 0 {
            return Ok(Some(DirtyReservation { volume: self, bytes }));
        }
        let requested = ebb_mem::clock::now();
        let reserve = |now| self.control().reserve(requested, now, bytes, self.dirty());
        if !self.writeback.writer_queue.is_free() || !reserve(requested).is_zero() {
            let _head = self.writeback.writer_queue.enter().await;
            loop {
                let now = ebb_mem::clock::now();
                let pause = reserve(now);
                if pause.is_zero() {
                    break;
                }
                let waited = now.saturating_duration_since(requested);
                let control = self.control();
                if waited >= control.patience() {
                    if self.writeback.full.load(Ordering::SeqCst) {
                        return Err(StoreFull);
                    }
                    if control.is_full() {
                        return Ok(None);
                    }
                }
                self.writeback.writer_queue.first.wait(io, pause).await;
            }
        }
        Ok(Some(DirtyReservation { volume: self, bytes }))
    }

    /// Makes one frame's part dirty. False if the cache has no room for it.
    async fn dirty_part(&self, io: &Io, part: &FramePart, data: &[u8]) -> Result<bool, StoreFull> {
        let number = shard_of(part.frame);
        let worker = io.pool().worker();
        let fresh = part.touched() & !self.lock(number).ready(part.frame);
        let Some(mut reservation) = self.reservation(io, fresh).await? else { return Ok(false) };
        let mut tries = 0;
        while tries < TRIES {
            // The size changes only while the last page is part of an in-flight write, which is waited for
            // below.
            let whole = part.covered(self.size());
            let (write, absent, fresh, short) = {
                let shard = self.lock(number);
                let short = reservation.is_short_of(part.touched() & !shard.ready(part.frame));
                let write = shard.inflight.write_in_flight(part.frame, part.touched());
                // The rest of these is known without the store.
                let known = whole | shard.blank(part.frame, part.touched() & !whole);
                let absent = part.touched() & !known & !shard.valid(part.frame);
                (write, absent, known & !shard.covered(part.frame), short)
            };
            if write.1 {
                return Ok(false);
            }
            if short {
                // Some of it was written back in the meantime. With a reservation for all pages this happens
                // at most once.
                drop(reservation);
                match self.reservation(io, part.touched()).await? {
                    Some(whole) => reservation = whole,
                    None => return Ok(false),
                }
                continue;
            }
            if let Some(fill) = write.0 {
                InflightWait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            tries += 1;
            if absent != 0 {
                // The write covers part of a page: read the remainder first.
                for page in each(absent) {
                    let page = part.frame * FRAME_PAGES + page as u64;
                    if !Box::pin(self.fetch(io, page)).await {
                        return Ok(false);
                    }
                }
                continue;
            }
            let mut prepared = if fresh == 0 || !self.cache.admits() {
                PreparedBuffers::none()
            } else {
                self.prepare(worker, part, fresh, data)
            };
            let marked =
                self.dirty_now(worker, part, whole, data, (&mut prepared, &mut reservation));
            prepared.finish(&self.cache, worker);
            if marked == part.touched() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Updates the pages and marks them dirty, unless something intervened. Returns the pages that hold the
    /// data.
    fn dirty_now(
        &self,
        worker: &ebb_mem::WorkerMemory,
        part: &FramePart,
        whole: u16,
        data: &[u8],
        (prepared, reservation): (&mut PreparedBuffers, &mut DirtyReservation<'_>),
    ) -> u16 {
        let mut shard = self.lock(shard_of(part.frame));
        let want = part.touched();
        let blank = shard.blank(part.frame, want & !whole);
        let there = shard.valid(part.frame) | whole | blank;
        let fresh = want & !shard.ready(part.frame);
        let unready = shard.inflight.writing(part.frame, want) != 0
            || want & !there != 0
            || whole != part.covered(self.size());
        if unready || reservation.is_short_of(fresh) {
            return 0;
        }
        let first = part.frame * FRAME_PAGES;
        // Only of these pages: a write to others of the frame does not have to begin again.
        for (start, count) in runs(want) {
            let start = first + start as u64;
            shard.inflight.poison(&(start..start + count as u64));
        }
        let tick = self.cache.tick.load(Ordering::Relaxed);
        shard.clear(worker, part.frame, blank);
        let updated = shard.update(worker, part, want, whole, data);
        let valid = shard.valid(part.frame) & !updated;
        prepared.attach(&mut shard, part.frame, 0, tick);
        // The attached buffers hold the data, too.
        let attached = shard.valid(part.frame) & (whole | blank) & !valid;
        let now = ebb_mem::clock::now();
        let (marked, fresh) =
            shard.mark_dirty(part.frame, (updated | attached) & want, self.cache.millis(now));
        drop(shard);
        reservation.bytes = reservation.bytes.saturating_sub(u64::from(fresh.count_ones()) * PAGE);
        if fresh != 0 && self.writeback.idle.load(Ordering::SeqCst) {
            self.writeback.idle.store(false, Ordering::SeqCst);
            self.writeback.flusher_sleep.interrupt();
        }
        marked
    }

    /// Reads a page into the cache. False if that failed.
    async fn fetch(&self, io: &Io, page: u64) -> bool {
        let offset = page * PAGE;
        let length = index(PAGE.min(self.size().saturating_sub(offset)));
        match io.pool().try_take(length) {
            Some(buf) => self.read(io, buf, offset).await.0.is_ok(),
            None => false,
        }
    }

    /// Writes back everything that is dirty now and makes it stable. A writeback that failed before
    /// is no failure of this: its data is still dirty.
    pub(crate) async fn write_back_and_flush(&self, io: &Io) -> Result<(), BlockError> {
        self.clean(io, &(0..u64::MAX)).await?;
        self.stabilize(io).await
    }
}
