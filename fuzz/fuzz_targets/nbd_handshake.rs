//! Option haggling of the NBD server, under libFuzzer. See `ebbd_fuzz::negotiation`.
#![no_main]

use ebb_export_nbd::handshake::Handshake;
use ebbd_fuzz::{Finding, negotiation};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(Finding(text)) = negotiation::run(Handshake::new, data) {
        panic!("{text}");
    }
});
