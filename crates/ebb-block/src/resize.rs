//! Resizing a store that is in use.
//!
//! Growing is safe while the store is in use. Shrinking loses data, so it needs an explicit flag,
//! and requests beyond the new end fail from that moment on.

use std::borrow::Cow;
use std::io;

use ebb_advice::Advice;

use crate::SECTOR;
use crate::error::BlockError;

/// The size that a store is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Bytes; `None`: the size that the file, device or export has now.
    pub to: Option<u64>,
    /// Allow shrinking: the data beyond the new end is lost.
    pub shrink: bool,
}

/// Why a store was not resized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// This store cannot be resized from here.
    #[error("{why}")]
    Unsupported {
        /// The reason.
        why: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// It would become smaller.
    #[error("it would shrink from {from} to {to} bytes and lose the data beyond")]
    Shrinks {
        /// Its size, bytes.
        from: u64,
        /// The requested size, bytes.
        to: u64,
    },
    /// Not a multiple of the sector size.
    #[error("a size of {to} bytes is 0 or not a multiple of {unit}")]
    Sectors {
        /// The requested size, bytes.
        to: u64,
        /// What it must be a multiple of, bytes.
        unit: u64,
    },
    /// A block device cannot be resized by the daemon.
    #[error("the device has {size} bytes")]
    Device {
        /// Its size, bytes.
        size: u64,
    },
    /// A remote export cannot be resized by the daemon.
    #[error("the server's export has {size} bytes")]
    Server {
        /// Its size, bytes.
        size: u64,
    },
    /// The server did not return the size of its export, or the export cannot be used with it.
    #[error("the size of the server's export is not known, so the volume keeps its size")]
    Remote(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Requests of the old size did not complete in time.
    #[error("earlier requests did not complete within {seconds} s, so it keeps its size")]
    Busy {
        /// How long the resize waited for them.
        seconds: u64,
    },
    /// Data of the cache could not be written.
    #[error("data of the volume's cache could not be written, so it keeps its size")]
    Unsaved(#[source] BlockError),
    /// The store of an overlay is too small, and cannot grow from here.
    #[error("its store has {size} bytes, and an overlay of that size needs {needed}")]
    TooSmall {
        /// Its size, bytes.
        size: u64,
        /// What the header, the block map and the data need, bytes.
        needed: u64,
    },
    /// The block map of an overlay has no room for the size.
    #[error("its block map has room for a volume of {most} bytes")]
    Room {
        /// The largest size, bytes.
        most: u64,
    },
    /// The header or the block map of an overlay could not be written.
    #[error(
        "the header or the block map of the overlay could not be written, so it keeps its size"
    )]
    Metadata(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A system error.
    #[error("the file cannot be resized")]
    Io(#[from] io::Error),
}

impl Advice for ResizeError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            ResizeError::Unsupported { remedy, .. } => remedy,
            ResizeError::Shrinks { .. } => "use --shrink if that is intended",
            ResizeError::Sectors { unit, .. } => {
                return Some(format!("choose a multiple of {unit} above 0").into());
            }
            ResizeError::Device { .. } => {
                "resize the device itself, then resize the volume without a size"
            }
            ResizeError::Server { .. } => {
                "resize it on the server, then resize the volume without a size"
            }
            ResizeError::Remote(_) => {
                "its requests go on with the former size: see the cause, then try again"
            }
            ResizeError::Busy { .. } => "check whether the store responds, then try again",
            ResizeError::Unsaved(_) | ResizeError::Metadata(_) => {
                "writes to the store fail: check the store, then try again"
            }
            ResizeError::TooSmall { .. } => "enlarge the store, then try again",
            ResizeError::Room { .. } => {
                "make a new overlay of the size that you need, and copy the disk"
            }
            ResizeError::Io(error) => for_the_file(error),
        };
        Some(remedy.into())
    }
}

/// The remedy when the system cannot resize the file.
fn for_the_file(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::FileTooLarge => {
            "its file system, or LimitFSIZE= of the service, allows no file of this size: choose a \
             smaller size, or move the image"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on its file system, then try again"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "its file system, or an attribute of the file (lsattr), makes it read-only: change that, \
             then try again"
        }
        _ => "check its file system, then try again",
    }
}

/// Checks a change from `from` to `to` bytes on a store whose size is a multiple of `unit`.
///
/// # Errors
/// [`ResizeError::Sectors`], and [`ResizeError::Shrinks`] unless `shrink` allows that.
pub fn check_size_change(from: u64, to: u64, unit: u64, shrink: bool) -> Result<(), ResizeError> {
    let unit = unit.max(SECTOR);
    if to == 0 || !to.is_multiple_of(unit) {
        return Err(ResizeError::Sectors { to, unit });
    }
    if to < from && !shrink {
        return Err(ResizeError::Shrinks { from, to });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_about_a_size_stands_without_its_remedy() {
        for to in [0, 1000] {
            let error = check_size_change(4096, to, 1, true).expect_err("it is no size");
            assert_eq!(
                error.to_string(),
                format!("a size of {to} bytes is 0 or not a multiple of 512")
            );
        }
    }
}
