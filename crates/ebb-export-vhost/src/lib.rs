//! A vhost-user-blk backend over volumes, for guests of KVM.
//!
//! It serves frontends (QEMU and others) at unix sockets: split and packed virtqueues, indirect descriptors, event indices,
//! several queues, requests in flight that outlive the process, live migration, changes of memory and of the size.
//! Sources: QEMU's `interop/vhost-user.rst`, and virtio 1.2, sections 2.6 to 2.8 and 5.2.
//!
//! # Parts
//! - **control** (`control`, on its own thread): accepts connections and carries out messages; `session` is the state of one
//!   frontend, with its memory and its queues; `descriptors` bounds the descriptors that frontends hold.
//! - **queues** (`queue`, on a worker): take chains out of a ring (`virtqueue`, `split_ring`, `packed_ring`, `chain`), parse
//!   requests (`request`), and carry them out: at once if nothing has to be waited for (`inline_io`), otherwise in a task
//!   (`request_task`), in which the kernel transfers guest memory directly if the store can (`foreign`). Completions are published in batches.
//! - **inflight** (`inflight`, `split_inflight`, `packed_inflight`): what a successor of a killed daemon has to repeat.
//!
//! # Vocabulary
//! - **frontend**: the process that runs the guest, at the other end of a connection. **guest**: its virtual machine.
//! - **chain**: the descriptors of one request. **head**: the first of them. **token**: the right to complete it once.
//!
//! # Invariants
//! - Guest memory is copied once and the copy is checked; there are no references into guest memory, and it is never counted or
//!   reclaimed as memory of this process.
//! - Each request is completed exactly once, after it has completed, also if the daemon is killed.
//! - Nothing a guest or a frontend does causes a panic, an unchecked sum or an unbounded allocation, or affects another guest.
//!
//! Circles: inline_io, queue, request_task, throttle: a queue has one state, and its methods are in a file for each step of a request.

mod area;
mod backend;
mod chain;
mod commands;
mod control;
mod cursor;
mod descriptors;
mod dirty_log;
mod disk_served;
mod disk_shared;
mod events;
mod features;
mod foreign;
mod frontend_socket;
mod inflight;
mod inline_io;
mod memory;
mod packed_inflight;
mod packed_ring;
mod position;
mod queue;
mod ranges;
mod region_backing;
mod request;
mod request_task;
mod ring_setup;
mod ring_uses;
mod session;
mod split_inflight;
mod split_ring;
#[cfg(feature = "sim")]
mod stepped;
mod stuck_writes;
mod throttle;
mod unread;
mod virtqueue;
mod volume_socket;
mod vring;

pub use backend::{VhostBackend, VhostFigures, VhostOptions};
pub use descriptors::FrontendDescriptors;
pub use disk_served::{DrainingFrontends, VhostDisk};
pub use disk_shared::VhostStats;
#[cfg(feature = "sim")]
pub use stepped::{DeathAtStore, SteppedFrontends};
pub use volume_socket::VolumeSocket;

#[cfg(test)]
mod tests;
