//! A million fuzzed inputs over both parsers, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` chooses another million; the seed is printed, and a finding names the
//! input, so that it can be reproduced. The bugs of three broken servers must be found, otherwise the
//! harness itself is broken.
#![expect(unreachable_pub, reason = "the module is also a library of its own")]

#[path = "../../../../fuzz/src/lib.rs"]
mod fuzz;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;

use ebb_export_nbd::decode::{NbdRequest, RequestHeader, check};
use ebb_export_nbd::handshake::{
    Exports, Handshake, HandshakeError, HandshakePolicy, HandshakeStep, Session,
};
use ebb_export_nbd::proto::{Command, Errno, ReplyStyle};
use fuzz::negotiation::Negotiator;
use fuzz::{Finding, negotiation, requests};
use seeded::FuzzRun;

/// The inputs for each of the two parsers: 16 to 136 bytes.
fn fuzz_run() -> FuzzRun {
    FuzzRun::new(0x0ebb_d5ee_d000_0001, 520_000, 2..18)
}

/// Runs the inputs of a seed through a check, up to the first finding.
fn hunt(salt: u64, mut judge: impl FnMut(&[u8]) -> Result<(), Finding>) -> Result<(), String> {
    fuzz_run().salted(salt).hunt(|input| judge(input).map_err(|Finding(text)| text))
}

#[test]
fn seeds_lead_to_their_outcomes() {
    seeds::check("nbd_handshake", |input| negotiation::run(Handshake::new, input));
    seeds::check("nbd_transmission", |input| requests::run(check, input));
}

#[test]
fn half_a_million_handshakes() {
    let mut sum = negotiation::Tally::default();
    let outcome = hunt(0, |input| {
        let tally = negotiation::run(Handshake::new, input)?;
        sum.answered += tally.answered;
        sum.refused += tally.refused;
        sum.upgrades += tally.upgrades;
        sum.transmissions += tally.transmissions;
        sum.closed += tally.closed;
        Ok(())
    });
    let FuzzRun { seed, inputs, .. } = fuzz_run();
    println!("seed {seed}: {inputs} handshakes, {sum:?}");
    outcome.unwrap_or_else(|finding| panic!("{finding}"));
    // The inputs reach all states: a generator that fails in the first state would never find anything.
    assert!(sum.answered > inputs, "{sum:?}");
    assert!(sum.refused > inputs / 4 && sum.refused < sum.answered, "{sum:?}");
    assert!(sum.upgrades > inputs / 10, "{sum:?}");
    assert!(sum.transmissions > inputs / 4, "{sum:?}");
    assert!(sum.closed > inputs / 20, "{sum:?}");
}

#[test]
fn half_a_million_transmissions() {
    let mut sum = requests::Tally::default();
    let outcome = hunt(1, |input| {
        let tally = requests::run(check, input)?;
        sum.accepted += tally.accepted;
        sum.refused += tally.refused;
        sum.closed += tally.closed;
        Ok(())
    });
    let FuzzRun { seed, inputs, .. } = fuzz_run();
    println!("seed {seed}: {inputs} transmissions, {sum:?}");
    outcome.unwrap_or_else(|finding| panic!("{finding}"));
    assert!(sum.accepted > inputs, "{sum:?}");
    assert!(sum.refused > inputs / 4, "{sum:?}");
    assert!(sum.closed > inputs / 100, "{sum:?}");
}

/// Adds offset and length without an overflow check, a bug that servers have had.
fn check_that_wraps(header: &RequestHeader, session: &Session) -> Result<NbdRequest, Errno> {
    let RequestHeader { command, offset, length, .. } = *header;
    let verdict = check(header, session);
    let wraps = offset.checked_add(length).is_none();
    match (command, u32::try_from(length)) {
        (Command::Read, Ok(length)) if wraps && offset.wrapping_add(length.into()) <= 4096 => {
            Ok(NbdRequest::Read { offset, length, unfragmented: false })
        }
        _ => verdict,
    }
}

#[test]
fn a_check_that_wraps_is_found_out() {
    let outcome = hunt(1, |input| requests::run(check_that_wraps, input).map(|_| ()));
    let finding = outcome.expect_err("the harness must find the overflow");
    assert!(finding.contains("Read"), "{finding}");
}

/// A handshake with one of two bugs that servers have had at STARTTLS.
struct Careless {
    inner: Handshake,
    /// Accepts plain text after STARTTLS as the first option under TLS; otherwise keeps
    /// structured replies that were negotiated before.
    takes_plaintext: bool,
    awaiting_tls: bool,
    structured: bool,
}

impl Careless {
    fn new(policy: HandshakePolicy, takes_plaintext: bool) -> Self {
        let inner = Handshake::new(policy);
        Self { inner, takes_plaintext, awaiting_tls: false, structured: false }
    }
}

impl Negotiator for Careless {
    fn greeting(&mut self, out: &mut Vec<u8>) {
        self.inner.greeting(out);
    }

    fn advance(
        &mut self,
        mut input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, HandshakeStep), HandshakeError> {
        if self.takes_plaintext && self.awaiting_tls {
            self.tls_established()?;
        }
        if self.takes_plaintext && input.starts_with(b"IHAVEOPT\0\0\0\x05\0\0\0\0") {
            input = &input[..16];
        }
        let said = out.len();
        let (consumed, mut step) = self.inner.advance(input, exports, out)?;
        self.awaiting_tls = step == HandshakeStep::StartTls;
        self.structured |=
            input.starts_with(b"IHAVEOPT\0\0\0\x08") && out[said..].get(15) == Some(&1);
        if let HandshakeStep::Transmission(session) = &mut step
            && self.structured
            && !self.takes_plaintext
            && session.style == ReplyStyle::Simple
        {
            session.style = ReplyStyle::Structured;
        }
        Ok((consumed, step))
    }

    fn tls_established(&mut self) -> Result<(), HandshakeError> {
        self.awaiting_tls = false;
        self.inner.tls_established()
    }

    fn input_max(&self) -> usize {
        self.inner.input_max()
    }
}

#[test]
fn plain_text_accepted_as_tls_is_found_out() {
    let make = |policy| Careless::new(policy, true);
    let outcome = hunt(0, |input| negotiation::run(make, input).map(|_| ()));
    let finding = outcome.expect_err("the harness must find the injection");
    assert!(finding.contains("plain text"), "{finding}");
}

#[test]
fn state_kept_across_starttls_is_found_out() {
    let make = |policy| Careless::new(policy, false);
    let outcome = hunt(0, |input| negotiation::run(make, input).map(|_| ()));
    let finding = outcome.expect_err("the harness must find the state kept across STARTTLS");
    assert!(finding.contains("Structured where the client expects Simple"), "{finding}");
}
