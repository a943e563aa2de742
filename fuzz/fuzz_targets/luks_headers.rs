//! LUKS2 headers, under libFuzzer. See `fuzz/src/luks.rs`.
#![no_main]

use ebbd_fuzz::{Finding, choices};

#[path = "../src/luks.rs"]
mod luks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(Finding(text)) = luks::run(luks::load, data) {
        panic!("{text}");
    }
});
