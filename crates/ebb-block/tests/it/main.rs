//! Tests of the contract of stores, and of the suite that checks it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod conformance;
mod example_store;
