//! What all exports share, whatever protocol they speak: the tasks that execute requests, the memory that a request
//! is charged for, and the limit of log lines about failed requests.
//!
//! # Invariants
//! - *Nothing is allocated per request once warm*: a task executes one request after the other ([`RequestTasks`]).
//! - *A request that a task has begun is completed*: builds with debug assertions panic if one is dropped without a
//!   reply ([`ReplyDue`]).
//! - All of this belongs to one connection or ring and stays on its worker: there are no locks and no atomics, and no
//!   hand-over between threads.
//!
//! What exports of guest rings share beyond this is in `ebb-guest-ring`.

mod charge;
mod error_lines;
mod request_tasks;

pub use charge::{PIECE, REQUEST_BYTES, longest_piece, piece_bytes};
pub use error_lines::{ErrorLine, ErrorLines};
pub use request_tasks::{ReplyDue, RequestRunner, RequestTask, RequestTasks};
