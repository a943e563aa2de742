//! How to reach a remote export, and what can be wrong with it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use ebb_tls::Keys as NbdTlsKeys;
use ebb_tls::TlsError;

/// How long requests wait for a lost server unless the operator says otherwise.
pub const RECONNECT_DEFAULT: Duration = Duration::from_secs(60);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// A host name or address, and a port.
    Tcp {
        /// Name, IPv4 or IPv6 address (without brackets).
        host: String,
        /// 1 to 65535.
        port: u16,
    },
    /// A unix stream socket.
    Unix(PathBuf),
}

/// How to encrypt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdTls {
    /// The keys.
    pub keys: NbdTlsKeys,
    /// The name the server's certificate must have; without it, the host of the address.
    pub hostname: Option<String>,
    /// Whether the server's certificate is checked. Pre-shared keys check themselves.
    pub verify: bool,
}

/// What becomes of writes that were acknowledged and not flushed when a connection was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostWrites {
    /// The server is taken to have kept them, as one does whose process alone ended and whose
    /// bytes are in files: a flush is the first request of a new connection, and makes them stable.
    #[default]
    Flush,
    /// The server may have lost them: the next flush fails and says so.
    Report,
}

/// How to open a remote export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Where the server is.
    pub address: NbdAddress,
    /// The name of the export, at most 4096 bytes; empty is the server's default.
    pub export: String,
    /// Encryption, or none.
    pub tls: Option<NbdTls>,
    /// Only read: the server may refuse writes.
    pub read_only: bool,
    /// How long requests wait for a lost server before they fail.
    pub reconnect: Duration,
    /// How long a server may owe answers and give none before its connection counts as lost; `None`:
    /// for ever. See the module for what a limit costs.
    pub silence: Option<Duration>,
    /// Whether a lost connection may have lost acknowledged writes.
    pub lost_writes: LostWrites,
    /// Where the random part of waiting times starts.
    pub jitter_seed: u64,
}

impl NbdOptions {
    /// An export in plain text with the defaults.
    #[must_use]
    pub fn new(address: NbdAddress, export: &str) -> NbdOptions {
        NbdOptions {
            address,
            export: export.to_owned(),
            tls: None,
            read_only: false,
            reconnect: RECONNECT_DEFAULT,
            silence: None,
            lost_writes: LostWrites::default(),
            jitter_seed: 1,
        }
    }
}

impl std::fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NbdAddress::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            NbdAddress::Tcp { host, port } => write!(f, "{host}:{port}"),
            NbdAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why a remote export could not become a store, or cannot be one any more. Each message says
/// what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum NbdError {
    /// Nobody answers.
    #[error("NBD server {address}: cannot connect ({source}): is it running there?")]
    Connect { address: String, source: io::Error },
    /// It stopped talking in the handshake, or took too long.
    #[error("NBD server {address}: the connection ended in the handshake ({source}): see its log")]
    Handshake { address: String, source: io::Error },
    /// What it said is not NBD, or not by the protocol.
    #[error("NBD server {address}: {what}: is there an NBD server at this address?")]
    Protocol { address: String, what: String },
    /// It is of before 2016 or so.
    #[error("NBD server {address}: {what}: a server with fixed newstyle negotiation is needed")]
    TooOld { address: String, what: &'static str },
    /// It has no such export.
    #[error(
        "NBD server {address}: has no export `{export}`{reason}: `nbdinfo --list` shows its exports"
    )]
    NoExport { address: String, export: String, reason: String },
    /// It turned us away.
    #[error("NBD server {address}: refuses export `{export}`{reason}: allow this client there")]
    Refused { address: String, export: String, reason: String },
    /// It wants TLS.
    #[error("NBD server {address}: demands TLS: write nbds:// or nbds+unix://")]
    TlsNeeded { address: String },
    /// It has no TLS.
    #[error("NBD server {address}: has no TLS{reason}: set it up there, or write nbd://")]
    NoTls { address: String, reason: String },
    /// TLS did not come about.
    #[error("NBD server {address}: {source}: check certificates, keys and names of both sides")]
    TlsFailed { address: String, source: io::Error },
    /// A file of keys is unusable.
    #[error(transparent)]
    Keys(#[from] TlsError),
    /// Neither whole sectors nor a possible size.
    #[error(
        "NBD server {address}: export `{export}` is {size} bytes: a volume needs a multiple of {unit} \
         bytes, and at least 512: resize it there"
    )]
    Size { address: String, export: String, size: u64, unit: u64 },
    /// Writes are wanted and refused.
    #[error(
        "NBD server {address}: export `{export}` is read-only: set `read_only = true` for the volume, \
         or allow writes there"
    )]
    ReadOnly { address: String, export: String },
    /// It is another export than before.
    #[error(
        "NBD server {address}: export `{export}` came back with {what}: restore it there, or \
         reload after taking the volume out and in again"
    )]
    Changed { address: String, export: String, what: String },
}
