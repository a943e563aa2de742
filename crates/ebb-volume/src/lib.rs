//! A disk: geometry, request checks, and the store behind it, with a cache before that if it has one.
//! The one API every export sees.
//!
//! # Invariants
//! - Nothing reaches a store that is not within the volume and on sector bounds; no sum on the way
//!   to that verdict can overflow.
//! - A read-only volume's store is never asked to change anything.
//! - Closing refuses new requests, waits for those in flight, and flushes: after [`Volume::close`]
//!   everything acknowledged is as stable as the store makes it.
//! - Requests are judged by the size of the moment, from inside the gate; a store is cut only when all
//!   that were judged by a larger size are over.
//! - Requests run to their end: an export whose client is gone still waits for them, so that
//!   `close` knows of every write the kernel may still do.

mod gate;
mod log_limit;
mod resize;
mod stats;
mod stop;
mod volume;
mod writer;

pub use ebb_cache::{Mode, VolumeCache, VolumeCacheStats};
pub use ebb_store::{
    BLOCK, BlockError, Buf, BufResult, Capabilities, ErrorKind, Extent, FailedKind, Identity, Io,
    Operation, Resize, ResizeError, SECTOR, Store, StoreHealth, StoreState, ZeroFlags,
};
pub use gate::{Gate, Pass};
pub use log_limit::LogLimit;
pub use resize::{RESIZE_LIMIT, Resized};
pub use stats::{OperationStats, VolumeStats};
pub use stop::Stop;
pub use volume::{AtHand, Volume, VolumeOptions};
pub use writer::{Lease, Writer, WriterConflict};
