//! Elastic I/O memory: grows with the load, and goes back to the kernel when the host needs it.
//!
//! A server that moves blocks of data holds memory in one of two bad ways: a static pool sized for
//! the worst case, or none at all. This crate keeps what the load needs, *lends* what is idle to the
//! kernel (which may then take it at any moment without I/O and without asking), and gives all of it
//! back within milliseconds when told to. It answers two specifications: the squeezed page pools of
//! Linux's xen-blkback (seed `000`) and the back pressure of FreeBSD's UMA (seed `004`).
//!
//! # Vocabulary
//! - **block**: owned memory, 4 KiB aligned, of stable address ([`Block`]).
//! - **arena**: the reserved address range all blocks come from, carved into 2 MiB **extents**, each
//!   serving one size class (4 KiB to 1 MiB) or one larger run.
//! - **zone**: the cache of one size class: **buckets** of blocks at each worker, a shared **depot**,
//!   and the extents (slabs) below.
//! - **worker**: one thread's way in ([`Worker`]); its hit path takes no lock and touches no heap.
//! - **pool**: free pages of one queue ([`PagePool`]).
//! - **wired**: in use, or free and kept warm. **Unwired**: lent to the kernel (`MADV_FREE`), or
//!   about to be. **Returned**: given up (`MADV_DONTNEED`).
//! - **owner**: who memory is accounted to ([`OwnerId`]).
//!
//! # Invariants
//! - Memory in use, registered ([`Registered`]) or in flight is never advised. Every page is in
//!   exactly one state, and only free or unwired ones are ever offered.
//! - Advice is given by helper threads, in batches; a worker never waits for it: a block that is
//!   being lent at this moment is passed over for another.
//! - Freeing never allocates, and nothing allocates while memory is being reclaimed.
//! - Everything is bounded: wired memory by the ceiling, buckets by a share of it, depots by the
//!   working set, the advisor's queue by one bit per extent.
//! - No globals and no logging; time comes in as arguments. Only the advisor's pauses (2 ms to
//!   batch small offers, 100 ms before a freed run is lent) are its own.
//!
//! # Who calls what, when
//! - a worker's loop: [`Worker::needs_poll`] each turn, [`Worker::poll`] when it says so and at
//!   [`Worker::next_deadline`];
//! - a controller: [`Memory::tick`] about once a second; under pressure [`Memory::squeeze`] and
//!   [`Memory::reclaim`] (L1 [`Reclaim::Trim`], L2 [`Reclaim::Drain`], L3 [`Reclaim::DrainWorkers`]),
//!   and [`Memory::calm`] when it is over. When that is, [`pressure`] can tell.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//! use ebb_mem::{Memory, Options, PagePool, PoolParameters, Reclaim};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let now = Instant::now();
//! // At most 256 MiB wired; address space is reserved, no memory used.
//! let memory = Memory::new(Options::new(256 << 20, now))?;
//! let disk = memory.owner("disk")?;
//!
//! // On each I/O thread. The callback must make that thread's loop turn.
//! let worker = memory.worker(|| { /* ring the thread's eventfd */ });
//!
//! // A request's buffer: taken, used, freed.
//! let mut block = worker.alloc(10_000, disk)?;
//! assert_eq!(block.capacity(), 16_384);
//! block[..5].copy_from_slice(b"hello");
//! worker.free(block);
//!
//! // A queue's page pool, its limits changeable at run time.
//! let limits = Arc::new(PoolParameters::default());
//! let pool = PagePool::new(&worker, disk, limits.clone());
//! let block = pool.take(4096)?;
//! pool.put(block);
//! pool.done(now);
//! assert_eq!(pool.free_pages(), (1, 0));
//!
//! // The host is short of memory: pools drop to nothing, caches are drained, all of it goes back.
//! let event = now + Duration::from_secs(1);
//! memory.squeeze(event);
//! memory.reclaim(Reclaim::DrainWorkers, event);
//! worker.poll(event); // the loop turns, since it was woken
//! memory.settle(); // only here: waits for the advisor
//! assert_eq!(memory.stats().arena.resident(), 0);
//! memory.calm();
//! # Ok(())
//! # }
//! ```

mod advise;
mod arena;
mod bits;
mod block;
mod buffer;
mod class;
pub mod clock;
mod overcommit;

mod estimate;
mod gauge;
mod kernel;
mod memory;
#[cfg(all(test, feature = "shuttle"))]
mod models;
mod options;
mod owners;
mod pool;
pub mod pressure;
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
pub use buffer::{Buffer, PageSet, Registered, RewireError};
pub use class::{CLASSES, EXTENT_BYTES, MAX_BLOCK_BYTES, PAGE_BYTES};
pub use memory::{Error, Memory, Reclaim};
pub use options::{Options, Policy};
pub use pool::{POOL_INTERVAL, PagePool, PoolParameters};
pub use share::{Charge, QueueShare, Share, Shares};
pub use small::{Offers, Residency, SMALL_PAGES, SmallBuffer};
pub use spare::{Spare, SpareHeld, Spares};
pub use stats::{ArenaStats, OwnerStats, PoolStats, Stats, ZoneStats};
pub use sys::trim_heap;
pub use worker::{AllocWait, Exhausted, QUIET, Worker};
