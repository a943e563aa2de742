//! Tests of volumes through their public interface.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod close;
mod flush;
mod growth;
mod latency;
mod layers;
mod oracle;
mod owed_loss;
mod resize;
mod shrink;
