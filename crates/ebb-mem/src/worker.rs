//! A worker: one thread's buckets, and the slow paths below them.
//!
//! One thread owns a [`WorkerMemory`]. Its hit path is a pop from an array and two counters that only this
//! thread writes; it takes no lock and does not use the heap. Freeing never allocates: a full bucket is
//! exchanged for an existing empty one, or its blocks are freed to the slabs.
//!
//! Another thread cannot empty these buckets. It sets a flag and wakes the worker, whose loop then calls
//! [`WorkerMemory::poll`], which purges all zones at once. (FreeBSD's UMA binds to every CPU for every zone,
//! `pcpu_cache_drain_safe` in `sys/vm/uma_core.c`.) A worker without allocations for [`QUIET_AFTER`] frees its
//! cached blocks by itself.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::advise::LockedArena;
use crate::arena::{Arena, Give, Shortage};
use crate::block::{Block, OwnerId};
use crate::class::{
    CLASSES, EXTENT_PAGES, MAX_BLOCK_BYTES, PAGE_BYTES, class_bytes, class_of, class_pages,
    pages_of,
};
use crate::gauge::{PURGE, RELEASE_CACHES, SQUEEZE, STICKY, WAITERS, WorkerShared};
use crate::memory::Memory;
use crate::options::IdlePolicy;
use crate::pool::PoolInner;
use crate::sync::Ordering;
use crate::sys::Span;
use crate::wait::Waiter;
use crate::zone::Bucket;

/// A worker without any allocation for this long frees its cached blocks.
pub const QUIET_AFTER: Duration = Duration::from_secs(1);

/// No memory is available now: wait for it ([`WorkerMemory::alloc_wait`]) or fail the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for {len} bytes: the ceiling or a zone limit is reached")]
pub struct Exhausted {
    /// Requested bytes.
    pub len: usize,
}

struct WorkerCache {
    loaded: Box<Bucket>,
    previous: Box<Bucket>,
}

/// The interface of one thread to a [`Memory`]. Cheap to clone; stays on its thread. Dropping the last
/// clone frees everything that it cached.
#[derive(Clone)]
pub struct WorkerMemory(pub(crate) Rc<WorkerInner>);

pub(crate) struct WorkerInner {
    pub(crate) memory: Arc<Memory>,
    pub(crate) shared: Arc<WorkerShared>,
    caches: RefCell<[WorkerCache; CLASSES]>,
    pools: RefCell<Vec<Weak<PoolInner>>>,
    /// Number of allocations at the last poll, and when it last changed.
    seen: Cell<(i64, Option<Instant>)>,
    /// The caches may contain blocks.
    has_blocks: Cell<bool>,
}

impl WorkerMemory {
    pub(crate) fn new(memory: Arc<Memory>, shared: Arc<WorkerShared>) -> WorkerMemory {
        let caches = std::array::from_fn(|class| {
            let size = memory.zones[class].target();
            WorkerCache {
                loaded: Box::new(Bucket::new(size)),
                previous: Box::new(Bucket::new(size)),
            }
        });
        WorkerMemory(Rc::new(WorkerInner {
            memory,
            shared,
            caches: RefCell::new(caches),
            pools: RefCell::default(),
            seen: Cell::default(),
            has_blocks: Cell::new(false),
        }))
    }

    /// The memory that this worker allocates from.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    /// A block of at least `len` bytes (up to [`MAX_BLOCK_BYTES`]), accounted to `owner`.
    ///
    /// # Errors
    /// [`Exhausted`] when the ceiling or the zone's limit is reached and nothing could be reclaimed, when
    /// earlier allocations wait for memory, or when `len` is too large.
    #[inline]
    pub fn alloc(&self, len: usize, owner: OwnerId) -> Result<Block, Exhausted> {
        let class = class_of(len);
        if let Ok(mut caches) = self.0.caches.try_borrow_mut()
            && let Some(cache) = caches.get_mut(class)
            && let Some(page) = cache.loaded.pop()
        {
            return Ok(self.0.make_block(page as usize, class, class_pages(class), owner));
        }
        self.0.alloc_slow(len, owner, false).map_err(|_| Exhausted { len })
    }

    /// As [`WorkerMemory::alloc`], but waits for memory in first-in, first-out order. The queue node is a field
    /// of the future: waiting allocates nothing. A length above the ceiling or [`MAX_BLOCK_BYTES`] fails
    /// at once.
    pub fn alloc_wait(&self, len: usize, owner: OwnerId) -> AllocWait {
        AllocWait { worker: self.clone(), len, owner, waiter: Waiter::default(), queued: false }
    }

    /// Frees a block. Never allocates, never waits for the kernel.
    ///
    /// # Panics
    /// If the block belongs to another [`Memory`].
    #[inline]
    pub fn free(&self, block: Block) {
        self.0.free(block);
    }

    /// Whether [`WorkerMemory::poll`] has something to do at once. Cheap: call it in each iteration of the loop.
    #[inline]
    pub fn needs_poll(&self) -> bool {
        self.0.shared.flags.load(Ordering::Relaxed) & !STICKY != 0
    }

    /// Carries out what other threads have requested (purge, squeeze), shrinks and lends idle pools, and
    /// frees the cached blocks of an idle worker. Call it when [`WorkerMemory::needs_poll`] returns true and at
    /// [`WorkerMemory::next_deadline`].
    pub fn poll(&self, now: Instant) {
        self.0.poll(now);
    }

    /// When [`WorkerMemory::poll`] must be called at the latest; `None`: not before the next wake-up. Check
    /// [`WorkerMemory::needs_poll`] before sleeping as well: a large pool is released in several iterations.
    pub fn next_deadline(&self) -> Option<Instant> {
        let quiet = match self.0.seen.get() {
            (_, Some(since)) if self.0.has_blocks.get() => Some(since + QUIET_AFTER),
            _ => None,
        };
        let pools = self.0.pools.borrow();
        let pools = pools.iter().filter_map(Weak::upgrade).filter_map(|pool| pool.deadline());
        pools.chain(quiet).min()
    }

    /// Bytes in this worker's caches, without its pools.
    pub fn cached_bytes(&self) -> usize {
        let caches = self.0.caches.borrow();
        let count = |(class, cache): (usize, &WorkerCache)| {
            (cache.loaded.len() + cache.previous.len()) * class_bytes(class)
        };
        caches.iter().enumerate().map(count).sum()
    }

    pub(crate) fn add_pool(&self, pool: &Rc<PoolInner>) {
        self.0.pools.borrow_mut().push(Rc::downgrade(pool));
    }

    pub(crate) fn remove_pool(&self, pool: &Rc<PoolInner>) {
        self.0.pools.borrow_mut().retain(|other| !std::ptr::eq(other.as_ptr(), Rc::as_ptr(pool)));
    }
}

impl std::fmt::Debug for WorkerMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerMemory").field("cached_bytes", &self.cached_bytes()).finish()
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl WorkerInner {
    #[inline]
    fn make_block(&self, page: usize, class: usize, pages: usize, owner: OwnerId) -> Block {
        self.shared.zones[class.min(CLASSES)].allocs.add(1);
        self.account(owner, signed(pages * PAGE_BYTES), 0);
        let ptr = self.memory.core.reservation.address(page);
        // SAFETY: the page comes from the arena (through a bucket or directly), which allocates each block
        // once until it is freed; all its pages are wired; the mapping outlives every block
        // (`Memory::drop`).
        unsafe { Block::new(ptr, u32::try_from(pages).unwrap_or(u32::MAX), class, owner) }
    }

    #[inline]
    pub(crate) fn account(&self, owner: OwnerId, wired: i64, unwired: i64) {
        if let Some(gauges) = self.shared.owners.get(owner.0) {
            gauges.wired.add(wired);
            if unwired != 0 {
                gauges.unwired.add(unwired);
            }
        }
    }

    fn flags(&self) -> u32 {
        self.shared.flags.load(Ordering::Relaxed)
    }

    fn give(&self) -> Give {
        if self.memory.core.arena.lock().prefer_return() { Give::Return } else { Give::Lend }
    }

    /// The path below the loaded bucket. `first`: the caller is the first of its wait queue.
    #[cold]
    fn alloc_slow(&self, len: usize, owner: OwnerId, first: bool) -> Result<Block, Shortage> {
        if len > MAX_BLOCK_BYTES {
            return Err(Shortage::Budget);
        }
        let class = class_of(len);
        if class >= CLASSES {
            if !first && self.flags() & WAITERS != 0 && self.memory.must_queue(class) {
                return Err(Shortage::Budget);
            }
            return self.alloc_run(pages_of(len), owner);
        }
        if let Some(page) = self.cached(class) {
            return Ok(self.make_block(page, class, class_pages(class), owner));
        }
        if !first && self.flags() & WAITERS != 0 && self.memory.must_queue(class) {
            return Err(Shortage::Budget);
        }
        let mut result = self.refill(class);
        if result == Err(Shortage::Budget) {
            if !self.memory.relieve(class_pages(class)) {
                self.purge(Give::Lend);
            }
            result = self.refill(class);
        }
        match result {
            Ok(page) => Ok(self.make_block(page, class, class_pages(class), owner)),
            Err(shortage) => {
                self.memory.zones[class].fails.fetch_add(1, Ordering::Relaxed);
                Err(shortage)
            }
        }
    }

    /// The previous bucket, or a full one from the depot.
    fn cached(&self, class: usize) -> Option<usize> {
        let mut caches = self.caches.borrow_mut();
        let cache = &mut caches[class];
        if cache.previous.is_empty() {
            if self.flags() & STICKY != 0 {
                return None;
            }
            if !self.memory.zones[class].exchange_empty(&mut cache.loaded) {
                return None;
            }
            self.shared.zones[class].filled.add(signed(cache.loaded.len()));
            self.has_blocks.set(true);
        } else {
            std::mem::swap(&mut cache.loaded, &mut cache.previous);
        }
        cache.loaded.pop().map(|page| page as usize)
    }

    /// One block from the slabs, and as many resident ones as fit the bucket.
    fn refill(&self, class: usize) -> Result<usize, Shortage> {
        let zone = &self.memory.zones[class];
        let mut caches = self.caches.borrow_mut();
        let bucket = &mut caches[class].loaded;
        let caching = self.flags() & STICKY == 0;
        if caching && bucket.is_empty() {
            bucket.resize(zone.target());
        }
        let mut count = 1;
        let (page, out) = {
            let (mut arena, page) = self.take(|arena| arena.take(class), 1)?;
            while caching && count < bucket.room() {
                let Some(more) = arena.take_warm(class) else { break };
                if !bucket.push(u32::try_from(more).unwrap_or(u32::MAX)) {
                    arena.give(more, class, Give::Lend);
                    break;
                }
                count += 1;
            }
            (page, arena.out(class))
        };
        let (core, pages) = (&self.memory.core, class_pages(class));
        core.cancel_loan(Span { page, pages });
        for &page in bucket.newest(count - 1) {
            core.cancel_loan(Span { page: usize::try_from(page).unwrap_or(usize::MAX), pages });
        }
        self.has_blocks.set(true);
        self.shared.zones[class].filled.add(signed(count));
        if caching {
            zone.missed(out);
        }
        Ok(page)
    }

    /// Calls `take`, and opens address space as long as that is what it lacks.
    fn take(
        &self,
        take: impl Fn(&mut Arena) -> Result<usize, Shortage>,
        extents: usize,
    ) -> Result<(LockedArena<'_>, usize), Shortage> {
        loop {
            let mut arena = self.memory.core.arena.lock();
            match take(&mut arena) {
                Ok(page) => return Ok((arena, page)),
                // Another worker may have used what was opened, so try again.
                Err(Shortage::Closed) => {
                    drop(arena);
                    if !self.memory.open(extents) {
                        return Err(Shortage::Budget);
                    }
                }
                Err(shortage) => return Err(shortage),
            }
        }
    }

    fn alloc_run(&self, pages: usize, owner: OwnerId) -> Result<Block, Shortage> {
        let extents = pages.div_ceil(EXTENT_PAGES).max(1);
        let take = || self.take(|arena| arena.take_run(pages), extents).map(|(_, page)| page);
        let page = take().or_else(|_| {
            if !self.memory.relieve(pages) {
                self.purge(Give::Lend);
            }
            take()
        })?;
        self.memory.core.cancel_loan(Span { page, pages });
        self.shared.zones[CLASSES].filled.add(1);
        Ok(self.make_block(page, CLASSES, pages, owner))
    }

    #[inline]
    #[allow(clippy::needless_pass_by_value, reason = "a block is given up here")]
    fn free(&self, block: Block) {
        let Some(page) = self.memory.core.reservation.page_of(block.start()) else {
            unreachable!("a block is freed to the memory it came from")
        };
        let class = block.class();
        self.shared.zones[class.min(CLASSES)].frees.add(1);
        self.account(block.owner(), -signed(block.capacity()), 0);
        if self.flags() == 0
            && let Ok(mut caches) = self.caches.try_borrow_mut()
            && let Some(cache) = caches.get_mut(class)
            && cache.loaded.push(u32::try_from(page).unwrap_or(u32::MAX))
        {
            return;
        }
        self.free_slow(page, class);
    }

    #[cold]
    fn free_slow(&self, page: usize, class: usize) {
        if class >= CLASSES {
            let pressed = self.flags() & STICKY != 0;
            let give = if pressed { self.surplus() } else { Give::Cool };
            self.shared.zones[CLASSES].filled.add(-1);
            self.memory.core.arena.lock().give_run(page, give);
            return self.after_give();
        }
        if self.flags() & STICKY != 0 {
            self.to_slab(page, class, self.surplus());
            return self.after_give();
        }
        let mut caches = self.caches.borrow_mut();
        let cache = &mut caches[class];
        self.has_blocks.set(true);
        let page32 = u32::try_from(page).unwrap_or(u32::MAX);
        if cache.previous.is_empty() {
            cache.previous.resize(self.memory.zones[class].target());
            std::mem::swap(&mut cache.loaded, &mut cache.previous);
        } else if !cache.loaded.push(page32) {
            let full = signed(cache.previous.len());
            if self.memory.zones[class].exchange_full(&mut cache.previous) {
                self.shared.zones[class].filled.add(-full);
            } else {
                self.empty_bucket(&mut cache.previous, class, self.surplus());
                cache.previous.resize(self.memory.zones[class].target());
            }
            std::mem::swap(&mut cache.loaded, &mut cache.previous);
        } else {
            return;
        }
        if !cache.loaded.push(page32) {
            drop(caches);
            self.to_slab(page, class, self.surplus());
        }
    }

    fn to_slab(&self, page: usize, class: usize, give: Give) {
        self.shared.zones[class].filled.add(-1);
        self.memory.core.arena.lock().give(page, class, give);
    }

    fn empty_bucket(&self, bucket: &mut Bucket, class: usize, give: Give) {
        self.shared.zones[class].filled.add(-signed(bucket.len()));
        let mut arena = self.memory.core.arena.lock();
        while let Some(page) = bucket.pop() {
            arena.give(page as usize, class, give);
        }
    }

    /// Frees a pool's blocks to the slabs under one lock. The caller calls [`WorkerInner::after_give`]
    /// when it has no `RefCell` borrowed: waking may run other code.
    pub(crate) fn release(&self, blocks: impl Iterator<Item = Block>, give: Give) {
        let mut arena = self.memory.core.arena.lock();
        for block in blocks {
            let Some(page) = self.memory.core.reservation.page_of(block.start()) else { continue };
            let zone = &self.shared.zones[block.class().min(CLASSES)];
            zone.frees.add(1);
            zone.filled.add(-1);
            if block.is_run() {
                arena.give_run(page, give);
            } else {
                arena.give(page, block.class(), give);
            }
        }
    }

    /// Frees a block that a pool has no room for: into the caches, if caching is on.
    pub(crate) fn spill(&self, block: Block) {
        if self.flags() & STICKY == 0 {
            return self.free(block);
        }
        self.account(block.owner(), -signed(block.capacity()), 0);
        self.release(std::iter::once(block), self.surplus());
    }

    /// What happens to a freed block that no cache has room for. While pressure continues the caches are
    /// almost empty, so that such blocks are what requests reuse: they stay wired for one sweep.
    fn surplus(&self) -> Give {
        if self.memory.draining() { Give::Cool } else { Give::Lend }
    }

    /// What happens to memory that a squeeze releases from the pools.
    pub(crate) fn squeeze_give(&self) -> Give {
        let until_pressure = self.memory.options.policy == IdlePolicy::UntilPressure;
        if until_pressure || self.prefers_return() { Give::Return } else { Give::Lend }
    }

    pub(crate) fn prefers_return(&self) -> bool {
        self.memory.core.arena.lock().prefer_return()
    }

    /// Wakes waiting allocations after memory was freed.
    pub(crate) fn after_give(&self) {
        if self.flags() & WAITERS != 0 {
            self.memory.wake_waiters();
        }
    }

    /// Empties this worker's caches of all zones.
    pub(crate) fn purge(&self, give: Give) {
        let mut caches = self.caches.borrow_mut();
        for (class, cache) in caches.iter_mut().enumerate() {
            for bucket in [&mut cache.loaded, &mut cache.previous] {
                if !bucket.is_empty() {
                    self.empty_bucket(bucket, class, give);
                }
            }
        }
        self.has_blocks.set(false);
    }

    fn poll(&self, now: Instant) {
        let flags = self.shared.flags.fetch_and(STICKY, Ordering::SeqCst);
        let release = flags & RELEASE_CACHES != 0;
        if flags & PURGE != 0 || release {
            let give = self.give();
            self.purge(give);
            self.shared.purges.add(1);
            if release {
                self.memory.empty_depots(give);
            }
        }
        self.poll_pools(now, flags & SQUEEZE != 0, release);
        if release {
            self.memory.wake_waiters();
        } else {
            self.after_give();
        }
        self.poll_quiet(now);
    }

    fn poll_pools(&self, now: Instant, squeeze: bool, release: bool) {
        let mut index = 0;
        loop {
            // The list must not be borrowed while a pool works.
            let pool = self.pools.borrow().get(index).map(Weak::upgrade);
            let Some(pool) = pool else { break };
            index += 1;
            if let Some(pool) = pool {
                if release {
                    pool.empty(self);
                } else if squeeze {
                    pool.shrink(self, now);
                } else {
                    pool.poll(self, now);
                }
            }
        }
    }

    fn poll_quiet(&self, now: Instant) {
        let allocs: i64 = self.shared.zones.iter().map(|zone| zone.allocs.get()).sum();
        match self.seen.get() {
            (seen, Some(since)) if seen == allocs => {
                if self.has_blocks.get() && now.saturating_duration_since(since) >= QUIET_AFTER {
                    self.purge(Give::Lend);
                }
            }
            _ => self.seen.set((allocs, Some(now))),
        }
    }
}

impl Drop for WorkerInner {
    fn drop(&mut self) {
        self.purge(self.give());
        let mut workers = self.memory.workers.lock();
        workers.retired.add(&self.shared);
        workers.list.retain(|worker| !Arc::ptr_eq(worker, &self.shared));
        drop(workers);
        self.memory.wake_waiters();
    }
}

/// The future of [`WorkerMemory::alloc_wait`].
#[must_use = "futures do nothing unless polled"]
pub struct AllocWait {
    worker: WorkerMemory,
    len: usize,
    owner: OwnerId,
    waiter: Waiter,
    queued: bool,
}

impl AllocWait {
    /// The fields: the waiter stays pinned, the other fields do not.
    fn parts(self: Pin<&mut Self>) -> (Pin<&Waiter>, &WorkerMemory, usize, OwnerId, &mut bool) {
        // SAFETY: nothing is moved out of `this`; only `waiter` is ever treated as pinned, and it
        // is returned pinned.
        let this = unsafe { self.get_unchecked_mut() };
        // SAFETY: a field of a pinned value, never moved (above).
        let waiter = unsafe { Pin::new_unchecked(&this.waiter) };
        (waiter, &this.worker, this.len, this.owner, &mut this.queued)
    }
}

impl Future for AllocWait {
    type Output = Result<Block, Exhausted>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (waiter, worker, len, owner, queued) = self.parts();
        let memory = worker.memory();
        let class = class_of(len);
        if len > MAX_BLOCK_BYTES || pages_of(len) > memory.core.arena.lock().most() {
            return Poll::Ready(Err(Exhausted { len }));
        }
        if !*queued {
            match worker.alloc(len, owner) {
                Ok(block) => return Poll::Ready(Ok(block)),
                Err(_) => {
                    // Queue first, then try again, so that memory freed in between is not missed.
                    let first = memory.waits.len() == 0;
                    memory.waits.enqueue(waiter, crate::wait::BUDGET, cx.waker());
                    *queued = true;
                    memory.waiter_added(first);
                    if let Some(zone) = memory.zones.get(class) {
                        zone.sleeps.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        if memory.waits.is_first(waiter) {
            match worker.0.alloc_slow(len, owner, true) {
                Ok(block) => {
                    memory.waits.remove(waiter);
                    *queued = false;
                    memory.waiter_removed();
                    memory.wake_waiters();
                    return Poll::Ready(Ok(block));
                }
                Err(shortage) => {
                    memory.waits.enqueue(waiter, Memory::wait_queue(shortage, class), cx.waker());
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for AllocWait {
    fn drop(&mut self) {
        if !self.queued {
            return;
        }
        // SAFETY: a future that is queued has been pinned, and dropping leaves it where it is.
        let waiter = unsafe { Pin::new_unchecked(&self.waiter) };
        let memory = self.worker.memory();
        if memory.waits.remove(waiter) {
            memory.waiter_removed();
            memory.wake_waiters();
        }
    }
}
