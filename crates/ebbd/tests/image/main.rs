//! `ebbd image`, beside QEMU's own programs and on deltas that a daemon has written.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod chains;
mod check;
mod common;
mod copies;
mod hostile;
