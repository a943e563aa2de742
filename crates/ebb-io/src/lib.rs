//! The worker: one thread, one io_uring, one executor.
//!
//! Everything that waits in ebbd waits here: sockets, eventfds, timers and storage I/O of a worker
//! complete through one ring and are waited for in one system call. The room knows no policy: not
//! what a volume is, not who may hold how much memory.
//!
//! # Vocabulary
//! - **worker**: a thread with a ring and a run queue ([`Worker`]). Tasks never move between workers.
//! - **operation**: one submission and its completion. It owns its buffer and its file from the
//!   call until the kernel has answered.
//! - **buffer**: an owned, 4 KiB-aligned piece of memory from the worker's [`BufPool`].
//!
//! # Invariants
//! - *A buffer the kernel may still write is never freed or reused.* An operation's buffer lives in
//!   the ring's slot, not in the future; a dropped future leaves it there, asks the kernel to cancel,
//!   and the slot lets go when the completion has arrived.
//! - *A full ring is back pressure, not an error.* An operation that finds no room waits in line.
//! - *One wait.* The thread sleeps in `io_uring_enter` only.
//! - *No allocation per operation once warm*: slots, run queue and buffers are reused.
//!
//! # Cancellation contract
//! Every future of this crate may be dropped at any time. A dropped read or receive may or may not
//! have happened; a dropped write may still reach the file.

mod buf;
mod gather;
mod offload;
mod op;
mod ring;
mod signal;
#[cfg(feature = "sim")]
pub mod sim;
mod tasks;
mod timer;
mod worker;

pub use ebb_mem::clock;

pub use buf::{Buf, BufPool, MAX_BUF};
pub use ebb_mem::{Charge, QueueShare, Share, Shares};
pub use gather::Gather;
pub use op::{Fd, WriteFlags, fd_from};
pub use signal::{Budget, BudgetGuard, Signal};
pub use worker::{Io, Task, Worker, WorkerHandle, WorkerStats};
