//! qcow2 images, under libFuzzer. See `fuzz/src/qcow2.rs`.
#![no_main]

use ebbd_fuzz::{Finding, choices};

#[path = "../src/qcow2.rs"]
mod qcow2;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(Finding(text)) = qcow2::run(qcow2::find, data) {
        panic!("{text}");
    }
});
