//! What all exports share, whatever protocol they speak: the tasks that execute requests, the
//! memory that a request is charged for, the limit of log lines about failed requests, messages to
//! the thread that controls an export, the disks of guests that are served, their writes that a
//! kill would lose, and the store that a peer is attached to. [`guards`] lists the promises that
//! every export keeps.
//!
//! # Invariants
//! - *Nothing is allocated per request once warm*: a task executes one request after the other ([`RequestTasks`]).
//! - *A request that a task has begun is completed*: builds with debug assertions panic if one is dropped without a
//!   reply ([`ReplyDue`]).
//! - All of this, except [`Mailbox`], [`ServedDisks`] and [`UnstableWrites`], belongs to one connection or ring and stays on its worker: there are no locks and
//!   no atomics, and no hand-over between threads.
//!
//! What exports of guest rings share beyond this is in `ebb-guest-ring`.

mod backing;
mod charge;
mod error_lines;
pub mod guards;
mod mailbox;
mod request_tasks;
mod served;
mod unstable;

pub use backing::{Backing, BackingChange, RecordedBacking};
pub use charge::{PIECE, REQUEST_BYTES, longest_piece, piece_bytes};
pub use error_lines::{ErrorLine, ErrorLines};
pub use mailbox::Mailbox;
pub use request_tasks::{ReplyDue, RequestRunner, RequestTask, RequestTasks};
pub use served::{DrainingDisks, ServedDisk, ServedDisks};
pub use unstable::{FlushMark, UnstableRecord, UnstableWrites};
