//! Statistics of backing devices.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A backing device: a disk, a server, or one named in the configuration. Ratios are parts of the limit
/// of all dirty data, 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
