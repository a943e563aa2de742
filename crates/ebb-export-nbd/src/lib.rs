//! An NBD server that exports volumes.
//!
//! Implements `doc/proto.md` of the NBD project: fixed newstyle negotiation, structured replies,
//! extended headers, `base:allocation`, TLS.
//!
//! # Path of a request
//! `server` accepts a connection and negotiates (`handshake`, a state machine without I/O). `connection`
//! reads requests and checks them (`decode`). A `request_task` executes each on the volume, and `sender`
//! sends the replies (`reply`) in batches.
//!
//! # Invariants
//! - No input from a client causes a panic, an unchecked sum, or an unbounded allocation.
//! - Each request has exactly one reply, sent after the request has completed.
//! - A client that stalls, floods, violates the protocol or disconnects affects no other client.

mod client_limit;
mod clients;
mod connection;
pub mod decode;
mod exports;
pub mod handshake;
mod kept;
mod pending_handshakes;
mod receiver;
mod refusal_log;
pub mod reply;
mod request_task;
mod sender;
mod server;

pub use client_limit::{ServerLimits, ServerParameters};
pub use clients::{NbdClient, NbdConnectionId};
pub use ebb_nbd_proto as proto;
pub use ebb_tls::{ExpiringKind, ServerTls, TlsError};
pub use handshake::TlsMode;
pub use kept::{InvalidState, KeptConnection, SessionState};
pub use server::{KeptWriters, Server};
