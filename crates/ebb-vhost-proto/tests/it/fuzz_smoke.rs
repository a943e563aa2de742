//! Fuzzed conversations of a frontend, on any toolchain, the same each time.
//!
//! `EBBD_FUZZ_SEED=<number>` sets the seed; it is printed, and a finding names the input. The
//! bugs of broken decoders must be found, otherwise the harness itself is broken.

use ebb_vhost_proto::{FrontendMessage, MessageHeader, ProtocolError};

use crate::{Finding, seeds, vhost};

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} must be a number")),
        Err(_) => default,
    }
}

fn seed() -> u64 {
    number("EBBD_FUZZ_SEED", 0x0ebb_d5ee_d000_0003)
}

/// `split_mix`.
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Runs inputs of 16 to 143 bytes up to the first finding.
fn hunt(decode: vhost::Decode) -> Result<(u64, vhost::Tally), String> {
    let seed = seed();
    let inputs = test_scale::scaled(1_000_000);
    let (mut state, mut sum) = (seed, vhost::Tally::default());
    let mut input = Vec::new();
    for number in 0..inputs {
        let words = 2 + mixed(&mut state) % 16;
        input.clear();
        for _ in 0..words {
            input.extend_from_slice(&mixed(&mut state).to_le_bytes());
        }
        match vhost::run(decode, &input) {
            Ok(tally) => {
                sum.decoded += tally.decoded;
                sum.unsupported += tally.unsupported;
                sum.refused += tally.refused;
                sum.ended += tally.ended;
            }
            Err(Finding(text)) => {
                return Err(format!("seed {seed}, input {number}, bytes {input:02x?}:\n{text}"));
            }
        }
    }
    Ok((inputs, sum))
}

#[test]
fn seeds_lead_to_their_outcomes() {
    seeds::check("vhost_messages", |input| vhost::run(vhost::decode, input));
}

#[test]
fn a_million_conversations() {
    let (inputs, sum) = hunt(vhost::decode).unwrap_or_else(|finding| panic!("{finding}"));
    println!("seed {}: {inputs} conversations, {sum:?}", seed());
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
