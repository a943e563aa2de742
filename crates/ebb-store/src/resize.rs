//! Another size for a store that is in use.
//!
//! Growing is harmless to whoever uses the store, at any time. Shrinking loses data, so it is done
//! only if it is asked for by name; requests for what is cut off fail from that moment on.

use std::io;

use ebb_io::Io;

use crate::{SECTOR, Store};

/// What size a store shall have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Bytes; `None` is whatever the file or device has grown to by itself.
    pub to: Option<u64>,
    /// It may become smaller: the data beyond the new end is lost.
    pub shrink: bool,
}

/// Why a store keeps its size.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// It is another one's to say.
    #[error("{0}")]
    Unsupported(&'static str),
    /// It would become smaller.
    #[error(
        "it would shrink from {from} to {to} bytes and lose what lies beyond: \
             say so with --shrink if that is meant"
    )]
    Shrinks {
        /// Its size, bytes.
        from: u64,
        /// The size asked for, bytes.
        to: u64,
    },
    /// Not whole sectors.
    #[error("a size of {to} bytes: it must be a multiple of {unit}, and not 0")]
    Sectors {
        /// The size asked for, bytes.
        to: u64,
        /// What it must be a multiple of, bytes.
        unit: u64,
    },
    /// A block device has the size it has.
    #[error("the device has {size} bytes: resize the device itself, then ask again without a size")]
    Device {
        /// Its size, bytes.
        size: u64,
    },
    /// The system says no.
    #[error("the file cannot be resized")]
    Io(#[from] io::Error),
}

/// The verdict on a change from `from` to `to` bytes.
pub(crate) fn judge(from: u64, to: u64, unit: u64, shrink: bool) -> Result<(), ResizeError> {
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
    /// Gives the store another size; the size it has then, bytes. One at a time for each store.
    ///
    /// # Errors
    /// [`ResizeError`]; then it has the size it had.
    pub async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match self {
            Store::File(s) => s.resize(io, order).await,
            Store::Memory(s) => s.resize(order),
            Store::Null(_) => Err(ResizeError::Unsupported("a null store keeps its size")),
            Store::Nbd(_) => Err(ResizeError::Unsupported(
                "the server says how large an export is: resize it there, and open it anew",
            )),
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.resize(order),
        }
    }
}
