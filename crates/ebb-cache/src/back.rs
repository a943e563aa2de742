//! Writeback: writes are acknowledged from memory, and reach the store later.
//!
//! # Invariants
//! - A dirty page is wired and stays until the store has it; a failed write leaves it dirty.
//! - Of a page at most one copy is on its way to the store.
//! - A page is dirty or under a [`Change`](crate::write::Change), never both: who wants the other waits.
//! - The flusher has its buffer before anything is dirty: writing back never waits for memory.
//!
//! How much is written when, and how long writers pause, is for a [`Control`] to say.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ebb_store::{BlockError, Buf, BufResult, Io, Store};

use crate::flight::Wakers;
use crate::pages::{
    FRAME, FRAME_PAGES, PAGE, PAGE_BYTES, Part, each, index, mask, parts, runs, touched, within,
};
use crate::read::Wait;
use crate::shard::few_frames;
use crate::sync::Mutex;
use crate::volume::{Prepared, SHARDS, VolumeCache};

/// Bytes that are always there to write from, and most that are written at once.
const RESERVE: usize = 64 << 10;
const CLUSTER_MAX: usize = 1 << 20;
/// Frames that a cluster may touch.
const FRAMES: usize = CLUSTER_MAX / 65536 + 1;
/// Times a write tries to find its place in memory before it goes through to the store.
const TRIES: usize = 3;

/// What a flusher does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Write the oldest data back, with what lies beside it: so many bytes at most (up to 1 MiB).
    Write(usize),
    /// Nothing for so long.
    Wait(Duration),
}

/// Decides how much is written back when, and how long writers pause. All calls are quick; several
/// workers call at once. Bytes.
pub trait Control: Send + Sync {
    /// Before a write of `bytes` is taken, while `dirty` are: how long it must wait.
    fn pause(&self, now: Instant, bytes: u64, dirty: u64) -> Duration;

    /// So much became dirty that was not.
    fn dirtied(&self, now: Instant, bytes: u64) {
        let _ = (now, bytes);
    }

    /// A write to the store took so long; `saved`: it went well.
    fn written(&self, now: Instant, bytes: u64, took: Duration, saved: bool) {
        let _ = (now, bytes, took, saved);
    }

    /// What the flusher does next, while `dirty` bytes are, the oldest of them for `age`.
    fn next(&self, now: Instant, dirty: u64, age: Duration) -> Order;
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
        let age_max = Duration::from_secs(5);
        FixedLimit { dirty_max: 64 << 20, age_max, cluster: CLUSTER_MAX }
    }
}

impl Control for FixedLimit {
    fn pause(&self, _: Instant, bytes: u64, dirty: u64) -> Duration {
        if dirty + bytes > self.dirty_max { Duration::from_millis(2) } else { Duration::ZERO }
    }

    fn next(&self, _: Instant, dirty: u64, age: Duration) -> Order {
        if dirty > self.dirty_max / 4 || age >= self.age_max {
            Order::Write(self.cluster)
        } else {
            Order::Wait((self.age_max - age).min(Duration::from_millis(100)))
        }
    }
}

/// What a volume knows of its writeback.
#[derive(Default)]
pub(crate) struct Back {
    control: OnceLock<Arc<dyn Control>>,
    /// A failure that no flush has told of yet.
    failed: Mutex<Option<BlockError>>,
}

/// Dirty data on its way.
struct Cluster {
    offset: u64,
    length: usize,
    taken: [(u64, u64, u16); FRAMES],
    count: usize,
}

impl VolumeCache {
    fn control(&self) -> &Arc<dyn Control> {
        self.back.control.get_or_init(|| Arc::new(FixedLimit::default()))
    }

    /// Says who decides; the first call counts. Without one it is [`FixedLimit`].
    pub fn set_control(&self, control: Arc<dyn Control>) {
        let _ = self.back.control.set(control);
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
        loop {
            let pause = self.control().pause(Instant::now(), length, self.dirty());
            if pause.is_zero() {
                break;
            }
            io.sleep(pause).await;
        }
        for part in parts(offset, buf.len()) {
            if !self.dirty_part(io, store, &part, &buf[part.range()]).await {
                return self.write_through(io, store, buf, offset, fua).await;
            }
        }
        if fua {
            let pages = touched(offset, length);
            let saved = match self.clean(io, store, &pages).await {
                Ok(()) => store.flush(io).await,
                failed => failed,
            };
            return (saved, buf);
        }
        (Ok(()), buf)
    }

    /// Makes one frame's part dirty. False if there is no place for it.
    async fn dirty_part(
        self: &Arc<Self>,
        io: &Io,
        store: &Arc<Store>,
        part: &Part,
        data: &[u8],
    ) -> bool {
        let number = VolumeCache::shard_of(part.frame);
        let worker = io.pool().worker();
        let whole = part.covered(self.size());
        let mut tries = 0;
        while tries < TRIES {
            let (change, absent, fresh) = {
                let shard = self.lock(number);
                let change = shard.flights.changed_by(part.frame, part.touched());
                let valid = shard.valid(part.frame);
                let absent = part.touched() & !whole & !valid;
                (change, absent, whole & !shard.covered(part.frame))
            };
            if change.1 {
                return false;
            }
            if let Some(fill) = change.0 {
                Wait { volume: self, shard: number, fill, waiter: None }.await;
                continue;
            }
            tries += 1;
            if absent != 0 {
                // A part of a page: the rest is read first.
                for page in each(absent) {
                    if !self.fetch(io, store, part.frame * FRAME_PAGES + page as u64).await {
                        return false;
                    }
                }
                continue;
            }
            let mut prepared = if fresh == 0 || !self.cache.admits() {
                Prepared::none()
            } else {
                self.prepare(worker, part, fresh, data)
            };
            let marked = self.dirty_now(worker, part, whole, data, &mut prepared);
            prepared.finish(&self.cache, worker);
            if marked == part.touched() {
                return true;
            }
        }
        false
    }

    /// Updates and marks, if nothing has come in between. Returns the pages that hold the data.
    fn dirty_now(
        &self,
        worker: &ebb_mem::Worker,
        part: &Part,
        whole: u16,
        data: &[u8],
        prepared: &mut Prepared,
    ) -> u16 {
        let mut shard = self.lock(VolumeCache::shard_of(part.frame));
        let want = part.touched();
        let there = shard.valid(part.frame) | whole;
        if shard.flights.changing(part.frame, want) != 0 || want & !there != 0 {
            return 0;
        }
        let first = part.frame * FRAME_PAGES;
        shard.flights.poison(&(first..first + FRAME_PAGES));
        let before = shard.tally.dirty;
        let tick = self.cache.tick.load(std::sync::atomic::Ordering::Relaxed);
        let updated = shard.update(worker, part, want, whole, data);
        let valid = shard.valid(part.frame) & !updated;
        prepared.attach(&mut shard, part.frame, 0, tick);
        // What was attached holds the data, too.
        let attached = shard.valid(part.frame) & whole & !valid;
        let now = Instant::now();
        let marked =
            shard.mark_dirty(part.frame, (updated | attached) & want, self.cache.millis(now));
        let new = (shard.tally.dirty - before) * PAGE;
        drop(shard);
        if new > 0 {
            self.control().dirtied(now, new);
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

    /// Has all that is dirty of `pages` now on the store, and nothing of it on its way.
    pub(crate) async fn clean(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
        pages: &Range<u64>,
    ) -> Result<(), BlockError> {
        let mut frames = Vec::new();
        if let Some(few) = few_frames(pages) {
            let unsaved = |frame: u64| self.lock(VolumeCache::shard_of(frame)).unsaved(frame);
            frames.extend(few.filter(|&frame| unsaved(frame) & within(frame, pages) != 0));
        } else {
            for shard in 0..SHARDS {
                self.lock(shard).unsaved_frames(&mut frames);
            }
            frames.retain(|&frame| within(frame, pages) != 0);
            frames.sort_unstable();
            frames.dedup();
        }
        if frames.is_empty() {
            return Ok(());
        }
        let mut buf = match io.pool().try_take(CLUSTER_MAX) {
            Some(buf) => buf,
            None => io.pool().take(RESERVE).await,
        };
        let mut result = Ok(());
        for frame in frames {
            let (done, back) = self.clean_frame(io, store, frame, buf).await;
            buf = back;
            if done.is_err() {
                result = done;
            }
        }
        result
    }

    async fn clean_frame(&self, io: &Io, store: &Store, frame: u64, mut buf: Buf) -> BufResult {
        let number = VolumeCache::shard_of(frame);
        let mut from = 0;
        // What was on its way already may hold older data: wait for that first.
        loop {
            let busy = self.lock(number).flights.cleaning(frame, u16::MAX).1;
            let Some(fill) = busy else { break };
            Wait { volume: self, shard: number, fill, waiter: None }.await;
        }
        while from < 16 {
            let most = buf.capacity().min(CLUSTER_MAX);
            buf.set_len(most);
            let Some(cluster) = self.take(frame, from, &mut buf) else { break };
            from = index((cluster.offset + cluster.length as u64 - frame * FRAME).div_ceil(PAGE));
            let (result, back) = self.save(io, store, cluster, buf).await;
            buf = back;
            if result.is_err() {
                return (result, buf);
            }
        }
        (Ok(()), buf)
    }

    /// Takes the first run of dirty pages from page `from` of `frame` on, and what follows it.
    fn take(&self, frame: u64, from: usize, buf: &mut Buf) -> Option<Cluster> {
        let mut cluster = Cluster { offset: 0, length: 0, taken: [(0, 0, 0); FRAMES], count: 0 };
        let (mut at, mut from) = (frame, from);
        while cluster.count < FRAMES && cluster.length < buf.len() {
            let mut shard = self.lock(VolumeCache::shard_of(at));
            let ready = shard.ready(at) & !mask(0, from);
            let room = (buf.len() - cluster.length) / PAGE_BYTES;
            let run = runs(ready).next().map(|(start, count)| (start, count.min(room)));
            let Some((start, count)) = run.filter(|run| run.1 > 0) else { break };
            if cluster.count > 0 && start != 0 {
                break;
            }
            let offset = at * FRAME + (start * PAGE_BYTES) as u64;
            let length =
                index(((count * PAGE_BYTES) as u64).min(self.size().saturating_sub(offset)));
            let pages = mask(start, count);
            let out = &mut buf[cluster.length..cluster.length + length];
            let id = shard.take_dirty(at, pages, out);
            if cluster.count == 0 {
                cluster.offset = offset;
            }
            cluster.taken[cluster.count] = (at, id, pages);
            cluster.count += 1;
            cluster.length += length;
            if start + count < 16 {
                break;
            }
            (at, from) = (at + 1, 0);
        }
        (cluster.count > 0).then_some(cluster)
    }

    /// Writes a cluster, and says what became of its pages.
    async fn save(&self, io: &Io, store: &Store, cluster: Cluster, mut buf: Buf) -> BufResult {
        let Cluster { offset, length, .. } = cluster;
        let mut pending = Pending { volume: self, cluster, saved: false };
        buf.set_len(length);
        let begun = Instant::now();
        let (result, buf) = if length > 0 {
            store.write(io, buf, offset, false).await
        } else {
            // Beyond the end: the volume has become shorter.
            (Ok(()), buf)
        };
        pending.saved = result.is_ok();
        drop(pending);
        let now = Instant::now();
        self.control().written(now, length as u64, now - begun, result.is_ok());
        (result, buf)
    }

    /// All that is dirty now reaches the store, and is stable there. A failure of the writeback since the
    /// last flush is told once; its data is kept.
    pub(crate) async fn flush_back(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
    ) -> Result<(), BlockError> {
        let cleaned = self.clean(io, store, &(0..u64::MAX)).await;
        let flushed = match cleaned {
            Ok(()) => store.flush(io).await,
            failed => failed,
        };
        let before = self.back.failed.lock().take();
        match (flushed, before) {
            (Ok(()), Some(error)) => Err(error),
            (result, _) => result,
        }
    }

    /// Writes back in the background for as long as the volume's cache has other users: a task of one
    /// worker.
    pub async fn run_flusher(self: Arc<Self>, io: Io, store: Arc<Store>) {
        let mut buf = io.pool().take(RESERVE).await;
        while Arc::strong_count(&self) > 1 {
            let now = Instant::now();
            let oldest =
                (0..SHARDS).filter_map(|shard| self.lock(shard).oldest()).min_by_key(|a| a.since);
            let age = oldest.map_or(0, |aged| self.cache.millis(now).saturating_sub(aged.since));
            let order = match oldest {
                Some(_) => self.control().next(now, self.dirty(), Duration::from_millis(age)),
                None => Order::Wait(Duration::from_millis(20)),
            };
            match (order, oldest) {
                (Order::Write(bytes), Some(aged)) => {
                    let bytes = bytes.clamp(PAGE_BYTES, CLUSTER_MAX);
                    let large = if bytes > RESERVE { io.pool().try_take(bytes) } else { None };
                    let (result, back) = match large {
                        Some(large) => {
                            (self.clean_frame(&io, &store, aged.frame, large).await.0, buf)
                        }
                        None => self.clean_frame(&io, &store, aged.frame, buf).await,
                    };
                    buf = back;
                    if let Err(error) = result {
                        *self.back.failed.lock() = Some(error);
                        io.sleep(Duration::from_millis(200)).await;
                    }
                }
                (Order::Wait(time), _) => io.sleep(time).await,
                (Order::Write(_), None) => io.sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

/// A cluster that is being written. Dropped before its end its pages are dirty again.
struct Pending<'a> {
    volume: &'a VolumeCache,
    cluster: Cluster,
    saved: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let now = self.volume.cache.millis(Instant::now());
        for &(frame, id, pages) in &self.cluster.taken[..self.cluster.count] {
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(VolumeCache::shard_of(frame));
            shard.end_clean(frame, (id, pages), self.saved, now, &mut wakers);
        }
    }
}
