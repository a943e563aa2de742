//! Tests of the workers and their rings. Those that change the process are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod dropped_futures;
mod full_ring;
mod threads;
mod timers;
