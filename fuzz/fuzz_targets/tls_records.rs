//! Records of TLS, under libFuzzer. See `fuzz/src/tls.rs`.
#![no_main]

use std::sync::LazyLock;

use ebb_tls::ServerTls;
use ebbd_fuzz::{Finding, choices};

#[path = "../src/sealer.rs"]
mod sealer;
#[path = "../src/tls.rs"]
mod tls;

thread_local! {
    static RIG: LazyLock<tls::Rig> = LazyLock::new(|| {
        let path = std::env::temp_dir().join(format!("ebbd-fuzz-keys-{}", std::process::id()));
        std::fs::write(&path, sealer::KEY_LINE).expect("a file of keys");
        let server = ServerTls::from_psk(&path).expect("a server");
        std::fs::remove_file(&path).expect("a file of keys");
        tls::Rig::new(server)
    });
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    RIG.with(|rig| {
        if let Err(Finding(text)) = tls::run(rig, |session| session, data) {
            panic!("{text}");
        }
    });
});
