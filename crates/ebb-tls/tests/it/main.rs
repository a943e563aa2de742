//! Tests of TLS. The one that measures the process is a program of its own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[allow(dead_code, unreachable_pub, reason = "also built as a part of the fuzz targets")]
#[path = "../../../../fuzz/src/sealer.rs"]
mod sealer;

mod broken;
mod flood;
mod revoked;
mod suites;
mod turns;
