//! Statistics of the cache.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The cache of all volumes together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
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
    pub proactively_reclaimed_bytes: u64,
}

/// The cache of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// How long the oldest dirty data has been dirty, seconds; 0 without dirty data.
    #[serde(default)]
    pub dirty_age_seconds: f64,
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
