//! The page pool of a queue (seed `000`, and better where the seed leaves room).
//!
//! Free blocks, counted in 4 KiB pages. The pool grows from zero on demand; when the requests at
//! hand are done, or 100 ms have passed, it shrinks to `max_buffer_pages`; for
//! `buffer_squeeze_duration_ms` after a memory-pressure event that limit is 0, and each event starts
//! the time anew. A queue that is idle is woken for it.
//!
//! Beyond the seed: while pressure goes on ([`crate::Memory::draining`]), pools keep nothing. What one
//! queue gives back is at once there for all of them, so that together they hold what is in use
//! rather than each the most it ever used.
//!
//! Beyond the seed, too: blocks that were not needed during the last 100 ms, except for a small floor,
//! are lent to the kernel where they lie. The kernel may take them before anybody is told. They need
//! no sentinel, since nobody cares what is in a free block; taking one back only cancels the loan, and
//! a block the advisor is at this moment lending is passed over for another.
//!
//! Invariant: what the pool lends, shrinks or squeezes is in the pool, so it is in no request: in
//! use, registered and in-flight blocks cannot be touched from here.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::arena::{Give, Retake};
use crate::block::{Block, OwnerId};
use crate::class::{CLASSES, PAGE_BYTES, class_bytes, class_of, class_pages};
use crate::gauge::SQUEEZE;
use crate::options::Policy;
use crate::sync::{AtomicU32, AtomicUsize, Ordering};
use crate::sys::Span;
use crate::worker::{Exhausted, Worker, WorkerInner};

/// How often an idle pool is looked at, and how long a block must have been idle to be lent.
///
/// The seed's figure, and the measured cost agrees: lending a page and taking it back costs about
/// 0.6 µs, so lending a full default pool once per interval costs under 1 % of a CPU even if all of
/// it is wanted again, while at 10 ms it would cost 6 %.
pub const POOL_INTERVAL: Duration = Duration::from_millis(100);
/// A pool without any request for so long lends its floor as well.
const POOL_QUIET: Duration = Duration::from_secs(1);

/// Blocks released under one lock, and in one turn of the worker's loop.
const RELEASE_BATCH: usize = 64;
const RELEASE_TURN: usize = 2048;

/// Parameters of page pools, to be shared by all queues of a volume and changed at any time.
#[derive(Debug)]
pub struct PoolParameters {
    max_buffer_pages: AtomicU32,
    squeeze_ms: AtomicU32,
    floor_pages: AtomicU32,
}

impl Default for PoolParameters {
    /// `max_buffer_pages` 1024, `buffer_squeeze_duration_ms` 10, a floor of 64 pages.
    fn default() -> PoolParameters {
        PoolParameters {
            max_buffer_pages: AtomicU32::new(1024),
            squeeze_ms: AtomicU32::new(10),
            floor_pages: AtomicU32::new(64),
        }
    }
}

impl PoolParameters {
    /// Most free pages (4 KiB) a pool keeps once its requests are done.
    pub fn max_buffer_pages(&self) -> u32 {
        self.max_buffer_pages.load(Ordering::Relaxed)
    }

    /// Sets [`PoolParameters::max_buffer_pages`]; takes effect when a pool next shrinks.
    pub fn set_max_buffer_pages(&self, pages: u32) {
        self.max_buffer_pages.store(pages, Ordering::Relaxed);
    }

    /// How long pools stay empty after a memory-pressure event, in milliseconds.
    pub fn buffer_squeeze_duration_ms(&self) -> u32 {
        self.squeeze_ms.load(Ordering::Relaxed)
    }

    /// Sets [`PoolParameters::buffer_squeeze_duration_ms`]; a squeeze under way keeps its length.
    pub fn set_buffer_squeeze_duration_ms(&self, milliseconds: u32) {
        self.squeeze_ms.store(milliseconds, Ordering::Relaxed);
    }

    fn squeeze_nanos(&self) -> u64 {
        u64::from(self.buffer_squeeze_duration_ms()) * 1_000_000
    }

    /// Free pages a pool in use keeps wired rather than lent.
    pub fn wired_floor_pages(&self) -> u32 {
        self.floor_pages.load(Ordering::Relaxed)
    }

    /// Sets [`PoolParameters::wired_floor_pages`].
    pub fn set_wired_floor_pages(&self, pages: u32) {
        self.floor_pages.store(pages, Ordering::Relaxed);
    }
}

/// What other threads see of a pool.
#[derive(Debug, Default)]
pub(crate) struct PoolShared {
    pub(crate) owner: u16,
    pub(crate) wired: AtomicUsize,
    pub(crate) lent: AtomicUsize,
    pub(crate) squeezes: AtomicUsize,
    pub(crate) squeezed_pages: AtomicUsize,
}

/// Free blocks of one size: lent ones (the oldest) in front, wired ones behind.
#[derive(Default)]
struct List {
    blocks: VecDeque<Block>,
    /// How many in front are lent or offered.
    lent: usize,
    /// Fewest wired ones since the last look: so many were not needed.
    low: usize,
    /// Blocks handed out and not put back: room for them is kept, so that putting never allocates.
    out: usize,
}

impl List {
    fn wired(&self) -> usize {
        self.blocks.len() - self.lent
    }
}

#[derive(Default)]
struct State {
    lists: [List; CLASSES],
    wired_pages: usize,
    lent_pages: usize,
}

pub(crate) struct PoolInner {
    parameters: Arc<PoolParameters>,
    shared: Arc<PoolShared>,
    owner: OwnerId,
    state: RefCell<State>,
    looked: Cell<Option<Instant>>,
    /// Last time a block was taken or put, as far as the pool was told the time.
    used: Cell<Option<Instant>>,
    busy: Cell<bool>,
    squeeze: Cell<Squeeze>,
    /// An event has been seen and not all that was there then has been given back yet.
    draining: Cell<bool>,
}

#[derive(Clone, Copy, Default)]
struct Squeeze {
    /// Number of the last event seen.
    event: u64,
    /// Nanoseconds of the memory's time until which the limit is 0.
    until: u64,
}

/// The pool of one queue, on the queue's worker. Dropping it gives everything back.
pub struct PagePool {
    worker: Worker,
    inner: Rc<PoolInner>,
}

impl PagePool {
    /// An empty pool. What it holds and hands out is accounted to `owner`.
    pub fn new(worker: &Worker, owner: OwnerId, parameters: Arc<PoolParameters>) -> PagePool {
        let shared = Arc::new(PoolShared { owner: owner.0, ..PoolShared::default() });
        // A pool made while others are squeezed is squeezed as well.
        let squeeze = match worker.memory().last_squeeze() {
            (_, 0) => Squeeze::default(),
            (at, event) => Squeeze { event, until: at.saturating_add(parameters.squeeze_nanos()) },
        };
        let inner = Rc::new(PoolInner {
            parameters,
            shared: shared.clone(),
            owner,
            state: RefCell::default(),
            looked: Cell::default(),
            used: Cell::default(),
            busy: Cell::default(),
            squeeze: Cell::new(squeeze),
            draining: Cell::default(),
        });
        worker.memory().workers.lock().pools.push(Arc::downgrade(&shared));
        worker.add_pool(&inner);
        PagePool { worker: worker.clone(), inner }
    }

    /// A block of at least `len` bytes: the last one put in, or a new one.
    ///
    /// # Errors
    /// [`Exhausted`] when the pool is empty and the worker has none either.
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

    /// Puts a block in. It may go on to the worker at once if the pool has no room for it. Never
    /// allocates.
    #[inline]
    pub fn put(&self, block: Block) {
        self.inner.busy.set(true);
        let shares = self.worker.memory().draining();
        if let Some(block) = self.inner.put(block, shares) {
            self.worker.free(block);
        }
    }

    /// The requests at hand are done: shrinks the pool to its limit now.
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
        // A weak reference keeps the allocation, and that a page of the heap: none stays behind.
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
    fn publish(&self, state: &State) {
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
            if list.lent == 0 && self.parameters.max_buffer_pages() == 0 {
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
    fn take_lent(&self, worker: &WorkerInner, class: usize, state: &mut State) -> Option<Block> {
        let list = &mut state.lists[class];
        list.low = 0;
        // Room for this one when it comes back.
        list.blocks.reserve(list.out);
        let pages = class_pages(class);
        // The youngest first: likeliest to be still there. A few tries are enough: past those the
        // advisor is at, the slabs have others.
        for index in (list.lent.saturating_sub(4)..list.lent).rev() {
            let page = worker.memory.core.reservation.page_of(list.blocks[index].start())?;
            let span = Span { page, pages };
            let retake = worker.memory.core.books.lock().retake(span);
            match retake {
                Retake::Busy => {}
                Retake::Short => return None,
                Retake::Taken => {
                    worker.memory.core.take_back(span);
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

    /// A block that was asked for could not be had after all.
    fn missed(&self, class: usize) {
        if let Some(list) = self.state.borrow_mut().lists.get_mut(class) {
            list.out = list.out.saturating_sub(1);
        }
    }

    /// The block itself if it cannot stay.
    #[inline]
    fn put(&self, block: Block, shares: bool) -> Option<Block> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let class = block.class();
        let Some(list) = state.lists.get_mut(class) else { return Some(block) };
        list.out = list.out.saturating_sub(1);
        // With nothing to be kept it would only be moved twice: straight to the worker's caches.
        let keeps = !shares && self.parameters.max_buffer_pages() > 0;
        let room = list.blocks.len() < list.blocks.capacity();
        if !keeps || !room || block.owner() != self.owner {
            return Some(block);
        }
        list.blocks.push_back(block);
        state.wired_pages += class_pages(class);
        self.publish(state);
        None
    }

    /// The limit in force: 0 while squeezed. A new event counts at once, however late it is seen.
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
        if memory.options.policy == Policy::Uncached {
            return (0, false);
        }
        (self.parameters.max_buffer_pages() as usize, false)
    }

    /// Down to the limit, the coldest first. Under a squeeze past all caches.
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
                // The rest at the next turn of the loop: requests go on in between.
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

    /// The coldest block of a class, and whether it was lent: then it is off the owner's account
    /// already, and must go past the caches, which hold wired blocks only.
    fn pop_cold(
        &self,
        worker: &WorkerInner,
        class: usize,
        state: &mut State,
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

    /// Past all caches, at most `most` blocks; true if that was all.
    fn release_all(
        &self,
        worker: &WorkerInner,
        state: &mut State,
        most: usize,
        give: Give,
    ) -> bool {
        let mut left = most;
        for class in 0..CLASSES {
            while left > 0 && !state.lists[class].blocks.is_empty() {
                // A few at a time: the advisor begins with the first while the rest is collected.
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

    /// Gives everything back.
    pub(crate) fn empty(&self, worker: &WorkerInner) {
        let mut state = self.state.borrow_mut();
        let give = if worker.prefers_return() { Give::Return } else { Give::Lend };
        while !self.release_all(worker, &mut state, usize::MAX, give) {}
        self.publish(&state);
    }

    /// The regular look: shrinks, and lends what was not needed since the last one.
    pub(crate) fn poll(&self, worker: &WorkerInner, now: Instant) {
        if self.busy.replace(false) || self.used.get().is_none() {
            self.used.set(Some(now));
        }
        let due = match self.looked.get() {
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
        self.looked.set(Some(now));
        self.shrink(worker, now);
        self.lend_idle(worker, now);
    }

    fn lend_idle(&self, worker: &WorkerInner, now: Instant) {
        let quiet =
            self.used.get().is_some_and(|used| now.saturating_duration_since(used) >= POOL_QUIET);
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let mut floor = if quiet { 0 } else { self.parameters.wired_floor_pages() as usize };
        let mut arena = worker.memory.core.books.lock();
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
                    arena.offer_held(Span { page, pages });
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

    /// When the next look is due, if there is anything to look at.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let state = self.state.borrow();
        (state.wired_pages > 0).then(|| self.looked.get().map(|at| at + POOL_INTERVAL))?
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
    use crate::options::Options;

    const QUEUES: usize = 23;

    /// 32 requests of 128 KiB at once: as much as a pool may keep.
    fn burst(pool: &PagePool, now: Instant) {
        let blocks: Vec<Block> = (0..32).map(|_| pool.take(128 << 10).unwrap()).collect();
        blocks.into_iter().for_each(|block| pool.put(block));
        pool.done(now);
    }

    #[test]
    fn while_pressure_goes_on_queues_share_what_is_in_turnover_and_it_stays() {
        for level in [Reclaim::Drain, Reclaim::DrainWorkers] {
            let mut now = Instant::now();
            let memory = Memory::without_advisor(Options::new(256 << 20, now)).unwrap();
            let worker = memory.worker(|| ());
            let pool = |_| PagePool::new(&worker, OwnerId(0), Arc::default());
            let pools: Vec<PagePool> = (0..QUEUES).map(pool).collect();
            let counts = || memory.core.books.lock().counts();
            for event in 0..5 {
                memory.squeeze(now);
                memory.reclaim(level, now);
                worker.poll(now);
                assert_eq!(
                    counts().unwired,
                    0,
                    "an event more takes none of it: {event} {level:?}"
                );
                for pool in &pools {
                    now += Duration::from_millis(50);
                    burst(pool, now);
                    assert_eq!(pool.free_pages(), (0, 0));
                    // Nothing of it is on its way to the kernel, to be faulted in again.
                    let shared = PageCounts { wired: 1024, ..PageCounts::default() };
                    assert_eq!(counts(), shared, "{level:?}");
                    memory.core.books.lock().sweep();
                }
            }
            // Nobody takes it any more: two sweeps, and a worker's last two blocks.
            let _ = memory.core.books.lock().sweep();
            let _ = memory.core.books.lock().sweep();
            assert!(counts().wired <= 2 * 32, "{:?} {level:?}", counts());
            memory.calm();
            burst(&pools[0], now);
            assert_eq!(pools[0].free_pages(), (1024, 0), "calm: queues keep their own");
        }
    }
}
