//! Tests of the stores.
//!
//! `file_name`, `limits`, `nbd_allocations`, `nbd_census` and `qcow2` limit or measure their
//! process. `cargo xtask test` gives each test a process; `cargo test` runs them in one, where
//! they may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod common;
#[path = "common/fake.rs"]
mod fake;
#[path = "common/qcow2.rs"]
mod image;
#[path = "common/nbd.rs"]
mod server;

mod block_device;
mod bounded;
mod conformance;
mod encrypted;
mod faulty;
mod file_name;
mod holes;
mod limits;
mod nbd;
mod nbd_abort;
mod nbd_allocations;
mod nbd_census;
mod nbd_dead_servers;
mod nbd_lost;
mod nbd_probe;
mod nbd_resize;
mod nbd_status;
mod open;
mod qcow2;
mod qcow2_fuzz_smoke;
mod short;
mod unaligned;
