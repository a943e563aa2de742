//! Requests against an encoder written from the protocol text only.

use super::*;
use crate::handshake::{BlockSizes, ExportCapabilities, ExportInfo};
use proptest::prelude::*;

const SIZE: u64 = 1 << 30;

fn session(style: ReplyStyle, read_only: bool) -> Session {
    let export = ExportInfo {
        snapshots: Vec::new(),
        handle: 0,
        name: "disk".into(),
        description: String::new(),
        size: SIZE,
        capabilities: ExportCapabilities {
            read_only,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
            rotational: false,
        },
        block: BlockSizes::default(),
    };
    Session {
        flags: export.transmission_flags(style),
        style,
        context: style.is_chunked().then_some(1),
        changed_since: None,
        block_size_requested: true,
        no_zeroes: true,
        tls: false,
        export,
    }
}

const STYLES: [ReplyStyle; 3] = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended];

/// The client's side of "Request message".
fn encode(
    style: ReplyStyle,
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u64,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let extended = style == ReplyStyle::Extended;
    bytes.extend(if extended { 0x21e4_1c71_u32 } else { 0x2560_9513 }.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    if extended {
        bytes.extend(length.to_be_bytes());
    } else {
        bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
    }
    bytes
}

fn decoded(session: &Session, bytes: &[u8]) -> RequestHeader {
    match decode_request(session, bytes) {
        Ok(Decoded::Request(header, consumed)) => {
            assert_eq!(consumed, session.style.request_len());
            header
        }
        other => panic!("expected a request, got {other:?}"),
    }
}

/// Decodes and checks a request in each style; adds the payload flag where it is needed.
fn verdict(
    style: ReplyStyle,
    flags: u16,
    command: u16,
    offset: u64,
    length: u64,
) -> Result<NbdRequest, Errno> {
    let session = session(style, false);
    let payload = style == ReplyStyle::Extended && command == 1;
    let flags = if payload { flags | 0x20 } else { flags };
    check(&decoded(&session, &encode(style, flags, command, 5, offset, length)), &session)
}

#[test]
fn a_write_follows_the_protocol() {
    let session = session(ReplyStyle::Simple, false);
    let bytes = b"\x25\x60\x95\x13\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\
                  \0\0\0\0\0\x10\0\0\0\0\x20\0rest";
    let Ok(Decoded::Request(header, 28)) = decode_request(&session, bytes) else {
        panic!("a request of 28 bytes");
    };
    let expected = RequestHeader {
        cookie: 0x0102_0304_0506_0708,
        command: Command::Write,
        flags: CommandFlags::FUA,
        offset: 0x10_0000,
        length: 0x2000,
        payload_len: 0x2000,
    };
    assert_eq!(header, expected);
    assert_eq!(
        check(&header, &session),
        Ok(NbdRequest::Write { offset: 0x10_0000, length: 0x2000, fua: true })
    );
}

#[test]
fn an_extended_trim_follows_the_protocol() {
    let session = session(ReplyStyle::Extended, false);
    let bytes = b"\x21\xe4\x1c\x71\0\0\0\x04\0\0\0\0\0\0\0\x09\
                  \0\0\0\0\0\0\x02\0\0\0\0\0\x3f\xff\xfe\0";
    let header = decoded(&session, bytes);
    assert_eq!(header.payload_len, 0);
    assert_eq!(
        check(&header, &session),
        Ok(NbdRequest::Trim { offset: 512, length: SIZE - 512, fua: false })
    );
}

#[test]
fn a_wrong_magic_number_is_fatal_at_once() {
    for style in STYLES {
        let session = session(style, false);
        for start in [*b"IHAV", [0; 4], 0x6744_6698_u32.to_be_bytes()] {
            let found = u32::from_be_bytes(start);
            assert!(matches!(decode_request(&session, &start),
                    Err(Fatal::BadMagic { found: was, .. }) if was == found));
        }
    }
    // The magic number of the other header format is wrong, too.
    let compact = encode(ReplyStyle::Simple, 0, 0, 0, 0, 512);
    assert!(decode_request(&session(ReplyStyle::Extended, false), &compact).is_err());
}

#[test]
fn every_command_in_every_style() {
    for style in STYLES {
        let ask = |flags, command| verdict(style, flags, command, 4096, 8192);
        let (offset, length) = (4096, 8192);
        let read = |unfragmented| NbdRequest::Read { offset, length: 8192, unfragmented };
        assert_eq!(ask(0, 0), Ok(read(false)));
        assert_eq!(ask(1, 0), Ok(read(false)), "FUA is accepted everywhere");
        assert_eq!(ask(0, 1), Ok(NbdRequest::Write { offset, length: 8192, fua: false }));
        assert_eq!(ask(1, 4), Ok(NbdRequest::Trim { offset, length, fua: true }));
        assert_eq!(ask(0, 5), Ok(NbdRequest::Cache { offset, length }));
        for bits in 0..8_u16 {
            let flags = (bits & 3) | (bits & 4) << 2;
            let [fua, no_hole, fast] = [1, 2, 4].map(|bit| bits & bit != 0);
            let expected = NbdRequest::WriteZeroes { offset, length, fua, no_hole, fast };
            assert_eq!(ask(flags, 6), Ok(expected));
        }
        if style.is_chunked() {
            assert_eq!(ask(4, 0), Ok(read(true)));
            assert_eq!(ask(0, 7), Ok(NbdRequest::BlockStatus { offset, length, one: false }));
            assert_eq!(ask(8, 7), Ok(NbdRequest::BlockStatus { offset, length, one: true }));
        } else {
            assert_eq!(ask(4, 0), Err(Errno::Inval), "DF was not offered");
            assert_eq!(ask(0, 7), Err(Errno::Inval), "no context was selected");
        }
        assert_eq!(verdict(style, 0, 3, 0, 0), Ok(NbdRequest::Flush));
        assert_eq!(verdict(style, 0, 3, 0, 512), Err(Errno::Inval));
        assert_eq!(verdict(style, 0, 3, 512, 0), Err(Errno::Inval));
        assert_eq!(verdict(style, 0, 2, 0, 0), Ok(NbdRequest::Disconnect));
        assert_eq!(verdict(style, 0xffdf, 2, 9, 9), Ok(NbdRequest::Disconnect), "a lax farewell");
        for unknown in [8, 9, 0xffff] {
            assert_eq!(ask(0, unknown), Err(Errno::Inval));
        }
    }
}

#[test]
fn flags_are_valid_only_for_their_commands() {
    // By command: the flags that are valid besides FUA if all are offered.
    let valid: [u16; 8] = [0x04, 0, 0, 0, 0, 0, 0x12, 0x08];
    for (command, valid) in (0_u16..).zip(valid) {
        for bit in 1..16 {
            if command == 2 || (command == 1 && bit == 5) {
                continue;
            }
            let flag = 1 << bit;
            let range = if command == 3 { (0, 0) } else { (512, 512) };
            let ok = verdict(ReplyStyle::Extended, flag, command, range.0, range.1).is_ok();
            assert_eq!(ok, flag & valid != 0, "command {command} flag {flag:#x}");
        }
    }
    let mut plain = session(ReplyStyle::Simple, false);
    plain.flags = TransmissionFlags::HAS_FLAGS;
    for (flags, command) in [(1, 0), (1, 1), (0, 3), (0, 4), (0, 5), (0, 6)] {
        let length = if command == 3 { 0 } else { 512 };
        let bytes = encode(plain.style, flags, command, 0, 0, length);
        assert_eq!(check(&decoded(&plain, &bytes), &plain), Err(Errno::Inval), "{command}");
    }
}

#[test]
fn a_read_only_export_is_not_written() {
    for style in STYLES {
        let session = session(style, true);
        for command in [1_u16, 4, 6] {
            let flags = if command == 1 && style == ReplyStyle::Extended { 0x20 } else { 0 };
            let bytes = encode(style, flags, command, 0, 0, 512);
            assert_eq!(check(&decoded(&session, &bytes), &session), Err(Errno::Perm));
        }
        let bytes = encode(style, 0, 0, 0, 0, 512);
        assert!(check(&decoded(&session, &bytes), &session).is_ok());
    }
}

#[test]
fn the_end_of_the_export() {
    for style in STYLES {
        for (command, beyond) in [
            (0, Errno::Inval),
            (1, Errno::NoSpc),
            (4, Errno::Inval),
            (5, Errno::Inval),
            (6, Errno::NoSpc),
        ] {
            let ask = |offset, length| verdict(style, 0, command, offset, length);
            assert!(ask(SIZE - 512, 512).is_ok(), "the last sector");
            assert_eq!(ask(SIZE - 512, 1024), Err(beyond));
            assert_eq!(ask(SIZE, 512), Err(beyond));
            assert_eq!(ask(u64::MAX - 511, 512), Err(beyond), "the sum would overflow");
            assert_eq!(ask(u64::MAX, 1), Err(beyond));
            assert_eq!(ask(0, 0), Err(Errno::Inval), "length 0");
            assert_eq!(ask(1, 512), Err(Errno::Inval), "not aligned");
            assert_eq!(ask(512, 513), Err(Errno::Inval), "not aligned");
        }
    }
    let ask = |command| verdict(ReplyStyle::Extended, 0, command, 512, u64::MAX - 511);
    assert_eq!(ask(6), Err(Errno::NoSpc));
    assert_eq!(ask(7), Err(Errno::Inval));
}

#[test]
fn lengths_above_the_maximum_payload() {
    let max = 1 << 25;
    for style in STYLES {
        assert!(verdict(style, 0, 0, 0, max).is_ok());
        assert!(verdict(style, 0, 1, 0, max).is_ok());
        let refused = if style.is_chunked() { Errno::Overflow } else { Errno::Inval };
        assert_eq!(verdict(style, 0, 0, 0, max + 512), Err(refused));
        assert!(verdict(style, 0, 4, 0, SIZE).is_ok(), "what carries no payload may be long");
        assert!(verdict(style, 0, 6, 0, SIZE).is_ok());
    }
}

#[test]
fn payloads_up_to_32_mib_are_accepted_and_longer_ones_are_fatal() {
    for style in STYLES {
        let mut small = session(style, false);
        small.export.block = BlockSizes::new(512, 4096, 1 << 20).unwrap();
        let flags = if style == ReplyStyle::Extended { 0x20 } else { 0 };
        let write = |length| encode(style, flags, 1, 0, 0, length);
        // Longer than advertised, but within 32 MiB.
        for length in [(1 << 20) + 512, 1 << 25] {
            let header = decoded(&small, &write(length));
            assert_eq!(u64::from(header.payload_len), length);
            assert!(check(&header, &small).is_ok());
            assert!(check(&decoded(&small, &encode(style, 0, 0, 0, 0, length)), &small).is_ok());
        }
        assert_eq!(
            decode_request(&small, &write((1 << 25) + 1)),
            Err(Fatal::PayloadTooLong { length: (1 << 25) + 1, max: 1 << 25 })
        );
        assert!(decode_request(&small, &write(u64::from(u32::MAX))).is_err());
        // A larger advertised maximum applies.
        small.export.block = BlockSizes::new(512, 4096, 1 << 26).unwrap();
        assert!(check(&decoded(&small, &write(1 << 26)), &small).is_ok());
    }
    let extended = session(ReplyStyle::Extended, false);
    let bytes = encode(ReplyStyle::Extended, 0x20, 1, 0, 0, 1 << 32);
    assert!(matches!(decode_request(&extended, &bytes), Err(Fatal::PayloadTooLong { .. })));
}

#[test]
fn payload_and_effect_of_extended_requests() {
    let session = session(ReplyStyle::Extended, false);
    // A WRITE without the flag has no payload, and is refused.
    let header = decoded(&session, &encode(session.style, 0, 1, 0, 0, 512));
    assert_eq!((header.payload_len, check(&header, &session)), (0, Err(Errno::Inval)));
    // Any other command with a payload is refused, and its payload skipped.
    for command in [0, 3, 4, 5, 6, 7, 8, 99] {
        let header = decoded(&session, &encode(session.style, 0x20, command, 0, 0, 512));
        assert_eq!((header.payload_len, check(&header, &session)), (512, Err(Errno::Inval)));
    }
    // Compact headers do not have the flag.
    let plain = self::session(ReplyStyle::Structured, false);
    let header = decoded(&plain, &encode(plain.style, 0x20, 0, 0, 0, 512));
    assert_eq!((header.payload_len, check(&header, &plain)), (0, Err(Errno::Inval)));
    let header = decoded(&plain, &encode(plain.style, 0x20, 1, 0, 0, 512));
    assert_eq!((header.payload_len, check(&header, &plain)), (512, Err(Errno::Inval)));
}

proptest! {
    #[test]
    fn what_a_client_encodes_is_decoded(
        style in 0_usize..3, flags: u16, command: u16, cookie: u64, offset: u64, length: u64,
        behind in proptest::collection::vec(any::<u8>(), 0..8),
    ) {
        let style = STYLES[style];
        let extended = style == ReplyStyle::Extended;
        let length = if extended { length } else { length >> 32 };
        let session = session(style, false);
        let mut bytes = encode(style, flags, command, cookie, offset, length);
        let whole = bytes.len();
        bytes.extend(behind);
        let outcome = decode_request(&session, &bytes);
        // Cut anywhere, it is incomplete, and the full length is needed.
        for cut in 0..whole {
            prop_assert_eq!(decode_request(&session, &bytes[..cut]), Ok(Decoded::NeedMore(whole)));
        }
        let carries = if extended { flags & 0x20 != 0 } else { command == 1 };
        if carries && length > 1 << 25 {
            prop_assert_eq!(outcome, Err(Fatal::PayloadTooLong { length, max: 1 << 25 }));
            return Ok(());
        }
        let Ok(Decoded::Request(header, consumed)) = outcome else {
            return Err(TestCaseError::fail(format!("{outcome:?}")));
        };
        prop_assert_eq!(consumed, whole);
        prop_assert_eq!(header.cookie, cookie);
        prop_assert_eq!(header.command.to_wire(), command);
        prop_assert_eq!(header.flags.0, flags);
        prop_assert_eq!((header.offset, header.length), (offset, length));
        prop_assert_eq!(u64::from(header.payload_len), if carries { length } else { 0 });
        if let Ok(NbdRequest::Trim { offset, length, .. } | NbdRequest::WriteZeroes { offset, length, .. })
            = check(&header, &session)
        {
            prop_assert!(u128::from(offset) + u128::from(length) <= u128::from(SIZE));
        }
    }
}
