//! Tests of the Xen backend with guests in this process.
//!
//! `lines` takes the log of its process. `cargo xtask test` gives each test a process; those of
//! `cargo test` share one, and this one may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod common;

mod cap;
mod ceiling;
mod guards;
mod hostile;
mod limits;
mod lines;
mod parameters;
mod restart;
mod serve;
mod stop;
mod storms;
mod warm;
mod writers;
