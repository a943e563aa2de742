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

/// A worker's gauges by owner. Chunks are made as owners are registered ([`crate::Memory::owner`]), so
/// that counting never allocates, and stay: what is never registered costs nothing.
pub(crate) struct OwnerTable(Box<[OnceLock<Box<[OwnerGauges]>>]>);

impl OwnerTable {
    /// With room for the first `owners`.
    pub(crate) fn new(owners: usize) -> OwnerTable {
        let table = OwnerTable(std::iter::repeat_with(OnceLock::new).take(CHUNKS).collect());
        table.make_room(owners);
        table
    }

    /// Makes room for the first `owners`. Any thread may do that.
    pub(crate) fn make_room(&self, owners: usize) {
        for chunk in self.0.iter().take(owners.div_ceil(CHUNK)) {
            chunk
                .get_or_init(|| std::iter::repeat_with(OwnerGauges::default).take(CHUNK).collect());
        }
    }

    #[inline]
    pub(crate) fn get(&self, owner: u16) -> Option<&OwnerGauges> {
        let owner = usize::from(owner);
        self.0.get(owner / CHUNK)?.get()?.get(owner % CHUNK)
    }

    /// All there is room for, by number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OwnerGauges> {
        self.0.iter().map_while(OnceLock::get).flat_map(|chunk| chunk.iter())
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
