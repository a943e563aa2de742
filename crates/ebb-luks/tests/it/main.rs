//! Tests of encrypted volumes.
//!
//! The one that reads the memory of the process is a program of its own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod cryptsetup;
mod headers;
