//! Tests of the vhost-user server with guests in this process.
//!
//! Those that kill or measure a process are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

mod connections;
mod direct;
mod greed;
mod guards;
mod hostile;
mod limits;
mod memory;
mod migration;
mod restart;
mod serve;
mod session;
mod stop;
