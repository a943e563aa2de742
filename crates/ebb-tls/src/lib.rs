//! The byte stream of a socket on a worker, in plain text or under TLS, as a server or as a client.
//!
//! Implements "TLS support" of the NBD protocol, for the NBD server and for the store that is an NBD client.
//! TLS 1.2 or newer. OpenSSL does the cryptography without access to sockets ([`TlsSession`]): cipher text
//! is passed in and out through memory, on a handshake thread or on a worker ([`Transport`]).
//!
//! Files have the names that other NBD programs use: `ca-cert.pem`, `server-cert.pem`,
//! `server-key.pem`, `client-cert.pem`, `client-key.pem` and `ca-crl.pem` in a directory, or one
//! file of pre-shared keys with lines `name:hex`.
//!
//! # Invariants
//! - Buffered data is bounded by what the caller feeds and takes: one record, or one batch.
//! - A server's handshakes run on separate threads (`handshake_threads`), round-robin by peer address.
//! - Nothing is received while much cipher text waits to be sent: a peer that causes OpenSSL to send
//!   (alerts, key updates) and does not receive stalls only its own connection.
//! - Records are sent in the order in which OpenSSL produced them: only one task sends.

mod context;
mod handshake_threads;
mod keys;
mod pem_files;
mod psk_name;
mod session;
mod transport;

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use ebb_advice::Advice;

pub use context::{ClientTls, Keys, ServerTls};
pub use handshake_threads::{PeerKey, StepResult, handshake};
pub use pem_files::{ExpiringFile, ExpiringKind};
pub use session::{TlsRead, TlsSession};
pub use transport::Transport;

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum TlsError {
    /// A file is missing or cannot be read.
    #[error("cannot read {path} ({source})")]
    File { path: PathBuf, purpose: &'static str, source: io::Error },
    /// A file has the wrong content.
    #[error("{path} is not {purpose} ({reason})")]
    Content { path: PathBuf, purpose: &'static str, reason: String },
    /// A file is encrypted.
    #[error("{path} is encrypted, and the daemon has no passphrase for it")]
    Encrypted { path: PathBuf },
    /// The list of revoked certificates should have been replaced.
    #[error(
        "{path}: the list of revoked certificates expired on {date}, and every peer is rejected"
    )]
    OldList { path: PathBuf, date: String },
    /// A line of a key file is malformed.
    #[error("{path}, line {line}: expected `name:key` with the key in hexadecimal digits")]
    Psk { path: PathBuf, line: usize },
    /// A key file lacks the requested key.
    #[error("{path} has no key for `{user}`")]
    NoKey { path: PathBuf, user: String },
    /// The key and the certificate do not belong together.
    #[error("{path}: the key does not belong to the certificate in the same directory")]
    Mismatch { path: PathBuf },
    /// A certificate has expired.
    #[error("{path}: the certificate expired on {date} and clients refuse it")]
    Expired { path: PathBuf, date: String },
    /// A certificate is not valid yet.
    #[error("{path}: the certificate is not valid before {date}")]
    NotYet { path: PathBuf, date: String },
    /// An error of OpenSSL.
    #[error("cannot set up OpenSSL for TLS")]
    Setup(#[from] openssl::error::ErrorStack),
}

impl Advice for TlsError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            TlsError::File { purpose, source, .. } => match source.kind() {
                io::ErrorKind::NotFound => format!("put {purpose} there").into(),
                io::ErrorKind::PermissionDenied => {
                    format!("let the daemon's user read it; it has to be {purpose}").into()
                }
                _ => format!("it has to be {purpose}").into(),
            },
            TlsError::Encrypted { .. } => {
                "write it without one (`openssl pkey -in FILE -out NEW`), readable by the daemon's \
                 user only"
                    .into()
            }
            TlsError::OldList { .. } => "create a new one, or remove the file".into(),
            TlsError::NoKey { .. } => {
                "write nbds://NAME@HOST with a name that the file contains".into()
            }
            TlsError::Expired { .. } => "create a new one".into(),
            TlsError::NotYet { .. } => "set the clock, or create a new one".into(),
            TlsError::Content { .. }
            | TlsError::Psk { .. }
            | TlsError::Mismatch { .. }
            | TlsError::Setup(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_cannot_be_read_has_a_next_step() {
        let remedy = |kind| {
            let (path, purpose) = ("/tls/server-cert.pem".into(), "the server's certificate (PEM)");
            let error = TlsError::File { path, purpose, source: io::Error::from(kind) };
            error.remedy().unwrap_or_default().into_owned()
        };
        let missing = remedy(io::ErrorKind::NotFound);
        assert_eq!(missing, "put the server's certificate (PEM) there");
        assert!(remedy(io::ErrorKind::PermissionDenied).starts_with("let the daemon's user read"));
    }
}
