//! Real clients and guests with a running `ebbd`: tools for tests, no part of the product.
//!
//! Independent implementations test a protocol best: `nbdinfo`, `nbdcopy`, `qemu-img`, `qemu-io`,
//! `fio` and a Linux guest under QEMU. This crate starts the daemon, runs those programs against
//! it, and keeps their output, so that a failed test explains itself.
//!
//! | module | what it does |
//! |---|---|
//! | [`harness`] | the daemon under test, its clients and peers, and what a disk may hold |
//! | [`guest`] | boots Linux with a disk exported by the daemon, runs a script there |
//! | [`xen`] | boots Xen with a job in dom0 and guests |
//! | [`demo`] | the demo of `make demo`, and its plots |
//! | [`bench`] | the benches: loads, peers, figures; one module for each program `bench-*` of `src/bin` |
//!
//! Programs named `guest-*` run inside a guest. Benches of one crate alone, without a daemon, are examples of that crate:
//! they need its test features, and a daemon that is measured must not be built with those.
//!
//! Invariants:
//! * A missing program is an error that names the remedy, never a skipped test.
//! * Every wait has a deadline, and every process started here is ended here.
//! * Randomness comes from a seed that a failure prints.

pub mod bench;
pub mod demo;
pub mod guest;
pub mod harness;
pub mod xen;

pub use guest::Guest;
pub use harness::error::{Error, Result, check};
pub use harness::nbdkit::Nbdkit;
pub use harness::server::{Server, Setup};
pub use harness::tool::Tool;
