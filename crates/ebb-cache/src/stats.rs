//! Cache modes and statistics.

use std::fmt;

use crate::shard::ShardCounters;

/// Bytes of a page, for gauges.
const PAGE: u64 = crate::pages::PAGE;

/// How a volume uses the cache. The names are QEMU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Every request goes to the store.
    #[default]
    None,
    /// Reads are served from memory; a write is acknowledged when the store has completed it.
    Writethrough,
    /// Writes are acknowledged from memory and reach the store later; a flush waits for that.
    Writeback,
}

impl Mode {
    /// The name used in configuration: `none`, `writethrough` or `writeback`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Writethrough => "writethrough",
            Mode::Writeback => "writeback",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Statistics of one volume's part of the cache: gauges in bytes, counters since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeCacheStats {
    /// Memory that holds cached data: wired, or lent and not known to be discarded.
    pub bufspace: u64,
    /// The wired part of that.
    pub bufwiredspace: u64,
    /// Address space of all buffers.
    pub bufkvaspace: u64,
    /// Data that the store does not have yet.
    pub dirty: u64,
    /// How long the oldest of it has been dirty; zero without dirty data.
    pub dirty_age: std::time::Duration,
    /// Number of buffers.
    pub buffers: u64,
    /// Bytes of the tables that index the buffers.
    pub tables: u64,
    /// Pages (4 KiB) that reads found in the cache.
    pub hits: u64,
    /// Of those, pages that were lent at the time and still intact.
    pub lent_hits: u64,
    /// Pages that had to be read from the store.
    pub misses: u64,
    /// Pages that reads wanted and the kernel had discarded; each is a miss, too.
    pub lost_hits: u64,
    /// Pages that the scan found discarded.
    pub reclaimed: u64,
    /// Pages evicted to make room.
    pub evictions: u64,
    /// Pages inserted.
    pub insertions: u64,
    /// Of those, by read-ahead.
    pub read_ahead: u64,
}

impl VolumeCacheStats {
    pub(crate) fn add(&mut self, tally: &ShardCounters, tables: usize) {
        self.bufspace += tally.held() * PAGE;
        self.bufwiredspace += (tally.address - tally.lent) * PAGE;
        self.bufkvaspace += tally.address * PAGE;
        self.dirty += tally.dirty * PAGE;
        self.buffers += tally.buffers;
        self.tables += tables as u64;
        self.hits += tally.hits;
        self.lent_hits += tally.lent_hits;
        self.misses += tally.misses;
        self.lost_hits += tally.lost_hits;
        self.reclaimed += tally.reclaimed;
        self.evictions += tally.evicted;
        self.insertions += tally.inserted;
        self.read_ahead += tally.ahead;
    }

    fn sum(&mut self, other: &VolumeCacheStats) {
        self.bufspace += other.bufspace;
        self.bufwiredspace += other.bufwiredspace;
        self.bufkvaspace += other.bufkvaspace;
        self.dirty += other.dirty;
        self.buffers += other.buffers;
        self.tables += other.tables;
        self.hits += other.hits;
        self.lent_hits += other.lent_hits;
        self.misses += other.misses;
        self.lost_hits += other.lost_hits;
        self.reclaimed += other.reclaimed;
        self.evictions += other.evictions;
        self.insertions += other.insertions;
        self.read_ahead += other.read_ahead;
    }
}

/// Statistics of the whole cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Sums over all open volumes.
    pub total: VolumeCacheStats,
    /// Each volume, by name.
    pub volumes: Vec<(String, VolumeCacheStats)>,
    /// What the cache may hold now, in bytes.
    pub limit: u64,
    /// What it may hold when memory is plentiful, in bytes.
    pub max: u64,
    /// What it keeps under pressure, in bytes.
    pub min: u64,
    /// False from a last resort (L3) until pressure is over: requests go to the store.
    pub admits: bool,
    /// Buffers that found no memory; the requests were served all the same.
    pub refused: u64,
    /// Scans for pages that the kernel discarded.
    pub scans: u64,
    /// Bytes returned by proactive reclaim since the start.
    pub proactively_reclaimed: u64,
}

impl CacheStats {
    pub(crate) fn push(&mut self, name: &str, stats: VolumeCacheStats) {
        self.total.sum(&stats);
        self.volumes.push((name.to_owned(), stats));
    }
}
