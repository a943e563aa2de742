//! Elastic I/O memory: buffers that grow with the load and are returned to the kernel under memory
//! pressure.
//!
//! A block server usually either keeps a static buffer pool sized for the worst case or allocates every
//! buffer anew. This crate keeps the memory that the load needs, marks idle memory `MADV_FREE` (*lends*
//! it: the kernel may discard it at any time without I/O), and returns all free memory within
//! milliseconds under pressure. It is modelled on the page pools of Linux's xen-blkback
//! (`drivers/block/xen-blkback`) and on the zones of FreeBSD's UMA (`sys/vm/uma_core.c`).
//!
//! # Terms
//! - **block**: owned memory with a stable address, aligned to 4 KiB ([`Block`]).
//! - **arena**: the reserved address range that all blocks come from, divided into 2 MiB **extents**.
//!   An extent serves one size class (4 KiB to 1 MiB) or is part of one larger run.
//! - **zone**: the cache of one size class: **buckets** of blocks at each worker, a shared **depot**,
//!   and below them the extents (slabs).
//! - **worker**: the interface of one thread to the memory ([`WorkerMemory`]). Its hit path takes no lock and
//!   does not use the heap.
//! - **pool**: the free pages of one queue ([`PagePool`]).
//! - **wired**: in use, or free and kept resident. **Unwired**: marked `MADV_FREE` (lent), or about to
//!   be. **Returned**: released with `MADV_DONTNEED`.
//! - **owner**: the volume, queue or cache that memory is accounted to ([`OwnerId`]).
//!
//! # Invariants
//! - Memory in use or in flight is never advised. Every page is in exactly one state, and only free or
//!   unwired pages are offered to the kernel.
//! - Helper threads make the `madvise` calls, in batches. A worker never waits for them: it skips a
//!   block that is being advised and uses another one.
//! - Freeing never allocates, and nothing allocates while memory is being reclaimed.
//! - Everything is bounded: wired memory by the ceiling, buckets by a share of it, depots by the
//!   working set, the advisor's queue by one bit per extent.
//! - No globals and no logging; the caller passes the time. Only the advisor uses a clock of its own:
//!   it waits 2 ms to batch small offers, and 100 ms before it lends a freed run.
//!
//! # Use
//! - A worker's loop calls [`WorkerMemory::needs_poll`] in each iteration, and [`WorkerMemory::poll`] when that
//!   returns true and at [`WorkerMemory::next_deadline`].
//! - A controller calls [`Memory::tick`] about once a second; under pressure [`Memory::squeeze`] and
//!   [`Memory::reclaim`] (L1 [`Reclaim::Trim`], L2 [`Reclaim::Drain`], L3 [`Reclaim::DrainWorkers`]);
//!   and [`Memory::calm`] when the pressure has ended. [`pressure`] measures the level.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//! use ebb_mem::{Memory, MemoryOptions, PagePool, PoolParameters, Reclaim};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let now = Instant::now();
//! // At most 256 MiB wired. This reserves address space and uses no memory yet.
//! let memory = Memory::new(MemoryOptions::new(256 << 20, now))?;
//! let disk = memory.owner("disk")?;
//!
//! // On each I/O thread. The callback must wake that thread's loop.
//! let worker = memory.worker(|| { /* write to the thread's eventfd */ });
//!
//! // A request's buffer: allocated, used, freed.
//! let mut block = worker.alloc(10_000, disk)?;
//! assert_eq!(block.capacity(), 16_384);
//! block[..5].copy_from_slice(b"hello");
//! worker.free(block);
//!
//! // The page pool of a queue. Its limits can be changed at run time.
//! let limits = PoolParameters::default();
//! let pool = PagePool::new(&worker, disk, &limits);
//! let block = pool.take(4096)?;
//! pool.put(block);
//! pool.done(now);
//! assert_eq!(pool.free_pages(), (1, 0));
//!
//! // The host is short of memory: empty the pools, drain the caches, return all of it.
//! let event = now + Duration::from_secs(1);
//! memory.squeeze(event);
//! memory.reclaim(Reclaim::DrainWorkers, event);
//! worker.poll(event); // the callback has woken the loop
//! memory.settle(); // only in this example: waits for the advisor
//! assert_eq!(memory.stats().arena.resident(), 0);
//! memory.calm();
//! # Ok(())
//! # }
//! ```
//!
//! Circles: advise, memory, owners, pool, space, worker: a memory makes its workers, pools and advisor, and each of them
//! works on the memory; the files divide one structure by who calls it.

mod advise;
mod arena;
mod bits;
mod block;
mod class;
pub mod clock;
mod estimate;
mod gauge;
mod kernel;
mod memory;
#[cfg(all(test, feature = "shuttle"))]
mod models;
mod options;
mod overcommit;
mod owners;
mod pool;
pub mod pressure;
mod program_pages;
pub mod random;
mod sentinel;
mod share;
mod small;
mod space;
mod spare;
mod stats;
mod sync;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod wait;
mod worker;
mod zone;

pub use block::{Block, OwnerId};
pub use class::{CLASSES, EXTENT_BYTES, MAX_BLOCK_BYTES, PAGE_BYTES};
pub use memory::{Memory, MemoryError, Reclaim};
pub use options::{IdlePolicy, MemoryOptions};
pub use pool::{POOL_INTERVAL, PagePool, PoolParameters};
pub use program_pages::release_program_pages;
pub use share::{Charge, QueueShare, Share, Shares};
pub use small::{Offers, Residency, RewireError, SMALL_PAGES, SmallBuffer};
pub use spare::{Spare, SpareHeld, Spares};
pub use stats::{ArenaStats, OwnerStats, PoolStats, Stats, ZoneStats};
pub use sys::trim_heap;
pub use worker::{AllocWait, Exhausted, QUIET_AFTER, WorkerMemory};
