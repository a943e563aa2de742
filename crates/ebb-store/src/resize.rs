//! Resizing a store that is in use.
//!
//! Growing is safe while the store is in use. Shrinking loses data, so it needs an explicit flag,
//! and requests beyond the new end fail from that moment on.

use std::io;

use ebb_io::Io;

use crate::{BlockError, SECTOR, Store};

/// The size that a store is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Bytes; `None`: the size that the file or device has grown to.
    pub to: Option<u64>,
    /// Allow shrinking: the data beyond the new end is lost.
    pub shrink: bool,
}

/// Why a store was not resized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// This store cannot be resized from here.
    #[error("{0}")]
    Unsupported(&'static str),
    /// It would become smaller.
    #[error(
        "it would shrink from {from} to {to} bytes and lose the data beyond: \
             use --shrink if that is intended"
    )]
    Shrinks {
        /// Its size, bytes.
        from: u64,
        /// The requested size, bytes.
        to: u64,
    },
    /// Not a multiple of the sector size.
    #[error("a size of {to} bytes: it must be a multiple of {unit} and not 0")]
    Sectors {
        /// The requested size, bytes.
        to: u64,
        /// What it must be a multiple of, bytes.
        unit: u64,
    },
    /// A block device cannot be resized by the daemon.
    #[error(
        "the device has {size} bytes: resize the device itself, then resize the volume without a size"
    )]
    Device {
        /// Its size, bytes.
        size: u64,
    },
    /// Requests of the old size did not complete in time.
    #[error(
        "earlier requests did not complete within {seconds} s, so it keeps its size: \
             check whether the store responds, then try again"
    )]
    Busy {
        /// How long the resize waited for them.
        seconds: u64,
    },
    /// Data of the cache could not be written.
    #[error("data of the volume's cache could not be written, so it keeps its size")]
    Unsaved(#[source] BlockError),
    /// A system error.
    #[error("the file cannot be resized")]
    Io(#[from] io::Error),
}

/// Checks a change from `from` to `to` bytes.
pub(crate) fn check_size_change(
    from: u64,
    to: u64,
    unit: u64,
    shrink: bool,
) -> Result<(), ResizeError> {
    let unit = unit.max(SECTOR);
    if to == 0 || !to.is_multiple_of(unit) {
        return Err(ResizeError::Sectors { to, unit });
    }
    if to < from && !shrink {
        return Err(ResizeError::Shrinks { from, to });
    }
    Ok(())
}

impl Store {
    /// The size in bytes that [`Store::resize`] would result in; nothing is changed.
    ///
    /// # Errors
    /// [`ResizeError`]: it would not be resized.
    pub async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match self {
            Store::File(s) => s.check_resize(io, order).await.map(|(to, _)| to),
            Store::Memory(_) => {
                let (from, unit) = (self.size(), crate::BLOCK);
                let to = order.to.unwrap_or(from);
                check_size_change(from, to, unit, order.shrink).map(|()| to)
            }
            #[cfg(feature = "test-store")]
            Store::Test(_) => {
                let to = order.to.unwrap_or(self.size());
                check_size_change(self.size(), to, SECTOR, order.shrink).map(|()| to)
            }
            // `resize` fails with the reason.
            Store::Null(_) | Store::Nbd(_) => self.resize(io, order).await,
        }
    }

    /// Resizes the store and returns its new size in bytes. One call at a time for each store.
    /// Before shrinking, the caller waits until no write beyond the new end is in flight: one that
    /// runs after the file was truncated would extend it again.
    ///
    /// # Errors
    /// [`ResizeError`]; its size is unchanged then.
    pub async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match self {
            Store::File(s) => s.resize(io, order).await,
            Store::Memory(s) => s.resize(io, order).await,
            Store::Null(_) => Err(ResizeError::Unsupported("a null store keeps its size")),
            Store::Nbd(_) => Err(ResizeError::Unsupported(
                "the server determines the size of an export: resize it there, then reopen the volume",
            )),
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.resize(order),
        }
    }
}
