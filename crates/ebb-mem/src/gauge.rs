//! Counters with a single writer and any number of readers: no locked instruction on the hit path.
//!
//! Each worker has its own set. A block allocated by one worker and freed by another increments one
//! worker's counter and decrements the other's; the sum over all workers is exact.

use std::sync::OnceLock;

use crate::class::CLASSES;
use crate::sync::{AtomicI64, AtomicU32, Ordering};

/// The worker must free everything in its caches.
pub(crate) const PURGE: u32 = 1;
/// The worker must squeeze its page pools.
pub(crate) const SQUEEZE: u32 = 2;
/// An allocation has begun to wait: the worker must free what its caches, its pools and the depots hold.
pub(crate) const RELEASE_CACHES: u32 = 4;
/// Allocations wait: freed memory is not cached. Set until the last one has stopped waiting.
pub(crate) const WAITERS: u32 = 8;
/// Caching is off until [`crate::Memory::calm`].
pub(crate) const UNCACHED: u32 = 16;
/// Flags that a poll does not clear.
pub(crate) const STICKY: u32 = WAITERS | UNCACHED;

/// A counter with a single writer.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicI64);

impl Gauge {
    /// Adds. Called only by the worker that owns the gauge.
    #[inline]
    pub(crate) fn add(&self, amount: i64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One worker's counters of one zone.
#[derive(Debug, Default)]
pub(crate) struct ZoneGauges {
    pub(crate) allocs: Gauge,
    pub(crate) frees: Gauge,
    /// Blocks that the worker took from the depot or the slabs, less those that it returned to them.
    pub(crate) filled: Gauge,
}

/// One worker's counters of one owner, in bytes.
#[derive(Debug, Default)]
pub(crate) struct OwnerGauges {
    pub(crate) wired: Gauge,
    pub(crate) unwired: Gauge,
}

/// Owners in one chunk of a table (4 KiB), and the number of chunks: enough for every [`crate::OwnerId`].
const CHUNK: usize = 256;
const CHUNKS: usize = 1 << 16 >> CHUNK.trailing_zeros();

type Chunk = [OwnerGauges; CHUNK];

/// A worker's gauges by owner. The first chunk is part of the table: few daemons have more owners, and
/// these are reached without a further load. The other chunks are allocated when owners are registered
/// ([`crate::Memory::owner`]), so that counting never allocates, and are never freed.
pub(crate) struct OwnerTable {
    first: Chunk,
    rest: [OnceLock<Box<Chunk>>; CHUNKS - 1],
}

fn chunk() -> Chunk {
    std::array::from_fn(|_| OwnerGauges::default())
}

impl OwnerTable {
    /// A table with gauges for the first `owners`.
    fn new(owners: usize) -> OwnerTable {
        let table =
            OwnerTable { first: chunk(), rest: std::array::from_fn(|_| OnceLock::default()) };
        table.make_room(owners);
        table
    }

    /// Allocates gauges for the first `owners`. May be called from any thread.
    pub(crate) fn make_room(&self, owners: usize) {
        for place in self.rest.iter().take(owners.div_ceil(CHUNK).saturating_sub(1)) {
            place.get_or_init(|| Box::new(chunk()));
        }
    }

    #[inline]
    pub(crate) fn get(&self, owner: u16) -> Option<&OwnerGauges> {
        let owner = usize::from(owner);
        match self.first.get(owner) {
            Some(gauges) => Some(gauges),
            None => self.rest.get(owner / CHUNK - 1)?.get()?.get(owner % CHUNK),
        }
    }

    /// All allocated gauges, by number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OwnerGauges> {
        let rest = self.rest.iter().map_while(OnceLock::get).flat_map(|chunk| chunk.iter());
        self.first.iter().chain(rest)
    }
}

/// The part of a worker that other threads see.
pub(crate) struct WorkerShared {
    pub(crate) flags: AtomicU32,
    pub(crate) wake: Box<dyn Fn() + Send + Sync>,
    /// Per class; the last is for runs.
    pub(crate) zones: [ZoneGauges; CLASSES + 1],
    pub(crate) owners: OwnerTable,
    /// Purges that the worker has carried out on request.
    pub(crate) purges: Gauge,
}

impl WorkerShared {
    pub(crate) fn new(owners: usize, wake: Box<dyn Fn() + Send + Sync>) -> WorkerShared {
        WorkerShared {
            flags: AtomicU32::new(0),
            wake,
            zones: Default::default(),
            owners: OwnerTable::new(owners),
            purges: Gauge::default(),
        }
    }

    /// Sets flags and wakes the worker.
    pub(crate) fn request(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::SeqCst);
        (self.wake)();
    }
}

/// Sums over workers that have been dropped.
#[derive(Default)]
pub(crate) struct Retired {
    pub(crate) zones: [[i64; 3]; CLASSES + 1],
    pub(crate) owners: Vec<[i64; 2]>,
    pub(crate) purges: i64,
}

impl Retired {
    pub(crate) fn add(&mut self, worker: &WorkerShared) {
        self.purges += worker.purges.get();
        for (sum, zone) in self.zones.iter_mut().zip(&worker.zones) {
            let values = [&zone.allocs, &zone.frees, &zone.filled];
            for (sum, gauge) in sum.iter_mut().zip(values) {
                *sum += gauge.get();
            }
        }
        add_owners(&mut self.owners, worker);
    }
}

/// Adds the counters of `worker` for each owner.
pub(crate) fn add_owners(sums: &mut Vec<[i64; 2]>, worker: &WorkerShared) {
    for (number, owner) in worker.owners.iter().enumerate() {
        if sums.len() <= number {
            sums.push([0; 2]);
        }
        if let Some(sum) = sums.get_mut(number) {
            sum[0] += owner.wired.get();
            sum[1] += owner.unwired.get();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn owners_are_counted_by_number_in_and_past_the_first_chunk() {
        let worker = WorkerShared::new(CHUNK, Box::new(|| ()));
        let last = |table: &OwnerTable| u16::try_from(table.iter().count() - 1).unwrap();
        assert_eq!(usize::from(last(&worker.owners)), CHUNK - 1);
        assert!(worker.owners.get(256).is_none() && worker.owners.get(u16::MAX).is_none());
        worker.owners.make_room(CHUNK + 1);
        assert_eq!(usize::from(last(&worker.owners)), 2 * CHUNK - 1);
        worker.owners.make_room(1 << 16);
        assert_eq!(last(&worker.owners), u16::MAX);
        let mut sums = Vec::new();
        for owner in [0, 255, 256, 511, 512, u16::MAX] {
            worker.owners.get(owner).unwrap().wired.add(i64::from(owner) + 1);
        }
        add_owners(&mut sums, &worker);
        let counted: Vec<_> = (0..1 << 16).filter(|&owner| sums[owner][0] != 0).collect();
        assert_eq!(counted, [0, 255, 256, 511, 512, 65535]);
        assert!(counted.iter().all(|&owner| sums[owner][0] == i64::try_from(owner).unwrap() + 1));
    }
}
