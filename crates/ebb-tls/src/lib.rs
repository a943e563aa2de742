//! A socket's bytes on a worker, in plain text or under TLS, as a server or as a client.
//!
//! Answers "TLS support" of the NBD protocol, for the export that listens and the store that connects. At
//! least TLS 1.2. OpenSSL does the cryptography and never sees a socket ([`TlsSession`]): cipher text
//! goes in and out through memory, on a helper thread or on a worker ([`Transport`]).
//!
//! Files have the names that other NBD programs use: `ca-cert.pem`, `server-cert.pem`,
//! `server-key.pem`, `client-cert.pem`, `client-key.pem` in a folder, or one file of pre-shared
//! keys with lines `name:hex`.
//!
//! # Invariants
//! - What waits in memory is bounded by what the caller feeds and takes: one record, or one batch.
//! - A server's handshakes run on threads of their own (`crew`), in turn by address.
//! - Nothing is received while much cipher text waits to be sent: what a peer makes OpenSSL say that it
//!   never reads (alerts, key updates) holds up that peer.
//! - Records leave in the order OpenSSL made them: one task sends.

mod context;
mod handshake_threads;
mod keys;
mod session;
mod transport;

use std::io;
use std::path::PathBuf;

pub use context::{ClientTls, Keys, ServerTls};
pub use handshake_threads::Peer;
pub use session::TlsSession;
pub use transport::Transport;

/// Why TLS could not be set up. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum TlsError {
    /// A file is missing or cannot be read.
    #[error("{path}: cannot be read ({source}): TLS needs {purpose}")]
    File { path: PathBuf, purpose: &'static str, source: io::Error },
    /// A file does not hold what it should.
    #[error("{path}: is not {purpose} ({reason})")]
    Content { path: PathBuf, purpose: &'static str, reason: String },
    /// A line of a key file is malformed.
    #[error("{path}: line {line}: expected `name:key` with the key in hexadecimal digits")]
    Psk { path: PathBuf, line: usize },
    /// A key file lacks the key that is wanted.
    #[error("{path}: has no key for `{user}`: write nbds://NAME@HOST with a name that is there")]
    NoKey { path: PathBuf, user: String },
    /// The key and the certificate do not belong together.
    #[error("{path}: the key is not that of the certificate beside it")]
    Mismatch { path: PathBuf },
    /// A certificate is not valid any more.
    #[error("{path}: the certificate expired on {date}: clients refuse it; make a new one")]
    Expired { path: PathBuf, date: String },
    /// A certificate is not valid yet.
    #[error("{path}: the certificate is valid from {date} on: set the clock, or make a new one")]
    NotYet { path: PathBuf, date: String },
    /// OpenSSL refused.
    #[error("OpenSSL could not be set up for TLS")]
    Setup(#[from] openssl::error::ErrorStack),
}
