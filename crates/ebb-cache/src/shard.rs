//! One shard of a volume's cache: frames, their buffers, and which of their pages are readable.
//!
//! A mutex protects all of it ([`VolumeCache`](crate::VolumeCache) has sixteen shards); it is held for one
//! frame at a time, never across an await. A buffer is one block of 4 to 64 KiB at a multiple of its size
//! within a frame; a **slot** is the 40-byte record of a buffer.
//!
//! # Invariants
//! - A page is *valid* in at most one slot of its frame, and then equals what the store holds (or is dirty:
//!   newer than the store).
//! - A dirty page is valid and wired, and its slot is not evicted. The same holds for a page that is not
//!   stable on the store (`stable.rs`).
//! - A *lost* page was lent and discarded by the kernel; it is not valid and no longer counts as held.
//! - Every slot with a wired page that may be lent is in the queue `wired`.

use std::collections::VecDeque;

use ebb_mem::{Memory, SmallBuffer, WorkerMemory};

use crate::copy_target::CopyTarget;
use crate::inflight::InflightTable;
use crate::pages::{FramePart, PAGE_BYTES, each, mask, runs, small};
use crate::policy::{Eviction, EvictionPolicy, NextVictim};
use crate::table::{FrameIndex, Linked, NONE, Slab, hash};

mod dirty;
mod lend;
mod stable;
mod zeroed;

pub(crate) use dirty::{DirtyFrame, few_frames};
use zeroed::ZeroedRanges;

/// Shards of a volume: workers on different frames seldom contend.
pub(crate) const SHARDS: usize = 16;

/// The shard of a frame.
#[inline]
pub(crate) fn shard_of(frame: u64) -> usize {
    usize::try_from(hash(frame) & 15).unwrap_or(0)
}
pub(crate) use zeroed::{ZeroedRange, join};

/// The slot is in the queue `wired`.
const QUEUED: u8 = 1;
/// One-pass data: lent at once.
pub(crate) const COLD: u8 = 2;
/// The first buffer of a read-ahead window: reading it starts the next window.
pub(crate) const MARK: u8 = 4;
/// Loaded by read-ahead.
pub(crate) const AHEAD: u8 = 8;

/// The record of a buffer. Masks are of the frame's pages.
#[derive(Debug)]
pub(crate) struct BufferSlot {
    buffer: Option<SmallBuffer>,
    frame: u32,
    /// The frame's next slot.
    next: u32,
    valid: u16,
    lost: u16,
    dirty: u16,
    /// Dirty pages that are under writeback. A page may be in both masks: it was written again meanwhile.
    cleaning: u16,
    /// On the store and not stable there: `stable.rs`.
    unstable: u16,
    flushing: u16,
    /// First page of the buffer, within the frame.
    base: u8,
    flags: u8,
    /// When it was last used, see `Cache::tick`.
    tick: u8,
}

const _: () = assert!(size_of::<BufferSlot>() == 40, "there are millions of them");

impl Default for BufferSlot {
    fn default() -> BufferSlot {
        let (frame, next) = (NONE, NONE);
        let (valid, lost, dirty, cleaning, unstable, flushing) = (0, 0, 0, 0, 0, 0);
        let (base, flags, tick) = (0, 0, 0);
        let buffer = None;
        BufferSlot {
            buffer,
            frame,
            next,
            valid,
            lost,
            dirty,
            cleaning,
            unstable,
            flushing,
            base,
            flags,
            tick,
        }
    }
}

impl Linked for BufferSlot {
    fn link(&self) -> u32 {
        self.next
    }
    fn set_link(&mut self, link: u32) {
        self.next = link;
    }
}

impl BufferSlot {
    /// The pages its buffer covers.
    fn covers(&self) -> u16 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.all() << self.base)
    }

    /// The pages that are offered or lent to the kernel.
    fn unwired(&self) -> u16 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.unwired() << self.base)
    }

    /// Pages that the store does not have yet.
    fn unsaved(&self) -> u16 {
        self.dirty | self.cleaning
    }
}

/// Counters of a shard. Gauges are in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardCounters {
    /// Pages in buffers.
    pub(crate) address: u64,
    /// Of those, lent.
    pub(crate) lent: u64,
    /// Of the lent ones, known to be discarded.
    pub(crate) lost: u64,
    /// Pages that the store does not have yet.
    pub(crate) dirty: u64,
    /// Pages that are on the store and not known to be stable there.
    pub(crate) unstable: u64,
    /// Slots in use.
    pub(crate) buffers: u64,
    /// Pages read from the cache, and those of them that were lent at the time.
    pub(crate) hits: u64,
    pub(crate) lent_hits: u64,
    /// Pages that had to be read from the store.
    pub(crate) misses: u64,
    /// Lent pages that were found discarded by a read.
    pub(crate) lost_hits: u64,
    /// Pages that a scan found discarded.
    pub(crate) reclaimed: u64,
    /// Pages evicted.
    pub(crate) evicted: u64,
    /// Pages inserted.
    pub(crate) inserted: u64,
    /// Pages inserted by read-ahead.
    pub(crate) ahead: u64,
}

impl ShardCounters {
    /// Pages that have memory.
    pub(crate) fn held(&self) -> u64 {
        self.address - self.lost
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shard {
    index: FrameIndex,
    slots: Slab<BufferSlot>,
    policy: Eviction,
    wired: VecDeque<u32>,
    pub(crate) inflight: InflightTable,
    pub(crate) tally: ShardCounters,
    /// Where the next scan for discarded pages continues.
    scan_position: u32,
    /// A read met a read-ahead mark since this was last reset.
    pub(crate) marked: bool,
    /// Pages evicted up to the last call of `age`.
    aged: u64,
    /// Frames that became dirty, oldest first. Some may be clean again, or listed twice.
    aging: VecDeque<DirtyFrame>,
    /// Frames with unstable pages, see `stable.rs`; those that the flush in progress makes stable.
    kept: Vec<u64>,
    kept_flushing: Vec<u64>,
    /// Some data is on the store, not stable, and not in memory, so that it cannot be written again after a
    /// failed flush.
    pub(crate) loose: bool,
    pub(crate) loose_flushing: bool,
    zeroed: ZeroedRanges,
}

/// Buffers removed from a shard, to be freed after its lock is released.
#[derive(Debug)]
pub(crate) struct FreeBatch {
    buffers: [Option<SmallBuffer>; FreeBatch::SIZE],
    count: usize,
}

impl FreeBatch {
    pub(crate) const SIZE: usize = 64;

    pub(crate) fn new() -> FreeBatch {
        FreeBatch { buffers: [const { None }; FreeBatch::SIZE], count: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count == FreeBatch::SIZE
    }

    fn push(&mut self, buffer: SmallBuffer) {
        debug_assert!(!self.is_full(), "checked by the caller");
        if let Some(place) = self.buffers.get_mut(self.count) {
            *place = Some(buffer);
            self.count += 1;
        }
    }

    /// Frees the buffers: wired ones to the worker's caches, the others lent; with `now`, all memory is
    /// returned to the kernel. Returns the number of pages.
    pub(crate) fn free(&mut self, worker: &WorkerMemory, now: bool) -> usize {
        let mut pages = 0;
        let filled = &mut self.buffers[..self.count];
        for place in filled.iter_mut() {
            pages += place.as_ref().map_or(0, SmallBuffer::pages);
            if !now && place.as_ref().is_some_and(|buffer| buffer.unwired() == 0) {
                place.take().into_iter().for_each(|buffer| buffer.free(worker));
            }
        }
        if filled.iter().any(Option::is_some) {
            SmallBuffer::free_all(worker, filled.iter_mut().filter_map(Option::take), now);
        }
        self.count = 0;
        pages
    }
}

impl Drop for FreeBatch {
    fn drop(&mut self) {
        debug_assert!(self.count == 0, "the caller frees it");
    }
}

impl Shard {
    pub(crate) fn new() -> Shard {
        Shard {
            index: FrameIndex::new(),
            slots: Slab::new(),
            policy: Eviction::with_capacity(0),
            wired: VecDeque::new(),
            inflight: InflightTable::default(),
            tally: ShardCounters::default(),
            scan_position: 0,
            marked: false,
            aged: 0,
            aging: VecDeque::new(),
            kept: Vec::new(),
            kept_flushing: Vec::new(),
            loose: false,
            loose_flushing: false,
            zeroed: ZeroedRanges::default(),
        }
    }

    /// The frame's slots.
    fn first(&self, frame: u64) -> u32 {
        self.index.find(frame).and_then(|entry| self.index.get(entry)).map_or(NONE, |f| f.first)
    }

    /// Pages of `frame` that are valid.
    pub(crate) fn valid(&self, frame: u64) -> u16 {
        self.fold(frame, |slot| slot.valid)
    }

    /// Whether all of `pages` are valid.
    pub(crate) fn has(&self, frame: u64, pages: u16) -> bool {
        let (mut left, mut at) = (pages, self.first(frame));
        while left != 0
            && let Some(slot) = self.slots.get(at)
        {
            left &= !slot.valid;
            at = slot.next;
        }
        left == 0
    }

    /// Pages of `frame` that a buffer covers, valid or not.
    pub(crate) fn covered(&self, frame: u64) -> u16 {
        self.fold(frame, BufferSlot::covers)
    }

    fn fold(&self, frame: u64, of: impl Fn(&BufferSlot) -> u16) -> u16 {
        let (mut all, mut at) = (0, self.first(frame));
        while let Some(slot) = self.slots.get(at) {
            all |= of(slot);
            at = slot.next;
        }
        all
    }

    /// Copies the valid pages among `want` (pages of the part) to `out`, the part's bytes. Returns the pages
    /// it could not serve.
    pub(crate) fn copy_out(
        &mut self,
        memory: &Memory,
        part: &FramePart,
        want: u16,
        out: &mut (impl CopyTarget + ?Sized),
        tick: u8,
    ) -> u16 {
        let mut missing = want;
        let mut at = self.first(part.frame);
        while missing != 0
            && let Some(slot) = self.slots.get_mut(at)
        {
            let next = slot.next;
            let here = slot.valid & missing;
            if here != 0 {
                let lost = slot.copy_out(memory, part, here, out);
                slot.tick = tick;
                self.marked |= slot.flags & MARK != 0;
                slot.flags &= !MARK;
                self.policy.hit(at);
                let served = here & !lost;
                self.tally.hits += u64::from(served.count_ones());
                self.tally.lent_hits += u64::from((served & slot.unwired()).count_ones());
                missing &= !served;
                if lost != 0 {
                    self.tally.lost_hits += u64::from(lost.count_ones());
                    self.lose(at, lost);
                }
            }
            at = next;
        }
        missing
    }

    /// Marks pages of a slot as discarded by the kernel.
    fn lose(&mut self, at: u32, pages: u16) {
        if let Some(slot) = self.slots.get_mut(at) {
            let new = pages & slot.unwired() & !slot.lost;
            slot.valid &= !pages;
            slot.lost |= new;
            self.tally.lost += u64::from(new.count_ones());
        }
    }

    /// Inserts a buffer for the pages from `base` on, all of them valid; `kind` is [`COLD`], [`MARK`] and
    /// [`AHEAD`], or 0. Returns the buffer if there is no room in the tables.
    pub(crate) fn attach(
        &mut self,
        frame: u64,
        base: usize,
        buffer: SmallBuffer,
        kind: u8,
        tick: u8,
    ) -> Result<(), SmallBuffer> {
        let Some(entry) = self.index.ensure(frame) else { return Err(buffer) };
        let pages = u64::from(buffer.all().count_ones());
        let valid = buffer.all() << base;
        let first = self.index.get(entry).map_or(NONE, |frame| frame.first);
        let flags = QUEUED | kind;
        let (next, base_page) = (first, small(base));
        let slot = BufferSlot {
            frame: entry,
            next,
            valid,
            base: base_page,
            flags,
            tick,
            ..BufferSlot::default()
        };
        let Some((at, left)) = self.slots.insert(slot) else { return Err(buffer) };
        if let Some(slot) = self.slots.get_mut(at) {
            slot.buffer = Some(buffer);
        }
        if let Some(frame) = self.index.get_mut(entry) {
            frame.first = at;
        }
        if left.flags & QUEUED == 0 {
            self.wired.push_back(at);
        }
        let weight = u32::try_from(pages).unwrap_or(1);
        self.policy.insert(at, frame << 4 | base as u64, weight, kind & COLD != 0);
        self.tally.address += pages;
        self.tally.buffers += 1;
        self.tally.inserted += pages;
        if kind & AHEAD != 0 {
            self.tally.ahead += pages;
        }
        Ok(())
    }

    /// Overwrites `want` (pages of the part that a buffer covers) with `data`, the part's bytes. Whole pages
    /// become valid; a page that the range covers in part must be valid already, or is left alone. Pages that
    /// cannot be wired now become invalid. Returns the pages that are valid.
    pub(crate) fn update(
        &mut self,
        worker: &WorkerMemory,
        part: &FramePart,
        want: u16,
        whole: u16,
        data: &[u8],
    ) -> u16 {
        // First where a page is valid, then where a buffer covers it.
        let valid = self.update_where(worker, part, want, whole, data, |slot| slot.valid);
        let rest = want & whole & !valid;
        valid | self.update_where(worker, part, rest, whole, data, BufferSlot::covers)
    }

    fn update_where(
        &mut self,
        worker: &WorkerMemory,
        part: &FramePart,
        want: u16,
        whole: u16,
        data: &[u8],
        of: impl Fn(&BufferSlot) -> u16,
    ) -> u16 {
        let (mut done, mut at) = (0, self.first(part.frame));
        while let Some(slot) = self.slots.get_mut(at) {
            let next = slot.next;
            let here = of(slot) & want & !done;
            if here != 0 {
                let (unwired, lost) = (slot.unwired(), slot.lost);
                done |= slot.update(worker, part, here, whole, data);
                self.tally.lent -= u64::from((unwired & !slot.unwired()).count_ones());
                self.tally.lost -= u64::from((lost & !slot.lost).count_ones());
                if unwired != slot.unwired() && slot.flags & QUEUED == 0 {
                    slot.flags |= QUEUED;
                    self.wired.push_back(at);
                }
            }
            at = next;
        }
        done
    }

    /// Makes `pages` of a frame invalid; buffers without a valid page go to `batch`. False if the batch
    /// filled up first: free it and call again. The caller has written back all dirty pages; one that is
    /// dirty nevertheless is kept, since it is the only copy of its data.
    pub(crate) fn invalidate(&mut self, frame: u64, pages: u16, batch: &mut FreeBatch) -> bool {
        let unsaved = self.fold(frame, BufferSlot::unsaved);
        debug_assert!(unsaved & pages == 0, "dirty data of frame {frame} must not be dropped");
        let pages = pages & !unsaved;
        let unstable = pages & self.unstable(frame);
        if unstable != 0 {
            self.loose = true;
            self.forget_zeroed(frame, unstable);
        }
        self.forget(frame, pages, batch)
    }

    /// As [`Shard::invalidate`], for pages beyond the end of the volume, dirty or not: nothing
    /// there needs to be stable.
    pub(crate) fn forget(&mut self, frame: u64, pages: u16, batch: &mut FreeBatch) -> bool {
        let mut at = self.first(frame);
        while let Some(slot) = self.slots.get_mut(at) {
            let next = slot.next;
            if slot.covers() & pages != 0 {
                if batch.is_full() {
                    return false;
                }
                slot.valid &= !pages;
                self.tally.dirty -= u64::from((slot.unsaved() & pages).count_ones());
                slot.dirty &= !pages;
                slot.cleaning &= !pages;
                let unstable = slot.unstable() & pages;
                self.tally.unstable -= u64::from(unstable.count_ones());
                slot.unstable &= !pages;
                slot.flushing &= !pages;
                if slot.valid == 0 {
                    self.policy.remove(at);
                    self.detach(at, batch);
                }
            }
            at = next;
        }
        true
    }

    /// The frame number of an entry, if it is in use: for walks over all entries.
    pub(crate) fn frame_at(&self, entry: u32) -> Option<u64> {
        self.index.get(entry).map(|frame| frame.number).filter(|&number| number != u64::MAX)
    }

    /// The range of frame entries: `0..entries()`.
    pub(crate) fn entries(&self) -> u32 {
        self.index.entries()
    }

    /// Removes a slot from its frame; the policy has removed it already.
    fn detach(&mut self, at: u32, batch: &mut FreeBatch) {
        let Some(slot) = self.slots.get(at) else { return };
        let (entry, next) = (slot.frame, slot.next);
        debug_assert!(slot.must_stay() == 0, "dirty data is never dropped");
        if let Some(frame) = self.index.get_mut(entry) {
            if frame.first == at {
                frame.first = next;
                if next == NONE {
                    self.index.remove(entry);
                }
            } else {
                let mut before = frame.first;
                while let Some(slot) = self.slots.get_mut(before) {
                    if slot.next == at {
                        slot.next = next;
                        break;
                    }
                    before = slot.next;
                }
            }
        }
        let mut slot = self.slots.remove(at);
        self.tally.address -= u64::from(slot.covers().count_ones());
        self.tally.lent -= u64::from(slot.unwired().count_ones());
        self.tally.lost -= u64::from(slot.lost.count_ones());
        self.tally.buffers -= 1;
        if slot.flags & QUEUED != 0
            && let Some(freed) = self.slots.get_mut(at)
        {
            // Its position in the queue passes to the next slot with this number.
            freed.flags = QUEUED;
        }
        slot.buffer.take().into_iter().for_each(|buffer| batch.push(buffer));
    }

    /// See [`EvictionPolicy::catch_up`].
    pub(crate) fn catch_up(&mut self, turned: u64) {
        self.policy.catch_up(turned);
    }

    /// Evicts the coldest buffers until `pages` are in the batch, it is full, or none may be evicted. Returns
    /// the number of pages that had memory.
    pub(crate) fn evict(&mut self, pages: u64, batch: &mut FreeBatch) -> u64 {
        let before = self.tally.held();
        while before - self.tally.held() < pages && !batch.is_full() {
            let slots = &self.slots;
            let clean = |at| slots.get(at).is_some_and(|slot| slot.must_stay() == 0);
            let Some(at) = self.policy.evict(clean) else { break };
            let pages = self.slots.get(at).map_or(0, |slot| slot.valid.count_ones());
            self.tally.evicted += u64::from(pages);
            self.detach(at, batch);
        }
        before - self.tally.held()
    }

    /// What the next eviction would take: for the choice between shards.
    pub(crate) fn next_victim(&self) -> NextVictim {
        self.policy.next()
    }

    /// Ages the policy while nothing is evicted: called once a second.
    pub(crate) fn age(&mut self) {
        if std::mem::replace(&mut self.aged, self.tally.evicted) == self.tally.evicted {
            self.policy.age(u32::try_from(self.tally.buffers / 64).unwrap_or(u32::MAX).min(1024));
        }
    }

    /// Size of the tables in bytes.
    pub(crate) fn table_bytes(&self) -> usize {
        self.index.bytes() + self.slots.bytes() + self.policy.bytes() + self.wired.capacity() * 4
    }
}

impl BufferSlot {
    /// Copies valid pages; returns those that were lost.
    fn copy_out(
        &self,
        memory: &Memory,
        part: &FramePart,
        pages: u16,
        out: &mut (impl CopyTarget + ?Sized),
    ) -> u16 {
        let Some(buffer) = &self.buffer else { return pages };
        let base = usize::from(self.base);
        let unwired = self.unwired();
        for (start, count) in runs(pages & !unwired) {
            let range = part.clip(start, count);
            let from = range.start - start * PAGE_BYTES;
            if let Some(bytes) = buffer.bytes(start - base..start - base + count) {
                out.put(range.start - part.from, &bytes[from..from + range.len()]);
            }
        }
        let mut lost = 0;
        for page in each(pages & unwired) {
            let range = part.clip(page, 1);
            let from = range.start - page * PAGE_BYTES;
            let read = |to: &mut [u8]| buffer.read_unwired(memory, page - base, from, to);
            if !out.put_checked(range.start - part.from..range.end - part.from, read) {
                lost |= mask(page, 1);
            }
        }
        lost
    }

    /// See [`Shard::update`]; the caller updates the counters.
    fn update(
        &mut self,
        worker: &WorkerMemory,
        part: &FramePart,
        pages: u16,
        whole: u16,
        data: &[u8],
    ) -> u16 {
        let Some(buffer) = &mut self.buffer else { return 0 };
        let base = usize::from(self.base);
        let unwired = pages & (buffer.unwired() << base);
        let mut unusable = 0;
        if unwired != 0 {
            match buffer.rewire(worker, unwired >> base) {
                // A page that is overwritten completely cannot be lost.
                Ok(lost) => unusable = (lost << base) & !whole,
                Err(_) => unusable = unwired,
            }
        }
        let wired = !(buffer.unwired() << base);
        self.lost &= !wired;
        for (start, count) in runs(pages & !unusable) {
            let range = part.clip(start, count);
            let from = range.start - start * PAGE_BYTES;
            let pages = start - base..start - base + count;
            if let Some(bytes) = buffer.bytes_mut(pages) {
                bytes[from..from + range.len()]
                    .copy_from_slice(&data[range.start - part.from..range.end - part.from]);
            }
        }
        self.valid = (self.valid | pages) & !unusable;
        self.valid & pages
    }
}
