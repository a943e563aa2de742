//! A volume: geometry, request checks, an optional cache and the store. The one interface that all exports
//! use.
//!
//! # Invariants
//! - A request reaches the store only if it is within the volume and aligned to sectors; no sum in that
//!   check can overflow.
//! - The store of a read-only volume gets no request that changes data.
//! - Closing refuses new requests, waits for those in flight, and flushes: after [`Volume::close`]
//!   everything that was acknowledged is as stable as the store makes it.
//! - Requests are checked against the current size, inside the gate; a store is truncated only when all
//!   requests that were checked against a larger size have completed.
//! - Requests run to completion: an export waits for them also if the client has disconnected, so that
//!   `close` waits for every write the kernel may still do.

mod changes;
mod gate;
mod limit;
mod log_limit;
mod owed_loss;
mod registry;
mod resize;
mod stats;
mod stop;
mod tracepoints;
mod volume;
mod writer;

pub use ebb_block::{
    BLOCK, BlockError, Buf, BufResult, Capabilities, ErrorKind, Extent, FailedKind, Identity, Io,
    LatencySnapshot, Loss, Operation, Resize, ResizeError, SECTOR, StoreHealth, ZeroFlags,
};
pub use ebb_cache::{Mode, VolumeCache, VolumeCacheStats};
pub use ebb_store::{Store, StoreState};
pub use gate::{Gate, Pass};
pub use limit::{
    LimitFigures, LimitGroup, LimitStage, RateLimits, RequestCost, RequestKind, VolumeLimits,
};
pub use log_limit::LogLimit;
pub use owed_loss::ToldLosses;
pub use registry::{ServedVolume, Volumes};
pub use resize::{RESIZE_LIMIT, Resized};
pub use stats::{OperationStats, VolumeStats};
pub use stop::Stop;
pub use volume::{CachedAccess, DirectAccess, Volume, VolumeOptions};
pub use writer::{Lease, Writer, WriterConflict};
