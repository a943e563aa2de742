//! Tests of the vhost-user server with guests in this process.
//!
//! `warm` measures the memory of its process. `cargo xtask test` gives each test a process; those
//! of `cargo test` share one, and this one may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod common;

mod connections;
mod direct;
mod greed;
mod guards;
mod hostile;
mod limits;
mod memory;
mod migration;
mod restart;
mod serve;
mod session;
mod sigkill;
mod stop;
mod warm;
