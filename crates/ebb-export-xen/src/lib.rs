//! A Xen blkif backend: what Linux's xen-blkback offers, in user space, over volumes.
//!
//! Answers Xen's `blkif.h` and the ways of Linux's two drivers, and seeds `003` (persistent grants)
//! and `000` (page pools and their squeeze). Facts to the byte are in the reference; where header
//! and implementations differ, the implementations count.
//!
//! # Two halves
//! - **xenstore** (`control`, on a thread of its own): finds devices, follows the states of both
//!   ends (`machine`, pure), reads the frontend's nodes with distrust (`nodes`), maps rings.
//! - **the ring** (`queue`, on a worker): takes requests (`ring`, `abi`), carries them out in lanes
//!   (`lane`), or at once where nothing must be waited for (`express`), keeps grants mapped
//!   (`persistent`) or has the hypervisor copy (`copier`), answers in batches.
//!
//! Xen itself stands behind small traits ([`platform`]); with the feature `shm` there is a second
//! implementation within the process, and models of frontends ([`shm`]).
//!
//! # Vocabulary
//! - **guest**, **frontend**: the domain, and its driver for one disk. **device**: one disk of one
//!   guest. **queue**: one of its rings.
//! - **grant**: a page the guest shares, named by a **gref**. **Persistent**: kept mapped.
//! - **entry**: a request's place in the journal, which lets a successor go on ([`journal`]).
//!
//! # Invariants
//! - Guest memory is copied once, then checked; no reference into it exists.
//! - A request is answered exactly once, after it has run to its end, also across a kill.
//! - Nothing a guest does reaches a panic, an unchecked sum or an unbounded allocation; what it
//!   breaks is its own.

pub mod abi;
mod allowance;
mod attach;
mod backend;
mod busy_poll;
mod copier;
mod counted;
mod device;
mod device_shared;
pub mod guest_memory;
mod inline_io;
pub mod journal;
mod mailbox;
pub mod nodes;
mod params;
pub mod persistent;
pub mod platform;
mod queue;
mod request_task;
pub mod ring;
mod served;
#[cfg(feature = "shm")]
pub mod shm;
mod unstable;
pub mod xenbus_state;
mod xenstore;

pub use attach::{AttachError, DiskSpec, attach, detach, device_number, find_domain};
pub use backend::{Backend, DeviceStats, Figures, Options, StartError};
pub use device_shared::{MAX_SEGMENTS, Transient, XenStats};
pub use params::XenParameters;
pub use served::Ending;
pub use xenstore::{Awaited, Lookup, Turn, XenstoreControl};
