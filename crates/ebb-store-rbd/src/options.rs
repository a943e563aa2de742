//! How an image is opened, and why that fails.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ebb_advice::Advice;

/// How long a request waits for the cluster by default.
pub const RBD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// The most cluster handles for the images of one cluster.
pub const RBD_CONNECTIONS_MOST: u32 = 64;

/// The image of a volume, and how its cluster is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty: that of the pool itself.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// A snapshot of the image, which is read-only.
    pub snapshot: Option<String>,
    /// `ceph.conf`; `None`: where librados looks for it.
    pub conf: Option<PathBuf>,
    /// The name of the user, without `client.`; `None`: `admin`.
    pub id: Option<String>,
    /// The file with the user's key; `None`: where `ceph.conf` says.
    pub keyring: Option<PathBuf>,
    /// How librbd encrypts the image; `None`: it does not.
    pub encryption: Option<RbdEncryption>,
    /// How many cluster handles the images of this cluster and user share: 1 to [`RBD_CONNECTIONS_MOST`].
    pub connections: u32,
    /// How long a request waits for the cluster before it fails; zero: without limit.
    pub timeout: Duration,
    /// Open the image read-only, without its lock.
    pub read_only: bool,
    /// The directory in which the addresses of lock owners are recorded, so that the lock of a killed daemon can be
    /// broken by the next one.
    pub records: Option<PathBuf>,
}

/// The encryption of an image by librbd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdEncryption {
    /// Its format.
    pub format: RbdEncryptionFormat,
    /// The file with the passphrase.
    pub passphrase: PathBuf,
}

/// The format of an encrypted image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RbdEncryptionFormat {
    /// LUKS1.
    Luks1,
    /// LUKS2.
    Luks2,
}

impl fmt::Display for RbdEncryptionFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RbdEncryptionFormat::Luks1 => "luks1",
            RbdEncryptionFormat::Luks2 => "luks2",
        })
    }
}

impl RbdOptions {
    /// An image of a pool, with defaults for everything else.
    pub fn new(pool: &str, image: &str) -> RbdOptions {
        RbdOptions {
            pool: pool.to_owned(),
            namespace: String::new(),
            image: image.to_owned(),
            snapshot: None,
            conf: None,
            id: None,
            keyring: None,
            encryption: None,
            connections: 1,
            timeout: RBD_TIMEOUT_DEFAULT,
            read_only: false,
            records: None,
        }
    }

    /// The image as `rbd` writes it: `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`.
    pub fn image_spec(&self) -> String {
        let mut text = self.pool.clone();
        for part in [&self.namespace, &self.image] {
            if !part.is_empty() {
                text.push('/');
                text.push_str(part);
            }
        }
        if let Some(snapshot) = &self.snapshot {
            text.push('@');
            text.push_str(snapshot);
        }
        text
    }

    /// Whether the image is written.
    pub(crate) fn is_written(&self) -> bool {
        !self.read_only && self.snapshot.is_none()
    }
}

/// A call of librbd or librados that failed.
#[derive(Debug)]
pub struct RbdCall {
    /// The function.
    pub call: &'static str,
    /// The system's error.
    pub source: io::Error,
}

impl fmt::Display for RbdCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.source)
    }
}

impl std::error::Error for RbdCall {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl RbdCall {
    /// The result of a call: its value, or its error.
    pub(crate) fn check(call: &'static str, result: i32) -> Result<i32, RbdCall> {
        if result >= 0 {
            return Ok(result);
        }
        Err(RbdCall::failed(call, result.saturating_neg()))
    }

    pub(crate) fn failed(call: &'static str, code: i32) -> RbdCall {
        RbdCall { call, source: io::Error::from_raw_os_error(code) }
    }

    pub(crate) fn code(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(libc::EIO)
    }
}

/// Why an image could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RbdError {
    /// librbd is not installed, or cannot be used.
    #[error("librbd cannot be used ({what})")]
    Library {
        /// What the loader said.
        what: String,
    },
    /// A name or path that librbd cannot take.
    #[error("{what} has a zero byte in it")]
    Name {
        /// The name.
        what: &'static str,
    },
    /// The configuration of the client.
    #[error("{image}: the configuration of the Ceph client cannot be used")]
    Configuration {
        /// The image.
        image: String,
        /// The call.
        source: RbdCall,
    },
    /// The cluster cannot be reached.
    #[error("{image}: its cluster cannot be reached")]
    Connect {
        /// The image.
        image: String,
        /// The call.
        source: RbdCall,
    },
    /// There is no such pool, image or snapshot.
    #[error("{image}: there is no such {what}")]
    Missing {
        /// The image.
        image: String,
        /// What is missing.
        what: &'static str,
    },
    /// The user may not use the image.
    #[error("{image}: the user may not use it")]
    Denied {
        /// The image.
        image: String,
    },
    /// A client has the lock.
    #[error("{image}: the client at {owner} has its lock")]
    Locked {
        /// The image.
        image: String,
        /// The address of the owner.
        owner: String,
    },
    /// Another daemon of this host has the image.
    #[error("{image}: another process of this host has it open ({record} is locked)")]
    InUse {
        /// The image.
        image: String,
        /// The record.
        record: String,
    },
    /// The image has no exclusive lock.
    #[error(
        "{image}: it has no exclusive lock, so that another client could write to it at the same time"
    )]
    NoLockFeature {
        /// The image.
        image: String,
    },
    /// The size is none of a disk.
    #[error("{image}: its size of {size} bytes is 0 or no multiple of 512")]
    Size {
        /// The image.
        image: String,
        /// Its size.
        size: u64,
    },
    /// librbd is too old.
    #[error("{image}: librbd {version} cannot open encrypted images")]
    NoEncryption {
        /// The image.
        image: String,
        /// The version of librbd's interface.
        version: String,
    },
    /// The passphrase cannot be read.
    #[error("{image}: its passphrase cannot be read from {path}")]
    Passphrase {
        /// The image.
        image: String,
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The passphrase is another one.
    #[error("{image}: the passphrase in {path} does not open the image")]
    WrongPassphrase {
        /// The image.
        image: String,
        /// The file.
        path: String,
    },
    /// It is not encrypted, or in another way.
    #[error("{image}: it is not encrypted with {format}")]
    NotEncrypted {
        /// The image.
        image: String,
        /// The format in the options.
        format: RbdEncryptionFormat,
        /// The call.
        source: RbdCall,
    },
    /// The record of lock owners.
    #[error("{image}: the record of its lock, {record}, cannot be used")]
    Record {
        /// The image.
        image: String,
        /// The record.
        record: String,
        /// The cause.
        source: io::Error,
    },
    /// The cluster does not answer.
    #[error("{image}: the cluster did not answer within {seconds} s")]
    Silent {
        /// The image.
        image: String,
        /// The time.
        seconds: u64,
    },
    /// Any other failure.
    #[error("{image}: it cannot be opened")]
    Open {
        /// The image.
        image: String,
        /// The call.
        source: RbdCall,
    },
    /// The thread that opens it could not be started.
    #[error("cannot start a thread to open an image")]
    Thread(#[source] io::Error),
}

impl Advice for RbdError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            RbdError::Library { .. } => "install it (Debian's package is librbd1), then try again",
            RbdError::Name { .. } => "remove it",
            RbdError::Configuration { .. } => "check `conf`, `keyring` and `id`",
            RbdError::Connect { .. } => {
                "check `mon_host` in ceph.conf, the user's key and the network (`ceph --conf ... --id \
                 ... status`)"
            }
            RbdError::Missing { .. } => "create it, or correct the name",
            RbdError::Denied { .. } => "give it the capabilities `profile rbd` for the pool",
            RbdError::Locked { .. } => {
                "stop that client, or open the image read-only; if it is on a host that has failed, \
                 `rbd lock ls` and `rbd lock rm` remove its lock"
            }
            RbdError::InUse { .. } => "stop that one, or give each its own image",
            RbdError::NoLockFeature { image } => {
                let remedy = format!(
                    "enable it with `rbd feature enable {image} exclusive-lock`, or open it read-only"
                );
                return Some(remedy.into());
            }
            RbdError::Size { .. } => "resize it with `rbd resize`",
            RbdError::NoEncryption { .. } => {
                "install librbd of Ceph 16 or later (Debian's package is librbd1), then restart ebbd"
            }
            RbdError::Passphrase { .. } => "correct the file or `encryption-passphrase-file`",
            RbdError::WrongPassphrase { .. } => {
                "write the right one to the file, or correct `encryption-passphrase-file`"
            }
            RbdError::NotEncrypted { .. } => {
                "correct `encryption-format`; an image that is not encrypted is named without it, and \
                 made so by `rbd encryption format`, which destroys what it holds"
            }
            RbdError::Record { .. } => "check the state directory",
            RbdError::Silent { .. } => {
                "check `ceph status`; it is tried again as other volumes are"
            }
            RbdError::Open { .. } => "check `ceph status` and the capabilities of the user",
            RbdError::Thread(_) => "raise TasksMax, or the limit of processes",
        };
        Some(remedy.into())
    }
}
