//! Statistics: zones with the columns of FreeBSD's `vmstat -z`, and gauges per owner.

use crate::class::{PAGE_BYTES, class_bytes};
use crate::gauge::add_owners;
use crate::memory::Memory;
use crate::sync::Ordering;

/// Statistics of one zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneStats {
    /// Bytes in a block (0: the runs above 1 MiB, of any size).
    pub item_bytes: usize,
    /// The zone's limit on blocks in use and in caches; `None`: only the ceiling applies.
    pub limit: Option<usize>,
    /// Blocks in use (or in page pools).
    pub used: u64,
    /// Blocks cached by workers and the depot.
    pub free: u64,
    /// Allocations so far.
    pub requests: u64,
    /// Allocations that were refused.
    pub fails: u64,
    /// Allocations that waited.
    pub sleeps: u64,
    /// Allocations that found the caches empty.
    pub misses: u64,
    /// Times a worker found the depot locked.
    pub contended: u64,
    /// Current size of a bucket, in blocks.
    pub bucket: usize,
    /// Largest size that a bucket may reach under the ceiling, in blocks.
    pub bucket_max: usize,
    /// Blocks in the depot.
    pub depot: u64,
    /// Working set: blocks the depot needs.
    pub wss: u64,
    /// Blocks that were not needed for a long time (UMA's `uzd_limin`).
    pub limin: u64,
    /// Seconds since the zone last ran out of cache.
    pub timin: u32,
}

/// Memory of one owner, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerStats {
    /// Its name.
    pub name: String,
    /// In use, or in its pools and wired.
    pub wired: i64,
    /// In its pools and buffers, lent to the kernel.
    pub unwired: i64,
}

/// One page pool, in 4 KiB pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Its owner's name.
    pub owner: String,
    /// Free pages kept wired.
    pub free: usize,
    /// Free pages lent.
    pub lent: usize,
    /// Squeezes it has carried out.
    pub squeezes: usize,
    /// Pages that these squeezes released.
    pub squeezed_pages: usize,
}

/// The arena's gauges, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// Address space.
    pub reserved: usize,
    /// Of that, the accessible part: what a kernel with strict overcommit charges for.
    pub open: usize,
    /// The limit on wired memory.
    pub ceiling: usize,
    /// In use, or free and kept resident: `Rss - LazyFree`, once all of it has been touched.
    pub wired: usize,
    /// Lent, or about to be: the kernel may have discarded any of it.
    pub unwired: usize,
    /// Of the unwired, what the advisor has yet to process.
    pub advising: usize,
}

impl ArenaStats {
    /// Bytes that may have memory behind them.
    pub fn resident(&self) -> usize {
        self.wired + self.unwired
    }
}

/// All statistics. The arena's figures are exact; those of busy workers are read one after another and
/// may differ by a few operations.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// The arena.
    pub arena: ArenaStats,
    /// The zones by size; the last one stands for runs.
    pub zones: Vec<ZoneStats>,
    /// Owners by number.
    pub owners: Vec<OwnerStats>,
    /// Page pools.
    pub pools: Vec<PoolStats>,
    /// Squeezes so far.
    pub squeezes: u64,
    /// Purges workers have done.
    pub purges: u64,
    /// Allocations that wait for memory now.
    pub waiting: usize,
}

impl Stats {
    /// Blocks in use, over all zones.
    pub(crate) fn blocks_out(&self) -> u64 {
        self.zones.iter().map(|zone| zone.used).sum()
    }
}

fn count(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

impl Memory {
    /// The current statistics.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            squeezes: self.squeezes.load(Ordering::Relaxed),
            waiting: self.waits.len(),
            ..Stats::default()
        };
        let names = self.owners.lock().names.clone();
        let name = |owner: usize| names.get(owner).cloned().flatten();
        let (mut zones, mut owners);
        {
            let workers = self.workers.lock();
            zones = workers.retired.zones;
            owners = workers.retired.owners.clone();
            stats.purges = count(workers.retired.purges);
            for worker in &workers.list {
                for (sum, zone) in zones.iter_mut().zip(&worker.zones) {
                    sum[0] += zone.allocs.get();
                    sum[1] += zone.frees.get();
                    sum[2] += zone.filled.get();
                }
                add_owners(&mut owners, worker);
                stats.purges += count(worker.purges.get());
            }
            for pool in workers.pools.iter().filter_map(std::sync::Weak::upgrade) {
                stats.pools.push(PoolStats {
                    owner: name(usize::from(pool.owner)).unwrap_or_default(),
                    free: pool.wired.load(Ordering::Relaxed),
                    lent: pool.lent.load(Ordering::Relaxed),
                    squeezes: pool.squeezes.load(Ordering::Relaxed),
                    squeezed_pages: pool.squeezed_pages.load(Ordering::Relaxed),
                });
            }
        }
        for (class, [allocs, frees, filled]) in zones.into_iter().enumerate() {
            stats.zones.push(self.zone_stats(class, allocs, frees, filled));
        }
        for (owner, name) in names.into_iter().enumerate() {
            if let Some(name) = name {
                // A number without gauges at any worker has no memory.
                let [wired, unwired] = owners.get(owner).copied().unwrap_or_default();
                stats.owners.push(OwnerStats { name, wired, unwired });
            }
        }
        stats.arena = self.arena_stats();
        stats
    }

    /// The arena's part of [`Memory::stats`]: takes one lock and allocates nothing.
    pub fn arena_stats(&self) -> ArenaStats {
        let arena = self.core.arena.lock();
        let counts = arena.counts();
        ArenaStats {
            reserved: self.core.reservation.bytes(),
            open: arena.open_pages() * PAGE_BYTES,
            ceiling: arena.ceiling() * PAGE_BYTES,
            wired: counts.wired * PAGE_BYTES,
            unwired: counts.unwired * PAGE_BYTES,
            advising: (counts.offered + counts.advising) * PAGE_BYTES,
        }
    }

    fn zone_stats(&self, class: usize, allocs: i64, frees: i64, filled: i64) -> ZoneStats {
        let used = count(allocs - frees);
        let mut stats = ZoneStats { used, requests: count(allocs), ..ZoneStats::default() };
        let Some(zone) = self.zones.get(class) else { return stats };
        let limit = self.core.arena.lock().limit(class);
        let depot = zone.depot();
        let estimate = depot.estimate;
        stats.item_bytes = class_bytes(class);
        stats.limit = (limit != usize::MAX).then_some(limit);
        stats.depot = depot.items();
        // What entered the workers' buckets, less what they allocated and has not been freed yet.
        stats.free = stats.depot + count(filled + frees - allocs);
        stats.fails = zone.fails.load(Ordering::Relaxed);
        stats.sleeps = zone.sleeps.load(Ordering::Relaxed);
        stats.misses = zone.misses.load(Ordering::Relaxed);
        stats.contended = zone.contended.load(Ordering::Relaxed);
        stats.bucket = zone.target();
        stats.bucket_max = zone.max_target();
        stats.wss = estimate.wss();
        stats.limin = estimate.limin();
        stats.timin = estimate.timin();
        stats
    }
}
