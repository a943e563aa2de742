//! Statistics of a volume whose store is an NBD server.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The connections to a remote store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteStat {
    /// The server's address.
    pub address: String,
    /// Established connections.
    pub connections: u64,
    /// Lost connections that were made again.
    pub reconnects: u64,
    /// Requests in flight, including those that wait for a connection.
    pub in_flight: u64,
    /// Requests that were sent again on a new connection.
    pub replayed: u64,
    /// Writes acknowledged and not flushed.
    pub unflushed: u64,
    /// The error of the last connection that ended or could not be made, if any.
    pub last_error: Option<String>,
    /// Seconds since `connections` last changed.
    pub since_seconds: u64,
    /// Seconds for which the connected server has not replied to requests; 0 if it replies.
    #[serde(default)]
    pub silent_seconds: u64,
}
