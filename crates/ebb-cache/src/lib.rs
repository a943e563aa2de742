//! The buffer cache: volumes' data in memory that the host does not need at the moment.
//!
//! One cache serves all volumes. There is no size to tune: it grows while memory is plentiful, marks idle
//! buffers `MADV_FREE` so that the kernel may discard them without I/O, and shrinks at once under memory
//! pressure.
//!
//! # Vocabulary
//! - **page**: 4 KiB of a volume. **frame**: 64 KiB of it. **buffer**: a block of 4 to 64 KiB that holds
//!   pages of one frame.
//! - **wired**: the kernel may not take it. **lent**: marked `MADV_FREE`, still readable. **lost**: lent, and
//!   found discarded by the kernel. `bufspace` counts wired and lent pages, `bufwiredspace` wired ones,
//!   `bufkvaspace` all (the names are FreeBSD's).
//! - **fill**: a read from the store whose data enters the cache. **in-flight write**: a write, discard or
//!   write-zeroes request.
//! - **layer**: a store and its part of the cache. A volume has one of its own, and may have read-only ones below it,
//!   **bases**, which it shares with other volumes ([`Layers`]). The cache is keyed by layer and page.
//! - **reclaimer**: the thread that lends idle buffers, evicts, and detects discarded pages. **Proactive
//!   reclaim**: returning memory before the kernel has to search for it.
//!
//! # Invariants
//! - A valid page equals what the store holds. Whatever could break that (overlapping writes, failed writes,
//!   a fill that overlaps a write) leaves nothing in the cache.
//! - A hit takes one lock, which covers a sixteenth of its volume, and allocates nothing. It does not wire
//!   the page: lent data is read in place, and the sentinel word shows whether the kernel discarded it
//!   ([`ebb_mem::SmallBuffer`]).
//! - No lock is held across an await, and a hit makes no system call. Wakers are woken outside locks.
//! - A page of a layer is held once, however many volumes read it; what a volume may hold while memory is short depends
//!   on the volume, not on its layers (`fair_share.rs`).
//! - Requests have priority: a buffer that finds no memory is not cached, and no request waits for one.
//!
//! Circles: cache, fair_share, reclaimer, volume: the cache lists its volumes, which take room from each other through it
//! by their shares, and the reclaimer is its thread.

mod abort_signal;
mod base;
mod base_samples;
mod cache;
mod cached_store;
mod copy_target;
mod delta;
mod delta_error;
mod fair_share;
mod first_writes;
mod inflight;
mod layer_identities;
mod layers;
mod layers_error;
mod lower_layers;
#[cfg(all(test, feature = "shuttle"))]
mod models;
mod overlay;
mod own_blocks;
mod page_states;
mod pages;
pub mod policy;
mod proactive_reclaim;
mod read;
mod read_ahead;
mod read_streams;
mod reclaimer;
mod shard;
mod shared_reads;
mod size;
mod size_limit;
mod stack_common;
mod stacked;
mod stats;
mod sync;
mod table;
mod throttle;
mod volume;
mod write;
mod write_gate;
mod writeback;
mod writeback_state;

pub use base::{BaseLayer, BaseLayers};
pub use base_samples::{plain_parent, sample_places};
pub use cache::{Cache, CacheError, CacheOptions};
pub use cached_store::{CachedStore, PreparedResize};
pub use delta::Delta;
pub use delta_error::DeltaError;
pub use layer_identities::{MergedPair, NextLayers};
pub use layers::Layers;
pub use layers::figures::LayerFigures;
pub use layers_error::{LayersError, SnapshotError};
pub use lower_layers::{LayerMap, LayerRun, ReadStep, RemainingRead};
pub use overlay::FillFrom;
pub use reclaimer::{DiscardCounter, MemoryProbe, Reclaimer, pages_discarded_by_kernel};
pub use shared_reads::SharedReads;
pub use stacked::DeltaLayer;
pub use stats::{CacheStats, Mode, VolumeCacheStats};
pub use volume::{StoreCache, VolumeCache};
pub use writeback_state::{FixedLimit, WritebackControl, WritebackOrder};
