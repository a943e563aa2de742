//! Writeback: writes are acknowledged from memory, and reach the store later.
//!
//! # Invariants
//! - A dirty page is wired and stays until the store has it; a failed write leaves it dirty.
//! - Of a page at most one copy is on its way to the store.
//! - A page is dirty or under a [`Change`](crate::write::Change), never both: who wants the other waits.
//! - Whatever becomes dirty has reservation to; a page that is so already needs none, and its writer does not wait.
//! - What the store has is kept until it is stable there (`writeback/stable.rs`).
//! - The flusher has its buffer before anything is dirty: writing back never waits for memory.
//!
//! How much is written when, and how long writers pause, is for a [`WritebackControl`] to say.

mod flusher;
mod frames;
mod stable;
mod throttle;
mod zeroes;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ebb_store::{BlockError, Buf, BufResult, ErrorKind, Io, Operation, Store};

use self::throttle::{Line, Poke};
use crate::pages::{FRAME_PAGES, PAGE, Part, each, index, parts, touched};
use crate::read::Wait;
use crate::stats::Mode;
use crate::sync::Mutex;
use crate::volume::{Prepared, VolumeCache};
use crate::write::FRAMES_AT_ONCE;

/// Bytes that are always there to write from, and most that are written at once.
const RESERVE: usize = 64 << 10;
const CLUSTER_MAX: usize = 1 << 20;
/// Frames that a cluster may touch.
const FRAMES: usize = CLUSTER_MAX / 65536 + 1;
/// How long a write waits for a store that is full, see [`WritebackControl::patience`].
const FULL_PATIENCE: Duration = Duration::from_secs(30);
/// Times a write tries to find its place in memory before it goes through to the store.
const TRIES: usize = 3;

/// What holds while there is no control, and nothing dirty.
static BEFORE: FixedLimit =
    FixedLimit { dirty_max: 64 << 20, age_max: Duration::from_secs(5), cluster: CLUSTER_MAX };

/// What a flusher does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritebackOrder {
    /// Write the oldest data back, with what lies beside it: so many bytes at most (up to 1 MiB).
    Write(usize),
    /// Nothing for so long.
    Wait(Duration),
}

/// Decides how much is written back when, and how long writers pause. All calls are quick; several
/// workers call at once. Bytes, of whole pages: a page counts once while it is dirty, and once while a
/// copy of it is on its way to the store.
pub trait WritebackControl: Send + Sync {
    /// `bytes` want to become dirty, since `asked`, while `dirty` are not on the store: zero if they may,
    /// and then they count; else how long to wait before asking again, which
    /// [`VolumeCache::ask_again`] cuts short. Only the first of a volume's writers asks.
    fn ask(&self, asked: Instant, now: Instant, bytes: u64, dirty: u64) -> Duration;

    /// So much that counted as dirty is not: it was so already.
    fn unused(&self, bytes: u64) {
        let _ = bytes;
    }

    /// So much that was dirty is on its way to the store.
    fn sent(&self, now: Instant, bytes: u64) {
        let _ = (now, bytes);
    }

    /// What was sent at `sent` has ended; `saved`: it is in the store, else it is dirty again.
    fn written(&self, now: Instant, bytes: u64, sent: Instant, saved: bool) {
        let _ = (now, bytes, sent, saved);
    }

    /// How long a write waits for reservation while the store answers that it is full: then it fails with
    /// [`ErrorKind::NoSpace`](ebb_store::ErrorKind::NoSpace).
    fn patience(&self) -> Duration {
        FULL_PATIENCE
    }

    /// What the flusher does next, while `dirty` bytes are not on the store, the oldest of them for
    /// `age`. Asked after each write to the store that has ended, too.
    fn next(&self, now: Instant, dirty: u64, age: Duration) -> WritebackOrder;
}

/// The simplest control: a limit on what is dirty, and on how old it gets.
#[derive(Clone, Copy, Debug)]
pub struct FixedLimit {
    /// Most bytes dirty before writers pause.
    pub dirty_max: u64,
    /// Oldest that data gets in memory.
    pub age_max: Duration,
    /// Bytes of a write to the store.
    pub cluster: usize,
}

impl Default for FixedLimit {
    fn default() -> FixedLimit {
        BEFORE
    }
}

impl WritebackControl for FixedLimit {
    fn ask(&self, _: Instant, _: Instant, bytes: u64, dirty: u64) -> Duration {
        if dirty + bytes > self.dirty_max { Duration::from_millis(2) } else { Duration::ZERO }
    }

    fn next(&self, _: Instant, dirty: u64, age: Duration) -> WritebackOrder {
        if dirty > self.dirty_max / 4 || age >= self.age_max {
            WritebackOrder::Write(self.cluster)
        } else {
            WritebackOrder::Wait((self.age_max - age).min(Duration::from_millis(20)))
        }
    }
}

/// What a volume knows of its writeback.
#[derive(Default)]
pub(crate) struct WritebackState {
    control: OnceLock<Arc<dyn WritebackControl>>,
    /// A failure that no flush has told of yet.
    failed: Mutex<Option<BlockError>>,
    line: Line,
    /// Whose turn it is to make a long list of what is dirty.
    listing: Line,
    /// What the flusher waits by; whether it waits for something to become dirty; whether it is to end.
    work: Poke,
    idle: AtomicBool,
    ended: AtomicBool,
    /// Flushes of the store: whose turn it is, the number of the last one that began and of the last one
    /// that went well, the milliseconds when that was (after a failure: from when on it is tried
    /// again), and the store's losses that were made good.
    syncing: Line,
    /// The last write to the store found it full.
    full: AtomicBool,
    begun: AtomicU64,
    done: AtomicU64,
    synced: AtomicU64,
    losses: AtomicU64,
}

/// The store has been full for too long.
struct Full;

/// DirtyReservation to make so many bytes dirty; what is not used of it is given back.
struct DirtyReservation<'a> {
    volume: &'a VolumeCache,
    bytes: u64,
}

impl DirtyReservation<'_> {
    /// Whether it is for less than these pages.
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
    /// Who decides. Nothing is dirty before one was set, and so nobody asks.
    pub(crate) fn control(&self) -> &dyn WritebackControl {
        self.writeback.control.get().map_or(&BEFORE, |control| &**control)
    }

    /// Says who decides, before which nothing becomes dirty: writes go to the store first. The first
    /// call counts, and it alone: no write settles this.
    pub fn set_control(&self, control: Arc<dyn WritebackControl>) {
        let _ = self.writeback.control.set(control);
    }

    /// Whether a write may stay in memory.
    pub(crate) fn is_written_back(&self) -> bool {
        self.mode() == Mode::Writeback && self.writeback.control.get().is_some()
    }

    /// Takes a write into memory. What finds no place there goes through to the store.
    pub(crate) async fn write_back(
        self: &Arc<Self>,
        io: &Io,
        store: &Arc<Store>,
        buf: Buf,
        offset: u64,
        fua: bool,
    ) -> BufResult {
        let length = buf.len() as u64;
        for (number, part) in parts(offset, buf.len()).enumerate() {
            if number > 0 && number % FRAMES_AT_ONCE == 0 {
                io.yield_now().await;
            }
            match self.dirty_part(io, store, &part, &buf[part.range()]).await {
                Ok(true) => {}
                Ok(false) => return self.write_through(io, store, buf, offset, fua).await,
                Err(_) => {
                    let error =
                        BlockError::new(ErrorKind::NoSpace, Operation::Write, offset, length);
                    return (Err(error), buf);
                }
            }
        }
        if fua {
            let pages = touched(offset, length);
            let saved = match Box::pin(self.clean(io, store, &pages)).await {
                Ok(()) => Box::pin(self.stabilize(io, store)).await,
                failed => failed,
            };
            return (saved, buf);
        }
        (Ok(()), buf)
    }

    /// Waits for reservation to make these pages dirty. What is dirty already needs none.
    async fn reservation(&self, io: &Io, pages: u16) -> Result<DirtyReservation<'_>, Full> {
        let bytes = u64::from(pages.count_ones()) * PAGE;
        if bytes == 0 {
            return Ok(DirtyReservation { volume: self, bytes });
        }
        let asked = ebb_mem::clock::now();
        let ask = |now| self.control().ask(asked, now, bytes, self.dirty());
        if !self.writeback.line.is_free() || !ask(asked).is_zero() {
            let _place = self.writeback.line.enter().await;
            loop {
                let now = ebb_mem::clock::now();
                let pause = ask(now);
                if pause.is_zero() {
                    break;
                }
                let waited = now.saturating_duration_since(asked);
                if self.writeback.full.load(Ordering::SeqCst) && waited >= self.control().patience()
                {
                    return Err(Full);
                }
                self.writeback.line.first.wait(io, pause).await;
            }
        }
        Ok(DirtyReservation { volume: self, bytes })
    }

    /// Makes one frame's part dirty. False if there is no place for it.
    async fn dirty_part(
        self: &Arc<Self>,
        io: &Io,
        store: &Arc<Store>,
        part: &Part,
        data: &[u8],
    ) -> Result<bool, Full> {
        let number = VolumeCache::shard_of(part.frame);
        let worker = io.pool().worker();
        let fresh = part.touched() & !self.lock(number).ready(part.frame);
        let mut reservation = self.reservation(io, fresh).await?;
        let mut tries = 0;
        while tries < TRIES {
            // The size changes only while the last page is under a change, which is waited for below.
            let whole = part.covered(self.size());
            let (change, absent, fresh, short, zeroed) = {
                let shard = self.lock(number);
                let short = reservation.is_short_of(part.touched() & !shard.ready(part.frame));
                let change = shard.flights.changed_by(part.frame, part.touched());
                let valid = shard.valid(part.frame);
                let absent = part.touched() & !whole & !valid;
                let zeroed = if absent == 0 { 0 } else { shard.zeroed(part.frame) };
                (change, absent, whole & !shard.covered(part.frame), short, zeroed)
            };
            if change.1 {
                return Ok(false);
            }
            if short {
                // Some of it was written back in the meantime: with reservation for all this happens once.
                drop(reservation);
                reservation = self.reservation(io, part.touched()).await?;
                continue;
            }
            if let Some(fill) = change.0 {
                Wait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            tries += 1;
            if absent & zeroed != 0 {
                // What is read of it would not be kept.
                return Ok(false);
            }
            if absent != 0 {
                // A part of a page: the rest is read first.
                for page in each(absent) {
                    let page = part.frame * FRAME_PAGES + page as u64;
                    if !Box::pin(self.fetch(io, store, page)).await {
                        return Ok(false);
                    }
                }
                continue;
            }
            let mut prepared = if fresh == 0 || !self.cache.admits() {
                Prepared::none()
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

    /// Updates and marks, if nothing has come in between. Returns the pages that hold the data.
    fn dirty_now(
        &self,
        worker: &ebb_mem::Worker,
        part: &Part,
        whole: u16,
        data: &[u8],
        (prepared, reservation): (&mut Prepared, &mut DirtyReservation<'_>),
    ) -> u16 {
        let mut shard = self.lock(VolumeCache::shard_of(part.frame));
        let want = part.touched();
        let there = shard.valid(part.frame) | whole;
        let fresh = want & !shard.ready(part.frame);
        let unready = shard.flights.changing(part.frame, want) != 0
            || want & !there != 0
            || whole != part.covered(self.size());
        if unready || reservation.is_short_of(fresh) {
            return 0;
        }
        let first = part.frame * FRAME_PAGES;
        shard.flights.poison(&(first..first + FRAME_PAGES));
        let tick = self.cache.tick.load(Ordering::Relaxed);
        let updated = shard.update(worker, part, want, whole, data);
        let valid = shard.valid(part.frame) & !updated;
        prepared.attach(&mut shard, part.frame, 0, tick);
        // What was attached holds the data, too.
        let attached = shard.valid(part.frame) & whole & !valid;
        let now = ebb_mem::clock::now();
        let (marked, fresh) =
            shard.mark_dirty(part.frame, (updated | attached) & want, self.cache.millis(now));
        drop(shard);
        reservation.bytes = reservation.bytes.saturating_sub(u64::from(fresh.count_ones()) * PAGE);
        if fresh != 0 && self.writeback.idle.load(Ordering::SeqCst) {
            self.writeback.idle.store(false, Ordering::SeqCst);
            self.writeback.work.poke();
        }
        marked
    }

    /// Reads a page into the cache. False if that failed.
    async fn fetch(self: &Arc<Self>, io: &Io, store: &Arc<Store>, page: u64) -> bool {
        let offset = page * PAGE;
        let length = index(PAGE.min(self.size().saturating_sub(offset)));
        match io.pool().try_take(length) {
            Some(buf) => self.read(io, store, buf, offset).await.0.is_ok(),
            None => false,
        }
    }

    /// All that is dirty now reaches the store, and is stable there. A failure of the writeback since the
    /// last flush is told once; its data is kept.
    pub(crate) async fn write_back_and_flush(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
    ) -> Result<(), BlockError> {
        let cleaned = self.clean(io, store, &(0..u64::MAX)).await;
        let flushed = match cleaned {
            Ok(()) => self.stabilize(io, store).await,
            failed => failed,
        };
        let before = self.writeback.failed.lock().take();
        match (flushed, before) {
            (Ok(()), Some(error)) => Err(error),
            (result, _) => result,
        }
    }
}
