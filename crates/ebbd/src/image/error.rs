//! [`ImageError`]: why `ebbd image` has failed.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use ebb_advice::Advice;
use ebb_block::BlockError;
use ebb_cache::DeltaError;
use ebb_store::{EncryptedError, NbdError, OpenError, Qcow2Error};

use crate::delta_file::header_at;
use crate::stores::StoreError;
use crate::volume_key::KeyError;

/// The remedies for a file that is in use.
const CLOSE: &str = "stop the daemon, or remove the volume (`ebbd volume remove`, or from the configuration, and reload)";
const CLOSE_OR_SNAPSHOT: &str = "stop the daemon, or remove the volume (`ebbd volume remove`, or from the configuration, and \
    reload); an overlay can be copied while it is in use, from a snapshot (`ebbd volume snapshot`) that the daemon serves as \
    `nbd+unix:///VOLUME@NAME?socket=PATH`";

/// Why `ebbd image` has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum ImageError {
    /// A store cannot be opened.
    #[error(transparent)]
    Store(StoreError),
    /// Its lock is held.
    #[error("{place}: a running daemon or another program has it open (its lock is held)")]
    InUse { place: String, remedy: &'static str },
    /// There is no such file.
    #[error("{path}: no such file")]
    Missing { path: PathBuf },
    /// The folder of a new file is not there.
    #[error("{path}: its folder does not exist")]
    NoFolder { path: PathBuf },
    /// The user may not open it.
    #[error("{path}: permission denied")]
    Denied { path: PathBuf },
    /// A destination on a server that permits no writes.
    #[error("NBD server {address}: export `{export}` is read-only")]
    ReadOnlyExport { address: String, export: String },
    /// A delta cannot be used.
    #[error(transparent)]
    Delta(DeltaError),
    /// What is below a delta was not given.
    #[error("{place} is a delta that was made above {base}")]
    NoBase { place: String, base: String },
    /// A delta of the chain is not in the folder.
    #[error("{place} is above the delta {base}, which is not found in its folder ({found})")]
    NoLayer { place: String, base: String, found: &'static str },
    /// A base was given that the chain does not need.
    #[error("{place} is not below {top}")]
    OtherLayer { place: String, top: String },
    /// More deltas above each other than a daemon serves.
    #[error("more than {most} deltas are above each other")]
    TooDeep { most: usize },
    /// Nothing can be checked.
    #[error("{place} is neither a delta nor a qcow2 image, and a raw disk has nothing to check")]
    NothingToCheck { place: String },
    /// An image that is named as a raw file.
    #[error("{place} looks like a qcow2 image")]
    LooksLikeQcow2 { place: String, path: String, or_raw: &'static str },
    /// An image of a format that ebbd does not read, named as a raw file.
    #[error("{place} looks like a {format} image")]
    OtherFormat { place: String, format: &'static str, remedy: &'static str, or_raw: &'static str },
    /// A base that is not directly below the delta that is checked.
    #[error("{base} is not directly below {place}")]
    NotDirectlyBelow { place: String, base: String, expected: String },
    /// A destination that is not to be overwritten.
    #[error("{place} {holds}")]
    Exists { place: String, holds: String },
    /// The destination is a part of the source.
    #[error("{place} is the source of the copy, or below it")]
    SameFile { place: String },
    /// A destination that is smaller than the source.
    #[error("{place} has {size} bytes and the source has {wanted}")]
    TooSmall { place: String, size: u64, wanted: u64 },
    /// A store that is not to be cleared.
    #[error("{place} holds something, and clearing it destroys that")]
    Used { place: String },
    /// A kind of store that is not cleared.
    #[error("{place} is not cleared")]
    NotCleared { place: String },
    /// A kind of store that nothing is copied to.
    #[error("{place} is no destination")]
    NoDestination { place: String },
    /// A store that is no plain file.
    #[error("{place} is no raw file")]
    NoFile { place: String },
    /// The file system has no reflinks.
    #[error("{place}: the file system cannot share blocks between these two files ({reason})")]
    NoReflink { place: String, reason: io::Error },
    /// A copy has failed.
    #[error("{place}: {source}")]
    Copy { place: String, source: BlockError },
    /// A part of a block map is damaged, and with it what the disk holds there.
    #[error(
        "{place}: page {page} of the block map is damaged, so that the content of the disk from byte \
         {first} on is not known"
    )]
    LostPage { place: String, page: u32, first: u64 },
    /// A signal has ended it.
    #[error("interrupted: the copy is not complete{0}")]
    Interrupted(&'static str),
    /// The output.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// A system error.
    #[error("{path}: cannot {action}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    /// The thread that carries out requests.
    #[error("cannot start a thread with io_uring")]
    Worker(#[source] io::Error),
    /// That thread has ended.
    #[error("the worker has ended")]
    Ended,
}

impl Advice for ImageError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            ImageError::Store(error) => return error.remedy(),
            ImageError::Delta(error) => return error.remedy(),
            ImageError::Copy { .. }
            | ImageError::Interrupted(_)
            | ImageError::Output(_)
            | ImageError::Io { .. } => return None,
            ImageError::NoBase { place, .. } => {
                let remedy = format!(
                    "give that with `--base STORE`, or `--raw` if {place} is a raw disk that only \
                     looks like a delta"
                );
                return Some(remedy.into());
            }
            ImageError::LooksLikeQcow2 { path, or_raw, .. } => {
                return Some(format!("write `qcow2:{path}`{or_raw}").into());
            }
            ImageError::OtherFormat { remedy, or_raw, .. } => {
                return Some(format!("{remedy}{or_raw}").into());
            }
            ImageError::NotDirectlyBelow { expected, .. } => {
                return Some(format!("`--base` is for {expected}").into());
            }
            ImageError::InUse { remedy, .. } => remedy,
            ImageError::Missing { .. } => "correct the path",
            ImageError::NoFolder { .. } => "make it, or correct the path",
            ImageError::Denied { .. } => "run this as a user that may access it",
            ImageError::ReadOnlyExport { .. } => "allow writes there, or name another destination",
            ImageError::NoLayer { .. } => "put it there, or give it with `--base file:PATH`",
            ImageError::OtherLayer { .. } => "leave out this `--base`",
            ImageError::TooDeep { .. } => "the chain goes round, or is damaged",
            ImageError::NothingToCheck { .. } => {
                "for a qcow2 image write `qcow2:` and its path; if it was a delta, both slots of its \
                 header are gone: restore it from a backup"
            }
            ImageError::Exists { .. } => "name another destination, or overwrite it with `--force`",
            ImageError::SameFile { .. } => "name another destination",
            ImageError::TooSmall { .. } => "enlarge it first",
            ImageError::Used { .. } => "`--force` does it all the same",
            ImageError::NotCleared { .. } => {
                "name a block device, an export or an image; remove a file instead"
            }
            ImageError::NoDestination { .. } => {
                "name `file:` and a path, an export, such as nbd://server/disk, or an image of a Ceph \
                 cluster, such as rbd:pool/image"
            }
            ImageError::NoFile { .. } => {
                "`file:` and a path are needed; `ebbd image import` copies any store"
            }
            ImageError::NoReflink { .. } => {
                "copy with `ebbd image import`, which keeps holes, or add a volume with `base`, which \
                 needs no copy; XFS, Btrfs and bcachefs have reflinks within one file system"
            }
            ImageError::LostPage { .. } => {
                "look at it with `ebbd image check`, and restore the file from a backup"
            }
            ImageError::Worker(_) => "`ebbd doctor` says what this host lacks",
            ImageError::Ended => "this is a mistake of ebbd; report it",
        };
        Some(remedy.into())
    }
}

impl From<StoreError> for ImageError {
    fn from(error: StoreError) -> ImageError {
        match error {
            StoreError::File(error) => error.into(),
            StoreError::Qcow2(error) => error.into(),
            StoreError::Delta(error) => error.into(),
            StoreError::Nbd(NbdError::ReadOnly { address, export }) => {
                ImageError::ReadOnlyExport { address, export }
            }
            error => ImageError::Store(error),
        }
    }
}

impl From<OpenError> for ImageError {
    fn from(error: OpenError) -> ImageError {
        match error {
            OpenError::InUse { path } => ImageError::in_use(&path),
            OpenError::Missing { path, .. } => ImageError::Missing { path },
            OpenError::Denied { path, .. } => ImageError::Denied { path },
            error => ImageError::Store(error.into()),
        }
    }
}

impl From<Qcow2Error> for ImageError {
    fn from(error: Qcow2Error) -> ImageError {
        match error {
            Qcow2Error::File(error) => error.into(),
            Qcow2Error::Missing { path } => ImageError::Missing { path },
            error => ImageError::Store(error.into()),
        }
    }
}

impl From<EncryptedError> for ImageError {
    fn from(error: EncryptedError) -> ImageError {
        match error {
            EncryptedError::File(error) => error.into(),
            error => ImageError::Store(error.into()),
        }
    }
}

impl From<KeyError> for ImageError {
    fn from(error: KeyError) -> ImageError {
        ImageError::Store(error.into())
    }
}

impl From<DeltaError> for ImageError {
    fn from(error: DeltaError) -> ImageError {
        ImageError::Delta(error)
    }
}

impl ImageError {
    /// A file whose lock is held.
    pub(super) fn in_use(path: &std::path::Path) -> ImageError {
        let is_delta = matches!(header_at(path, false), Ok(Some(_)));
        let remedy = if is_delta { CLOSE_OR_SNAPSHOT } else { CLOSE };
        ImageError::InUse { place: path.display().to_string(), remedy }
    }

    /// As one of a command for the keys of a file, with a remedy that goes on without the file.
    pub(super) fn of_keys(self, remedy: &'static str) -> ImageError {
        match self {
            ImageError::InUse { place, .. } => ImageError::InUse { place, remedy },
            error => error,
        }
    }

    /// A failed request to a store.
    pub(super) fn of(place: String) -> impl FnOnce(BlockError) -> ImageError {
        move |source| ImageError::Copy { place, source }
    }

    /// A failed system call.
    pub(super) fn io(
        path: &std::path::Path,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> ImageError {
        let path = path.to_path_buf();
        move |source| ImageError::Io { path, action, source }
    }
}
