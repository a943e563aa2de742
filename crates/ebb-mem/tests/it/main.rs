//! Tests of the memory through its public interface.
//!
//! `gauges`, `lending` and `overcommit` limit or measure their process. `cargo xtask test` lets no
//! test of another module share it; all tests of `cargo test` do, and may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod direct;
mod gauges;
mod lending;
mod no_alloc;
mod overcommit;
mod owners;
mod policies;
mod pool;
mod pressure_ladder;
mod pressure_monitor;
mod pressure_shared;
mod reclaim;
mod rewire;
mod shares;
mod small;
mod waiters;
