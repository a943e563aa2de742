//! Metrics of the cache: of the daemon, and of each volume with a cache.

use std::fmt;

use ebb_api::stat::{CacheStat, Stat, VolumeCacheStat};
use prometheus_client::registry::Unit;

use super::{Out, float};

type Value = fn(&VolumeCacheStat) -> u64;

/// Writes them.
pub(super) fn encode(cache: &CacheStat, stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    for (name, help, value) in [
        ("ebbd_cache_bufspace", "Memory in buffers, wired and lent", cache.bufspace_bytes),
        ("ebbd_cache_bufwiredspace", "Memory in buffers that is wired", cache.bufwiredspace_bytes),
        ("ebbd_cache_bufkvaspace", "Address space of buffers", cache.bufkvaspace_bytes),
        ("ebbd_cache_max", "Maximum size of the cache, 0 without a limit", cache.max_bytes),
        ("ebbd_cache_min", "Size the cache keeps under memory pressure", cache.min_bytes),
    ] {
        out.gauge((name, help), Some(&Unit::Bytes), float(value))?;
    }
    out.counter(
        ("ebbd_cache_proactively_reclaimed", "Bytes returned by proactive reclaim"),
        Some(&Unit::Bytes),
        cache.proactively_reclaimed_bytes,
    )?;
    let volumes = |value: Value| {
        stat.volumes.iter().filter_map(move |volume| {
            let own = volume.cache.as_ref()?;
            Some(([("volume", volume.name.as_str())], value(own)))
        })
    };
    for (name, help, value) in [
        (
            "ebbd_volume_cache_bufspace",
            "Memory in the volume's buffers, wired and lent",
            (|own| own.bufspace_bytes) as Value,
        ),
        (
            "ebbd_volume_cache_bufwiredspace",
            "Memory in the volume's buffers that is wired",
            |own| own.bufwiredspace_bytes,
        ),
        ("ebbd_volume_cache_dirty", "Data that the volume's store does not have yet", |own| {
            own.dirty_bytes
        }),
        ("ebbd_volume_cache_bufkvaspace", "Address space of the volume's buffers", |own| {
            own.bufkvaspace_bytes
        }),
    ] {
        out.gauges((name, help), Some(&Unit::Bytes), volumes(value))?;
    }
    let ages = stat.volumes.iter().filter_map(|volume| {
        let own = volume.cache.as_ref().filter(|own| own.mode == "writeback")?;
        Some(([("volume", volume.name.as_str())], own.dirty_age_seconds))
    });
    let age = ("ebbd_volume_dirty_age", "How long the oldest dirty data has been dirty");
    out.fractions(age, Some(&Unit::Seconds), ages)?;
    for (name, help, value) in [
        ("ebbd_volume_cache_hit", "Bytes of cache hits", (|own| own.hit_bytes) as Value),
        ("ebbd_volume_cache_miss", "Bytes of cache misses", |own| own.miss_bytes),
        ("ebbd_volume_cache_kept", "Lent bytes that were intact when read", |own| {
            own.rewire_kept_bytes
        }),
        ("ebbd_volume_cache_lost", "Lent bytes that the kernel had discarded", |own| {
            own.rewire_lost_bytes
        }),
        ("ebbd_volume_cache_read_ahead", "Bytes read ahead", |own| own.read_ahead_bytes),
        ("ebbd_volume_cache_evicted", "Bytes evicted", |own| own.evicted_bytes),
    ] {
        out.counters((name, help), Some(&Unit::Bytes), volumes(value))?;
    }
    Ok(())
}
