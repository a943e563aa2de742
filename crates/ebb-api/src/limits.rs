//! Limits of a volume or of a group of volumes: requests and bytes per second.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The limits in force of a volume or a group, and what they have done. 0: no limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LimitStat {
    /// The group whose limits apply together with those of the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Requests per second, reads and writes together.
    pub iops: u64,
    /// Reads per second.
    pub read_iops: u64,
    /// Writes per second.
    pub write_iops: u64,
    /// Bytes per second, reads and writes together.
    pub bandwidth: u64,
    /// Bytes per second of reads.
    pub read_bandwidth: u64,
    /// Bytes per second of writes.
    pub write_bandwidth: u64,
    /// How long a volume that was idle may exceed its limits: its burst is this time's requests and bytes, milliseconds.
    pub burst_ms: u64,
    /// Requests that were delayed.
    pub throttled_requests: u64,
    /// The time in which at least one request was delayed, seconds.
    pub throttled_seconds: f64,
}

/// The limits of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LimitGroupStat {
    /// Its name.
    pub name: String,
    /// Its volumes.
    pub volumes: Vec<String>,
    /// Its limits, and what they have done.
    pub limits: LimitStat,
}
