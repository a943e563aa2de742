//! [`EncryptedError`]: why an encrypted volume cannot be opened or changed.

use std::borrow::Cow;
use std::path::PathBuf;

use ebb_advice::Advice;
use ebb_luks::{LuksError, NEW_SECTOR};

use crate::open_options::OpenError;

/// Why an encrypted volume could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum EncryptedError {
    /// Its file.
    #[error(transparent)]
    File(#[from] OpenError),
    /// Its header or its key.
    #[error("{path}: {source}")]
    Luks { path: PathBuf, source: LuksError },
    /// The file holds something, so that no header is made in it. Empty is a file without data, or
    /// with zeroes in its first 16 MiB and no data behind them; of a block device the first 16 MiB
    /// count.
    #[error("{path}: it holds something that is no LUKS volume")]
    NotBlank { path: PathBuf },
    /// Another use of its key slots does not end.
    #[error("{path}: another change of its key slots has not ended")]
    KeysInUse { path: PathBuf },
    /// The volume is smaller than the configured size.
    #[error("{path}: the volume in it is {size} bytes, but the configuration says {wanted}")]
    OtherSize { path: PathBuf, size: u64, wanted: u64 },
    /// The file holds nothing, and is too small for the header and the volume.
    #[error(
        "{path}: it holds no data and has {size} bytes, but a new encrypted volume of {wanted} bytes needs {needed}"
    )]
    TooSmall { path: PathBuf, size: u64, wanted: u64, needed: u64, is_device: bool },
    /// The new volume would not have whole sectors.
    #[error(
        "{path}: the size of a new encrypted volume is a multiple of {NEW_SECTOR} bytes, and {wanted} is not"
    )]
    PartSector { path: PathBuf, wanted: u64 },
}

impl Advice for EncryptedError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            EncryptedError::File(error) => return error.remedy(),
            EncryptedError::Luks { source, .. } => return source.remedy(),
            EncryptedError::NotBlank { .. } => {
                "correct the path; to encrypt what it holds, serve it, make a new encrypted volume, \
                 and copy the data; if its creation was interrupted, remove it"
                    .into()
            }
            EncryptedError::KeysInUse { .. } => {
                "try again when it has; if its disk does not respond, repair it".into()
            }
            EncryptedError::OtherSize { .. } => {
                "correct `size`, or remove it and `create` to use the volume as it is, and then \
                 resize it with `ebbd volume resize`"
                    .into()
            }
            EncryptedError::TooSmall { is_device: true, .. } => {
                "name a larger device, or correct `size`".into()
            }
            EncryptedError::TooSmall { .. } => {
                "remove the file, or grow it with `truncate -s`".into()
            }
            EncryptedError::PartSector { wanted, .. } => {
                format!("the next multiple is {}", whole_sectors(*wanted)).into()
            }
        })
    }
}

/// The least size of whole sectors that is not below `size`.
pub(crate) fn whole_sectors(size: u64) -> u64 {
    size.checked_next_multiple_of(u64::from(NEW_SECTOR)).unwrap_or(u64::MAX)
}
