//! Tests of TLS.
//!
//! `growth` measures the memory of its process. `cargo xtask test` gives each test a process; those
//! of `cargo test` share one, and this one may fail.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[allow(dead_code, unreachable_pub, reason = "also built as a part of the fuzz targets")]
#[path = "../../../../fuzz/src/sealer.rs"]
mod sealer;

mod broken;
mod flood;
mod fuzz_smoke;
mod growth;
mod revoked;
mod suites;
mod turns;
