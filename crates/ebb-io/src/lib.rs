//! The worker: one thread, one io_uring, one executor.
//!
//! Sockets, eventfds, timers and storage I/O of a worker complete through one ring, and the worker waits for
//! all of them in one system call. This crate contains no policy: it has no notion of volumes or of limits on
//! their memory.
//!
//! # Terms
//! - **worker**: a thread with a ring and a run queue ([`Worker`]). Tasks never move between workers.
//! - **operation**: one submission and its completion. It owns its buffer and its file from the
//!   call until its completion has arrived.
//! - **buffer**: an owned, 4 KiB-aligned piece of memory from the worker's [`BufPool`].
//!
//! # Invariants
//! - *A buffer that the kernel may still access is never freed or reused.* An operation's buffer is owned by
//!   its slot in the ring, not by the future. When the future is dropped, the operation is cancelled, and
//!   the slot keeps the buffer until the completion has arrived.
//! - *A full ring is back pressure, not an error.* An operation waits in a queue until there is room.
//! - *One wait.* The thread sleeps in `io_uring_enter` only. While requests come quickly it polls before it sleeps.
//! - *No allocation per operation once warm*: slots, run queue and buffers are reused.
//!
//! # Cancellation contract
//! Every future of this crate may be dropped at any time. A dropped read or receive may or may not
//! have been executed; a dropped write may still reach the file.
//!
//! Circles: iteration_clock, offload, op, remote, ring, sim, timer, worker: an operation is a future of the worker that owns
//! the ring, and the worker completes it; all of it is one event loop.

mod buf;
mod busy_poll;
mod foreign;
mod gather;
mod iteration;
mod iteration_clock;
mod offload;
mod op;
mod per_worker;
mod read_now;
mod remote;
mod ring;
mod signal;
#[cfg(feature = "sim")]
pub mod sim;
mod tasks;
mod timer;
mod worker;

pub use ebb_mem::{clock, random};

pub use buf::{Buf, BufPool, BufWindow, MAX_BUF};
pub use busy_poll::{PollParameters, PollSource};
pub use ebb_mem::{Charge, QueueShare, Share, Shares};
pub use foreign::{FOREIGN_PIECES_MAX, ForeignVectors};
pub use gather::Gather;
pub use op::{Fd, WriteFlags, fd_from, was_cancelled};
pub use per_worker::{PerWorker, WorkerCount, WorkerSlot};
pub use ring::setup::OPERATIONS as RING_OPERATIONS;
pub use signal::{Budget, BudgetGuard, Signal};
pub use tasks::worker_ends;
pub use worker::{Io, Task, Worker, WorkerHandle, WorkerStats};
