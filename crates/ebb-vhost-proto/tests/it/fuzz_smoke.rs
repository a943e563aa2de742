//! Fuzzed conversations of a frontend, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken decoders must be found, otherwise the harness itself is broken.

use ebb_vhost_proto::{FrontendMessage, MessageHeader, ProtocolError};
use seeded::FuzzRun;

use crate::{Finding, seeds, vhost};

/// The inputs: 16 to 136 bytes.
fn fuzz() -> FuzzRun {
    FuzzRun::new(0x0ebb_d5ee_d000_0003, 1_000_000, 2..18)
}

/// Runs the inputs up to the first finding.
fn hunt(decode: vhost::Decode) -> Result<(u64, vhost::Tally), String> {
    let (fuzz, mut sum) = (fuzz(), vhost::Tally::default());
    fuzz.hunt(|input| {
        let tally = vhost::run(decode, input).map_err(|Finding(text)| text)?;
        sum.decoded += tally.decoded;
        sum.unsupported += tally.unsupported;
        sum.refused += tally.refused;
        sum.ended += tally.ended;
        Ok(())
    })?;
    Ok((fuzz.inputs, sum))
}

#[test]
fn seeds_lead_to_their_outcomes() {
    seeds::check("vhost_messages", |input| vhost::run(vhost::decode, input));
}

#[test]
fn a_million_conversations() {
    let (inputs, sum) = hunt(vhost::decode).unwrap_or_else(|finding| panic!("{finding}"));
    println!("seed {}: {inputs} conversations, {sum:?}", fuzz().seed);
    // The inputs reach all outcomes.
    assert!(sum.decoded > 3 * inputs, "{sum:?}");
    assert!(sum.unsupported > inputs / 2 && sum.unsupported < sum.decoded / 2, "{sum:?}");
    assert!(sum.refused > inputs / 8, "{sum:?}");
    assert!(sum.ended > inputs / 20, "{sum:?}");
}

/// Does not look at the flag that says that there is no descriptor.
fn decode_that_expects_files(
    header: MessageHeader,
    body: &[u8],
    descriptors: usize,
) -> Result<FrontendMessage<'_>, ProtocolError> {
    match FrontendMessage::decode(header, body, descriptors)? {
        FrontendMessage::SetVringCall(file) => {
            let file = ebb_vhost_proto::VringFile { has_descriptor: true, ..file };
            Ok(FrontendMessage::SetVringCall(file))
        }
        message => Ok(message),
    }
}

/// Does not count the descriptors that came.
fn decode_that_counts_no_files(
    header: MessageHeader,
    body: &[u8],
    _descriptors: usize,
) -> Result<FrontendMessage<'_>, ProtocolError> {
    FrontendMessage::decode(header, body, 8)
}

/// Reads what it needs from the front of a body, and does not look at the rest.
fn decode_that_ignores_the_rest(
    header: MessageHeader,
    body: &[u8],
    descriptors: usize,
) -> Result<FrontendMessage<'_>, ProtocolError> {
    let decoded = FrontendMessage::decode(header, body, descriptors);
    match decoded {
        Err(ProtocolError::Size { .. }) if body.len() > 8 => {
            FrontendMessage::decode(header, &body[..8], descriptors)
        }
        decoded => decoded,
    }
}

#[test]
fn broken_decoders_are_found_out() {
    let expect = |decode: vhost::Decode, what: &str| {
        let finding = hunt(decode).expect_err(what);
        assert!(finding.contains(what), "{finding}");
    };
    expect(decode_that_expects_files, "SetVringCall");
    expect(decode_that_counts_no_files, "descriptors, and");
    expect(decode_that_ignores_the_rest, "valid: false");
}
