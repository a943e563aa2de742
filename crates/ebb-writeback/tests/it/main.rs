//! Tests of the controller through its public interface, and on the simulator.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod acceptance;
mod invariants;
mod no_alloc;
