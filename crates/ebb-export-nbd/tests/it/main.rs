//! Tests of the NBD server with real sockets.
//!
//! `descriptors` leaves its process few descriptors. `cargo xtask test` gives each test a process;
//! `cargo test` runs them in one, where they may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod common;
#[path = "../../../ebb-store/tests/it/common/fake.rs"]
mod fake;

mod access;
mod ceiling;
mod descriptors;
mod fuzz_smoke;
mod guards;
mod keep;
mod lifecycle;
mod limits;
mod remote;
mod shrunk;
mod tls;
mod transmission;
mod zero_alloc;
mod zeroes;
