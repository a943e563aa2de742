//! One volume's part of the cache: its shards, insertion and eviction of buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ebb_io::{Buf, BufPool, Io};
use ebb_mem::{Memory, OwnerId, SmallBuffer, Spare, SpareHeld, WorkerMemory};
use ebb_store::Store;

use crate::cache::Cache;
use crate::fair_share::SharedLayer;
use crate::pages::{
    FRAME_PAGES, FramePart, PAGE, PAGE_BYTES, blocks, mask, sectors, touched, within,
};
use crate::policy::{FULL_ROUND, NextVictim};
use crate::read_streams::ReadAhead;
use crate::shard::{FreeBatch, SHARDS, Shard, shard_of};
use crate::stats::{Mode, VolumeCacheStats};
use crate::sync::{Mutex, MutexGuard};
use crate::writeback_state::WritebackState;

/// Frames that are visited under one acquisition of a lock.
const WALK: u32 = 64;
/// A volume is active if it was used within this many ticks of a quarter of a second.
const ACTIVE_TICKS: u32 = 40;

/// A volume's cache. Shared by the workers that serve it.
pub struct VolumeCache {
    name: Arc<str>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) memory: Arc<Memory>,
    /// Charged with buffers of optional work such as read-ahead.
    spare: Arc<Spare>,
    owner: OwnerId,
    pub(crate) size: AtomicU64,
    mode: Mode,
    pub(crate) writeback: WritebackState,
    shards: [Mutex<Shard>; SHARDS],
    /// Pages held by buffers.
    held: AtomicU64,
    /// Pages that the store does not have yet.
    dirty: AtomicU64,
    /// Pages that are on the store and not known to be stable there.
    pub(crate) unstable: AtomicU64,
    /// The shard that the next eviction examines first.
    cursor: AtomicU32,
    /// Position of the last evicted shard's clock ([`NextVictim::Used`]).
    turned: AtomicU64,
    next_write_id: AtomicU64,
    /// Requests that missed, and the reclaimer's record of when that count last changed.
    pub(crate) uses: AtomicU64,
    seen: AtomicU64,
    idle_ticks: AtomicU32,
    /// A read used another layer of the volume since the reclaimer last looked.
    used: AtomicBool,
    /// What it may hold, if it is a layer that volumes share.
    pub(crate) shared: Option<SharedLayer>,
    /// Pages of its share that it leaves to the layers below it.
    pub(crate) pays: AtomicU64,
    /// It has less than it may hold, and found nothing to evict from since the shares were last divided.
    pub(crate) is_short: AtomicBool,
    pub(crate) ahead: ReadAhead,
    /// A hit met the mark of a read-ahead.
    pub(crate) marked: AtomicBool,
}

/// A store and its part of the cache: what a request needs of both.
///
/// The cache knows its volumes by [`VolumeCache`] alone, without the store: other volumes' threads hold one for a
/// moment, and would otherwise close a store that its owner has dropped meanwhile, which may block.
#[derive(Clone, Debug)]
pub struct StoreCache {
    pub(crate) store: Arc<Store>,
    pages: Arc<VolumeCache>,
}

impl StoreCache {
    pub(crate) fn new(store: Arc<Store>, pages: Arc<VolumeCache>) -> StoreCache {
        StoreCache { store, pages }
    }

    /// The cached pages.
    pub fn pages(&self) -> &Arc<VolumeCache> {
        &self.pages
    }

    /// How many users the pages have, this one included.
    pub(crate) fn users(&self) -> usize {
        Arc::strong_count(&self.pages)
    }
}

impl std::ops::Deref for StoreCache {
    type Target = VolumeCache;

    #[inline]
    fn deref(&self) -> &VolumeCache {
        &self.pages
    }
}

/// The lock of a shard. Dropping it adds the change of held pages to the volume's and the cache's counters.
pub(crate) struct LockedShard<'a> {
    shard: MutexGuard<'a, Shard>,
    volume: &'a VolumeCache,
    held: u64,
    dirty: u64,
    unstable: u64,
}

impl std::ops::Deref for LockedShard<'_> {
    type Target = Shard;
    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl std::ops::DerefMut for LockedShard<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl Drop for LockedShard<'_> {
    fn drop(&mut self) {
        let held = self.shard.tally.held();
        if held != self.held {
            // Modulo 2^64, so that it may be negative.
            let change = held.wrapping_sub(self.held);
            self.volume.held.fetch_add(change, Ordering::Relaxed);
            self.volume.cache.held.fetch_add(change, Ordering::Relaxed);
        }
        let dirty = self.shard.tally.dirty;
        if dirty != self.dirty {
            self.volume.dirty.fetch_add(dirty.wrapping_sub(self.dirty), Ordering::Relaxed);
        }
        let unstable = self.shard.tally.unstable;
        if unstable != self.unstable {
            let change = unstable.wrapping_sub(self.unstable);
            self.volume.unstable.fetch_add(change, Ordering::Relaxed);
            self.volume.cache.unstable.fetch_add(change, Ordering::Relaxed);
        }
    }
}

/// Buffers that are filled and not yet in a shard.
pub(crate) struct PreparedBuffers {
    buffers: [Option<(usize, SmallBuffer)>; 16],
    count: usize,
    pages: u64,
}

impl PreparedBuffers {
    pub(crate) const fn none() -> PreparedBuffers {
        PreparedBuffers { buffers: [const { None }; 16], count: 0, pages: 0 }
    }

    /// Puts them into the shard, except buffers with a page that is valid already.
    pub(crate) fn attach(&mut self, shard: &mut Shard, frame: u64, kind: u8, tick: u8) {
        let valid = shard.valid(frame);
        for place in &mut self.buffers[..self.count] {
            let Some((base, buffer)) = place.take() else { continue };
            if valid & (buffer.all() << base) != 0 {
                *place = Some((base, buffer));
            } else if let Err(buffer) = shard.attach(frame, base, buffer, kind, tick) {
                *place = Some((base, buffer));
            }
        }
    }

    /// Frees what was not attached. Call it without the shard's lock.
    pub(crate) fn finish(&mut self, cache: &Cache, worker: &WorkerMemory) {
        for place in &mut self.buffers[..self.count] {
            place.take().into_iter().for_each(|(_, buffer)| buffer.free(worker));
        }
        cache.settle(std::mem::take(&mut self.pages));
        self.count = 0;
    }
}

impl VolumeCache {
    pub(crate) fn new(
        cache: Arc<Cache>,
        name: &str,
        size: u64,
        mode: Mode,
        owner: OwnerId,
        shared: Option<SharedLayer>,
    ) -> VolumeCache {
        VolumeCache {
            name: name.into(),
            memory: cache.memory.clone(),
            spare: cache.memory.spares().join(),
            cache,
            owner,
            size: AtomicU64::new(size),
            mode,
            writeback: WritebackState::default(),
            shards: std::array::from_fn(|_| Mutex::new(Shard::new())),
            held: AtomicU64::new(0),
            dirty: AtomicU64::new(0),
            unstable: AtomicU64::new(0),
            cursor: AtomicU32::new(0),
            turned: AtomicU64::new(0),
            next_write_id: AtomicU64::new(0),
            uses: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            idle_ticks: AtomicU32::new(0),
            used: AtomicBool::new(false),
            shared,
            pays: AtomicU64::new(0),
            is_short: AtomicBool::new(false),
            ahead: ReadAhead::default(),
            marked: AtomicBool::new(false),
        }
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The cache mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A buffer for optional work such as read-ahead: of `most` bytes, or of what is available, but at least
    /// `least`. Dropping the second part returns the memory charged for it.
    pub(crate) fn spare_buffer(
        &self,
        io: &Io,
        most: usize,
        least: usize,
    ) -> Option<(Buf, SpareHeld)> {
        let most = Some(most).filter(|&most| most > 0)?;
        let held = self.spare.try_take_some(BufPool::footprint(most), least)?;
        let buf = io.pool().try_take(most.min(held.bytes()))?;
        Some((buf, held))
    }

    /// Bytes of the volume.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Current statistics: gauges are exact, one shard after the other.
    pub fn stats(&self) -> VolumeCacheStats {
        let mut stats = VolumeCacheStats::default();
        let mut oldest = None;
        for shard in 0..SHARDS {
            let mut shard = self.lock(shard);
            stats.add(&shard.tally, shard.table_bytes());
            if shard.tally.dirty > 0 {
                let since = shard.oldest().map(|aged| aged.since);
                oldest = [oldest, since].into_iter().flatten().min();
            }
        }
        if let Some(since) = oldest {
            let now = self.cache.millis(ebb_io::clock::now());
            stats.dirty_age = std::time::Duration::from_millis(now.saturating_sub(since));
        }
        stats
    }

    /// Drops what is cached of a range that was changed outside the cache. Data of reads in flight is not
    /// kept. In writeback mode nothing of the range may be dirty.
    pub fn invalidate(&self, offset: u64, length: u64) {
        let pages = touched(offset, length);
        let worker = self.memory.worker(|| ());
        for number in 0..SHARDS {
            {
                let mut shard = self.lock(number);
                shard.inflight.poison(&pages);
                shard.inflight.mark_clash(&sectors(offset, length));
                shard.note_written_over(number, &pages, &pages);
            }
            self.drop_pages(number, &pages, &worker);
        }
    }

    #[inline]
    pub(crate) fn lock(&self, shard: usize) -> LockedShard<'_> {
        let shard = self.shards[shard % SHARDS].lock();
        let tally = &shard.tally;
        let (held, dirty, unstable) = (tally.held(), tally.dirty, tally.unstable);
        LockedShard { shard, volume: self, held, dirty, unstable }
    }

    /// Pages held by buffers.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes that the store does not have yet.
    pub fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed) * PAGE
    }

    /// A read of the volume used another layer. Reads memory only, mostly: it is called for each read.
    #[inline]
    pub(crate) fn note_use(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it was used recently.
    pub(crate) fn is_active(&self) -> bool {
        self.idle_ticks.load(Ordering::Relaxed) < ACTIVE_TICKS || self.used.load(Ordering::Relaxed)
    }

    /// Advances time by this many ticks.
    pub(crate) fn advance_time(&self, ticks: u32) {
        let uses = self.uses.load(Ordering::Relaxed) + self.hits();
        let used = self.used.swap(false, Ordering::Relaxed);
        if self.seen.swap(uses, Ordering::Relaxed) == uses && !used {
            let idle = self.idle_ticks.load(Ordering::Relaxed).saturating_add(ticks);
            self.idle_ticks.store(idle, Ordering::Relaxed);
        } else {
            self.idle_ticks.store(0, Ordering::Relaxed);
        }
    }

    fn hits(&self) -> u64 {
        (0..SHARDS).map(|shard| self.lock(shard).tally.hits).sum()
    }

    /// Called once a second.
    pub(crate) fn age(&self) {
        (0..SHARDS).for_each(|shard| self.lock(shard).age());
    }

    /// A new identifier for an in-flight write.
    pub(crate) fn new_write_id(&self) -> u64 {
        self.next_write_id.fetch_add(2, Ordering::Relaxed)
    }

    /// The shards that pages of a range lie in, as bits.
    pub(crate) fn shards_of(pages: &std::ops::Range<u64>) -> u16 {
        let frames = pages.start / FRAME_PAGES..pages.end.div_ceil(FRAME_PAGES);
        if frames.end - frames.start.min(frames.end) > 256 {
            return u16::MAX;
        }
        frames.fold(0, |all, frame| all | mask(shard_of(frame), 1))
    }

    /// Buffers with `pages` of a frame, filled from `data` (the part's bytes). Empty if there is no room or
    /// no memory now.
    pub(crate) fn prepare(
        &self,
        worker: &WorkerMemory,
        part: &FramePart,
        pages: u16,
        data: &[u8],
    ) -> PreparedBuffers {
        let mut prepared = PreparedBuffers::none();
        let count = u64::from(pages.count_ones());
        if count == 0 || !self.cache.make_room(self, worker, count) {
            return prepared;
        }
        prepared.pages = count;
        for (start, count) in blocks(pages) {
            let Ok(mut block) = worker.alloc(count * PAGE_BYTES, self.owner) else {
                self.cache.refuse();
                break;
            };
            let range = part.clip(start, count);
            let from = range.start - start * PAGE_BYTES;
            let end = from + range.len();
            block[from..end].copy_from_slice(&data[range.start - part.from..range.end - part.from]);
            block[..from].fill(0);
            block[end..].fill(0);
            match SmallBuffer::new(block) {
                Ok(buffer) => {
                    prepared.buffers[prepared.count] = Some((start, buffer));
                    prepared.count += 1;
                }
                Err(block) => worker.free(block),
            }
        }
        prepared
    }

    /// Evicts about `pages` pages, the coldest of all shards first. With `now` the memory is returned to the
    /// kernel at once. Returns the number of pages that had memory.
    ///
    /// Everything is freed together: data inserted at the same time is adjacent across all shards, and one
    /// call for 2 MiB costs the kernel a fifth less than calls for 64 KiB.
    pub(crate) fn evict(&self, worker: &WorkerMemory, pages: u64, now: bool) -> u64 {
        let mut got = 0;
        // Shards with nothing to evict.
        let mut left: u16 = 0;
        let mut batch = FreeBatch::new();
        while got < pages
            && let Some((number, next)) = self.coldest_shard(left)
        {
            let wanted = pages - got;
            let some = {
                let mut shard = self.lock(number);
                let most = match next {
                    NextVictim::Cold(pages) | NextVictim::New(pages) => pages.min(wanted),
                    NextVictim::Used(turned) => {
                        // A shard that was empty for long does not catch up for that time.
                        let last = self.turned.fetch_max(turned, Ordering::Relaxed);
                        shard.catch_up(last.saturating_sub(FULL_ROUND / 4));
                        wanted.min((pages / SHARDS as u64).max(FRAME_PAGES))
                    }
                    NextVictim::Nothing => 0,
                };
                shard.evict(most, &mut batch)
            };
            if some == 0 {
                left |= mask(number, 1);
            }
            got += some;
            if batch.is_full() {
                batch.free(worker, now);
                left = 0;
            }
        }
        batch.free(worker, now);
        got
    }

    /// The shard whose coldest page is worth least, except those in `but`; `None` if all are empty.
    fn coldest_shard(&self, but: u16) -> Option<(usize, NextVictim)> {
        // Start at a different shard each time, so that equal ones are chosen in rotation.
        let from = usize::try_from(self.cursor.fetch_add(1, Ordering::Relaxed)).unwrap_or(0);
        let numbers = (from..from.saturating_add(SHARDS)).map(|number| number % SHARDS);
        let shards = numbers.filter(|&number| but & mask(number, 1) == 0);
        let all = shards.map(|number| (number, self.lock(number).next_victim()));
        let some = all.filter(|(_, next)| *next != NextVictim::Nothing);
        some.min_by_key(|(_, next)| next.rank())
    }

    /// Drops everything of `pages` that is cached in one shard.
    pub(crate) fn drop_pages(
        &self,
        shard: usize,
        pages: &std::ops::Range<u64>,
        worker: &WorkerMemory,
    ) {
        self.drop_by(FrameWalk::new(pages), shard, worker);
    }

    fn drop_by(&self, mut walk: FrameWalk, shard: usize, worker: &WorkerMemory) {
        let mut batch = FreeBatch::new();
        while !walk.step(&mut self.lock(shard), shard, &mut batch) {
            batch.free(worker, false);
        }
        batch.free(worker, false);
    }
}

/// Visits the cached frames of a range in one shard, a bounded number at a time.
pub(crate) struct FrameWalk {
    pages: std::ops::Range<u64>,
    /// The next frame of the range, or the next entry of the shard's table, whichever are fewer. Unknown
    /// before the first step.
    at: u64,
    by_entry: Option<bool>,
    kind: WalkKind,
    /// Dirty pages that were dropped.
    pub(crate) dropped: u64,
    /// A page that is not stable was kept, and has to be written again.
    pub(crate) has_kept: bool,
}

/// The pages that a [`FrameWalk`] drops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WalkKind {
    Clean,
    /// Dirty pages as well.
    All,
    /// All but those that are not stable.
    Stable,
}

impl FrameWalk {
    pub(crate) fn new(pages: &std::ops::Range<u64>) -> FrameWalk {
        let (at, by_entry, kind) = (0, None, WalkKind::Clean);
        FrameWalk { pages: pages.clone(), at, by_entry, kind, dropped: 0, has_kept: false }
    }

    /// A walk over the pages of a request that has failed: those that are not stable are kept.
    pub(crate) fn after_failure(pages: &std::ops::Range<u64>) -> FrameWalk {
        FrameWalk { kind: WalkKind::Stable, ..FrameWalk::new(pages) }
    }

    /// Drops pages that are not stable as well, from now on.
    pub(crate) fn drop_unstable(&mut self) {
        self.kind = WalkKind::Clean;
    }

    /// A walk over pages beyond the end of the volume: dirty pages are dropped, too.
    pub(crate) fn beyond(pages: &std::ops::Range<u64>) -> FrameWalk {
        FrameWalk { kind: WalkKind::All, ..FrameWalk::new(pages) }
    }

    /// Invalidates some frames. True when all is done; otherwise free the batch and call again.
    pub(crate) fn step(&mut self, shard: &mut Shard, number: usize, batch: &mut FreeBatch) -> bool {
        let by_entry = self.by_entry.unwrap_or_else(|| {
            let first = self.pages.start / FRAME_PAGES;
            let frames = self.pages.end.div_ceil(FRAME_PAGES).saturating_sub(first);
            let by_entry = frames > u64::from(shard.entries());
            self.at = if by_entry { 0 } else { first };
            by_entry
        });
        self.by_entry = Some(by_entry);
        let end = if by_entry {
            u64::from(shard.entries())
        } else {
            self.pages.end.div_ceil(FRAME_PAGES)
        };
        for _ in 0..WALK {
            if self.at >= end {
                return true;
            }
            let frame = if by_entry {
                shard.frame_at(u32::try_from(self.at).unwrap_or(u32::MAX))
            } else {
                Some(self.at).filter(|&frame| shard_of(frame) == number)
            };
            if let Some(frame) = frame {
                let pages = within(frame, &self.pages);
                let done = match self.kind {
                    _ if pages == 0 => true,
                    WalkKind::All => {
                        let dirty = shard.dirty_of(frame, pages);
                        let done = shard.forget(frame, pages, batch);
                        self.dropped += dirty - shard.dirty_of(frame, pages);
                        done
                    }
                    WalkKind::Clean => shard.invalidate(frame, pages, batch),
                    WalkKind::Stable => {
                        let kept = shard.keep_unstable(frame, pages);
                        self.has_kept |= kept != 0;
                        shard.invalidate(frame, pages & !kept, batch)
                    }
                };
                if !done {
                    return false;
                }
            }
            self.at += 1;
        }
        false
    }
}

impl Drop for VolumeCache {
    fn drop(&mut self) {
        let worker = self.memory.worker(|| ());
        for shard in 0..SHARDS {
            // The volume is being dropped: no task can write back what is dirty.
            self.drop_by(FrameWalk::beyond(&(0..u64::MAX)), shard, &worker);
        }
        drop(worker);
        self.memory.release_owner(self.owner);
    }
}

impl std::fmt::Debug for VolumeCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeCache").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Cache {
    /// A buffer found no memory.
    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.reclaim_requests.short();
    }
}
