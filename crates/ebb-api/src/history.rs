//! History: figures of the last minutes and hours, from a ring of fixed size in the daemon.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::stat::{CacheStat, MemoryStat, PressureStat, RemoteCondition, VolumeCondition};

/// A part of the history of the daemon, or of one volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryView {
    /// Seconds between two points: 1 for `5m`, 12 for `1h`, 288 for `24h`, so that each range has 300 points.
    pub step_seconds: f64,
    /// The time of the last point, seconds since 1970. A point describes the `step_seconds` before it.
    pub end: f64,
    /// The figures by name; all have the same number of points, the oldest first. `null`: not known, such as the time
    /// before the daemon started, or a latency without requests. Names: `read_iops`, `write_iops`, `read_bytes` and
    /// `write_bytes` (each per second), `p50_seconds`, `p99_seconds`, `dirty_bytes`, `errors` (per second),
    /// `throttled` (part of the time), `clients`, `hit_ratio` and `cached_bytes`; of the daemon also `pressure` (the highest level),
    /// `lent_bytes` and `wired_bytes`.
    pub series: BTreeMap<String, Vec<Option<f64>>>,
}

/// How long the requests of a volume took over time: the counts of a latency heat map.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HeatmapView {
    /// Seconds between two columns.
    pub step_seconds: f64,
    /// The time of the last column, seconds since 1970. A column describes the `step_seconds` before it.
    pub end: f64,
    /// The ends of the rows, seconds: row `n` has the times from `bounds[n]` to `bounds[n + 1]`, the first row also
    /// shorter ones and the last row also longer ones.
    pub bounds: Vec<f64>,
    /// The columns, the oldest first: pairs of a row and the approximate number of its reads and writes, within a factor
    /// of two. `null`: not known.
    pub columns: Vec<Option<Vec<(u8, u64)>>>,
}

/// The figures of the daemon, without those of each volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DaemonView {
    /// The version of ebbd.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    /// Resident memory of the whole process, bytes.
    pub resident_bytes: u64,
    /// NBD connections now.
    pub clients: u64,
    /// I/O memory, without its zones, pools and owners.
    pub memory: Option<MemoryStat>,
    /// Memory pressure; absent if it is not monitored.
    pub pressure: Option<PressureStat>,
    /// The cache of all volumes together; absent if there is none.
    pub cache: Option<CacheStat>,
}

/// The state of all volumes in few bytes, for lists that are read once a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SummaryView {
    /// Seconds since 1970.
    pub time: f64,
    /// The memory of the history of the daemon and all volumes, bytes.
    pub history_bytes: u64,
    /// The most of it that one volume has, bytes.
    pub history_most_bytes: u64,
    /// The volumes by name.
    pub volumes: Vec<VolumeSummary>,
}

/// A volume in a [`SummaryView`]. Figures that are 0 or not known are absent. Rates are those of the last second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeSummary {
    /// The name it is exported under.
    pub name: String,
    /// As in [`VolumeStat::state`](crate::stat::VolumeStat::state).
    pub state: VolumeCondition,
    /// Reads and writes per second.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub iops: f64,
    /// Bytes read and written per second.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: f64,
    /// The time that 99 of 100 reads and writes did not exceed, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The part of the bytes read that the cache had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_ratio: Option<f64>,
    /// Dirty data, bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dirty: f64,
    /// Clients that are connected.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clients: f64,
    /// The state of the server of a remote store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteCondition>,
    /// Reads and writes per second of the last 25 points of the range `1h`, which are 5 minutes, the oldest first; absent
    /// if all are 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spark: Vec<f64>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}
