//! History: figures of the last minutes and hours, from a ring of fixed size in the daemon.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// `throttled` (part of the time), `clients`; of the daemon also `pressure` (the highest level),
    /// `cached_bytes`, `lent_bytes`, `in_use_bytes`.
    pub series: BTreeMap<String, Vec<Option<f64>>>,
}
