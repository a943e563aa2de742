//! The figures of backing devices.

use ebb_writeback::BdiStats;
use serde::{Deserialize, Serialize};

/// A backing device: a disk, a server, or what the configuration names. Ratios are parts of the limit of
/// all dirty data, 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BdiStat {
    /// The device's number, the server's address, or its name in the configuration.
    pub name: String,
    /// The volumes on it.
    pub volumes: Vec<String>,
    /// Accepted, and not on its way to the store, bytes.
    pub dirty_bytes: u64,
    /// On its way to the store, bytes.
    pub writeback_bytes: u64,
    /// The most of both it may have now, bytes.
    pub threshold_bytes: u64,
    /// What it is estimated to write, bytes per second.
    pub bandwidth_bytes_per_second: u64,
    /// The threshold's part of the limit.
    pub share: f64,
    /// Part of the last second or two it was busy.
    pub utilisation: f64,
    /// Written back, bytes.
    pub written_bytes: u64,
    /// Made dirty, bytes.
    pub dirtied_bytes: u64,
    /// Writes to the store that failed.
    pub failures: u64,
    /// Nothing completes for a second, or everything fails.
    pub stuck: bool,
    /// Writes that waited before they were taken.
    pub pauses: u64,
    /// For how long, in all, seconds.
    pub pause_seconds: f64,
    /// The longest, seconds.
    pub longest_pause_seconds: f64,
    /// Part of the limit that is kept for it.
    pub min_ratio: f64,
    /// The largest part it may have.
    pub max_ratio: f64,
    /// The most it may have; absent without such a limit, bytes.
    pub max_bytes: Option<u64>,
    /// Whether its own threshold counts even while others leave room.
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
