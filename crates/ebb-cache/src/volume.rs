//! One volume's part of the cache: its shards, and how buffers get in and out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ebb_io::{Buf, BufPool, Io};
use ebb_mem::{Memory, OwnerId, SmallBuffer, Spare, SpareHeld, Worker};

use crate::cache::Cache;
use crate::pages::{FRAME_PAGES, PAGE, PAGE_BYTES, Part, blocks, mask, sectors, touched, within};
use crate::policy::{Next, TURN};
use crate::read_ahead::ReadAhead;
use crate::shard::{Batch, Shard};
use crate::stats::{Mode, VolumeCacheStats};
use crate::sync::{Mutex, MutexGuard};
use crate::table::hash;
use crate::writeback::WritebackState;

/// Shards of a volume: workers on different frames seldom meet.
pub(crate) const SHARDS: usize = 16;
/// Frames that one hold of a lock walks over.
const WALK: u32 = 64;
/// A volume is active if it was used within so many ticks of a quarter of a second.
const ACTIVE_TICKS: u32 = 40;

/// A volume's cache. Shared by the workers that serve it.
pub struct VolumeCache {
    name: Arc<str>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) memory: Arc<Memory>,
    /// For buffers of work that does with less.
    spare: Arc<Spare>,
    owner: OwnerId,
    pub(crate) size: AtomicU64,
    mode: Mode,
    pub(crate) writeback: WritebackState,
    shards: [Mutex<Shard>; SHARDS],
    /// Pages that memory is behind.
    held: AtomicU64,
    /// Pages that the store does not have yet.
    dirty: AtomicU64,
    /// Pages that are on the store and not known to be stable there.
    pub(crate) unstable: AtomicU64,
    /// The shard that is looked at first when some is evicted.
    cursor: AtomicU32,
    /// How far the shard was gone round that was evicted from last ([`Next::Used`]).
    turned: AtomicU64,
    changes: AtomicU64,
    /// Requests that missed, and the reclaimer's account of when that last changed.
    pub(crate) uses: AtomicU64,
    seen: AtomicU64,
    idle_ticks: AtomicU32,
    pub(crate) ahead: ReadAhead,
    /// A hit has met a mark of read-ahead.
    pub(crate) marked: AtomicBool,
}

/// A shard's lock. What memory is held is told to volume and cache when it is let go.
pub(crate) struct Locked<'a> {
    shard: MutexGuard<'a, Shard>,
    volume: &'a VolumeCache,
    held: u64,
    dirty: u64,
    unstable: u64,
}

impl std::ops::Deref for Locked<'_> {
    type Target = Shard;
    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl Drop for Locked<'_> {
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
pub(crate) struct Prepared {
    buffers: [Option<(usize, SmallBuffer)>; 16],
    count: usize,
    pages: u64,
}

impl Prepared {
    pub(crate) const fn none() -> Prepared {
        Prepared { buffers: [const { None }; 16], count: 0, pages: 0 }
    }

    /// Puts them into the shard, those left out of which a page is valid already.
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

    /// Frees what was not attached. Call it when the shard's lock is free.
    pub(crate) fn finish(&mut self, cache: &Cache, worker: &Worker) {
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
            changes: AtomicU64::new(0),
            uses: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            idle_ticks: AtomicU32::new(0),
            ahead: ReadAhead::default(),
            marked: AtomicBool::new(false),
        }
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it is used.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A buffer for work that helps but does not have to be done, such as read-ahead: of `most` bytes, or as many of them
    /// as there are, but at least `least`. What it takes is given back with the second part.
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

    /// The figures of now: gauges are exact, one shard after the other.
    pub fn stats(&self) -> VolumeCacheStats {
        let mut stats = VolumeCacheStats::default();
        for shard in 0..SHARDS {
            let shard = self.lock(shard);
            stats.add(&shard.tally, shard.table_bytes());
        }
        stats
    }

    /// Forgets what is cached of a range: it was changed from outside. Data that is just being read
    /// from the store is not kept. Of a volume in writeback mode nothing of the range may be dirty.
    pub fn invalidate(&self, offset: u64, length: u64) {
        let pages = touched(offset, length);
        let worker = self.memory.worker(|| ());
        for shard in 0..SHARDS {
            {
                let mut shard = self.lock(shard);
                shard.flights.poison(&pages);
                shard.flights.mark_clash(&sectors(offset, length));
            }
            self.drop_pages(shard, &pages, &worker);
        }
    }

    /// The shard a frame belongs to.
    #[inline]
    pub(crate) fn shard_of(frame: u64) -> usize {
        usize::try_from(hash(frame) & 15).unwrap_or(0)
    }

    #[inline]
    pub(crate) fn lock(&self, shard: usize) -> Locked<'_> {
        let shard = self.shards[shard % SHARDS].lock();
        let tally = &shard.tally;
        let (held, dirty, unstable) = (tally.held(), tally.dirty, tally.unstable);
        Locked { shard, volume: self, held, dirty, unstable }
    }

    /// Pages that memory is behind.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes that the store does not have yet.
    pub fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed) * PAGE
    }

    /// Whether it was used lately.
    pub(crate) fn is_active(&self) -> bool {
        self.idle_ticks.load(Ordering::Relaxed) < ACTIVE_TICKS
    }

    /// Time has passed, by so many ticks.
    pub(crate) fn note_time(&self, ticks: u32) {
        let uses = self.uses.load(Ordering::Relaxed) + self.hits();
        if self.seen.swap(uses, Ordering::Relaxed) == uses {
            let idle = self.idle_ticks.load(Ordering::Relaxed).saturating_add(ticks);
            self.idle_ticks.store(idle, Ordering::Relaxed);
        } else {
            self.idle_ticks.store(0, Ordering::Relaxed);
        }
    }

    fn hits(&self) -> u64 {
        (0..SHARDS).map(|shard| self.lock(shard).tally.hits).sum()
    }

    /// A second has passed.
    pub(crate) fn age(&self) {
        (0..SHARDS).for_each(|shard| self.lock(shard).age());
    }

    /// A number for a change.
    pub(crate) fn new_change(&self) -> u64 {
        self.changes.fetch_add(2, Ordering::Relaxed)
    }

    /// The shards that pages of a range lie in, as bits.
    pub(crate) fn shards_of(pages: &std::ops::Range<u64>) -> u16 {
        let frames = pages.start / FRAME_PAGES..pages.end.div_ceil(FRAME_PAGES);
        if frames.end - frames.start.min(frames.end) > 256 {
            return u16::MAX;
        }
        frames.fold(0, |all, frame| all | mask(VolumeCache::shard_of(frame), 1))
    }

    /// Buffers with `pages` of a frame, filled from `data` (the part's bytes). Empty if there is no room
    /// or no memory now.
    pub(crate) fn prepare(
        &self,
        worker: &Worker,
        part: &Part,
        pages: u16,
        data: &[u8],
    ) -> Prepared {
        let mut prepared = Prepared::none();
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

    /// Evicts about `pages` pages, the coldest of all shards first. With `now` the memory is returned to
    /// the kernel at once. Returns the pages that memory was behind.
    ///
    /// All of it goes back together: what was put in at a time lies side by side over all shards, and a
    /// call for 2 MiB costs the kernel a fifth less than calls for 64 KiB.
    pub(crate) fn evict(&self, worker: &Worker, pages: u64, now: bool) -> u64 {
        let mut got = 0;
        // Shards that gave nothing.
        let mut left: u16 = 0;
        let mut batch = Batch::new();
        while got < pages
            && let Some((number, next)) = self.coldest_shard(left)
        {
            let wanted = pages - got;
            let some = {
                let mut shard = self.lock(number);
                let most = match next {
                    Next::Cold(pages) | Next::New(pages) => pages.min(wanted),
                    Next::Used(turned) => {
                        // Who has had no turn for long, since there was nothing, is not behind by that.
                        let last = self.turned.fetch_max(turned, Ordering::Relaxed);
                        shard.catch_up(last.saturating_sub(TURN / 4));
                        wanted.min((pages / SHARDS as u64).max(FRAME_PAGES))
                    }
                    Next::Nothing => 0,
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

    /// The shard that can best do without its coldest, of those not in `but`; `None` if all are empty.
    fn coldest_shard(&self, but: u16) -> Option<(usize, Next)> {
        // Among equals not always the same.
        let from = usize::try_from(self.cursor.fetch_add(1, Ordering::Relaxed)).unwrap_or(0);
        let numbers = (from..from.saturating_add(SHARDS)).map(|number| number % SHARDS);
        let shards = numbers.filter(|&number| but & mask(number, 1) == 0);
        let all = shards.map(|number| (number, self.lock(number).next_out()));
        let some = all.filter(|(_, next)| *next != Next::Nothing);
        some.min_by_key(|(_, next)| next.rank())
    }

    /// Drops all of `pages` that is cached in one shard.
    pub(crate) fn drop_pages(&self, shard: usize, pages: &std::ops::Range<u64>, worker: &Worker) {
        self.drop_by(Walk::new(pages), shard, worker);
    }

    fn drop_by(&self, mut walk: Walk, shard: usize, worker: &Worker) {
        let mut batch = Batch::new();
        while !walk.step(&mut self.lock(shard), shard, &mut batch) {
            batch.free(worker, false);
        }
        batch.free(worker, false);
    }
}

/// A walk over the cached frames of a range, in one shard, a bounded number at a time.
pub(crate) struct Walk {
    pages: std::ops::Range<u64>,
    /// The next frame, or entry of the shard's table: whichever are fewer. Not known before the first step.
    at: u64,
    by_entry: Option<bool>,
    /// Dirty pages go as well; so many went.
    all: bool,
    pub(crate) dropped: u64,
}

impl Walk {
    pub(crate) fn new(pages: &std::ops::Range<u64>) -> Walk {
        Walk { pages: pages.clone(), at: 0, by_entry: None, all: false, dropped: 0 }
    }

    /// A walk over pages that the volume does not have any more: what is dirty of them goes, too.
    pub(crate) fn beyond(pages: &std::ops::Range<u64>) -> Walk {
        Walk { all: true, ..Walk::new(pages) }
    }

    /// Invalidates some. True when all is done; else free the batch and call again.
    pub(crate) fn step(&mut self, shard: &mut Shard, number: usize, batch: &mut Batch) -> bool {
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
                Some(self.at).filter(|&frame| VolumeCache::shard_of(frame) == number)
            };
            if let Some(frame) = frame {
                let pages = within(frame, &self.pages);
                let dirty = if self.all { shard.dirty_of(frame, pages) } else { 0 };
                let done = match self.all {
                    _ if pages == 0 => true,
                    true => shard.forget(frame, pages, batch),
                    false => shard.invalidate(frame, pages, batch),
                };
                if self.all {
                    self.dropped += dirty - shard.dirty_of(frame, pages);
                }
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
            // Nobody is left who could have written back what is dirty.
            self.drop_by(Walk::beyond(&(0..u64::MAX)), shard, &worker);
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
        self.orders.short();
    }
}
