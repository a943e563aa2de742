//! Fuzzing of the NBD parsers with client input that is mostly valid.
//!
//! Fuzzer input is not sent as it is: nearly all of it would fail at the first magic number. It is
//! decoded as **choices** instead: which option, which name, where to cut, and, rarely, which
//! violation. So a conversation is valid by default, reaches deep code, and is wrong in one place
//! at a time.
//!
//! Each conversation is checked by a separate client, written from the protocol document without
//! the constants or the code of the server: which replies are valid, and which are not. A violation
//! by the server is a [`Finding`].
//!
//! The same functions run under libFuzzer (`cargo +nightly fuzz run nbd_handshake`, and
//! `nbd_transmission`; needs `cargo install cargo-fuzz`), and over a million seeded inputs in
//! `crates/ebb-export-nbd/tests/it/fuzz_smoke.rs`, which includes this file by its path and must
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
