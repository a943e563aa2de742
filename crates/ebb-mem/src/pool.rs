//! The page pool of a queue, after the free-page pools of Linux's xen-blkback
//! (`drivers/block/xen-blkback/blkback.c`).
//!
//! A pool holds free blocks, counted in 4 KiB pages. It grows from zero on demand. When no request is in
//! flight, or 100 ms have passed, it shrinks to `max_buffer_pages`. For `buffer_squeeze_duration_ms`
//! after a memory-pressure event that limit is 0; each event restarts the time, and an idle queue is
//! woken for it.
//!
//! In addition to xen-blkback:
//! - While pressure continues ([`crate::Memory::draining`]), pools keep nothing. A block freed by one
//!   queue is at once available to all queues, so that together they hold what is in use, not the sum
//!   of their peaks.
//! - Blocks that were not needed during the last 100 ms, except for a small floor, are lent to the
//!   kernel while they stay in the pool. They need no sentinel, since the content of a free block does
//!   not matter. Allocating such a block only cancels the loan; a block that is being advised is
//!   skipped.
//!
//! Invariant: only blocks in the pool are lent, shrunk or squeezed; blocks in use or in flight
//! are not in the pool.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_param::Parameter;

use crate::arena::{Give, Retake};
use crate::block::{Block, OwnerId};
use crate::class::{CLASSES, PAGE_BYTES, class_bytes, class_of, class_pages};
use crate::gauge::SQUEEZE;
use crate::options::IdlePolicy;
use crate::sync::{AtomicUsize, Ordering};
use crate::sys::Span;
use crate::worker::{Exhausted, WorkerInner, WorkerMemory};

/// How often a pool is checked, and how long a block must have been idle to be lent.
///
/// Linux's xen-blkback shrinks its pool at this interval. Measured: lending a page and taking it back
/// costs about 0.6 µs, so lending a full default pool once per interval costs under 1 % of a CPU even if
/// all of it is needed again; at 10 ms it would cost 6 %.
pub const POOL_INTERVAL: Duration = Duration::from_millis(100);
/// A pool without any request for this long lends its floor as well.
const POOL_QUIET: Duration = Duration::from_secs(1);
/// Free pages that a pool in use keeps wired instead of lent.
const WIRED_FLOOR_PAGES: usize = 64;

/// Blocks released under one lock, and in one iteration of the worker's loop.
const RELEASE_BATCH: usize = 64;
const RELEASE_TURN: usize = 2048;

/// Parameters of page pools, shared by all queues of a volume. They can be changed at any time.
#[derive(Clone, Debug)]
pub struct PoolParameters {
    /// Limit on the free pages (4 KiB) of a pool when no request is in flight. A change takes effect when a pool next
    /// shrinks.
    pub max_buffer_pages: Parameter<u32>,
    /// How long pools stay empty after a memory-pressure event, in milliseconds. A squeeze in progress keeps its
    /// length.
    pub buffer_squeeze_duration_ms: Parameter<u32>,
}

impl Default for PoolParameters {
    /// `max_buffer_pages` 1024, `buffer_squeeze_duration_ms` 10.
    fn default() -> PoolParameters {
        PoolParameters {
            max_buffer_pages: Parameter::new(1024),
            buffer_squeeze_duration_ms: Parameter::new(10),
        }
    }
}

impl PoolParameters {
    fn squeeze_nanos(&self) -> u64 {
        u64::from(self.buffer_squeeze_duration_ms.get()) * 1_000_000
    }
}

/// The counters of a pool that other threads read.
#[derive(Debug, Default)]
pub(crate) struct PoolShared {
    pub(crate) owner: u16,
    pub(crate) wired: AtomicUsize,
    pub(crate) lent: AtomicUsize,
    pub(crate) squeezes: AtomicUsize,
    pub(crate) squeezed_pages: AtomicUsize,
}

/// Free blocks of one size: first the lent ones (the oldest), then the wired ones.
#[derive(Default)]
struct List {
    blocks: VecDeque<Block>,
    /// How many at the front are lent or offered.
    lent: usize,
    /// Lowest number of wired blocks since the last check: this many were not needed.
    low: usize,
    /// Blocks allocated and not put back: capacity for them is kept, so that putting never allocates.
    out: usize,
}

impl List {
    fn wired(&self) -> usize {
        self.blocks.len() - self.lent
    }
}

#[derive(Default)]
struct PoolState {
    lists: [List; CLASSES],
    wired_pages: usize,
    lent_pages: usize,
}

pub(crate) struct PoolInner {
    parameters: PoolParameters,
    shared: Arc<PoolShared>,
    owner: OwnerId,
    state: RefCell<PoolState>,
    checked: Cell<Option<Instant>>,
    /// Last time a block was taken or put, as of the poll that noticed it.
    used: Cell<Option<Instant>>,
    busy: Cell<bool>,
    squeeze: Cell<Squeeze>,
    /// An event was seen, and not all blocks that were in the pool then have been released yet.
    draining: Cell<bool>,
}

#[derive(Clone, Copy, Default)]
struct Squeeze {
    /// Number of the last event seen.
    event: u64,
    /// Nanoseconds of the memory's time until which the limit is 0.
    until: u64,
}

/// The pool of one queue, on the queue's worker. Dropping it frees its blocks.
pub struct PagePool {
    worker: WorkerMemory,
    inner: Rc<PoolInner>,
}

impl PagePool {
    /// An empty pool. Its blocks, free and in use, are accounted to `owner`.
    pub fn new(worker: &WorkerMemory, owner: OwnerId, parameters: &PoolParameters) -> PagePool {
        let shared = Arc::new(PoolShared { owner: owner.0, ..PoolShared::default() });
        // A pool created during a squeeze is squeezed, too.
        let squeeze = match worker.memory().last_squeeze() {
            (_, 0) => Squeeze::default(),
            (at, event) => Squeeze { event, until: at.saturating_add(parameters.squeeze_nanos()) },
        };
        let inner = Rc::new(PoolInner {
            parameters: parameters.clone(),
            shared: shared.clone(),
            owner,
            state: RefCell::default(),
            checked: Cell::default(),
            used: Cell::default(),
            busy: Cell::default(),
            squeeze: Cell::new(squeeze),
            draining: Cell::default(),
        });
        worker.memory().workers.lock().pools.push(Arc::downgrade(&shared));
        worker.add_pool(&inner);
        PagePool { worker: worker.clone(), inner }
    }

    /// A block of at least `len` bytes: the one put in last, or a new one.
    ///
    /// # Errors
    /// [`Exhausted`] when the pool is empty and the worker cannot allocate one.
    #[inline]
    pub fn take(&self, len: usize) -> Result<Block, Exhausted> {
        let class = class_of(len);
        self.inner.busy.set(true);
        match self.inner.take(&self.worker.0, class) {
            Some(block) => Ok(block),
            None => {
                self.worker.alloc(len, self.inner.owner).inspect_err(|_| self.inner.missed(class))
            }
        }
    }

    /// Puts a block into the pool, or frees it to the worker if the pool has no room for it. Never
    /// allocates.
    #[inline]
    pub fn put(&self, block: Block) {
        self.inner.busy.set(true);
        let shares = self.worker.memory().draining();
        if let Some(block) = self.inner.put(block, shares) {
            self.worker.free(block);
        }
    }

    /// No request is in flight: shrinks the pool to its limit now.
    pub fn done(&self, now: Instant) {
        self.inner.shrink(&self.worker.0, now);
        self.worker.0.after_give();
    }

    /// Free pages (4 KiB) in the pool: (wired, lent).
    pub fn free_pages(&self) -> (usize, usize) {
        let state = self.inner.state.borrow();
        (state.wired_pages, state.lent_pages)
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        self.inner.empty(&self.worker.0);
        self.worker.0.after_give();
        // A weak reference keeps the allocation alive, and with it a page of the heap: remove it.
        let mut workers = self.worker.memory().workers.lock();
        let own = Arc::as_ptr(&self.inner.shared);
        workers.pools.retain(|pool| !std::ptr::eq(pool.as_ptr(), own));
        drop(workers);
        self.worker.remove_pool(&self.inner);
    }
}

impl std::fmt::Debug for PagePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PagePool").field("free_pages", &self.free_pages()).finish()
    }
}

impl PoolInner {
    fn publish(&self, state: &PoolState) {
        self.shared.wired.store(state.wired_pages, Ordering::Relaxed);
        self.shared.lent.store(state.lent_pages, Ordering::Relaxed);
    }

    #[inline]
    fn take(&self, worker: &WorkerInner, class: usize) -> Option<Block> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let list = state.lists.get_mut(class)?;
        list.out += 1;
        if list.wired() == 0 {
            if list.lent == 0 && self.parameters.max_buffer_pages.get() == 0 {
                return None;
            }
            return self.take_lent(worker, class, state);
        }
        let block = list.blocks.pop_back()?;
        list.low = list.low.min(list.wired());
        state.wired_pages -= class_pages(class);
        self.publish(state);
        Some(block)
    }

    #[cold]
    fn take_lent(
        &self,
        worker: &WorkerInner,
        class: usize,
        state: &mut PoolState,
    ) -> Option<Block> {
        let list = &mut state.lists[class];
        list.low = 0;
        // Capacity for this block when it is put back.
        list.blocks.reserve(list.out);
        let pages = class_pages(class);
        // The youngest first: it is most likely still resident. A few tries are enough: if the advisor has
        // claimed these, the slabs have other blocks.
        for index in (list.lent.saturating_sub(4)..list.lent).rev() {
            let page = worker.memory.core.reservation.page_of(list.blocks[index].start())?;
            let span = Span { page, pages };
            let retake = worker.memory.core.arena.lock().retake(span);
            match retake {
                Retake::Busy => {}
                Retake::Exhausted => return None,
                Retake::Wired => {
                    worker.memory.core.cancel_loan(span);
                    let block = list.blocks.remove(index);
                    list.lent -= 1;
                    state.lent_pages -= pages;
                    let bytes = signed(pages * PAGE_BYTES);
                    worker.account(self.owner, bytes, -bytes);
                    self.publish(state);
                    return block;
                }
            }
        }
        None
    }

    /// The allocation that [`PoolInner::take`] counted has failed.
    fn missed(&self, class: usize) {
        if let Some(list) = self.state.borrow_mut().lists.get_mut(class) {
            list.out = list.out.saturating_sub(1);
        }
    }

    /// Puts a block in; returns it if it cannot stay.
    #[inline]
    fn put(&self, block: Block, shares: bool) -> Option<Block> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let class = block.class();
        let Some(list) = state.lists.get_mut(class) else { return Some(block) };
        list.out = list.out.saturating_sub(1);
        // A pool that keeps nothing passes the block directly to the worker's caches.
        let keeps = !shares && self.parameters.max_buffer_pages.get() > 0;
        let room = list.blocks.len() < list.blocks.capacity();
        if !keeps || !room || block.owner() != self.owner {
            return Some(block);
        }
        list.blocks.push_back(block);
        state.wired_pages += class_pages(class);
        self.publish(state);
        None
    }

    /// The limit in force, and whether it is that of a squeeze. A new event counts however late it is seen.
    fn limit(&self, worker: &WorkerInner, now: Instant) -> (usize, bool) {
        let memory = &worker.memory;
        let (at, event) = memory.last_squeeze();
        let mut squeeze = self.squeeze.get();
        let fresh = event != squeeze.event;
        if fresh {
            squeeze = Squeeze { event, until: at.saturating_add(self.parameters.squeeze_nanos()) };
            self.squeeze.set(squeeze);
            self.shared.squeezes.fetch_add(1, Ordering::Relaxed);
            self.draining.set(true);
        }
        if self.draining.get() || memory.nanos(now) < squeeze.until {
            return (0, true);
        }
        if memory.options.policy == IdlePolicy::Uncached {
            return (0, false);
        }
        (self.parameters.max_buffer_pages.get() as usize, false)
    }

    /// Shrinks to the limit, the coldest blocks first. A squeeze frees them to the slabs, past all caches.
    pub(crate) fn shrink(&self, worker: &WorkerInner, now: Instant) {
        let (limit, squeezed) = self.limit(worker, now);
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let before = state.wired_pages + state.lent_pages;
        if before <= limit {
            self.draining.set(false);
            return;
        }
        if squeezed {
            let all = self.release_all(worker, state, RELEASE_TURN, worker.squeeze_give());
            self.draining.set(!all);
            if !all {
                // The remainder in the next iteration of the loop, so that requests run in between.
                worker.shared.flags.fetch_or(SQUEEZE, Ordering::Relaxed);
            }
            let after = state.wired_pages + state.lent_pages;
            self.shared.squeezed_pages.fetch_add(before - after, Ordering::Relaxed);
        } else {
            for class in (0..CLASSES).rev() {
                while state.wired_pages + state.lent_pages > limit {
                    let Some((block, lent)) = self.pop_cold(worker, class, state) else { break };
                    if lent {
                        worker.release(std::iter::once(block), Give::Lend);
                    } else {
                        worker.spill(block);
                    }
                }
            }
        }
        self.publish(state);
    }

    /// Removes the coldest block of a class. True if it was lent: then the owner's gauge is updated
    /// already, and the block must be freed to the slabs, since caches hold wired blocks only.
    fn pop_cold(
        &self,
        worker: &WorkerInner,
        class: usize,
        state: &mut PoolState,
    ) -> Option<(Block, bool)> {
        let list = &mut state.lists[class];
        let block = list.blocks.pop_front()?;
        let pages = class_pages(class);
        if list.lent > 0 {
            list.lent -= 1;
            state.lent_pages -= pages;
            worker.account(self.owner, 0, -signed(class_bytes(class)));
            return Some((block, true));
        }
        list.low = list.low.min(list.wired());
        state.wired_pages -= pages;
        Some((block, false))
    }

    /// Frees at most `most` blocks to the slabs, past all caches; true if the pool is empty then.
    fn release_all(
        &self,
        worker: &WorkerInner,
        state: &mut PoolState,
        most: usize,
        give: Give,
    ) -> bool {
        let mut left = most;
        for class in 0..CLASSES {
            while left > 0 && !state.lists[class].blocks.is_empty() {
                // In batches: the advisor starts with the first one while the next ones are collected.
                let few = left.min(RELEASE_BATCH);
                let mut taken = 0;
                let next = || {
                    let (block, lent) = self.pop_cold(worker, class, state)?;
                    if !lent {
                        worker.account(self.owner, -signed(class_bytes(class)), 0);
                    }
                    taken += 1;
                    Some(block)
                };
                worker.release(std::iter::from_fn(next).take(few), give);
                left -= taken.min(left);
            }
        }
        left > 0
    }

    /// Frees all blocks.
    pub(crate) fn empty(&self, worker: &WorkerInner) {
        let mut state = self.state.borrow_mut();
        let give = if worker.prefers_return() { Give::Return } else { Give::Lend };
        while !self.release_all(worker, &mut state, usize::MAX, give) {}
        self.publish(&state);
    }

    /// The regular check: shrinks, and lends what was not needed since the last one.
    pub(crate) fn poll(&self, worker: &WorkerInner, now: Instant) {
        if self.busy.replace(false) || self.used.get().is_none() {
            self.used.set(Some(now));
        }
        let due = match self.checked.get() {
            Some(at) => now.saturating_duration_since(at) >= POOL_INTERVAL,
            None => true,
        };
        if !due {
            let Squeeze { event, until } = self.squeeze.get();
            let squeezed = worker.memory.nanos(now) < until || self.draining.get();
            if squeezed || event != worker.memory.last_squeeze().1 {
                self.shrink(worker, now);
            }
            return;
        }
        self.checked.set(Some(now));
        self.shrink(worker, now);
        self.lend_idle(worker, now);
    }

    fn lend_idle(&self, worker: &WorkerInner, now: Instant) {
        let quiet =
            self.used.get().is_some_and(|used| now.saturating_duration_since(used) >= POOL_QUIET);
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let mut floor = if quiet { 0 } else { WIRED_FLOOR_PAGES };
        let mut arena = worker.memory.core.arena.lock();
        if !arena.lending() {
            return;
        }
        for class in 0..CLASSES {
            let pages = class_pages(class);
            let list = &mut state.lists[class];
            let kept = list.wired().min(floor / pages);
            let idle = list.low.min(list.wired() - kept);
            floor -= kept * pages;
            for index in list.lent..list.lent + idle {
                let start = list.blocks[index].start();
                if let Some(page) = worker.memory.core.reservation.page_of(start) {
                    arena.offer_allocated(Span { page, pages });
                }
            }
            list.lent += idle;
            state.wired_pages -= idle * pages;
            state.lent_pages += idle * pages;
            let bytes = signed(idle * class_bytes(class));
            worker.account(self.owner, -bytes, bytes);
            list.low = list.wired();
        }
        self.publish(state);
    }

    /// When the next check is due, if the pool has wired blocks.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = self.state.borrow();
        (state.wired_pages > 0).then(|| self.checked.get().map(|at| at + POOL_INTERVAL))?
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::arena::PageCounts;
    use crate::memory::{Memory, Reclaim};
    use crate::options::MemoryOptions;

    const QUEUES: usize = 23;

    /// 32 requests of 128 KiB at once: the limit of a pool.
    fn burst(pool: &PagePool, now: Instant) {
        let blocks: Vec<Block> = (0..32).map(|_| pool.take(128 << 10).unwrap()).collect();
        blocks.into_iter().for_each(|block| pool.put(block));
        pool.done(now);
    }

    #[test]
    fn while_pressure_continues_queues_share_the_memory_they_reuse_and_keep_it_wired() {
        for level in [Reclaim::Drain, Reclaim::DrainWorkers] {
            let mut now = Instant::now();
            let memory = Memory::without_advisor(MemoryOptions::new(256 << 20, now)).unwrap();
            let worker = memory.worker(|| ());
            let pool = |_| PagePool::new(&worker, OwnerId(0), &PoolParameters::default());
            let pools: Vec<PagePool> = (0..QUEUES).map(pool).collect();
            let counts = || memory.core.arena.lock().counts();
            for event in 0..5 {
                memory.squeeze(now);
                memory.reclaim(level, now);
                worker.poll(now);
                assert_eq!(
                    counts().unwired,
                    0,
                    "another event releases none of it: {event} {level:?}"
                );
                for pool in &pools {
                    now += Duration::from_millis(50);
                    burst(pool, now);
                    assert_eq!(pool.free_pages(), (0, 0));
                    // None of it is offered, which would fault it in again.
                    let shared = PageCounts { wired: 1024, ..PageCounts::default() };
                    assert_eq!(counts(), shared, "{level:?}");
                    memory.core.arena.lock().sweep();
                }
            }
            // It is no longer used: two sweeps lend all but the worker's last blocks.
            let _ = memory.core.arena.lock().sweep();
            let _ = memory.core.arena.lock().sweep();
            assert!(counts().wired <= 2 * 32, "{:?} {level:?}", counts());
            memory.calm();
            burst(&pools[0], now);
            assert_eq!(pools[0].free_pages(), (1024, 0), "calm: queues keep their own");
        }
    }
}
