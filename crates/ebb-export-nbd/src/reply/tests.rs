//! Replies, compared byte by byte with the layout in the protocol text.

use super::*;
use crate::decode::RequestHeader;
use crate::proto::{Command, CommandFlags, ExtentState};
use proptest::prelude::*;

fn to(style: ReplyStyle) -> ReplyTo {
    let request = RequestHeader {
        cookie: 0x1122_3344_5566_7788,
        command: Command::Read,
        flags: CommandFlags::NONE,
        offset: 0x0a00,
        length: 4096,
        payload_len: 0,
    };
    ReplyTo::new(style, &request)
}

const COOKIE: &[u8; 8] = b"\x11\x22\x33\x44\x55\x66\x77\x88";

fn simple(error: u8) -> Vec<u8> {
    [&b"\x67\x44\x66\x98\0\0\0"[..], &[error], COOKIE].concat()
}

fn structured(done: u8, kind: [u8; 2], length: u8, payload: &[u8]) -> Vec<u8> {
    let front = [0x66, 0x8e, 0x33, 0xef, 0, done];
    [&front[..], &kind, COOKIE, &[0, 0, 0, length], payload].concat()
}

fn extended(done: u8, kind: [u8; 2], length: u8, payload: &[u8]) -> Vec<u8> {
    let front = [0x6e, 0x8a, 0x27, 0x8c, 0, done];
    let offset = b"\0\0\0\0\0\0\x0a\0";
    [&front[..], &kind, COOKIE, offset, &[0, 0, 0, 0, 0, 0, 0, length], payload].concat()
}

#[test]
fn success_follows_the_protocol() {
    assert_eq!(to(ReplyStyle::Simple).success().as_bytes(), simple(0));
    assert_eq!(to(ReplyStyle::Structured).success().as_bytes(), simple(0));
    assert_eq!(to(ReplyStyle::Extended).success().as_bytes(), extended(1, [0, 0], 0, b""));
}

#[test]
fn errors_follow_the_protocol() {
    let (header, message) = to(ReplyStyle::Simple).error(Errno::NoSpc, "full");
    assert_eq!((header.as_bytes(), message), (&simple(28)[..], ""));
    let payload = b"\0\0\0\x1c\0\x04";
    let (header, message) = to(ReplyStyle::Structured).error(Errno::NoSpc, "full");
    assert_eq!(header.as_bytes(), structured(1, [0x80, 1], 10, payload));
    assert_eq!(message, "full");
    let (header, message) = to(ReplyStyle::Extended).error(Errno::NoSpc, "full");
    assert_eq!(header.as_bytes(), extended(1, [0x80, 1], 10, payload));
    assert_eq!(message, "full");
    let long = "x".repeat(4097);
    let (header, message) = to(ReplyStyle::Structured).error(Errno::Io, &long);
    assert_eq!(header.as_bytes(), structured(1, [0x80, 1], 6, b"\0\0\0\x05\0\0"));
    assert_eq!(message, "");
}

#[test]
fn simple_replies_have_no_chunks() {
    assert!(to(ReplyStyle::Simple).chunks().is_none());
}

#[test]
fn chunks_follow_the_protocol() {
    let plain = to(ReplyStyle::Structured).chunks().unwrap();
    let wide = to(ReplyStyle::Extended).chunks().unwrap();
    let offset = b"\0\0\0\0\0\0\x0c\0";

    assert_eq!(plain.none().as_bytes(), structured(1, [0, 0], 0, b""));
    assert_eq!(wide.none().as_bytes(), extended(1, [0, 0], 0, b""));

    assert_eq!(plain.data(0x0c00, 16, false).as_bytes(), structured(0, [0, 1], 24, offset));
    assert_eq!(wide.data(0x0c00, 16, true).as_bytes(), extended(1, [0, 1], 24, offset));

    let hole = [&offset[..], b"\0\0\x02\0"].concat();
    assert_eq!(plain.hole(0x0c00, 512, true).as_bytes(), structured(1, [0, 2], 12, &hole));
    assert_eq!(wide.hole(0x0c00, 512, false).as_bytes(), extended(0, [0, 2], 12, &hole));

    let status = plain.block_status(1, 3, true);
    assert_eq!(status.as_bytes(), structured(1, [0, 5], 4 + 3 * 8, b"\0\0\0\x01"));
    let status = wide.block_status(1, 3, true);
    assert_eq!(status.as_bytes(), extended(1, [0, 6], 8 + 3 * 16, b"\0\0\0\x01\0\0\0\x03"));
}

#[test]
fn the_longest_data_fits_its_length() {
    let chunks = to(ReplyStyle::Extended).chunks().unwrap();
    assert_eq!(chunks.data(0, u32::MAX, true).as_bytes()[24..32], 0x1_0000_0007_u64.to_be_bytes());
}

fn list(
    style: ReplyStyle,
    asked: (u64, bool),
    limits: (u32, u32),
    extents: &[(u64, u32)],
) -> (u32, Vec<u8>) {
    let mut out = b"kept".to_vec();
    let mut list = ExtentList::new(&mut out, style, asked, limits.0, limits.1);
    for (length, state) in extents {
        if !list.push(*length, ExtentState(*state)) {
            break;
        }
    }
    let count = list.finish();
    (count, out.split_off(4))
}

const ROOMY: (u32, u32) = (1 << 25, u32::MAX);

#[test]
fn descriptors_follow_the_protocol() {
    let extents = [(512, 0), (1024, 3), (512, 3), (0, 1), (4096, 0)];
    assert_eq!(
        list(ReplyStyle::Structured, (4096, false), ROOMY, &extents),
        (3, b"\0\0\x02\0\0\0\0\0\0\0\x06\0\0\0\0\x03\0\0\x08\0\0\0\0\0".to_vec())
    );
    assert_eq!(
        list(ReplyStyle::Extended, (1024, false), ROOMY, &extents),
        (2, b"\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\x03".to_vec())
    );
    assert_eq!(
        list(ReplyStyle::Structured, (4096, true), ROOMY, &extents),
        (1, b"\0\0\x02\0\0\0\0\0".to_vec()),
        "REQ_ONE"
    );
    assert_eq!(
        list(ReplyStyle::Structured, (4096, false), ROOMY, &[]),
        (1, b"\0\0\x10\0\0\0\0\0".to_vec()),
        "nothing known: allocated"
    );
}

#[test]
fn lists_are_limited() {
    let many: Vec<_> = (0..3000_u32).map(|n| (512, n % 2)).collect();
    let count = |style, limits| list(style, (1 << 30, false), limits, &many).0;
    assert_eq!(count(ReplyStyle::Structured, (1 << 25, 100)), 100);
    assert_eq!(count(ReplyStyle::Structured, (4096, 10_000)), 512);
    assert_eq!(count(ReplyStyle::Extended, (4096, 10_000)), 256);
    assert_eq!(count(ReplyStyle::Extended, (1, 0)), 1, "there is always one");
}

proptest! {
    /// Whatever is pushed, even after no more extents are needed, the result follows
    /// the rules and describes a prefix of what was pushed.
    #[test]
    fn lists_follow_the_protocol(
        wide: bool,
        one: bool,
        asked in prop_oneof![1_u64..5000, 1_u64..=u64::from(u32::MAX)],
        max in 0_u32..6,
        extents in proptest::collection::vec(
            (prop_oneof![0_u64..3000, any::<u64>()], 0_u32..4), 0..12),
    ) {
        let style = if wide { ReplyStyle::Extended } else { ReplyStyle::Structured };
        let mut out = Vec::new();
        let mut list = ExtentList::new(&mut out, style, (asked, one), 1 << 25, max);
        for (length, state) in &extents {
            list.push(*length, ExtentState(*state));
        }
        let count = list.finish();
        let size = if wide { 16 } else { 8 };
        prop_assert_eq!(out.len(), usize::try_from(count).unwrap() * size);
        let most = if one { 1 } else { max.max(1) };
        prop_assert!((1..=most).contains(&count));
        let descriptors: Vec<(u64, u64)> = out
            .chunks(size)
            .map(|bytes| {
                let (length, state) = bytes.split_at(size / 2);
                let number = |bytes: &[u8]| bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b));
                (number(length), number(state))
            })
            .collect();
        let mut at = 0;
        let known: u128 = extents.iter().map(|(length, _)| u128::from(*length)).sum();
        for (length, state) in &descriptors {
            prop_assert!(*length > 0);
            // Every described byte has the state that was pushed for it.
            let mut start = 0_u128;
            for (pushed, as_state) in &extents {
                let end = start + u128::from(*pushed);
                let (from, to) = (start.max(at), end.min(at + u128::from(*length)));
                if from < to {
                    prop_assert_eq!(u64::from(*as_state), *state);
                }
                start = end;
            }
            at += u128::from(*length);
        }
        prop_assert!(at <= u128::from(asked));
        if known > 0 {
            prop_assert!(at <= known, "only pushed bytes are described");
        }
        prop_assert!(descriptors.windows(2).all(|pair| pair[0].1 != pair[1].1));
    }
}
