//! Statistics of a Ceph cluster that volumes have their images in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ClusterCondition, LatencyStat};

/// A Ceph cluster, as the volumes name it: by `ceph.conf` and user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClusterStat {
    /// Its `ceph.conf`; `default` for the one that Ceph looks for.
    pub conf: String,
    /// The user, without `client.`.
    pub user: String,
    /// Its identity (`ceph fsid`); empty until it was reached.
    pub fsid: String,
    /// Whether it answers.
    pub state: ClusterCondition,
    /// Cluster handles, which images share.
    pub connections: u64,
    /// Open images.
    pub images: u64,
    /// Of these, those that are offline: they have lost their lock, or the cluster has fenced their handle.
    pub offline: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Of these, those that have waited for more than a second.
    pub slow: u64,
    /// The longest time for which an image with requests in flight has had no answer, seconds; 0 if all have.
    pub silent_seconds: u64,
    /// Requests so far that took more than a second.
    pub slow_requests: u64,
    /// Requests so far that failed, or were not answered in time.
    pub errors: u64,
    /// The last error of a request, or of an attempt to connect.
    pub last_error: Option<String>,
    /// How long the cluster took to answer requests, by operation: `read`, `write`, `flush`, `discard`, `write-zeroes`.
    pub times: BTreeMap<String, LatencyStat>,
}

impl ClusterStat {
    /// Returns true if images can be used: unless it is down or has fenced a handle.
    pub fn is_up(&self) -> bool {
        !matches!(self.state, ClusterCondition::Down | ClusterCondition::Fenced)
    }
}
