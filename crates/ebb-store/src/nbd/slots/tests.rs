use std::collections::HashMap;
use std::task::Waker;

use ebb_nbd_proto::chunk;
use seeded::Random;

use super::super::reply::decode;
use super::*;

type Requests = RequestSlots<Vec<u8>, ()>;

/// The receiver's loop over bytes in memory: how many were used, and why it ended.
fn receive(slots: &mut Requests, mut bytes: &[u8]) -> Result<usize, ProtocolViolation> {
    let all = bytes.len();
    loop {
        let Some((frame, used)) = decode(bytes)? else { return Ok(all - bytes.len()) };
        let step = slots.apply(&frame)?;
        bytes = &bytes[used..];
        let mut take = |count: usize| {
            let part = bytes.split_at_checked(count);
            part.map(|(part, rest)| {
                bytes = rest;
                part
            })
        };
        match step {
            ReplyStep::Done => {}
            ReplyStep::Fill(range) => {
                let cookie = Cookie(frame.cookie);
                let mut buf = slots.take_buf(cookie).ok_or(ProtocolViolation("no buffer"))?;
                let part = take(range.len());
                if let Some(part) = part {
                    buf[range].copy_from_slice(part);
                }
                slots.return_buf(cookie, buf);
                if part.is_none() {
                    return Ok(all);
                }
            }
            ReplyStep::Skip(count) => {
                if take(usize::try_from(count).unwrap()).is_none() {
                    return Ok(all);
                }
            }
            ReplyStep::Describe(entries) => {
                for _ in 0..entries {
                    let Some(part) = take(8) else { return Ok(all) };
                    slots.describe(Cookie(frame.cookie), part.try_into().unwrap())?;
                }
            }
        }
        slots.finish(&frame)?;
    }
}

fn request(command: Command, offset: u64, length: u32) -> RemoteRequest {
    let zeroes = false;
    RemoteRequest { command, flags: CommandFlags::NONE, offset, length, at: 0, limit: 8, zeroes }
}

/// Queues and sends one request; reads and writes get a buffer full of `0xee`.
fn submit(slots: &mut Requests, command: Command, offset: u64, length: u32) -> Cookie {
    let data = matches!(command, Command::Read | Command::Write);
    let buf = data.then(|| vec![0xee; usize::try_from(length).unwrap()]);
    let cookie = slots.push(request(command, offset, length), buf, None, None);
    assert_eq!(send(slots), 0, "none is sent again");
    cookie
}

/// Sends all queued requests; returns how many were sent again.
fn send(slots: &mut Requests) -> u64 {
    let mut again = 0;
    while let Some(next) = slots.next_to_send(u64::MAX) {
        again += u64::from(next.again);
        if let Some(buf) = next.payload {
            slots.return_buf(next.cookie, buf);
        }
    }
    again
}

fn outcome(slots: &mut Requests, cookie: Cookie) -> Option<RequestOutcome<Vec<u8>>> {
    match slots.poll(cookie, &Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}

fn simple(cookie: Cookie, error: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = magic::SIMPLE_REPLY.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.0.to_be_bytes());
    bytes.extend(data);
    bytes
}

fn piece(cookie: Cookie, done: bool, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = magic::STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(u16::from(done).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.0.to_be_bytes());
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn data(cookie: Cookie, done: bool, offset: u64, data: &[u8]) -> Vec<u8> {
    piece(cookie, done, chunk::OFFSET_DATA, &[&offset.to_be_bytes(), data].concat())
}

fn hole(cookie: Cookie, done: bool, offset: u64, length: u32) -> Vec<u8> {
    let payload = [&offset.to_be_bytes()[..], &length.to_be_bytes()[..]].concat();
    piece(cookie, done, chunk::OFFSET_HOLE, &payload)
}

fn chunked() -> Requests {
    let mut slots = Requests::default();
    slots.agree(true, Some(5));
    slots
}

#[test]
fn a_read_in_pieces_out_of_order_with_a_hole() {
    let mut slots = chunked();
    let cookie = submit(&mut slots, Command::Read, 1000, 6);
    let bytes = [
        data(cookie, false, 1004, b"ef"),
        hole(cookie, false, 1002, 2),
        data(cookie, true, 1000, b"ab"),
    ]
    .concat();
    assert_eq!(receive(&mut slots, &bytes), Ok(bytes.len()));
    let outcome = outcome(&mut slots, cookie).unwrap();
    assert_eq!(outcome.result, Ok(()));
    assert_eq!(outcome.buf.unwrap(), b"ab\0\0ef");
    assert_eq!(slots.busy(), 0);
}

#[test]
fn a_read_with_a_gap_an_overlap_or_bytes_outside_fails() {
    type Answer = fn(Cookie) -> Vec<u8>;
    let cases: [Answer; 7] = [
        |c| data(c, true, 0, b"abc"),
        |c| [data(c, false, 0, b"ab"), data(c, true, 1, b"bcd")].concat(),
        |c| data(c, true, 0, b"abcde"),
        |c| data(c, true, 3, b"de"),
        |c| data(c, true, u64::MAX - 1, b"ab"),
        |c| hole(c, true, 0, u32::MAX),
        |c| piece(c, true, chunk::NONE, &[]),
    ];
    for (number, reply_to) in cases.iter().enumerate() {
        let mut slots = chunked();
        let cookie = submit(&mut slots, Command::Read, 0, 4);
        assert!(receive(&mut slots, &reply_to(cookie)).is_err(), "{number}");
        let outcome = outcome(&mut slots, cookie).unwrap();
        assert!(matches!(outcome.result, Err(RequestFailure::Protocol(_))), "{number}");
        assert!(outcome.buf.is_some(), "the buffer comes back");
    }
}

#[test]
fn replies_complete_only_their_own_request() {
    let mut slots = Requests::default();
    let first = submit(&mut slots, Command::Write, 0, 512);
    assert_eq!(receive(&mut slots, &simple(first, 0, &[])), Ok(16));
    assert!(outcome(&mut slots, first).is_some());
    let second = submit(&mut slots, Command::Write, 0, 512);
    assert_ne!(first, second);
    assert!(receive(&mut slots, &simple(first, 0, &[])).is_err(), "an old cookie");
    assert!(receive(&mut slots, &simple(Cookie(77), 0, &[])).is_err(), "an invented one");
    assert!(outcome(&mut slots, second).is_none());
    assert_eq!(receive(&mut slots, &simple(second, 5, &[])), Ok(16));
    assert!(receive(&mut slots, &simple(second, 0, &[])).is_err(), "two replies");
    assert_eq!(outcome(&mut slots, second).unwrap().result, Err(RequestFailure::Server(5)));
}

#[test]
fn a_reply_before_the_data_was_sent_waits_for_the_buffer() {
    let mut slots = Requests::default();
    let write = request(Command::Write, 0, 512);
    let cookie = slots.push(write, Some(vec![1; 512]), None, None);
    let next = slots.next_to_send(u64::MAX).unwrap();
    assert_eq!(receive(&mut slots, &simple(cookie, 0, &[])), Ok(16));
    assert!(outcome(&mut slots, cookie).is_none(), "the sender still has the buffer");
    slots.return_buf(cookie, next.payload.unwrap());
    assert_eq!(outcome(&mut slots, cookie).unwrap().buf.unwrap().len(), 512);
}

#[test]
fn requests_without_a_reply_are_sent_again_and_old_replies_are_ignored() {
    let mut slots = chunked();
    let cookie = submit(&mut slots, Command::Read, 0, 4);
    assert!(receive(&mut slots, &data(cookie, false, 0, b"xy")).is_ok());
    let now = Instant::now();
    slots.replay(now, Duration::from_secs(1));
    assert!(receive(&mut slots, &data(cookie, true, 2, b"zz")).is_err(), "not sent yet");
    assert_eq!(send(&mut slots), 1);
    assert!(receive(&mut slots, &data(cookie, true, 0, b"abcd")).is_ok());
    assert_eq!(outcome(&mut slots, cookie).unwrap().buf.unwrap(), b"abcd");
    // A request that loses every connection fails when its time limit expires.
    let cookie = submit(&mut slots, Command::Read, 0, 4);
    slots.replay(now, Duration::from_secs(1));
    assert_eq!(send(&mut slots), 1);
    slots.replay(now + Duration::from_secs(2), Duration::from_secs(1));
    assert_eq!(send(&mut slots), 0);
    assert_eq!(outcome(&mut slots, cookie).unwrap().result, Err(RequestFailure::Lost));
}

#[test]
fn requests_held_back_behind_an_unanswered_first_flush_fail_in_time() {
    let (mut slots, limit) = (chunked(), Duration::from_secs(60));
    let mut now = Instant::now();
    let first = submit(&mut slots, Command::Read, 0, 4);
    slots.replay(now, limit);
    let later = slots.push(request(Command::Read, 4, 4), Some(vec![0; 4]), None, None);
    // Each connection begins with a flush, and the server replies to nothing.
    for _ in 0..7 {
        let flush = slots.push_first(request(Command::Flush, 0, 0));
        assert_eq!(slots.next_to_send(u64::MAX).unwrap().cookie, flush);
        slots.abandon(flush);
        now += Duration::from_secs(10);
        slots.replay(now, limit);
    }
    assert_eq!(outcome(&mut slots, first).unwrap().result, Err(RequestFailure::Lost));
    assert!(outcome(&mut slots, later).is_none(), "its first connection was lost 60 s ago");
    slots.replay(now + Duration::from_secs(1), limit);
    assert_eq!(outcome(&mut slots, later).unwrap().result, Err(RequestFailure::Lost));
    assert!(slots.next_to_send(u64::MAX).is_none());
}

#[test]
fn an_abandoned_request_keeps_its_buffer_until_it_completes() {
    let mut slots = Requests::default();
    let cookie = submit(&mut slots, Command::Read, 0, 4);
    slots.abandon(cookie);
    assert_eq!(slots.busy(), 1, "the reply is still to come");
    assert_eq!(receive(&mut slots, &simple(cookie, 0, b"abcd")), Ok(20));
    assert_eq!(slots.busy(), 0);
    // One that was not sent never is.
    let cookie = slots.push(request(Command::Read, 0, 4), Some(vec![0; 4]), None, None);
    slots.abandon(cookie);
    assert!(slots.next_to_send(u64::MAX).is_none());
    assert_eq!(slots.busy(), 0);
}

#[test]
fn block_status_is_cut_to_the_requested_range() {
    let mut slots = chunked();
    let cookie = submit(&mut slots, Command::BlockStatus, 512, 2048);
    let mut payload = 5u32.to_be_bytes().to_vec();
    for (length, state) in [(1024u32, 0u32), (512, 3), (u32::MAX, 1)] {
        payload.extend(length.to_be_bytes());
        payload.extend(state.to_be_bytes());
    }
    let bytes = piece(cookie, true, chunk::BLOCK_STATUS, &payload);
    assert_eq!(receive(&mut slots, &bytes), Ok(bytes.len()));
    let list = outcome(&mut slots, cookie).unwrap().extents;
    let plain: Vec<_> = list.iter().map(|e| (e.offset, e.length, e.hole)).collect();
    // A hole that may not read as zeroes counts as data.
    assert_eq!(plain, [(512, 1024, false), (1536, 512, true), (2048, 512, false)]);
    // Another context, and an extent of no bytes.
    for (context, length) in [(6u32, 512u32), (5, 0)] {
        let cookie = submit(&mut slots, Command::BlockStatus, 0, 512);
        let numbers = [context, length, 0];
        let payload: Vec<u8> = numbers.iter().flat_map(|n| n.to_be_bytes()).collect();
        assert!(receive(&mut slots, &piece(cookie, true, chunk::BLOCK_STATUS, &payload)).is_err());
        assert!(outcome(&mut slots, cookie).unwrap().result.is_err());
    }
}

#[test]
fn requests_beyond_a_size_stay_queued_and_late_ones_are_those_that_were_sent_before() {
    let mut slots = Requests::default();
    let late = submit(&mut slots, Command::Write, 0, 4);
    let beyond = slots.push(request(Command::Write, 6, 4), Some(vec![0; 4]), None, None);
    let within = slots.push(request(Command::Write, 4, 4), Some(vec![0; 4]), None, None);
    slots.mark_late();
    assert!(slots.late() == 1 && slots.has_queued_within(8));
    let next = slots.next_to_send(8).unwrap();
    assert_eq!(next.cookie, within);
    slots.return_buf(within, next.payload.unwrap());
    assert!(slots.next_to_send(8).is_none() && !slots.has_queued_within(8) && slots.has_queued());
    assert_eq!(receive(&mut slots, &simple(late, 0, b"")), Ok(16));
    assert!(slots.late() == 0 && slots.has_sent(), "the other one was sent later");
    assert_eq!(slots.next_to_send(10).unwrap().cookie, beyond);
}

#[test]
fn the_flush_of_a_new_connection_goes_first() {
    let mut slots = Requests::default();
    slots.push(request(Command::Write, 0, 4), Some(vec![0; 4]), None, None);
    let flush = slots.push_first(request(Command::Flush, 0, 0));
    assert_eq!(slots.next_to_send(u64::MAX).unwrap().cookie, flush);
}

fn number(random: &mut Random) -> u32 {
    u32::try_from(random.next() & 0xffff_ffff).unwrap()
}

/// The byte the export has at `offset`.
fn content(offset: u64) -> u8 {
    u8::try_from(offset % 251).unwrap()
}

/// The reply of a conforming server, or of one that changes it slightly. Returns whether it
/// conforms.
fn reply_to(
    random: &mut Random,
    cookie: Cookie,
    requested: RemoteRequest,
    bytes: &mut Vec<u8>,
) -> bool {
    let (offset, length) = (requested.offset, requested.length);
    let bytes_at = |from: u64, count: u64| (from..from + count).map(content).collect::<Vec<u8>>();
    match (requested.command, random.below(8)) {
        (Command::Read, 0..4) => {
            // In pieces, in random order.
            let mut pieces = Vec::new();
            let mut at = 0;
            while at < u64::from(length) {
                let count = 1 + random.below(u64::from(length) - at);
                pieces.push((offset + at, count));
                at += count;
            }
            let turn = usize::try_from(random.below(pieces.len() as u64)).unwrap();
            pieces.rotate_left(turn);
            let last = pieces.len() - 1;
            for (index, (from, count)) in pieces.into_iter().enumerate() {
                bytes.extend(data(cookie, index == last, from, &bytes_at(from, count)));
            }
            true
        }
        (Command::Read, 4) => {
            bytes.extend(data(cookie, true, offset + random.below(3), b"lies"));
            false
        }
        (Command::Read, 5) => {
            bytes.extend(hole(cookie, true, offset, number(random)));
            false
        }
        (Command::BlockStatus, 0..=5) => {
            let mut payload = 5u32.to_be_bytes().to_vec();
            for _ in 0..1 + random.below(12) {
                payload.extend(u32::try_from(random.below(9000)).unwrap().to_be_bytes());
                payload.extend(u32::try_from(random.below(5)).unwrap().to_be_bytes());
            }
            bytes.extend(piece(cookie, true, chunk::BLOCK_STATUS, &payload));
            false
        }
        (_, 6) => {
            let error = [&number(random).to_be_bytes()[..], &[0, 0]].concat();
            bytes.extend(piece(cookie, true, chunk::ERROR, &error));
            false
        }
        _ => {
            bytes.extend(simple(cookie, 0, &[]));
            false
        }
    }
}

/// One stream of a hostile server: nothing panics, and a read that succeeds has the right bytes.
fn stream(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut slots = chunked();
    let mut requested = HashMap::new();
    for _ in 0..1 + random.below(6) {
        let command = match random.below(5) {
            0..3 => Command::Read,
            3 => Command::Write,
            _ => Command::BlockStatus,
        };
        let length = u32::try_from(1 + random.below(64)).unwrap();
        let offset = random.below(5000);
        let cookie = submit(&mut slots, command, offset, length);
        requested.insert(cookie.0, (request(command, offset, length), true));
    }
    let mut bytes = Vec::new();
    let mut order: Vec<u64> = requested.keys().copied().collect();
    order.sort_unstable();
    for cookie in order {
        if let Some((request, honest)) = requested.get_mut(&cookie) {
            *honest = reply_to(&mut random, Cookie(cookie), *request, &mut bytes);
        }
    }
    let mut whole = true;
    if !bytes.is_empty() {
        for _ in 0..random.below(3) {
            let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
            bytes[at] = u8::try_from(random.below(256)).unwrap();
            whole = false;
        }
        if random.below(4) == 0 {
            bytes.truncate(usize::try_from(random.below(bytes.len() as u64)).unwrap());
        }
    }
    let _ = receive(&mut slots, &bytes);
    let mut good = 0;
    for (cookie, (request, honest)) in requested {
        let Some(outcome) = outcome(&mut slots, Cookie(cookie)) else { continue };
        for pair in outcome.extents.windows(2) {
            assert_eq!(pair[0].offset + pair[0].length, pair[1].offset, "seed {seed}");
        }
        let end = request.offset + u64::from(request.length);
        assert!(outcome.extents.last().is_none_or(|e| e.offset + e.length <= end), "seed {seed}");
        if let (Command::Read, Ok(()), Some(buf)) = (request.command, outcome.result, outcome.buf)
            && honest
            && whole
        {
            let right = (request.offset..end).map(content);
            assert!(right.eq(buf), "seed {seed}: wrong bytes reported as success");
            good += 1;
        }
    }
    good
}

#[test]
fn random_streams_of_a_hostile_server_do_no_harm() {
    let good: u64 = (0..200_000).map(stream).sum();
    assert!(good > 20_000, "only {good} reads succeeded: the test has lost its grip");
}
