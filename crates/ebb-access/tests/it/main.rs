//! Tests of access lists through their public interface.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod table;
