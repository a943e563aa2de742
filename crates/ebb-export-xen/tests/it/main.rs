//! Tests of the Xen backend with guests in this process.
//!
//! Those that measure the process or its log are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod cap;
mod ceiling;
mod guards;
mod hostile;
mod limits;
mod parameters;
mod restart;
mod serve;
mod stop;
mod storms;
mod writers;
