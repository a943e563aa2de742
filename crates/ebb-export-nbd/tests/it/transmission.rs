//! The transmission phase against a real server: every command in every reply style, compared byte by byte.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::collections::HashSet;

use common::{
    BLOCK_STATUS, CACHE, Client, DF, DISC, EINVAL, ENOSPC, ENOTSUP, EOVERFLOW, EPERM, FAST_ZERO,
    FLUSH, FUA, NO_HOLE, PAYLOAD_LEN, READ, REQ_ONE, Rig, STYLES, Style, TRIM, WRITE, WRITE_ZEROES,
    file, memory, pattern, read_only,
};
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_store::Direct;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 4 * MIB;
const COOKIE: u64 = 0x0102_0304_0506_0708;

/// A chunk; [`Style::Simple`] has none.
fn chunk(style: Style, done: bool, kind: u16, offset: u64, payload: &[u8]) -> Vec<u8> {
    let extended = style == Style::Extended;
    let magic: u32 = if extended { 0x6e8a_278c } else { 0x668e_33ef };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(u16::from(done).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(COOKIE.to_be_bytes());
    if extended {
        bytes.extend(offset.to_be_bytes());
        bytes.extend((payload.len() as u64).to_be_bytes());
    } else {
        bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    }
    bytes.extend(payload);
    bytes
}

fn simple(error: u32) -> Vec<u8> {
    [
        0x6744_6698u32.to_be_bytes().to_vec(),
        error.to_be_bytes().to_vec(),
        COOKIE.to_be_bytes().to_vec(),
    ]
    .concat()
}

fn success(style: Style, offset: u64) -> Vec<u8> {
    match style {
        Style::Simple | Style::Structured => simple(0),
        Style::Extended => chunk(style, true, 0, offset, b""),
    }
}

fn data(style: Style, done: bool, request: u64, at: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(style, done, 1, request, &[&at.to_be_bytes(), bytes].concat())
}

fn hole(style: Style, done: bool, request: u64, at: u64, length: u32) -> Vec<u8> {
    chunk(style, done, 2, request, &[&at.to_be_bytes()[..], &length.to_be_bytes()].concat())
}

fn expect(client: &mut Client, what: &str, expected: &[u8]) {
    let found = client.bytes(expected.len());
    assert!(found == expected, "{what}, {:?}:\n{found:02x?}\n{expected:02x?}", client.style);
}

/// Checks that no further bytes were sent: the next reply is that to a flush.
fn nothing_more(client: &mut Client) {
    client.send(FLUSH, 0, COOKIE, 0, 0);
    let expected = success(client.style, 0);
    expect(client, "only the reply to a flush", &expected);
}

#[test]
fn every_command_in_every_style_to_the_byte() {
    for style in STYLES {
        let rig = Rig::with([memory("disk", SIZE)]);
        let mut client = rig.client("disk", style);
        assert_eq!(client.size, SIZE);
        let df = if style == Style::Simple { 0 } else { 1 << 7 };
        // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO
        assert_eq!(client.flags, 0b1101_0110_1101 | df);
        let written = pattern(1, 8192);
        for flags in [0, FUA] {
            client.send_write(flags, COOKIE, 4096, &written);
            expect(&mut client, "write", &success(style, 4096));
            for (command, extra) in
                [(FLUSH, 0), (CACHE, 0), (TRIM, 0), (WRITE_ZEROES, 0), (WRITE_ZEROES, NO_HOLE)]
            {
                let (offset, length) = if command == FLUSH { (0, 0) } else { (16_384, 512) };
                client.send(command, flags | extra, COOKIE, offset, length);
                expect(&mut client, &format!("command {command}"), &success(style, offset));
            }
            client.send(READ, flags, COOKIE, 4096, 8192);
            let expected = match style {
                Style::Simple => [simple(0), written.clone()].concat(),
                _ => data(style, true, 4096, 4096, &written),
            };
            expect(&mut client, "read", &expected);
        }
        nothing_more(&mut client);
    }
}

#[test]
fn holes_are_sent_as_holes_unless_the_client_wants_one_piece() {
    for style in STYLES {
        let rig = Rig::with([memory("disk", SIZE)]);
        let mut client = rig.client("disk", style);
        let written = pattern(2, 4096);
        assert_eq!(client.write(0, 8192, &written), 0);
        let whole = [&[0; 4096][..], &written, &[0; 8192]].concat();
        client.send(READ, 0, COOKIE, 4096, 16_384);
        let expected = match style {
            Style::Simple => [simple(0), whole.clone()].concat(),
            _ => [
                hole(style, false, 4096, 4096, 4096),
                data(style, false, 4096, 8192, &written),
                hole(style, true, 4096, 12_288, 8192),
            ]
            .concat(),
        };
        expect(&mut client, "a read with holes", &expected);
        if style != Style::Simple {
            client.send(READ, DF, COOKIE, 4096, 16_384);
            let expected = data(style, true, 4096, 4096, &whole);
            expect(&mut client, "in one piece", &expected);
            client.send(READ, 0, COOKIE, MIB, 32 << 10);
            expect(&mut client, "zeroes", &hole(style, true, MIB, MIB, 32 << 10));
        }
        nothing_more(&mut client);
        // With more runs than a reply has chunks, the reply still covers the whole read.
        for at in (0..64u64).step_by(2) {
            assert_eq!(client.write(0, MIB + at * 4096, &written), 0);
        }
        let read = client.read(MIB, 64 * 4096).unwrap();
        for (number, block) in read.chunks(4096).enumerate() {
            assert!(if number % 2 == 0 { block == written } else { block == [0; 4096] });
        }
    }
}

fn status(style: Style, context: u32, request: u64, extents: &[(u64, u32)]) -> Vec<u8> {
    let mut payload = context.to_be_bytes().to_vec();
    if style == Style::Extended {
        payload.extend(u32::try_from(extents.len()).unwrap().to_be_bytes());
    }
    for (length, state) in extents {
        if style == Style::Extended {
            payload.extend(length.to_be_bytes());
            payload.extend(u64::from(*state).to_be_bytes());
        } else {
            payload.extend(u32::try_from(*length).unwrap().to_be_bytes());
            payload.extend(state.to_be_bytes());
        }
    }
    chunk(style, true, if style == Style::Extended { 6 } else { 5 }, request, &payload)
}

#[test]
fn block_status_distinguishes_data_and_holes() {
    const HOLE: u32 = 3;
    for style in [Style::Structured, Style::Extended] {
        let rig = Rig::with([memory("disk", SIZE)]);
        let mut client = rig.client("disk", style);
        let context = client.context;
        assert_eq!(client.write(0, MIB, &pattern(3, 8192)), 0);
        client.send(BLOCK_STATUS, 0, COOKIE, 0, SIZE);
        let all = [(MIB, HOLE), (8192, 0), (3 * MIB - 8192, HOLE)];
        expect(&mut client, "all", &status(style, context, 0, &all));
        client.send(BLOCK_STATUS, REQ_ONE, COOKIE, 0, SIZE);
        expect(&mut client, "one", &status(style, context, 0, &all[..1]));
        client.send(BLOCK_STATUS, REQ_ONE, COOKIE, MIB + 512, 1024);
        expect(
            &mut client,
            "not more than requested",
            &status(style, context, MIB + 512, &[(1024, 0)]),
        );
        assert_eq!(client.ask(TRIM, 0, MIB, 8192), 0);
        client.send(BLOCK_STATUS, 0, COOKIE, 512, SIZE - 512);
        expect(&mut client, "trimmed", &status(style, context, 512, &[(SIZE - 512, HOLE)]));
        nothing_more(&mut client);
    }
    let rig = Rig::with([memory("disk", SIZE)]);
    let mut client = rig.client("disk", Style::Simple);
    assert_eq!(client.ask(BLOCK_STATUS, 0, 0, 4096), EINVAL, "no context was selected");
}

#[test]
fn zeroes_keep_or_free_space_and_are_fast_or_refused() {
    for style in STYLES {
        let folder = tempfile::tempdir_in("/dev/shm").expect("this needs a tmpfs at /dev/shm");
        let path = folder.path().join("image");
        let rig = Rig::with([file("disk", &path, SIZE, Direct::Off)]);
        let mut client = rig.client("disk", style);
        let written = pattern(4, 2 << 20);
        assert_eq!(client.write(0, 0, &written), 0);
        // On tmpfs, zeroes without a hole have to be written: the only case of ENOTSUP.
        assert_eq!(client.ask(WRITE_ZEROES, FAST_ZERO | NO_HOLE, 512, MIB), ENOTSUP);
        assert!(client.read(0, 2 << 20).unwrap() == written, "nothing was changed");
        assert_eq!(client.ask(WRITE_ZEROES, FAST_ZERO | FUA, 512, MIB), 0);
        assert!(client.read(512, 1 << 20).unwrap().iter().all(|b| *b == 0));
        assert_eq!(client.write(0, 0, &written), 0);
        assert_eq!(client.ask(WRITE_ZEROES, NO_HOLE, 0, 2 * MIB), 0);
        assert!(client.read(0, 2 << 20).unwrap().iter().all(|b| *b == 0));
        use std::os::unix::fs::MetadataExt;
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 2 * MIB, "space was kept");
        assert_eq!(client.ask(WRITE_ZEROES, 0, 0, SIZE), 0);
        assert_eq!(std::fs::metadata(&path).unwrap().blocks(), 0, "space was freed");
    }
}

#[test]
fn invalid_requests_are_refused_and_the_connection_continues() {
    for style in STYLES {
        let rig = Rig::with([memory("disk", SIZE), memory("large", 64 * MIB)]);
        let mut client = rig.client("disk", style);
        let long = if style == Style::Simple { EINVAL } else { EOVERFLOW };
        let cases = [
            (READ, 0, 0, 0, EINVAL, "no length"),
            (READ, 0, 100, 512, EINVAL, "offset not aligned"),
            (READ, 0, 0, 100, EINVAL, "length not aligned"),
            (READ, 0, SIZE, 512, EINVAL, "past the end"),
            (READ, 0, SIZE - 512, 1024, EINVAL, "across the end"),
            (READ, 0, u64::MAX - 511, 1024, EINVAL, "offset and length overflow"),
            (READ, 1 << 14, 0, 512, EINVAL, "unknown flag"),
            (READ, NO_HOLE, 0, 512, EINVAL, "a flag of another command"),
            (FLUSH, 0, 512, 0, EINVAL, "a flush with an offset"),
            (FLUSH, 0, 0, 512, EINVAL, "a flush with a length"),
            (TRIM, 0, SIZE - 512, 1024, EINVAL, "trim across the end"),
            (TRIM, 0, 0, 0, EINVAL, "trim of length 0"),
            (CACHE, DF, 0, 512, EINVAL, "cache with DF"),
            (CACHE, 0, 0, SIZE + 512, EINVAL, "cache across the end"),
            (WRITE_ZEROES, 0, SIZE, 512, ENOSPC, "zeroes past the end"),
            (WRITE_ZEROES, REQ_ONE, 0, 512, EINVAL, "zeroes with REQ_ONE"),
            (BLOCK_STATUS, 0, SIZE, 512, EINVAL, "status past the end"),
            (BLOCK_STATUS, FAST_ZERO, 0, 512, EINVAL, "status with FAST_ZERO"),
            (8, 0, 0, 512, EINVAL, "resize"),
            (0xffff, 0, 0, 0, EINVAL, "an unknown command"),
        ];
        for (command, flags, offset, length, expected, what) in cases {
            assert_eq!(client.ask(command, flags, offset, length), expected, "{what}, {style:?}");
            assert_eq!(client.read(0, 512), Ok(vec![0; 512]), "after {what}, {style:?}");
        }
        let mut large = rig.client("large", style);
        assert_eq!(large.ask(READ, 0, 0, 32 * MIB + 512), long, "longer than the maximum");
        assert_eq!(large.read(0, 512), Ok(vec![0; 512]), "{style:?}");
        if style == Style::Simple {
            assert_eq!(client.ask(READ, DF, 0, 4096), EINVAL, "DF was not offered");
        }
        // The payload of a refused write is skipped, whatever its content.
        let looks_like_a_request = client.header(TRIM, 0, 1, 0, 4096).repeat(1024);
        let payload = &looks_like_a_request[..28_160];
        let writes = [
            (0, SIZE, ENOSPC, "past the end"),
            (0, SIZE - 512, ENOSPC, "across the end"),
            (0, 100, EINVAL, "not aligned"),
            (NO_HOLE, 0, EINVAL, "a flag of another command"),
            (1 << 9, 0, EINVAL, "unknown flag"),
        ];
        for (flags, offset, expected, what) in writes {
            assert_eq!(client.write(flags, offset, payload), expected, "{what}, {style:?}");
        }
        assert_eq!(client.write(0, 0, &[]), EINVAL, "length 0, {style:?}");
        assert!(client.read(0, 1 << 20).unwrap().iter().all(|b| *b == 0), "nothing was written");
        nothing_more(&mut client);
    }
}

/// With extended headers, a flag says whether a payload follows, for any command.
#[test]
fn an_unexpected_payload_is_skipped() {
    let rig = Rig::with([memory("disk", SIZE)]);
    let mut client = rig.client("disk", Style::Extended);
    for command in [READ, FLUSH, TRIM, BLOCK_STATUS, 77] {
        let mut bytes = client.header(command, PAYLOAD_LEN, 9, 0, 4096);
        bytes.extend(pattern(6, 4096));
        client.stream.write_all(&bytes).unwrap();
        assert_eq!(client.reply(|_| None).unwrap().error, EINVAL, "command {command}");
    }
    // A write without the flag has no payload.
    let mut bytes = client.header(WRITE, 0, 9, 0, 4096);
    bytes[4..6].copy_from_slice(&[0, 0]);
    client.stream.write_all(&bytes).unwrap();
    assert_eq!(client.reply(|_| None).unwrap().error, EINVAL);
    nothing_more(&mut client);
}

/// Lengths of more than 32 bits, with extended headers.
#[test]
fn extended_lengths_reach_the_whole_of_a_large_volume() {
    const LARGE: u64 = 1 << 40;
    let rig = Rig::with([memory("disk", LARGE)]);
    let mut client = rig.client("disk", Style::Extended);
    assert_eq!(client.write(0, LARGE / 2, &pattern(7, 4096)), 0);
    client.send(BLOCK_STATUS, 0, COOKIE, 0, LARGE);
    let all = [(LARGE / 2, 3), (4096, 0), (LARGE / 2 - 4096, 3)];
    let expected = status(Style::Extended, client.context, 0, &all);
    expect(&mut client, "a terabyte", &expected);
    assert_eq!(client.ask(WRITE_ZEROES, FAST_ZERO, 0, LARGE), 0);
    assert_eq!(client.ask(TRIM, 0, 0, LARGE), 0);
    assert_eq!(client.ask(CACHE, 0, 0, LARGE), 0);
    assert_eq!(client.ask(TRIM, 0, 0, u64::MAX), EINVAL);
    assert_eq!(client.ask(READ, 0, 0, LARGE), EOVERFLOW);
}

#[test]
fn a_read_only_volume_refuses_write_commands() {
    for style in STYLES {
        let rig = Rig::with([read_only("disk", SIZE)]);
        let mut client = rig.client("disk", style);
        assert_eq!(client.flags & 0b10, 0b10, "READ_ONLY");
        assert_eq!(client.write(0, 0, &pattern(8, 64 << 10)), EPERM);
        assert_eq!(client.ask(TRIM, 0, 0, 4096), EPERM);
        assert_eq!(client.ask(WRITE_ZEROES, 0, 0, 4096), EPERM);
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        assert_eq!(client.ask(CACHE, 0, 0, 4096), 0);
        assert!(client.read(0, 64 << 10).unwrap().iter().all(|b| *b == 0));
    }
}

#[test]
fn many_requests_at_once_each_receive_one_reply() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for style in STYLES {
        let path = folder.path().join(format!("{style:?}"));
        let rig = Rig::with([file("disk", &path, SIZE, Direct::Auto)]);
        let mut client = rig.client("disk", style);
        let expected = pattern(9, 4 << 20);
        for at in (0..4 << 20).step_by(1 << 20) {
            assert_eq!(client.write(0, at as u64, &expected[at..at + (1 << 20)]), 0);
        }
        // Reads of many lengths; offset and length by cookie.
        let place = |cookie: u64| {
            let number = cookie - 1;
            let length = 512usize << (number % 8);
            Some((number * 65_536 + number % 4 * 512, length))
        };
        let mut bytes = Vec::new();
        for cookie in 1..=64u64 {
            let (offset, length) = place(cookie).unwrap();
            if cookie <= 60 {
                bytes.extend(client.header(READ, 0, cookie, offset, length as u64));
            }
        }
        client.stream.write_all(&bytes).unwrap();
        let mut seen = HashSet::new();
        for _ in 1..=60 {
            let reply = client.reply(place).unwrap();
            let (offset, length) = place(reply.cookie).unwrap();
            let offset = usize::try_from(offset).unwrap();
            assert_eq!(reply.error, 0);
            assert!(reply.data == expected[offset..offset + length], "cookie {}", reply.cookie);
            assert!(seen.insert(reply.cookie), "twice");
        }
        nothing_more(&mut client);
    }
}

/// After `NBD_CMD_DISC` the client receives the replies to its requests in flight, and all its writes are executed.
#[test]
fn a_disconnect_request_waits_for_requests_in_flight() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for style in STYLES {
        let path = folder.path().join(format!("{style:?}"));
        let rig = Rig::with([file("disk", &path, SIZE, Direct::Auto)]);
        let mut client = rig.client("disk", style);
        let expected = pattern(10, 4 << 20);
        let mut bytes = Vec::new();
        for (number, data) in expected.chunks(64 << 10).enumerate() {
            let number = number as u64;
            bytes.extend(client.header(WRITE, 0, number + 1, number * 65_536, 64 << 10));
            bytes.extend_from_slice(data);
        }
        bytes.extend(client.header(DISC, 0, 99, 0, 0));
        client.stream.write_all(&bytes).unwrap();
        let cookies: HashSet<u64> = (0..64)
            .map(|_| {
                let reply = client.reply(|_| None).unwrap();
                assert_eq!(reply.error, 0);
                reply.cookie
            })
            .collect();
        assert_eq!(cookies, (1..=64).collect());
        assert!(client.is_at_end());
        assert!(std::fs::read(&path).unwrap() == expected);
    }
}

/// A client disconnects within a write: each write it had sent is executed
/// completely or not at all, and its connection ends.
#[test]
fn a_client_that_disconnects_within_a_write_leaves_whole_writes_only() {
    let rig = Rig::with([memory("disk", SIZE)]);
    let mut other = rig.client("disk", Style::Simple);
    let written = pattern(11, 64 << 10);
    for round in 0..20u64 {
        let mut client = rig.client("disk", STYLES[usize::try_from(round % 3).unwrap()]);
        assert_eq!(client.write(0, round * 65_536, &written), 0);
        for number in 0..8 {
            client.send_write(0, number + 1, 2 * MIB + number * 65_536, &written);
        }
        let header = client.header(WRITE, 0, 9, 3 * MIB, 4096);
        client.stream.write_all(&[header, vec![1; 4095]].concat()).unwrap();
        drop(client);
        while rig.server.clients() > 1 {
            std::thread::yield_now();
        }
        assert!(other.read(round * 65_536, 64 << 10).unwrap() == written, "it was acknowledged");
        for number in 0..8 {
            let found = other.read(2 * MIB + number * 65_536, 64 << 10).unwrap();
            assert!(found == written || found.iter().all(|b| *b == 0), "half a write");
        }
        assert_eq!(
            other.read(3 * MIB, 4096).unwrap(),
            [0; 4096],
            "a write received in part is not executed"
        );
        assert_eq!(other.ask(TRIM, 0, 2 * MIB, MIB), 0);
    }
}

#[test]
fn a_budget_smaller_than_one_request_still_makes_progress() {
    for style in STYLES {
        let limits = ServerLimits { connection_memory: 64 << 10, ..ServerLimits::default() };
        let rig = Rig::new(limits, TlsMode::Off, None);
        rig.server.volumes().add(memory("disk", 16 * MIB), std::sync::Arc::default());
        let mut client = rig.client("disk", style);
        let expected = pattern(12, 4 << 20);
        for at in [0, 4 * MIB] {
            assert_eq!(client.write(0, at, &expected), 0);
        }
        for cookie in 1..=8 {
            client.send(READ, 0, cookie, cookie % 2 * 4 * MIB, 4 * MIB);
        }
        for _ in 0..8 {
            let place = |cookie: u64| Some((cookie % 2 * 4 * MIB, 4 << 20));
            assert!(client.reply(place).unwrap().data == expected);
        }
    }
}
