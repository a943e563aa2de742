//! Tests of the memory through its public interface.
//!
//! Those that measure the process are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod direct;
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
