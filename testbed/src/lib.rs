//! Real clients and guests with a running `ebbd`: tools for tests, no part of the product.
//!
//! Independent implementations test a protocol best: `nbdinfo`, `nbdcopy`, `qemu-img`, `qemu-io`,
//! `fio` and a Linux guest under QEMU. This crate starts the daemon, runs those programs against
//! it, and keeps their output, so that a failed test explains itself.
//! | module | what it does |
//! |---|---|
//! | [`server`] | starts, stops, kills and restarts one daemon on its own directory and socket |
//! | [`tool`] | runs a program with a time limit and keeps its output |
//! | [`nbd`] | a small NBD client, for what no tool can do: lie, stall, be cut, count what was acknowledged |
//! | [`nbdkit`] | a remote store that counts its requests |
//! | [`guest`] | boots Linux with a disk exported by the daemon, runs a script there |
//! | [`xen`] | boots Xen with a job in dom0 and guests |
//! | [`tls`] | certificates and pre-shared keys |
//! | [`process`] | memory and file descriptors of a process |
//! | [`bench`] | loads of `bench-nbd` and `bench-cache`, the daemon compared with other servers |
//! | [`ledger`] | what a disk may hold after a crash |
//! | [`writer`] | writes as fast as it may and keeps the ledger |
//! | [`pattern`] | reproducible random numbers and disk content |
//!
//! Invariants:
//! * A missing program is an error that names the remedy, never a skipped test.
//! * Every wait has a deadline, and every process started here is ended here.
//! * Randomness comes from a seed that a failure prints.

pub mod bench;
pub mod binary;
pub mod error;
pub mod guest;
pub mod journal;
pub mod kernel;
pub mod ledger;
pub mod nbd;
pub mod nbdkit;
pub mod pattern;
pub mod process;
pub mod server;
pub mod tls;
pub mod tool;
pub mod writer;
pub mod xen;

pub use error::{Error, Result, check};
pub use guest::Guest;
pub use nbdkit::Nbdkit;
pub use server::{Server, Setup};
pub use tool::Tool;
