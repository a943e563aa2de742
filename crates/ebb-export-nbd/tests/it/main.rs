//! Tests of the NBD server with real sockets.
//!
//! Those that change or measure the process are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "../../../ebb-store/tests/it/common/fake.rs"]
mod fake;

mod access;
mod ceiling;
mod guards;
mod keep;
mod lifecycle;
mod limits;
mod remote;
mod shrunk;
mod tls;
mod transmission;
mod zeroes;
