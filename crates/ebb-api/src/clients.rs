//! Clients that are connected.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A connection of a client, or a disk of a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClientView {
    /// Its identifier: `nbd-17`, `xen-3-51712` (domain and device), or `vhost-17`.
    pub id: String,
    /// The export: `nbd`, `xen` or `vhost-user`.
    pub export: String,
    /// The volume that it uses.
    pub volume: String,
    /// Its address: `192.0.2.7:41234`, `unix`, `domain 3`, or the path of the socket of vhost-user.
    pub address: String,
    /// Who it is, as far as that is known: `uid:1000`, `psk:alice`, `cn:host.example` or `xen:guest1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The process number of a client on a unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Whether it may only read.
    pub read_only: bool,
    /// The writer that has its volume, until whose end it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Seconds since it connected.
    pub connected_seconds: f64,
    /// Its requests in flight.
    pub in_flight: u64,
    /// Completed requests.
    pub requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}
