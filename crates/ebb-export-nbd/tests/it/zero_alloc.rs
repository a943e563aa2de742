//! No request allocates from the heap once its connection is warm: a real server, a real client,
//! and an allocator that counts the allocations of the worker's thread.

use std::sync::Arc;

use counting_allocator::{mark_thread, marked_calls};
use ebb_store::Direct;
use ebb_volume::Volume;

use crate::common::{Client, FLUSH, FUA, READ, Rig, Style, file, memory, pattern};

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;
/// Attempts of which one must make no allocation.
const GOES: u32 = 5;

/// Sends a batch of `depth` requests, then receives their replies.
fn batch(client: &mut Client, depth: u64, round: u64, data: &[u8], bytes: &mut Vec<u8>) {
    bytes.clear();
    for number in 0..depth {
        let offset = (round * 31 + number * 7) % (SIZE / BLOCK) * BLOCK;
        match (round + number) % 8 {
            0..4 => bytes.extend(client.header(READ, 0, number + 1, offset, BLOCK)),
            kind @ 4..7 => {
                let flags = if kind == 6 { FUA } else { 0 };
                bytes.extend(client.header(1, flags, number + 1, offset, BLOCK));
                bytes.extend_from_slice(data);
            }
            _ => bytes.extend(client.header(FLUSH, 0, number + 1, 0, 0)),
        }
    }
    client.stream.write_all(bytes).unwrap();
    for _ in 0..depth {
        let kind = |cookie: u64| {
            let number = cookie - 1;
            let offset = (round * 31 + number * 7) % (SIZE / BLOCK) * BLOCK;
            ((round + number) % 8 < 4).then_some((offset, 4096))
        };
        assert_eq!(client.reply(kind).unwrap().error, 0);
    }
}

fn allocations(rig: &Rig, style: Style, depth: u64, requests: u64) -> u64 {
    let mut client = rig.client("disk", style);
    let data = pattern(1, 4096);
    let mut bytes = Vec::new();
    for round in 0..1000 / depth + 50 {
        batch(&mut client, depth, round, &data, &mut bytes);
    }
    // A connection is warm when it has had its maximum of requests in flight, which on
    // a busy machine may take more than one attempt; allocations per request would occur in every attempt.
    let mut count = 0;
    for _ in 0..GOES {
        let before = marked_calls();
        for round in 0..requests / depth {
            batch(&mut client, depth, round, &data, &mut bytes);
        }
        count = marked_calls() - before;
        if count == 0 {
            break;
        }
    }
    count
}

fn is_zero(volume: Arc<Volume>) {
    let rig = Rig::with([volume]);
    let mut filler = rig.client("disk", Style::Simple);
    for at in (0..SIZE).step_by(1 << 20) {
        assert_eq!(filler.write(0, at, &pattern(at, 1 << 20)), 0);
    }
    drop(filler);
    rig.run(|_, _| async { mark_thread(true) });
    for (style, depth) in [
        (Style::Simple, 1),
        (Style::Simple, 32),
        (Style::Structured, 1),
        (Style::Structured, 32),
        (Style::Extended, 32),
    ] {
        let requests = 4000;
        let count = allocations(&rig, style, depth, requests);
        assert_eq!(count, 0, "{count} allocations in {requests} requests, {style:?}, {depth} deep");
    }
    // The counter works: a new connection does allocate.
    let before = marked_calls();
    drop(rig.client("disk", Style::Simple));
    assert!(marked_calls() > before);
}

/// All in one test: the count is that of the process.
#[test]
fn a_warm_connection_allocates_nothing() {
    is_zero(memory("disk", SIZE));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for direct in [Direct::Off, Direct::Auto] {
        is_zero(file("disk", &folder.path().join(format!("{direct:?}")), SIZE, direct));
    }
}
