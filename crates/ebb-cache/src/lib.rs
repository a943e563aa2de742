//! The buffer cache: volumes' data in memory that nobody else needs at the moment.
//!
//! One cache serves all volumes. It has no size to tune: it grows while memory is plenty, lends what
//! rests to the kernel with its content, and recedes at once under pressure. It answers seed `002`
//! (dynamic buffers) and design sections 3 and 4.
//!
//! # Vocabulary
//! - **page**: 4 KiB of a volume. **frame**: 64 KiB of it. **buffer**: a block of 4 to 64 KiB with
//!   pages of one frame.
//! - **wired**, **lent**, **lost**: in use or kept warm; given to the kernel with its content, which may
//!   take it; found taken. `bufspace` counts the first two, `bufwiredspace` the first, `bufkvaspace` all.
//! - **fill**: a read from the store that is kept. **change**: a write, discard or the like.
//! - **reclaimer**: the thread that lends, gives back and finds out what was taken. To **recede** is to return
//!   what others are about to need, ahead of the kernel.
//!
//! # Invariants
//! - A valid page equals what the store holds. What could make it differ (overlapping changes, failed
//!   ones, a fill that overlaps a change) leaves nothing in the cache.
//! - A hit takes one lock, of a sixteenth of its volume, and nothing from the heap. It does not wire:
//!   lent data is read where it lies, and taken data is noticed by the sentinel ([`ebb_mem::SmallBuffer`]).
//! - No lock is held across a wait, and no system call is made by a hit. Wakers are woken outside locks.
//! - Requests come first: a buffer that finds no memory is not kept, and nobody waits for it.

mod cache;
mod inflight;
#[cfg(all(test, feature = "shuttle"))]
mod models;
mod pages;
pub mod policy;
mod proactive_reclaim;
mod read;
mod read_ahead;
mod reclaimer;
mod shard;
mod size;
mod size_limit;
mod stats;
mod sync;
mod table;
mod volume;
mod write;
mod writeback;

pub use cache::{Cache, CacheOptions, Error};
pub use reclaimer::{Look, Reclaimer, Taken, pages_taken};
pub use size::Edge;
pub use stats::{CacheStats, Mode, ModeError, VolumeCacheStats};
pub use volume::VolumeCache;
pub use writeback::{FixedLimit, WritebackControl, WritebackOrder};
