//! `ebbd image`, beside QEMU's own programs and on deltas that a daemon has written.

mod chains;
mod check;
mod common;
mod copies;
mod hostile;
