//! Tests of the program ebbd.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod cli;
mod control;
mod image;
mod output;
mod start;
mod tracepoints;
