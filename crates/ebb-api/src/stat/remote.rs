//! Statistics of a volume whose store is an NBD server.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::RemoteCondition;

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
    /// True if the last attempt to connect reached a server: it, or its export, cannot be used.
    #[serde(default)]
    pub is_reached: bool,
    /// Seconds since `connections` last changed; of a server that is down, seconds since the first
    /// lost connection or failed attempt to connect.
    pub since_seconds: u64,
    /// Seconds for which the connected server has not replied to requests; 0 if it replies.
    #[serde(default)]
    pub silent_seconds: u64,
}

impl RemoteStat {
    /// A connected server is silent after this many seconds without a reply to requests in flight.
    pub const SILENT_AFTER: u64 = 10;

    /// What these figures say of the server. Connections are made by the first request, and kept from then on.
    pub const fn condition(&self) -> RemoteCondition {
        match (self.connections, self.silent_seconds >= Self::SILENT_AFTER) {
            (0, _) if self.last_error.is_none() && self.in_flight == 0 => RemoteCondition::Idle,
            (0, _) => RemoteCondition::Down,
            (_, false) => RemoteCondition::Up,
            (_, true) => RemoteCondition::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_no_request_has_needed_is_not_down() {
        let idle = RemoteStat::default();
        assert_eq!(idle.condition(), RemoteCondition::Idle);
        let refused = RemoteStat { last_error: Some("refused".into()), ..idle.clone() };
        let waiting = RemoteStat { in_flight: 1, ..idle.clone() };
        for down in [refused, waiting] {
            assert_eq!(down.condition(), RemoteCondition::Down, "{down:?}");
        }
        let again = Some("lost, and made again".into());
        let up = RemoteStat { connections: 1, last_error: again, ..idle };
        assert_eq!(up.condition(), RemoteCondition::Up);
        let slow = RemoteStat { silent_seconds: 9, ..up.clone() };
        assert_eq!(slow.condition(), RemoteCondition::Up);
        let silent = RemoteStat { silent_seconds: 10, ..up };
        assert_eq!(silent.condition(), RemoteCondition::Silent);
    }
}
