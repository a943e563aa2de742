//! Metrics of backing devices.

use std::fmt;

use ebb_api::stat::{BdiStat, Stat};
use prometheus_client::registry::Unit;

use super::Out;

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let of = |value: fn(&BdiStat) -> f64| {
        stat.bdis.iter().map(move |bdi| ([("bdi", bdi.name.as_str())], value(bdi)))
    };
    let count = |value: fn(&BdiStat) -> u64| {
        stat.bdis.iter().map(move |bdi| ([("bdi", bdi.name.as_str())], value(bdi)))
    };
    let bytes = Some(&Unit::Bytes);
    out.gauges(("ebbd_bdi_dirty", "Dirty data"), bytes, count(|b| b.dirty_bytes))?;
    let writeback = ("ebbd_bdi_writeback", "Data being written to the store");
    out.gauges(writeback, bytes, count(|b| b.writeback_bytes))?;
    let threshold = ("ebbd_bdi_threshold", "Limit of dirty data and writeback of the device");
    out.gauges(threshold, bytes, count(|b| b.threshold_bytes))?;
    let rate = ("ebbd_bdi_write_bytes_per_second", "Estimated write rate");
    out.gauges(rate, None, count(|b| b.bandwidth_bytes_per_second))?;
    out.fractions(
        ("ebbd_bdi_share_ratio", "Part of the limit of all dirty data"),
        None,
        of(|b| b.share),
    )?;
    let busy = ("ebbd_bdi_utilisation_ratio", "Part of the time in which the device is busy");
    out.fractions(busy, None, of(|b| b.utilisation))?;
    out.gauges(
        ("ebbd_bdi_stuck", "Whether no write completes"),
        None,
        count(|b| u64::from(b.stuck)),
    )?;
    out.fractions(("ebbd_bdi_min_ratio", "Part that is reserved"), None, of(|b| b.min_ratio))?;
    out.fractions(("ebbd_bdi_max_ratio", "Largest possible part"), None, of(|b| b.max_ratio))?;
    let most = ("ebbd_bdi_max", "Configured limit of dirty data, 0 without one");
    out.gauges(most, bytes, count(|b| b.max_bytes.unwrap_or(0)))?;
    let strict = ("ebbd_bdi_strict_limit", "Whether every write must fit below the threshold");
    out.gauges(strict, None, count(|b| u64::from(b.strict_limit)))?;
    let longest = ("ebbd_bdi_longest_pause", "Longest pause of a write");
    out.fractions(longest, Some(&Unit::Seconds), of(|b| b.longest_pause_seconds))?;
    out.counters(("ebbd_bdi_written", "Data written back"), bytes, count(|b| b.written_bytes))?;
    out.counters(("ebbd_bdi_dirtied", "Data made dirty"), bytes, count(|b| b.dirtied_bytes))?;
    out.counters(("ebbd_bdi_failures", "Writes that failed"), None, count(|b| b.failures))?;
    out.counters(("ebbd_bdi_pauses", "Writes that were throttled"), None, count(|b| b.pauses))?;
    let waited = ("ebbd_bdi_paused", "Time for which writes were throttled");
    out.seconds(waited, of(|b| b.pause_seconds))
}
