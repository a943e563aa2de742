//! Messages of a vhost-user frontend, under libFuzzer. See `fuzz/src/vhost.rs`.
#![no_main]

use ebbd_fuzz::{Finding, choices};

#[path = "../src/vhost.rs"]
mod vhost;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(Finding(text)) = vhost::run(vhost::decode, data) {
        panic!("{text}");
    }
});
