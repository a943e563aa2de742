//! [`StoreError`]: why the store of a volume cannot be opened.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use ebb_advice::{Advice, full_text};
use ebb_store::{EncryptedError, NbdError, OpenError, Qcow2Error, RbdError};
use ebb_volume::Stop;

use super::{FoundInstead, StoreTarget};
use crate::credentials::MissingCredential;
use crate::volume_key::KeyError;

/// Why the store of a volume could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file or block device.
    #[error(transparent)]
    File(#[from] OpenError),
    /// A qcow2 image.
    #[error(transparent)]
    Qcow2(#[from] Qcow2Error),
    /// An encrypted volume.
    #[error(transparent)]
    Encrypted(#[from] EncryptedError),
    /// The key of an encrypted volume.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A remote export.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// An image of a Ceph cluster.
    #[error(transparent)]
    Rbd(#[from] RbdError),
    /// A credential that the store needs.
    #[error(transparent)]
    Credential(#[from] MissingCredential),
    /// The delta of an overlay.
    #[error(transparent)]
    Delta(#[from] ebb_cache::DeltaError),
    /// The layers of an overlay.
    #[error(transparent)]
    Layers(#[from] ebb_cache::LayersError),
    /// The chain of volumes below an overlay.
    #[error("{message}")]
    Chain {
        /// What is wrong.
        message: String,
        /// What to do about it.
        remedy: String,
    },
    /// A base of an overlay.
    #[error("its base {base}: {source}")]
    Base {
        /// The volume.
        base: String,
        /// Why it cannot be opened.
        source: Box<StoreError>,
    },
    /// The store of a new overlay holds something.
    #[error("{place} holds no delta that can be read, and is not empty")]
    NotEmpty {
        /// The store.
        place: String,
    },
    /// The cache cannot take another volume.
    #[error(transparent)]
    Cache(#[from] ebb_cache::CacheError),
    /// Its backing device cannot take another volume.
    #[error(transparent)]
    Bdi(#[from] ebb_writeback::WritebackError),
    /// The thread that opens it could not be started.
    #[error("cannot start a thread to open the store")]
    Thread(#[source] std::io::Error),
    /// With it open, too few descriptors would be left for sockets and clients.
    #[error(
        "{store}: too few of the {limit} file descriptors would be left for clients and for the \
         connections of remote volumes"
    )]
    Descriptors {
        /// The store.
        store: String,
        /// The limit of open files.
        limit: u64,
    },
    /// Another volume has the file or the export.
    #[error("{store}: {}", same_file(other, file, *held))]
    SameFile {
        /// The store.
        store: String,
        /// The other volume.
        other: String,
        /// The file or export.
        file: StoreTarget,
        /// How the other volume has it.
        held: HeldAs,
        /// Set when the other volume has released it.
        gone: Arc<Stop>,
    },
    /// Another volume that is being withdrawn still has the file or the export.
    #[error(
        "{store}: volume {other} was removed from the same {kind}, or is to be, and not all of its \
         writes have completed"
    )]
    NotReleased {
        /// The store.
        store: String,
        /// The other volume.
        other: String,
        /// Whether it is a file or an export.
        kind: &'static str,
    },
    /// The path of a volume no longer leads to its file.
    #[error("{store}: the file of the volume is no longer at its path ({})", found.text())]
    Moved {
        /// The store.
        store: String,
        /// What was found at the path.
        found: FoundInstead,
    },
    /// The file would be created in a mount point at which nothing is mounted.
    #[error(
        "{store}: nothing is mounted at {point}, and /etc/fstab has it, so that no file is created there",
        point = point.display()
    )]
    NotMounted {
        /// The store.
        store: String,
        /// The mount point.
        point: PathBuf,
    },
    /// The file was created for this volume before, and is missing.
    #[error("{store}: the file that was created for this volume is missing")]
    Vanished {
        /// The store.
        store: String,
        /// The files in the state directory that show that it was created.
        records: String,
    },
    /// The file of a volume that the state directory keeps is missing.
    #[error("{store}: the file of the volume is missing")]
    KeptVanished {
        /// The store.
        store: String,
        /// The volume.
        name: String,
    },
    /// The state directory cannot be read.
    #[error(transparent)]
    State(#[from] ebb_config::StateError),
    /// The store is a file that the daemon trusts.
    #[error("{store}: it is {what}")]
    Protected {
        /// The store.
        store: String,
        /// The purpose of the file.
        what: String,
    },
    /// The thread that opened it ended.
    #[error("opening the store was interrupted")]
    Interrupted,
}

/// How a volume has a file or export that another one wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldAs {
    /// It is its store.
    Store,
    /// It is a layer below it, and does not change.
    Layer,
    /// It is a snapshot of it that is not stable yet.
    UnstableSnapshot,
}

/// Why a volume cannot have a file or export that another one has.
fn same_file(other: &str, file: &StoreTarget, held: HeldAs) -> String {
    match held {
        HeldAs::UnstableSnapshot => {
            format!("a snapshot of volume {other} that is not stable yet")
        }
        HeldAs::Layer => format!("it is a layer below volume {other}"),
        HeldAs::Store => format!("volume {other} is on the same {}", file.kind()),
    }
}

impl Advice for StoreError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            StoreError::File(error) => return error.remedy(),
            StoreError::Qcow2(error) => return error.remedy(),
            StoreError::Encrypted(error) => return error.remedy(),
            StoreError::Key(error) => return error.remedy(),
            StoreError::Nbd(error) => return error.remedy(),
            StoreError::Credential(error) => return error.remedy(),
            StoreError::Base { source, .. } => return source.remedy(),
            StoreError::Rbd(error) => return error.remedy(),
            StoreError::State(error) => return error.remedy(),
            StoreError::Delta(error) => return error.remedy(),
            StoreError::Layers(error) => return error.remedy(),
            // Their messages say it.
            StoreError::Cache(_) | StoreError::Bdi(_) => return None,
            StoreError::Interrupted => return None,
            StoreError::Chain { remedy, .. } => remedy.into(),
            StoreError::NotEmpty { .. } => {
                "if it was a delta, both slots of its header are gone: restore it from a backup; else \
                 name a file that does not exist yet; to serve a raw disk, remove `base`; to overwrite \
                 a device, an export or an image, clear it first: `ebbd image clear`"
                    .into()
            }
            StoreError::Thread(_) => "raise TasksMax, or the limit of processes".into(),
            StoreError::Descriptors { .. } => "raise LimitNOFILE".into(),
            StoreError::SameFile { other, held: HeldAs::UnstableSnapshot, .. } => {
                format!("flush that volume: `ebbd flush {other}`").into()
            }
            StoreError::SameFile { other, held: HeldAs::Layer, .. } => format!(
                "set `read_only = true`, since a layer must not change; to write to it, first \
                 flatten or remove {other}"
            )
            .into(),
            StoreError::SameFile { held: HeldAs::Store, .. } => {
                "give each volume its own, or set `read_only = true` for both".into()
            }
            StoreError::NotReleased { .. } => {
                "ebbd tries again; if that server or device does not respond, repair it".into()
            }
            StoreError::Moved { found, .. } => {
                format!("{}; {}", found.back(), found.otherwise()).into()
            }
            StoreError::NotMounted { point, .. } => {
                format!("mount it: `mount {}`", point.display()).into()
            }
            StoreError::Vanished { records, .. } => format!(
                "restore it, or mount its file system; for a new, empty file remove {records}, and \
                 restart ebbd if it still has the missing file open"
            )
            .into(),
            StoreError::KeptVanished { name, .. } => format!(
                "restore it, or mount its file system; to give the volume up, remove it: `ebbd \
                 volume remove {name}`"
            )
            .into(),
            StoreError::Protected { .. } => "name another file".into(),
        })
    }
}

impl StoreError {
    /// The purpose of a [`StoreError::Protected`] file.
    pub const CONFIGURATION: &str = "the configuration file";

    /// The message with its remedy and its causes, in one line.
    pub fn full_text(&self) -> String {
        full_text(self)
    }
}
