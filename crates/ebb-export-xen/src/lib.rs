//! A Xen blkif backend in user space, with the features of Linux's xen-blkback, over volumes.
//!
//! It speaks the protocol of Xen's `xen/include/public/io/blkif.h` as Linux's `drivers/block/xen-blkfront.c`
//! and `drivers/block/xen-blkback` implement it; where the header and the implementations differ, it
//! follows the implementations. The parameters are those of xen-blkback: `max_persistent_grants`,
//! `max_buffer_pages`, `buffer_squeeze_duration_ms` and so on (see `docs/parameters`).
//!
//! # Parts
//! - **xenstore** (`xenstore`, on its own thread): finds devices, follows the states of frontend and
//!   backend (`xenbus_state`, a pure state machine), validates the frontend's nodes (`nodes`), maps rings.
//! - **rings** (`queue`, on a worker): consume requests (`ring`, `abi`) and carry them out, at once if
//!   nothing has to be waited for (`inline_io`), otherwise in a task (`request_task`); keep grants mapped
//!   (`persistent`) or have the hypervisor copy (`copier`); publish responses in batches.
//!
//! Xen is reached through small traits ([`platform`]). The feature `shm` adds a second implementation of
//! them within the process, and models of frontends ([`shm`]), for tests and benchmarks.
//!
//! # Vocabulary
//! - **guest**, **frontend**: the domain, and its driver for one disk. **device**: one disk of one
//!   guest. **queue**: one of its rings.
//! - **grant**: a page the guest shares, named by a grant reference (**gref**). **Persistent**: it
//!   stays mapped between requests.
//! - **entry**: the record of one request in the journal, from which a successor resumes (`journal`).
//!
//! # Invariants
//! - Guest memory is copied once and the copy is checked; there are no references into guest memory.
//! - Each request gets exactly one response, after it has completed, also if the daemon is killed.
//! - Nothing a guest does causes a panic, an unchecked sum or an unbounded allocation, or affects
//!   another guest.
//!
//! Circles: copier, inline_io, queue, request_task, throttle: a ring has one state, `Queue`, and its methods are in a file for
//! each way in which a request is carried out; the copier keeps the tasks that wait for it.

pub mod abi;
mod allowance;
mod attach;
mod backend;
mod copier;
mod counting_store;
mod device;
mod device_shared;
mod inline_io;
mod journal;
mod mailbox;
mod nodes;
mod params;
mod persistent;
pub mod platform;
mod queue;
mod request_task;
mod ring;
mod served;
mod shared_stores;
#[cfg(feature = "shm")]
pub mod shm;
mod throttle;
mod xenbus_state;
mod xenstore;

pub use attach::{AttachError, DiskSpec, attach, detach, device_number, disk_name, find_domain};
pub use backend::{Backend, BackendOptions, BackendStartError, Figures};
pub use device_shared::{MAX_SEGMENTS, XenStats};
pub use params::XenParameters;
pub use served::{DeviceStats, DrainingDevices};
#[cfg(feature = "sim")]
pub use shared_stores::death::DeathAtRingStore;
pub use xenstore::{Awaited, NextRun, XenstoreControl};
