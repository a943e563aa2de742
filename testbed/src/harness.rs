//! What tests and benches run: the daemon, its clients, and servers beside it.
//!
//! | module | what it does |
//! |---|---|
//! | [`binary`] | finds or builds the daemon |
//! | [`browser`] | a headless Chromium, for the page |
//! | [`cache`] | where tests keep what they download or build once |
//! | [`ceph`] | a Ceph cluster with one monitor and one OSD |
//! | [`server`] | starts, stops, kills and restarts one daemon on its own directory and socket |
//! | [`tool`] | runs a program with a time limit and keeps its output |
//! | [`nbd`] | a small NBD client, for what no tool can do: lie, stall, be cut, count what was acknowledged |
//! | [`nbdkit`] | a remote store that counts its requests |
//! | [`tls`] | certificates and pre-shared keys |
//! | [`process`] | memory and file descriptors of a process |
//! | [`vhost`] | a small frontend of vhost-user-blk, for what no virtual machine is small enough |
//! | [`ledger`] | what a disk may hold after a crash |
//! | [`writer`] | writes as fast as it may and keeps the ledger |
//! | [`pattern`] | reproducible random numbers and disk content |
//! | [`error`] | what goes wrong in a test |

pub mod binary;
pub mod browser;
pub mod cache;
pub mod ceph;
pub mod error;
pub mod ledger;
pub mod nbd;
pub mod nbdkit;
pub mod pattern;
pub mod process;
pub mod server;
pub mod tls;
pub mod tool;
pub mod vhost;
pub mod writer;
