//! What exports share that serve a guest's ring in shared memory: access to guest memory ([`Mapping`]), the loop that
//! consumes requests in time slices ([`serve_ring`]), and completions that are published in batches ([`Completions`]).
//!
//! An export implements [`GuestRing`] for its ring: where the indices are, how a request is decoded and carried out, how a
//! completion is written, how the guest is notified. Its requests run on the tasks of `ebb-export`.
//!
//! # Invariants
//! - Guest memory is copied once and the copy is checked; there are no references into guest memory.
//! - A peer that truncates the memory that it shares does not end this process.
//! - A ring that always has requests delays another ring of its worker by a time slice at most, and a lightly loaded one by
//!   less (`docs/adr/0006-turns.md`).
//! - A guest that sends events without requests causes one wakeup per millisecond at most.
//! - Nothing is allocated per request, and rings share nothing.

mod completions;
mod event_index;
mod fault_guard;
mod mapping_budget;
mod memory;
mod service;
mod shared_memory;
mod time_slice;

pub use completions::Completions;
pub use event_index::{RingIndex, is_event_due};
pub use mapping_budget::{MappingBudget, VolumeMappings};
#[cfg(feature = "count-copies")]
pub use memory::copied::bytes as copied_bytes;
pub use memory::{Mapping, Unmap, full_barrier, read_barrier, write_barrier};
pub use service::{Consumed, GuestRing, THROTTLE, serve_ring};
pub use shared_memory::{MemoryPlace, SharedMemory};
pub use time_slice::TimeSlice;
