//! Owned, aligned I/O buffers, allocated from elastic memory (`ebb-mem`).
//!
//! Invariants: a [`Buf`] has a stable address for its whole life; its memory is always initialised;
//! dropping it returns it to the pool it was allocated from: the worker's caches, or the page pool of a
//! queue. `ebb-mem` decides which free memory is kept there, lent to the kernel, or returned.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use ebb_mem::{Block, Memory, OwnerId, PagePool, PoolParameters};
use futures_lite::future::or;

use crate::signal::{Budget, BudgetGuard};

/// The size of the largest buffer, in bytes.
pub const MAX_BUF: usize = ebb_mem::MAX_BLOCK_BYTES;

/// During memory pressure, the requests in flight of all queues of a worker may use this share of
/// the memory's ceiling, within these bounds: enough to keep a few disks busy (64 requests of 128
/// KiB are 8 MiB). Under a low ceiling the least is a part of it.
const PRESSED_SHARE: usize = 32;
const PRESSED_LEAST_PART: usize = 8;
const PRESSED_LEAST: usize = 4 << 20;
const PRESSED_MOST: usize = 64 << 20;
/// Each queue may use this much in addition, so that it need not wait for the store of another queue.
const PRESSED_OWN: usize = 256 << 10;

/// Allocates buffers, for a worker or for one of its queues. Cheap to clone; not shared between
/// threads.
#[derive(Clone)]
pub struct BufPool(Rc<BufPoolInner>);

struct BufPoolInner {
    worker: ebb_mem::WorkerMemory,
    owner: OwnerId,
    queue: Option<PagePool>,
    used_bytes: Cell<usize>,
    /// See [`BufPool::admit`]: the budget of all queues of the worker, and of this one.
    budget: Rc<Budget>,
    own_budget: Rc<Budget>,
}

impl BufPool {
    pub(crate) fn new(worker: ebb_mem::WorkerMemory, owner: OwnerId) -> BufPool {
        let ceiling = worker.memory().arena_stats().ceiling;
        let least = PRESSED_LEAST.min(ceiling / PRESSED_LEAST_PART);
        let budget = Budget::new((ceiling / PRESSED_SHARE).clamp(least, PRESSED_MOST));
        BufPool::build(worker, owner, None, budget)
    }

    fn build(
        worker: ebb_mem::WorkerMemory,
        owner: OwnerId,
        queue: Option<PagePool>,
        budget: Rc<Budget>,
    ) -> BufPool {
        let (used_bytes, own_budget) = (Cell::new(0), Budget::new(PRESSED_OWN));
        BufPool(Rc::new(BufPoolInner { worker, owner, queue, used_bytes, budget, own_budget }))
    }

    /// A pool for one queue, accounted to `owner`, which keeps free pages as `parameters` allow
    /// (`max_buffer_pages`, `buffer_squeeze_duration_ms`).
    #[must_use]
    pub fn queue(&self, owner: OwnerId, parameters: &PoolParameters) -> BufPool {
        let worker = self.0.worker.clone();
        let queue = Some(PagePool::new(&worker, owner, parameters));
        BufPool::build(worker, owner, queue, self.0.budget.clone())
    }

    /// During memory pressure, waits until a request may allocate buffers of `bytes` bytes in all; otherwise
    /// returns at once. If all requests allocated their buffers as soon as they arrive, they would hold as much
    /// memory as the clients can request, long before the store can process them; waiting here, they reuse the
    /// same few buffers. Call this before allocating the first buffer, since a request that holds buffers must not
    /// wait for more, and keep the returned guard until the buffers are freed.
    pub async fn admit(&self, bytes: usize) -> Option<BudgetGuard> {
        if !self.memory().draining() {
            return None;
        }
        Some(or(self.0.own_budget.take(bytes), self.0.budget.take(bytes)).await)
    }

    /// The account of its buffers.
    pub fn owner(&self) -> OwnerId {
        self.0.owner
    }

    /// The memory that buffers are allocated from.
    pub fn memory(&self) -> &Arc<Memory> {
        self.0.worker.memory()
    }

    /// Allocates a buffer of `len` bytes (1 to [`MAX_BUF`]) with unspecified content. Waits, in order of
    /// arrival, while the memory's ceiling is reached.
    ///
    /// # Panics
    /// If `len` is larger than [`MAX_BUF`]: callers check lengths that come from outside first.
    pub async fn take(&self, len: usize) -> Buf {
        assert!(len <= MAX_BUF, "buffer of {len} bytes requested; callers check limits first");
        let block = match self.try_block(len) {
            Some(block) => block,
            None => match self.0.worker.alloc_wait(len, self.0.owner).await {
                Ok(block) => block,
                // Larger than the ceiling itself, which no configuration allows.
                Err(error) => panic!("{error}"),
            },
        };
        self.wrap(block, len)
    }

    /// As [`BufPool::take`], without waiting. For tests only: other code waits or handles the failure.
    ///
    /// # Panics
    /// When there is no memory.
    #[cfg(any(test, feature = "testing"))]
    pub fn get_for_test(&self, len: usize) -> Buf {
        match self.try_block(len) {
            Some(block) => self.wrap(block, len),
            None => panic!("no memory for a buffer of {len} bytes"),
        }
    }

    /// As [`BufPool::take`], without waiting: `None` when there is no memory now.
    pub fn try_take(&self, len: usize) -> Option<Buf> {
        let block = self.try_block(len)?;
        Some(self.wrap(block, len))
    }

    /// The worker's allocator, for blocks that are kept longer than a request.
    pub fn worker(&self) -> &ebb_mem::WorkerMemory {
        &self.0.worker
    }

    fn try_block(&self, len: usize) -> Option<Block> {
        match &self.0.queue {
            Some(queue) => queue.take(len).ok(),
            None => self.0.worker.alloc(len, self.0.owner).ok(),
        }
    }

    fn wrap(&self, block: Block, len: usize) -> Buf {
        let inner = &self.0;
        inner.used_bytes.set(inner.used_bytes.get() + block.capacity());
        Buf { block: ManuallyDrop::new(block), window: BufWindow::of(0..len), pool: self.clone() }
    }

    /// To be called when no request of the queue is in flight: its free pages are cut to their limit.
    pub fn done(&self, now: Instant) {
        if let Some(queue) = &self.0.queue {
            queue.done(now);
        }
    }

    /// Bytes of memory that a buffer of `len` bytes uses: its size class. To account for memory
    /// before it is allocated.
    #[inline]
    pub fn footprint(len: usize) -> usize {
        let pages = len.clamp(1, MAX_BUF).next_multiple_of(ebb_mem::PAGE_BYTES);
        if pages > 1 << 20 { pages } else { pages.next_power_of_two() }
    }

    /// Bytes in idle buffers kept for reuse, by the queue or the worker.
    #[cfg(any(test, feature = "testing"))]
    pub fn idle_bytes(&self) -> usize {
        match &self.0.queue {
            Some(queue) => {
                let (wired, lent) = queue.free_pages();
                (wired + lent) * ebb_mem::PAGE_BYTES
            }
            None => self.0.worker.cached_bytes(),
        }
    }

    /// Bytes in buffers that are in use.
    pub fn used_bytes(&self) -> usize {
        self.0.used_bytes.get()
    }

    fn put(&self, block: Block) {
        let inner = &self.0;
        inner.used_bytes.set(inner.used_bytes.get() - block.capacity());
        match &inner.queue {
            Some(queue) => queue.put(block),
            None => inner.worker.free(block),
        }
    }
}

/// The bytes of a block that a [`Buf`] shows. As small as a length, since the futures of requests hold several buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufWindow {
    start: u32,
    len: u32,
}

const _: () = assert!(MAX_BUF <= 1 << 31, "an offset in a block fits into 32 bits");

#[inline]
fn wide(bytes: u32) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl BufWindow {
    #[inline]
    fn of(range: Range<usize>) -> BufWindow {
        let small = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
        BufWindow { start: small(range.start), len: small(range.len()) }
    }

    /// Bytes that it shows.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a buffer is not empty")]
    pub fn len(self) -> usize {
        wide(self.len)
    }

    #[inline]
    fn range(self) -> Range<usize> {
        wide(self.start)..wide(self.start) + wide(self.len)
    }
}

/// An owned buffer of a worker. Dereferences to its bytes.
pub struct Buf {
    block: ManuallyDrop<Block>,
    window: BufWindow,
    pool: BufPool,
}

impl Buf {
    /// Bytes the buffer can hold: `len` may be set up to this.
    pub fn capacity(&self) -> usize {
        self.block.capacity() - self.window.range().start
    }

    /// Sets the length, at most [`Buf::capacity`].
    ///
    /// # Panics
    /// If `len` is larger than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "length {len} beyond capacity {}", self.capacity());
        let start = self.window.range().start;
        self.window = BufWindow::of(start..start + len);
    }

    /// What it shows now, for [`Buf::set_window`].
    #[inline]
    pub fn window(&self) -> BufWindow {
        self.window
    }

    /// Restricts it to `part` of what it showed when `window` was taken, for an operation on that part of a request.
    ///
    /// # Panics
    /// If the part is not within the window, or the window not within the buffer.
    #[inline]
    pub fn set_window(&mut self, window: BufWindow, part: Range<usize>) {
        let whole = window.range();
        let inside =
            part.start <= part.end && part.end <= whole.len() && whole.end <= self.block.capacity();
        assert!(inside, "a part outside the buffer");
        self.window = BufWindow::of(whole.start + part.start..whole.start + part.end);
    }

    /// Shows what it showed when `window` was taken. If it is another buffer, which an operation returned instead, and
    /// smaller: as much of it as there is.
    #[inline]
    pub fn restore(&mut self, window: BufWindow) {
        let (range, capacity) = (window.range(), self.block.capacity());
        self.window = BufWindow::of(range.start.min(capacity)..range.end.min(capacity));
    }

    pub(crate) fn addr(&self) -> *mut u8 {
        self.block.as_ptr().wrapping_add(self.window.range().start)
    }
}

impl Deref for Buf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // The kernel does not access them: an operation owns its Buf while it runs.
        &self.block[self.window.range()]
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block[self.window.range()]
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // SAFETY: the field is not used again: this is the drop of its owner.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        self.pool.put(block);
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buf").field("len", &self.len()).field("capacity", &self.capacity()).finish()
    }
}

/// A pool with its own memory, for tests of this crate.
#[cfg(test)]
pub(crate) fn private_pool() -> BufPool {
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let owner = memory.owner("test").unwrap();
    BufPool::new(memory.worker(|| {}), owner)
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once};

    use super::*;

    #[test]
    fn classes_round_up_to_powers_of_two() {
        let pool = private_pool();
        for (len, capacity) in [(1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)] {
            let buf = pool.get_for_test(len);
            assert_eq!((buf.len(), buf.capacity()), (len, capacity));
            assert_eq!(BufPool::footprint(len), capacity);
            assert_eq!(buf.as_ptr() as usize % 4096, 0);
        }
        assert_eq!(pool.get_for_test((1 << 20) + 1).capacity(), BufPool::footprint((1 << 20) + 1));
    }

    #[test]
    fn a_dropped_buffer_is_reused() {
        let pool = private_pool();
        let first = pool.get_for_test(5000);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.used_bytes(), 0);
        let second = pool.get_for_test(8000);
        assert_eq!(second.as_ptr(), address);
        assert_eq!(pool.used_bytes(), 8192);
    }

    #[test]
    fn a_window_is_a_part_of_the_buffer_at_its_place() {
        let pool = private_pool();
        let mut buf = pool.get_for_test(6000);
        for (at, byte) in buf.iter_mut().enumerate() {
            *byte = u8::try_from(at % 251).unwrap();
        }
        let (whole, start) = (buf.window(), buf.as_ptr() as usize);
        buf.set_window(whole, 512..4608);
        assert_eq!((buf.len(), buf.capacity()), (4096, 8192 - 512));
        assert_eq!((buf.as_ptr() as usize, buf.addr() as usize), (start + 512, start + 512));
        buf.set_len(1000);
        assert_eq!(buf[999], u8::try_from((512 + 999) % 251).unwrap());
        buf.fill(0xff);
        let inner = buf.window();
        buf.set_window(inner, 100..200);
        assert_eq!(buf.as_ptr() as usize, start + 612);
        buf.restore(whole);
        assert_eq!((buf.len(), buf.as_ptr() as usize), (6000, start));
        assert_eq!((buf[511], buf[512], buf[1511], buf[1512]), (9, 0xff, 0xff, 6));
    }

    #[test]
    #[should_panic(expected = "a part outside the buffer")]
    fn a_window_beyond_the_buffer_is_refused() {
        let pool = private_pool();
        let mut buf = pool.get_for_test(4096);
        buf.set_window(buf.window(), 512..4097);
    }

    #[test]
    #[should_panic(expected = "a part outside the buffer")]
    fn a_part_beyond_the_window_is_refused_even_if_the_block_is_larger() {
        let pool = private_pool();
        let mut buf = pool.get_for_test(8192);
        let whole = buf.window();
        buf.set_window(whole, 512..1024);
        buf.set_window(buf.window(), 0..513);
    }

    #[test]
    fn another_buffer_shows_as_much_of_a_window_as_it_has() {
        let pool = private_pool();
        let mut buf = pool.get_for_test(8192);
        let whole = buf.window();
        buf.set_window(whole, 4096..8192);
        let later = buf.window();
        let mut other = pool.get_for_test(512);
        other.restore(whole);
        assert_eq!(other.len(), 4096);
        other.restore(later);
        assert_eq!((other.len(), other.capacity()), (0, 0));
    }

    /// Admits requests of 128 KiB until one has to wait.
    fn admitted(queue: &BufPool) -> Vec<Option<BudgetGuard>> {
        std::iter::from_fn(|| block_on(poll_once(queue.admit(128 << 10)))).take(1000).collect()
    }

    #[test]
    fn under_pressure_requests_wait_for_buffers_and_no_queue_waits_for_another_one() {
        let pool = private_pool();
        let queue = |name| {
            let owner = pool.memory().owner(name).unwrap();
            pool.queue(owner, &PoolParameters::default())
        };
        let (stalled, other) = (queue("stalled"), queue("other"));
        assert_eq!(admitted(&stalled).len(), 1000, "calm: no limit");
        pool.memory().reclaim(ebb_mem::Reclaim::Drain, Instant::now());
        let held = admitted(&stalled);
        assert_eq!(held.len() << 17, PRESSED_LEAST + PRESSED_OWN);
        // The store of one queue never completes its requests: requests of the other queue use that queue's own
        // share, one after the other.
        let mut first = admitted(&other);
        assert_eq!(first.len() << 17, PRESSED_OWN);
        let mut waiting = Box::pin(other.admit(1 << 20));
        assert!(block_on(poll_once(&mut waiting)).is_none());
        first.pop();
        assert!(block_on(poll_once(&mut waiting)).is_none(), "larger than that: all of it");
        drop(first);
        let large = block_on(poll_once(&mut waiting)).flatten();
        assert_eq!(large.map(|guard| guard.amount()), Some(PRESSED_OWN));
        pool.memory().calm();
        assert_eq!(admitted(&other).len(), 1000);
        drop(held);
    }

    #[test]
    fn a_queue_keeps_as_many_free_pages_as_its_limit_allows() {
        let pool = private_pool();
        let owner = pool.memory().owner("queue").unwrap();
        let limits = PoolParameters::default();
        limits.max_buffer_pages.set(2);
        let queue = pool.queue(owner, &limits);
        let held: Vec<_> = (0..5).map(|_| queue.get_for_test(4096)).collect();
        assert_eq!(queue.used_bytes(), 5 * 4096);
        drop(held);
        queue.done(Instant::now());
        assert_eq!(queue.idle_bytes(), 2 * 4096);
    }
}
