//! Statistics of backing devices.

use ebb_writeback::BdiStats;
use serde::{Deserialize, Serialize};

/// A backing device: a disk, a server, or one named in the configuration. Ratios are parts of the limit
/// of all dirty data, 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BdiStat {
    /// The device's number, the server's address, or its name in the configuration.
    pub name: String,
    /// The volumes on it.
    pub volumes: Vec<String>,
    /// Dirty data, bytes.
    pub dirty_bytes: u64,
    /// Data being written to the store, bytes.
    pub writeback_bytes: u64,
    /// The limit of both together now, bytes.
    pub threshold_bytes: u64,
    /// The estimated write rate, bytes per second.
    pub bandwidth_bytes_per_second: u64,
    /// The threshold as a part of the limit.
    pub share: f64,
    /// Part of the last second or two in which it was busy.
    pub utilisation: f64,
    /// Data written back, bytes.
    pub written_bytes: u64,
    /// Data made dirty, bytes.
    pub dirtied_bytes: u64,
    /// Writes to the store that failed.
    pub failures: u64,
    /// No write has completed for a second, or all fail.
    pub stuck: bool,
    /// Writes that were throttled.
    pub pauses: u64,
    /// Their total pause, seconds.
    pub pause_seconds: f64,
    /// The longest pause, seconds.
    pub longest_pause_seconds: f64,
    /// Part of the limit that is reserved for it.
    pub min_ratio: f64,
    /// The largest part it may have.
    pub max_ratio: f64,
    /// Configured limit of its dirty data, bytes; absent without one.
    pub max_bytes: Option<u64>,
    /// Whether every write must fit below its threshold.
    pub strict_limit: bool,
}

fn seconds(nanos: u64) -> f64 {
    std::time::Duration::from_nanos(nanos).as_secs_f64()
}

fn ratio(parts_per_million: u32) -> f64 {
    f64::from(parts_per_million) / f64::from(ebb_writeback::WHOLE)
}

impl BdiStat {
    /// The figures of the device called `name`, with `volumes` on it.
    pub fn new(name: &str, volumes: Vec<String>, stats: &BdiStats) -> Self {
        Self {
            name: name.to_owned(),
            volumes,
            dirty_bytes: stats.dirty,
            writeback_bytes: stats.writeback,
            threshold_bytes: stats.threshold,
            bandwidth_bytes_per_second: stats.bandwidth,
            share: ratio(stats.share),
            utilisation: ratio(stats.utilisation),
            written_bytes: stats.written,
            dirtied_bytes: stats.dirtied,
            failures: stats.failures,
            stuck: stats.stuck,
            pauses: stats.pauses.count,
            pause_seconds: seconds(stats.pauses.total),
            longest_pause_seconds: seconds(stats.pauses.longest),
            min_ratio: ratio(stats.min_ratio),
            max_ratio: ratio(stats.max_ratio),
            max_bytes: Some(stats.max_bytes).filter(|bytes| *bytes != u64::MAX),
            strict_limit: stats.strict_limit,
        }
    }
}
