//! Statistics of the cache.

use ebb_cache::{CacheStats, Mode, VolumeCacheStats};
use serde::{Deserialize, Serialize};

/// The size of `pages` pages of the cache, bytes.
fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(4096)
}

/// The cache of all volumes together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStat {
    /// Memory in buffers, wired and lent, without what is known to be discarded, bytes.
    pub bufspace_bytes: u64,
    /// Of it, what is wired, bytes.
    pub bufwiredspace_bytes: u64,
    /// Address space of buffers, bytes.
    pub bufkvaspace_bytes: u64,
    /// Its maximum size at present, bytes; 0 without a limit.
    pub max_bytes: u64,
    /// The size it keeps under memory pressure, bytes.
    pub min_bytes: u64,
    /// Its state: `growing`, `pausing` (after a sign of memory pressure) or `off` (in the last
    /// resort).
    pub state: String,
    /// Dirty data, bytes.
    pub dirty_bytes: u64,
    /// Bytes of cache hits.
    pub hit_bytes: u64,
    /// Bytes of cache misses.
    pub miss_bytes: u64,
    /// Bytes of reads of lent buffers that were intact.
    pub rewire_kept_bytes: u64,
    /// Bytes of reads of lent buffers that the kernel had discarded.
    pub rewire_lost_bytes: u64,
    /// Bytes of lent buffers that the reclaimer found discarded before they were read.
    pub reclaimed_bytes: u64,
    /// Bytes evicted.
    pub evicted_bytes: u64,
    /// Of these, bytes returned by proactive reclaim.
    #[serde(default)]
    pub receded_bytes: u64,
}

/// The cache of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeCacheStat {
    /// `writethrough` or `writeback`.
    pub mode: String,
    /// Memory in its buffers, wired and lent, bytes.
    pub bufspace_bytes: u64,
    /// Of it, what is wired, bytes.
    pub bufwiredspace_bytes: u64,
    /// Address space of its buffers, bytes.
    pub bufkvaspace_bytes: u64,
    /// Dirty data, bytes.
    pub dirty_bytes: u64,
    /// Bytes of cache hits.
    pub hit_bytes: u64,
    /// Bytes of cache misses.
    pub miss_bytes: u64,
    /// Bytes of reads of lent buffers that were intact.
    pub rewire_kept_bytes: u64,
    /// Bytes of reads of lent buffers that the kernel had discarded.
    pub rewire_lost_bytes: u64,
    /// Bytes of lent buffers that the reclaimer found discarded before they were read.
    pub reclaimed_bytes: u64,
    /// Bytes read ahead.
    pub read_ahead_bytes: u64,
    /// Bytes evicted.
    pub evicted_bytes: u64,
}

impl From<&CacheStats> for CacheStat {
    fn from(stats: &CacheStats) -> Self {
        let total = &stats.total;
        let state = match (stats.admits, stats.limit < stats.max) {
            (false, _) => "off",
            (true, true) => "pausing",
            (true, false) => "growing",
        };
        Self {
            bufspace_bytes: total.bufspace,
            bufwiredspace_bytes: total.bufwiredspace,
            bufkvaspace_bytes: total.bufkvaspace,
            max_bytes: stats.limit,
            min_bytes: stats.min,
            state: state.to_owned(),
            dirty_bytes: total.dirty,
            hit_bytes: bytes(total.hits),
            miss_bytes: bytes(total.misses),
            rewire_kept_bytes: bytes(total.lent_hits),
            rewire_lost_bytes: bytes(total.lost_hits),
            reclaimed_bytes: bytes(total.reclaimed),
            evicted_bytes: bytes(total.evictions),
            receded_bytes: stats.proactively_reclaimed,
        }
    }
}

impl VolumeCacheStat {
    /// The figures of a volume cached in `mode`.
    pub fn new(mode: Mode, stats: &VolumeCacheStats) -> Self {
        Self {
            mode: mode.to_string(),
            bufspace_bytes: stats.bufspace,
            bufwiredspace_bytes: stats.bufwiredspace,
            bufkvaspace_bytes: stats.bufkvaspace,
            dirty_bytes: stats.dirty,
            hit_bytes: bytes(stats.hits),
            miss_bytes: bytes(stats.misses),
            rewire_kept_bytes: bytes(stats.lent_hits),
            rewire_lost_bytes: bytes(stats.lost_hits),
            reclaimed_bytes: bytes(stats.reclaimed),
            read_ahead_bytes: bytes(stats.read_ahead),
            evicted_bytes: bytes(stats.evictions),
        }
    }
}
