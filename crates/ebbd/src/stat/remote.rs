//! The figures of a volume whose store is an NBD server.

use serde::{Deserialize, Serialize};

/// How the connections to a remote store fare.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteStat {
    /// The server's address.
    pub address: String,
    /// Connections that are up.
    pub connections: u64,
    /// Connections that were lost and made again.
    pub reconnects: u64,
    /// Requests under way, those that wait for a connection included.
    pub in_flight: u64,
    /// Requests that were asked again on a new connection.
    pub replayed: u64,
    /// Changes acknowledged and not flushed.
    pub unflushed: u64,
    /// Why the last connection ended or did not come about, if that ever happened.
    pub last_error: Option<String>,
    /// Seconds since `connections` last changed.
    pub since_seconds: u64,
    /// Seconds for which the server, connected, has owed answers and given none; 0 if it answers.
    #[serde(default)]
    pub silent_seconds: u64,
}

impl From<ebb_store::StoreState> for RemoteStat {
    fn from(state: ebb_store::StoreState) -> RemoteStat {
        RemoteStat {
            address: state.address,
            connections: state.connections,
            reconnects: state.reconnects,
            in_flight: state.in_flight,
            replayed: state.replayed,
            unflushed: state.unflushed,
            last_error: state.last_error,
            since_seconds: state.since_seconds,
            silent_seconds: state.silent_seconds,
        }
    }
}
