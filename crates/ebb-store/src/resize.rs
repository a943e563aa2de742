//! Another size for a store that is in use.
//!
//! Growing is harmless to whoever uses the store, at any time. Shrinking loses data, so it is done
//! only if it is asked for by name; requests for what is cut off fail from that moment on.

use std::io;

use ebb_io::Io;

use crate::{BlockError, SECTOR, Store};

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
    /// Something of the old size is still under way, and did not end in time.
    #[error(
        "what was asked of it before is not over after {seconds} s, and it keeps its size: \
             see whether the store answers, then ask again"
    )]
    Busy {
        /// How long it was waited for.
        seconds: u64,
    },
    /// What is in memory only could not be written.
    #[error("data of the volume's cache could not be written, and it keeps its size")]
    Unsaved(#[source] BlockError),
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
    /// The size that [`Store::resize`] would give it, bytes; nothing is changed.
    ///
    /// # Errors
    /// [`ResizeError`]: it would keep the size it has.
    pub async fn judge_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match self {
            Store::File(s) => s.judge_resize(io, order).await.map(|(to, _)| to),
            Store::Memory(_) => {
                let (from, unit) = (self.size(), crate::BLOCK);
                let to = order.to.unwrap_or(from);
                judge(from, to, unit, order.shrink).map(|()| to)
            }
            #[cfg(feature = "test-store")]
            Store::Test(_) => {
                let to = order.to.unwrap_or(self.size());
                judge(self.size(), to, SECTOR, order.shrink).map(|()| to)
            }
            // They say why not.
            Store::Null(_) | Store::Nbd(_) => self.resize(io, order).await,
        }
    }

    /// Gives the store another size; the size it has then, bytes. One at a time for each store. Whoever has it
    /// shrunk sees to it that nothing is under way beyond the new end: a write that runs after the file
    /// was cut would make it longer again.
    ///
    /// # Errors
    /// [`ResizeError`]; then it has the size it had.
    pub async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        match self {
            Store::File(s) => s.resize(io, order).await,
            Store::Memory(s) => s.resize(io, order).await,
            Store::Null(_) => Err(ResizeError::Unsupported("a null store keeps its size")),
            Store::Nbd(_) => Err(ResizeError::Unsupported(
                "the server says how large an export is: resize it there, and open it anew",
            )),
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.resize(order),
        }
    }
}
