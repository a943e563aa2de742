//! Tests of encrypted volumes.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod cryptsetup;
mod fuzz_smoke;
mod headers;
mod memory;
