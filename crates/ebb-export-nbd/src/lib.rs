//! An NBD server: the published protocol in full over volumes.
//!
//! Answers `doc/proto.md` of the NBD project: fixed newstyle negotiation, structured replies,
//! extended headers, `base:allocation`, TLS.
//!
//! # The way of a request
//! `server` accepts and negotiates (`handshake`, a machine without I/O), `connection` reads and
//! checks (`decode`), a `lane` carries out through the volume, `sender` answers in batches
//! (`reply`).
//!
//! # Invariants
//! - Nothing a client sends reaches a panic, an unchecked sum, or an unbounded allocation.
//! - A reply goes out once, and after its request has run to its end.
//! - A client that stalls, floods, lies or disappears hurts only itself.

mod connection;
pub mod decode;
mod door;
mod exports;
pub mod handshake;
mod receiver;
pub mod reply;
mod request_task;
mod seats;
mod sender;
mod server;

pub use ebb_nbd_proto as proto;
pub use ebb_tls::{ServerTls, TlsError};
pub use handshake::Tls;
pub use server::{Limits, Server};
