//! Metrics of overlays: what they hold, and what they share with other volumes. What an overlay has of its own in memory is in
//! `ebbd_volume_cache_*`.

use std::fmt;

use ebb_api::stat::{Stat, VolumeStat};
use prometheus_client::registry::Unit;

use super::Out;

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let of = |value: fn(&VolumeStat) -> u64| {
        let overlays = stat.volumes.iter().filter(|volume| volume.layers > 1);
        overlays.map(move |volume| ([("volume", volume.name.as_str())], value(volume)))
    };
    let layers = ("ebbd_volume_layers", "Layers of the overlay, its own one included");
    out.gauges(layers, None, of(|volume| volume.layers))?;
    let own = stat
        .volumes
        .iter()
        .filter_map(|volume| volume.own_bytes.map(|own| ([("volume", volume.name.as_str())], own)));
    let help =
        ("ebbd_volume_own", "Bytes that the delta of the overlay holds, as of the last flush");
    out.gauges(help, Some(&Unit::Bytes), own)?;
    let cached =
        ("ebbd_volume_shared_cache", "Memory in buffers of the layers below, which are shared");
    out.gauges(cached, Some(&Unit::Bytes), of(|volume| volume.shared_cache_bytes))?;
    let hit = ("ebbd_volume_shared_hit", "Bytes read of layers below that were in memory");
    out.counters(hit, Some(&Unit::Bytes), of(|volume| volume.shared_hit_bytes))?;
    let miss = ("ebbd_volume_shared_miss", "Bytes read of layers below that were not in memory");
    out.counters(miss, Some(&Unit::Bytes), of(|volume| volume.shared_miss_bytes))
}
