//! Tests of the workers and their rings.
//!
//! `descriptors` counts the descriptors of its process, and `busy_poll` needs two processors. With
//! `cargo test` other tests use both at the same time, and these may fail: run `cargo xtask test`.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod busy_poll;
mod descriptors;
mod dropped_futures;
mod full_ring;
mod threads;
mod timers;
