//! Fuzzing of the NBD parsers: what a client may say, most of it in order.
//!
//! Bytes from a fuzzer are not taken for what a client sends: nearly all would fail at the first
//! magic number. They are taken for **choices** instead: which option, which name, where to cut,
//! and, rarely, which lie. So a conversation is valid by default, goes deep, and is wrong in one
//! place at a time.
//!
//! Each conversation is judged by a client of its own, written from the protocol text without the
//! constants or the code of the server: what may be answered, and what must not be. A judgement
//! against the server is a [`Finding`].
//!
//! The same functions run under libFuzzer (`cargo +nightly fuzz run nbd_handshake`, and
//! `nbd_transmission`; needs `cargo install cargo-fuzz`), and over a million seeded inputs in
//! `crates/ebb-export-nbd/tests/fuzz_smoke.rs`, which includes this file by its path and must
//! therefore find everything here by relative names.

pub mod choices;
pub mod client;
pub mod negotiation;
pub mod requests;

/// What the server did that it must not.
#[derive(Debug)]
pub struct Finding(pub String);

/// Judges; the text is made only when the judgement is against the server.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(super::Finding(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;
