//! What tests with seeds share: how much they do ([`scaled`]), one generator of numbers ([`Random`])
//! and runs of fuzzed inputs ([`FuzzRun`]).
//!
//! Invariant: the same seed gives the same numbers and inputs on any machine and toolchain.

mod fuzz;
mod random;
mod scale;

pub use fuzz::FuzzRun;
pub use random::{Random, seed};
pub use scale::{FULL, scaled};
