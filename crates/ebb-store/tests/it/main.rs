//! Tests of the stores. Those that change or measure the process are programs of their own.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "common/fake.rs"]
mod fake;
#[path = "common/nbd.rs"]
mod server;

mod block_device;
mod bounded;
mod conformance;
mod encrypted;
mod faulty;
mod holes;
mod nbd;
mod nbd_abort;
mod nbd_dead_servers;
mod nbd_lost;
mod nbd_probe;
mod nbd_resize;
mod nbd_status;
mod open;
mod unaligned;
