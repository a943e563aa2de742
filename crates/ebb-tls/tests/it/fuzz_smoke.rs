//! Fuzzed conversations over the record layer, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken wrappers must be found, otherwise the harness itself is broken.
#![expect(unreachable_pub, reason = "the modules are also those of a fuzz target")]

use std::io;

use ebb_tls::{ServerTls, TlsRead, TlsSession};
use seeded::FuzzRun;

use crate::sealer;

#[allow(dead_code, reason = "the fuzz targets share it, and each uses its part")]
#[path = "../../../../fuzz/src/choices.rs"]
mod choices;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;
#[path = "../../../../fuzz/src/tls.rs"]
mod tls;

/// A violation by the server.
#[derive(Debug)]
pub struct Finding(pub String);

fn rig() -> tls::Rig {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), sealer::KEY_LINE).expect("a file");
    tls::Rig::new(ServerTls::from_psk(file.path()).expect("a server"))
}

/// The inputs: 16 to 264 bytes.
fn fuzz() -> FuzzRun {
    FuzzRun::new(0x0ebb_d5ee_d000_0002, 8_000, 2..34)
}

/// Runs the inputs up to the first finding.
fn hunt<S: tls::Session>(wrap: fn(TlsSession) -> S) -> Result<tls::Tally, String> {
    let (rig, mut sum) = (rig(), tls::Tally::default());
    fuzz().hunt(|input| {
        let tally = tls::run(&rig, wrap, input).map_err(|Finding(text)| text)?;
        sum.shaken += tally.shaken;
        sum.records += tally.records;
        sum.failed += tally.failed;
        sum.read += tally.read;
        sum.received += tally.received;
        Ok(())
    })?;
    Ok(sum)
}

#[test]
fn seeds_lead_to_their_outcomes() {
    let rig = rig();
    seeds::check("tls_records", |input| tls::run(&rig, |session| session, input));
}

#[test]
fn thousands_of_conversations_over_the_record_layer() {
    let sum = hunt(|session| session).unwrap_or_else(|finding| panic!("{finding}"));
    println!("{sum:?}");
    // The inputs reach all states: a generator that fails in the first state would never find anything.
    let inputs = fuzz().inputs;
    assert!(sum.shaken > inputs / 2 && sum.shaken < inputs, "{sum:?}");
    assert!(sum.records > inputs * 5, "{sum:?}");
    assert!(sum.failed > inputs / 10 && sum.failed < inputs * 9 / 10, "{sum:?}");
    assert!(sum.read > inputs * 100 && sum.received > inputs * 10, "{sum:?}");
}

/// A wrapper with one of two bugs.
struct Careless {
    inner: TlsSession,
    /// Output that does not fit into the target of `take_output` is lost; otherwise, data is made up after an error.
    loses: bool,
    failed: bool,
}

impl tls::Session for Careless {
    fn feed(&mut self, bytes: &[u8]) {
        self.inner.feed(bytes);
    }

    fn handshake(&mut self) -> io::Result<bool> {
        self.inner.handshake()
    }

    fn read(&mut self, target: &mut [u8]) -> io::Result<TlsRead> {
        let result = self.inner.read(target);
        if !self.loses && self.failed && result.is_err() {
            return Ok(TlsRead::Data(1));
        }
        self.failed |= result.is_err();
        result
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.inner.write(bytes)
    }

    fn take_output(&mut self, target: &mut [u8]) -> usize {
        let count = self.inner.take_output(target);
        if self.loses && count == target.len() && count < 16 {
            self.inner.take_output(&mut [0]);
        }
        count
    }

    fn output_bytes(&self) -> usize {
        self.inner.output_bytes()
    }
}

#[test]
fn lost_output_is_found_out() {
    let outcome = hunt(|inner| Careless { inner, loses: true, failed: false });
    let finding = outcome.map(drop).expect_err("the harness must find the loss");
    assert!(finding.contains("the client reads"), "{finding}");
}

#[test]
fn data_after_an_error_are_found_out() {
    let outcome = hunt(|inner| Careless { inner, loses: false, failed: false });
    let finding = outcome.map(drop).expect_err("the harness must find made-up data");
    assert!(finding.contains("data read"), "{finding}");
}
