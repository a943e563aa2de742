//! A zone: the cache of one size class above the slabs, modelled on FreeBSD's UMA
//! (`sys/vm/uma_core.c`) and on Bonwick's magazines (USENIX 2001).
//!
//! Each worker has a loaded and a previous bucket per zone (`worker.rs`). Full buckets are exchanged at
//! the depot, behind a mutex that is locked once per bucket. Buckets grow when that mutex is contended,
//! shrink at every low-memory event, and are bounded by a share of the ceiling.
//!
//! Invariants: adding a bucket never allocates (both lists are allocated in full at the start); a bucket
//! is in one list at a time; the list of full buckets has no empty one.

use crate::class::class_bytes;
use crate::estimate::Estimate;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering};

/// Largest size of a bucket, in blocks.
pub(crate) const BUCKET_MAX: usize = 64;
/// Initial size of a bucket, in bytes of its blocks.
const BUCKET_START_BYTES: usize = 128 << 10;
/// Largest number of full buckets in a depot.
const DEPOT_MAX: usize = 4096;

/// Blocks of one class, by their first page.
pub(crate) struct Bucket {
    len: usize,
    cap: usize,
    pages: [u32; BUCKET_MAX],
}

impl Bucket {
    pub(crate) fn new(cap: usize) -> Bucket {
        Bucket { len: 0, cap: cap.clamp(1, BUCKET_MAX), pages: [0; BUCKET_MAX] }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        self.pages.get(self.len).copied()
    }

    /// False if it is full.
    #[inline]
    #[must_use]
    pub(crate) fn push(&mut self, page: u32) -> bool {
        if self.len >= self.cap {
            return false;
        }
        let Some(slot) = self.pages.get_mut(self.len) else { return false };
        *slot = page;
        self.len += 1;
        true
    }

    /// The blocks added last, at most `count`.
    pub(crate) fn newest(&self, count: usize) -> &[u32] {
        let pages = self.pages.get(..self.len).unwrap_or_default();
        pages.get(self.len.saturating_sub(count)..).unwrap_or_default()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn room(&self) -> usize {
        self.cap.saturating_sub(self.len)
    }

    /// Sets a new size. Its blocks stay, even if there are more.
    pub(crate) fn resize(&mut self, cap: usize) {
        self.cap = cap.clamp(1, BUCKET_MAX);
    }
}

/// The shared part of a zone's cache. Buckets are boxed: what is exchanged under the lock is a
/// pointer.
#[allow(clippy::vec_box)]
pub(crate) struct Depot {
    full: Vec<Box<Bucket>>,
    empty: Vec<Box<Bucket>>,
    limit: usize,
    /// Limit on its blocks while growth is paused; `u64::MAX` otherwise.
    cap: u64,
    /// Buckets allocated for this zone and not dropped.
    buckets: usize,
    pub(crate) estimate: Estimate,
}

impl Depot {
    /// A full bucket in exchange for an empty one.
    fn swap_full(&mut self, empty: &mut Box<Bucket>, size: usize) -> bool {
        let Some(full) = self.full.pop() else { return false };
        self.estimate.take(full.len() as u64);
        let mut old = std::mem::replace(empty, full);
        if self.empty.len() < self.empty.capacity() {
            old.resize(size);
            self.empty.push(old);
        } else {
            self.buckets -= 1;
        }
        true
    }

    /// An empty bucket in exchange for a full one; false if there is no empty one, or no room.
    fn swap_empty(&mut self, full: &mut Box<Bucket>, size: usize) -> bool {
        if self.full.len() >= self.limit || self.items() + full.len() as u64 > self.cap {
            return false;
        }
        let Some(mut empty) = self.empty.pop() else { return false };
        empty.resize(size);
        let full = std::mem::replace(full, empty);
        self.estimate.put(full.len() as u64);
        self.full.push(full);
        true
    }

    /// Blocks cached here.
    pub(crate) fn items(&self) -> u64 {
        self.estimate.items()
    }

    /// Removes the oldest full bucket, if at least `keep` blocks remain: for reclaim. The caller empties
    /// it without the lock and returns it with [`Depot::put_empty`].
    pub(crate) fn reclaim_above(&mut self, keep: u64) -> Option<Box<Bucket>> {
        let oldest = self.full.first()?.len() as u64;
        if self.items() < keep.saturating_add(oldest) {
            return None;
        }
        // This moves the newest bucket to the front: the order among old buckets matters little.
        let bucket = self.full.swap_remove(0);
        self.estimate.reclaimed(oldest);
        Some(bucket)
    }

    pub(crate) fn put_empty(&mut self, bucket: Box<Bucket>) {
        if self.empty.len() < self.empty.capacity() {
            self.empty.push(bucket);
        } else {
            self.buckets -= 1;
        }
    }

    /// Drops empty buckets that exchanges cannot need.
    pub(crate) fn drop_spare(&mut self) {
        let spare = self.empty.len().saturating_sub(2);
        self.buckets -= spare;
        self.empty.truncate(self.empty.len() - spare);
    }
}

/// One zone.
pub(crate) struct Zone {
    pub(crate) class: usize,
    depot: Mutex<Depot>,
    /// Current bucket size, in blocks.
    target: AtomicU32,
    max_target: u32,
    paused: AtomicBool,
    pub(crate) contended: AtomicU64,
    pub(crate) fails: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) misses: AtomicU64,
}

impl Zone {
    /// The zone of `class`; `ceiling` (bytes) bounds its buckets: at most 1/256 of it each.
    pub(crate) fn new(class: usize, ceiling: usize) -> Zone {
        let size = class_bytes(class);
        let max = (ceiling / 256 / size).clamp(1, BUCKET_MAX);
        let start = (BUCKET_START_BYTES / size).clamp(1, max);
        let limit = (ceiling / size).div_ceil(start).clamp(2, DEPOT_MAX);
        Zone {
            class,
            depot: Mutex::new(Depot {
                full: Vec::with_capacity(limit),
                empty: Vec::with_capacity(limit),
                limit,
                cap: u64::MAX,
                buckets: 0,
                estimate: Estimate::default(),
            }),
            target: AtomicU32::new(u32::try_from(start).unwrap_or(1)),
            max_target: u32::try_from(max).unwrap_or(1),
            paused: AtomicBool::new(false),
            contended: AtomicU64::new(0),
            fails: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    pub(crate) fn target(&self) -> usize {
        self.target.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn max_target(&self) -> usize {
        self.max_target as usize
    }

    /// The depot, for reclaim and statistics: contention is not counted.
    pub(crate) fn depot(&self) -> MutexGuard<'_, Depot> {
        self.depot.lock()
    }

    /// The depot, for a worker: contention makes the buckets grow.
    fn depot_of_worker(&self) -> MutexGuard<'_, Depot> {
        if let Some(depot) = self.depot.try_lock() {
            return depot;
        }
        self.contended.fetch_add(1, Ordering::Relaxed);
        let target = self.target.load(Ordering::Relaxed);
        if target < self.max_target && !self.paused.load(Ordering::Relaxed) {
            // Two workers that grow it at once may count as one, which is harmless.
            self.target.store(target + 1, Ordering::Relaxed);
        }
        self.depot.lock()
    }

    /// A low-memory event: buckets shrink by one block.
    pub(crate) fn shrink_target(&self) {
        let target = self.target.load(Ordering::Relaxed);
        self.target.store(target.saturating_sub(1).max(1), Ordering::Relaxed);
    }

    /// The last resort: buckets shrink to half.
    pub(crate) fn halve_target(&self) {
        let target = self.target.load(Ordering::Relaxed);
        self.target.store((target / 2).max(1), Ordering::Relaxed);
    }

    /// After a low-memory event: until [`Zone::resume`] the depot does not grow, no bucket is added, and
    /// buckets do not get larger.
    pub(crate) fn pause(&self) {
        let mut depot = self.depot();
        depot.cap = depot.items();
        self.paused.store(true, Ordering::Relaxed);
    }

    /// Allows growth again.
    pub(crate) fn resume(&self) {
        self.depot().cap = u64::MAX;
        self.paused.store(false, Ordering::Relaxed);
    }

    /// Exchanges an empty bucket for a full one.
    pub(crate) fn exchange_empty(&self, bucket: &mut Box<Bucket>) -> bool {
        self.depot_of_worker().swap_full(bucket, self.target())
    }

    /// Exchanges a full bucket for an empty one. Never allocates; false if the depot has no room or no
    /// empty bucket: then the caller frees the blocks to the slabs.
    pub(crate) fn exchange_full(&self, bucket: &mut Box<Bucket>) -> bool {
        self.depot_of_worker().swap_empty(bucket, self.target())
    }

    /// Records a cache miss, and allocates another bucket if the zone's blocks (`out`) would not fit in
    /// the existing ones. This is the only place that allocates buckets after a worker was created.
    pub(crate) fn missed(&self, out: usize) {
        self.misses.fetch_add(1, Ordering::Relaxed);
        let size = self.target();
        let mut depot = self.depot();
        depot.estimate.miss();
        let grows = depot.cap == u64::MAX;
        if grows && depot.buckets * size < out && depot.buckets < depot.limit {
            depot.buckets += 1;
            if depot.empty.len() < depot.empty.capacity() {
                depot.empty.push(Box::new(Bucket::new(size)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(zone: &Zone) -> Box<Bucket> {
        let mut bucket = Box::new(Bucket::new(zone.target()));
        while bucket.push(7) {}
        bucket
    }

    #[test]
    fn a_bucket_is_bounded_by_its_size_and_by_the_ceiling() {
        let zone = Zone::new(0, 1 << 30);
        assert_eq!(zone.max_target(), BUCKET_MAX);
        let small = Zone::new(4, 16 << 20);
        assert_eq!((small.max_target(), small.target()), (1, 1));
        assert_eq!(full(&zone).len(), zone.target());
    }

    #[test]
    fn a_full_bucket_needs_an_empty_one_in_exchange() {
        let zone = Zone::new(0, 1 << 30);
        let mut bucket = full(&zone);
        assert!(!zone.exchange_full(&mut bucket), "no empty bucket yet: nothing is allocated");
        zone.missed(1000);
        assert!(zone.exchange_full(&mut bucket));
        assert!(bucket.is_empty());
        assert_eq!(zone.depot().items(), zone.target() as u64);
        assert!(zone.exchange_empty(&mut bucket));
        assert_eq!(bucket.len(), zone.target());
    }

    #[test]
    fn contention_grows_buckets_and_low_memory_shrinks_them() {
        let zone = Zone::new(0, 1 << 30);
        let start = zone.target();
        std::thread::scope(|scope| {
            let held = zone.depot();
            let worker = scope.spawn(|| zone.exchange_empty(&mut Box::new(Bucket::new(1))));
            while zone.contended.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            drop(held);
            assert!(!worker.join().unwrap());
        });
        assert_eq!(zone.target(), start + 1);
        zone.shrink_target();
        assert_eq!(zone.target(), start);
        zone.halve_target();
        assert_eq!(zone.target(), start / 2);
        (0..100).for_each(|_| zone.shrink_target());
        assert_eq!(zone.target(), 1);
    }
}
