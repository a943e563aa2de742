//! The scenarios of the simulator.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod acceptance;
