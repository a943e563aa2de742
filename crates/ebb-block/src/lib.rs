//! The contract between a volume and its store: what a store implements, and what its callers may rely on.
//!
//! A *store* holds the data of a volume: a file, a block device, memory, the export of a server. It implements
//! [`BlockStore`]. Callers use it through [`Tracked`], which checks ranges, counts requests and remembers failed
//! syncs, so that no store has to. docs/guides/adding-a-store.md shows how to write one.
//!
//! # Terms
//! - **sector**: [`SECTOR`] bytes. Offsets, lengths and sizes are bytes, and multiples of it.
//! - **block**: the smallest unit that a store can transfer, [`Capabilities::alignment`] bytes. A store whose blocks
//!   are larger than a sector still accepts requests for any sectors (`unaligned.rs` does that for it).
//! - **stable**: not lost if the machine loses its power.
//!
//! # Invariants
//! - An operation is carried out whole, or fails. A short read or write is continued, or reported as
//!   [`ErrorKind::Short`]; never success.
//! - A flush completes when every write acknowledged before it was submitted is stable. A write with FUA completes
//!   when that write is stable.
//! - After a flush or a write with FUA has failed, other than for lack of space, no flush succeeds while
//!   acknowledged data may be lost (`flush_state.rs`).
//! - Buffers are owned by the operation and returned with the result. A request whose future is dropped may still be
//!   carried out, at any time; its buffer is freed when that is over.
//! - Requests of one store run concurrently and complete in any order. Two that overlap in time and in a sector leave
//!   the data of either in each sector.
//! - No future is boxed for a request on the usual path, and none has to be `Send`: a request stays on its worker.

mod blocks;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod flush_state;
mod identity;
mod latency;
mod outage_counters;
mod resize;
mod store;
pub mod tracked;
mod tracking;
pub mod unaligned;
mod zeroes;

pub use blocks::BlockLock;
pub use ebb_io::{Buf, ForeignVectors, Io};
pub use error::{BlockError, ErrorKind, FailedOperation, Operation};
pub use flush_state::{LaterFlushes, Loss};
pub use identity::{DeviceIdentity, Identity, nonce};
pub use latency::{Histogram, LatencySnapshot};
pub use outage_counters::{FailedKind, StoreHealth};
pub use resize::{Resize, ResizeError, check_size_change};
pub use store::{
    BlockStore, BufResult, Capabilities, Extent, ForeignResult, Wanted, ZeroFlags, push_extent,
    whole_sectors, write_zeroes_as_data,
};
pub use tracked::Tracked;
pub use tracking::Tracking;
pub use zeroes::{NONE_REMAINING, PIECE_BYTES, Remaining};

/// Bytes of a logical sector: every offset and length is a multiple of it.
pub const SECTOR: u64 = 512;
/// Bytes of a block: the preferred I/O size of stores, and the size of a page.
pub const BLOCK: u64 = 4096;
/// The size of [`Capabilities::read_piece`] for stores that copy from memory.
pub const MEMORY_PIECE: u32 = 128 << 10;
