//! How to connect to a remote export, and what can fail.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ebb_advice::Advice;
pub use ebb_tls::Keys as NbdTlsKeys;
use ebb_tls::TlsError;

/// How long requests wait for a lost server by default.
pub const RECONNECT_DEFAULT: Duration = Duration::from_secs(60);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// A host name or address, and a port.
    Tcp {
        /// Name, IPv4 or IPv6 address (without brackets; a link-local one may have a zone,
        /// `fe80::1%eth0`).
        host: String,
        /// 1 to 65535.
        port: u16,
    },
    /// A unix stream socket.
    Unix(PathBuf),
}

/// TLS settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdTls {
    /// The keys.
    pub keys: NbdTlsKeys,
    /// The name that the server's certificate must have; by default the host of the address.
    pub hostname: Option<String>,
    /// Whether the server's certificate is verified. Pre-shared keys verify the server themselves.
    pub verify: bool,
}

/// How to treat writes that were acknowledged and not flushed when a connection was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostWrites {
    /// Assume that the server kept them, as one does whose process alone ended and whose data is in
    /// files: a flush is the first request of a new connection, and makes them stable.
    #[default]
    Flush,
    /// Assume that the server may have lost them: the next flush fails with a message. The store uses one connection
    /// for all workers: with several, a flush on one could succeed before the loss of another is detected.
    Report,
}

/// How to open a remote export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Where the server is.
    pub address: NbdAddress,
    /// The name of the export, at most 4096 bytes; empty selects the server's default.
    pub export: String,
    /// TLS, if it is used.
    pub tls: Option<NbdTls>,
    /// Only read: the server may refuse writes.
    pub read_only: bool,
    /// How long requests wait for a lost server before they fail.
    pub reconnect: Duration,
    /// How long a server may leave requests in flight without a reply before its connection counts
    /// as lost; `None`: without limit. See the module for the risk of a limit.
    pub silence: Option<Duration>,
    /// How to treat acknowledged writes when a connection is lost.
    pub lost_writes: LostWrites,
    /// The seed of the random part of waiting times.
    pub jitter_seed: u64,
}

impl NbdOptions {
    /// An export without TLS and with the defaults.
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

/// Why a remote export could not be opened, or can no longer be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum NbdError {
    /// The connection could not be established.
    #[error("NBD server {address}: cannot connect ({source})")]
    Connect { address: String, source: io::Error },
    /// The server closed the connection during the handshake, or took too long.
    #[error("NBD server {address}: the handshake failed ({})", ending(source))]
    Handshake { address: String, source: io::Error },
    /// The server does not follow the NBD protocol.
    #[error("NBD server {address}: {what}")]
    Protocol { address: String, what: String },
    /// The server does not support fixed newstyle negotiation (before 2016).
    #[error("NBD server {address}: {what}")]
    TooOld { address: String, what: &'static str },
    /// The server has no such export.
    #[error("NBD server {address}: has no export `{export}`{reason}")]
    NoExport { address: String, export: String, reason: String },
    /// The server refused the export.
    #[error("NBD server {address}: refuses export `{export}`{reason}")]
    Refused { address: String, export: String, reason: String },
    /// The server requires TLS.
    #[error("NBD server {address}: requires TLS")]
    TlsNeeded { address: String },
    /// The server does not support TLS.
    #[error("NBD server {address}: has no TLS{reason}")]
    NoTls { address: String, reason: String },
    /// The TLS handshake failed.
    #[error("NBD server {address}: {source}")]
    TlsFailed { address: String, source: io::Error },
    /// A key file cannot be used.
    #[error(transparent)]
    Keys(#[from] TlsError),
    /// Not a multiple of the sector or block size, or not a possible size.
    #[error(
        "NBD server {address}: export `{export}` is {size} bytes: a volume needs a multiple of {unit} \
         bytes, and at least 512"
    )]
    Size { address: String, export: String, size: u64, unit: u64 },
    /// The volume is writable and the export is not.
    #[error("NBD server {address}: export `{export}` is read-only")]
    ReadOnly { address: String, export: String },
    /// The export has changed since it was opened.
    #[error("NBD server {address}: export `{export}` came back with {what}")]
    Changed { address: String, export: String, what: String, remedy: &'static str },
    /// A connection was ended since the server did not reply.
    #[error("the server did not reply for {seconds} s, the time set with `silence`")]
    Silent { seconds: u64 },
}

impl Advice for NbdError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(
            match self {
                NbdError::Connect { source, .. } => connect_remedy(source),
                NbdError::Handshake { .. } => {
                    "see the server's log, and whether it is an NBD server"
                }
                NbdError::Protocol { .. } => "is there an NBD server at this address?",
                NbdError::TooOld { .. } => "a server with fixed newstyle negotiation is needed",
                NbdError::NoExport { .. } => "`nbdinfo --list` shows its exports",
                NbdError::Refused { .. } => "allow this client there",
                NbdError::TlsNeeded { .. } => "write nbds:// or nbds+unix://",
                NbdError::NoTls { .. } => "set it up there, or write nbd://",
                NbdError::TlsFailed { .. } => "check certificates, keys and names of both sides",
                NbdError::Keys(error) => return error.remedy(),
                NbdError::Size { .. } => "resize it there",
                NbdError::ReadOnly { .. } => {
                    "set `read_only = true` for the volume, or allow writes there"
                }
                NbdError::Changed { remedy, .. } => remedy,
                NbdError::Silent { .. } => {
                    "check whether it hangs, or set a larger `silence` in the address of the store"
                }
            }
            .into(),
        )
    }
}

/// How a handshake ended.
fn ending(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => "the server closed the connection".to_owned(),
        _ => source.to_string(),
    }
}

/// The remedy where no connection could be established.
fn connect_remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if source.raw_os_error() == Some(libc::ENOSYS) => {
            "the process that connects for the daemon has ended: restart the daemon"
        }
        io::ErrorKind::PermissionDenied => {
            "if `connect_to` is set, add the server there, or the socket to `open_paths`"
        }
        // Of the kernel it has a number.
        io::ErrorKind::AddrNotAvailable if source.raw_os_error().is_none() => {
            "correct the name of the host, or see whether the name service of this host responds"
        }
        _ => "is it running there?",
    }
}
