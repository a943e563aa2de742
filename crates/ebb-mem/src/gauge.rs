//! Counters that one worker writes and anybody reads: no locked instruction on the hit path.
//!
//! Each worker has its own set; a block taken on one worker and freed on another makes one of them
//! go up and another down, and the sum over all is exact.

use std::sync::OnceLock;

use crate::class::CLASSES;
use crate::sync::{AtomicI64, AtomicU32, Ordering};

/// Everything the worker's caches hold is to be given back.
pub(crate) const PURGE: u32 = 1;
/// The page pools are squeezed.
pub(crate) const SQUEEZE: u32 = 2;
/// Somebody has begun to wait for memory: give back what is cached, everywhere.
pub(crate) const STARVED: u32 = 4;
/// Somebody waits: freed memory is not cached. Stays until nobody waits.
pub(crate) const WAITERS: u32 = 8;
/// Caching is off until calm.
pub(crate) const UNCACHED: u32 = 16;
/// Flags that stay set when the worker has looked.
pub(crate) const STICKY: u32 = WAITERS | UNCACHED;

/// A counter with a single writer.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicI64);

impl Gauge {
    /// Adds; only ever called by the one worker that owns the gauge.
    #[inline]
    pub(crate) fn add(&self, amount: i64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one worker did in one zone.
#[derive(Debug, Default)]
pub(crate) struct ZoneGauges {
    pub(crate) allocs: Gauge,
    pub(crate) frees: Gauge,
    /// Blocks that entered the worker's buckets from below, less those that left them downwards.
    pub(crate) filled: Gauge,
}

/// What one worker did for one owner, in bytes.
#[derive(Debug, Default)]
pub(crate) struct OwnerGauges {
    pub(crate) wired: Gauge,
    pub(crate) unwired: Gauge,
}

/// Owners in one chunk of a table (4 KiB), and chunks: one for each number an [`crate::OwnerId`] has.
const CHUNK: usize = 256;
const CHUNKS: usize = 1 << 16 >> CHUNK.trailing_zeros();

type Chunk = [OwnerGauges; CHUNK];

/// A worker's gauges by owner. The first chunk is part of the table: few daemons have more owners, and
/// theirs are reached without a further load. The others are made as owners are registered
/// ([`crate::Memory::owner`]), so that counting never allocates, and stay: what is never registered
/// costs nothing.
pub(crate) struct OwnerTable {
    first: Chunk,
    rest: [OnceLock<Box<Chunk>>; CHUNKS - 1],
}

fn chunk() -> Chunk {
    std::array::from_fn(|_| OwnerGauges::default())
}

impl OwnerTable {
    /// With room for the first `owners`.
    fn new(owners: usize) -> OwnerTable {
        let table =
            OwnerTable { first: chunk(), rest: std::array::from_fn(|_| OnceLock::default()) };
        table.make_room(owners);
        table
    }

    /// Makes room for the first `owners`. Any thread may do that.
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

    /// All there is room for, by number.
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
    /// Times the worker was asked to purge, and did.
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

    /// Raises flags and wakes the worker.
    pub(crate) fn ask(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::SeqCst);
        (self.wake)();
    }
}

/// Sums over workers that have ended.
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

/// Adds what `worker` did for each owner.
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
