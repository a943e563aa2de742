//! Figures of the cache.

use ebb_api::stat::{CacheStat, VolumeCacheStat};
use ebb_cache::{CacheStats, Mode, VolumeCacheStats};

/// The size of `pages` pages of the cache, bytes.
fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(4096)
}

/// The figures of the cache of all volumes together.
pub(super) fn cache_stat(stats: &CacheStats) -> CacheStat {
    let total = &stats.total;
    let state = match (stats.admits, stats.limit < stats.max) {
        (false, _) => "off",
        (true, true) => "pausing",
        (true, false) => "growing",
    };
    CacheStat {
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
        proactively_reclaimed_bytes: stats.proactively_reclaimed,
    }
}

/// The figures of a volume cached in `mode`.
pub(super) fn volume_cache_stat(mode: Mode, stats: &VolumeCacheStats) -> VolumeCacheStat {
    VolumeCacheStat {
        mode: mode.to_string(),
        bufspace_bytes: stats.bufspace,
        bufwiredspace_bytes: stats.bufwiredspace,
        bufkvaspace_bytes: stats.bufkvaspace,
        dirty_bytes: stats.dirty,
        dirty_age_seconds: stats.dirty_age.as_secs_f64(),
        hit_bytes: bytes(stats.hits),
        miss_bytes: bytes(stats.misses),
        rewire_kept_bytes: bytes(stats.lent_hits),
        rewire_lost_bytes: bytes(stats.lost_hits),
        reclaimed_bytes: bytes(stats.reclaimed),
        read_ahead_bytes: bytes(stats.read_ahead),
        evicted_bytes: bytes(stats.evictions),
    }
}
