//! Requests and replies of the NBD server, under libFuzzer. See `ebbd_fuzz::requests`.
#![no_main]

use ebb_export_nbd::decode::check;
use ebbd_fuzz::{Finding, requests};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(Finding(text)) = requests::run(check, data) {
        panic!("{text}");
    }
});
