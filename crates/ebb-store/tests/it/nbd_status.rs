//! Block status of large exports: how many requests one call sends to a server.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::Bench;
use ebb_block::BlockStore;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, BLOCK_STATUS, Fake, FakeRequest, MANY_CONNECTIONS, REQ_ONE, wait_for};

const PIB: u64 = 1 << 50;
/// The most requests for one call: see `STATUS_REQUESTS` in `nbd.rs`.
const ROUNDS: usize = 4;

fn bench(fake: &Fake) -> Bench {
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0))
}

/// One hole that covers the requested range.
fn hole(request: &FakeRequest) -> Act {
    Act::Status(vec![(request.length, 3)])
}

#[test]
fn a_petabyte_of_holes_costs_a_bounded_number_of_requests() {
    let fake = Fake::start(PIB, MANY_CONNECTIONS, hole);
    let bench = bench(&fake);
    let list = bench.extents(0, PIB, 2048).unwrap();
    assert!(fake.count(BLOCK_STATUS) <= ROUNDS, "{} questions", fake.count(BLOCK_STATUS));
    // It may end early, as its length shows; it covers at least a range of 32 bits.
    assert_eq!(list.len(), 1);
    let (offset, length, is_hole) = list[0];
    assert!(offset == 0 && is_hole && (1 << 32..PIB).contains(&length), "{length}");
    // A caller that continues from there reaches the end.
    let rest = bench.extents(PIB - 8192, 8192, 2048).unwrap();
    assert_eq!(rest, [(PIB - 8192, 8192, true)]);
}

#[test]
fn one_extent_costs_one_request() {
    let fake = Fake::start(PIB, MANY_CONNECTIONS, hole);
    let bench = bench(&fake);
    let list = bench.extents(4096, PIB - 4096, 1).unwrap();
    assert_eq!((list.len(), list[0].0), (1, 4096));
    let requests = fake.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!((requests[0].command, requests[0].flags), (BLOCK_STATUS, REQ_ONE));
}

/// A server may return one extent at a time, however small, and data and holes alternately.
#[test]
fn a_server_with_short_replies_receives_a_bounded_number_of_requests() {
    let fake = Fake::start(PIB, MANY_CONNECTIONS, |request| {
        Act::Status(vec![(4096, if request.offset / 4096 % 2 == 0 { 3 } else { 0 })])
    });
    let bench = bench(&fake);
    let list = bench.extents(0, 1 << 30, 2048).unwrap();
    assert!(fake.count(BLOCK_STATUS) <= ROUNDS, "{} questions", fake.count(BLOCK_STATUS));
    let expected: Vec<_> =
        (0..list.len() as u64).map(|n| (n * 4096, 4096, n.is_multiple_of(2))).collect();
    assert!(!list.is_empty() && list == expected, "{list:?}");
}

/// A dropped request submits no further requests to the server.
#[test]
fn a_dropped_request_submits_nothing_more() {
    let dropped = Arc::new(AtomicBool::new(false));
    let gate = dropped.clone();
    let fake = Fake::start(PIB, MANY_CONNECTIONS, move |request| {
        // The first request completes after its caller was dropped.
        wait_for("the end of the caller", || gate.load(Ordering::SeqCst));
        hole(request)
    });
    let bench = bench(&fake);
    bench.on(|io, store| async move {
        let own = io.clone();
        let task = io.spawn(async move { store.extents(&own, 0, PIB, 2048).await.is_ok() });
        io.sleep(Duration::from_millis(20)).await;
        task.cancel().await;
        dropped.store(true, Ordering::SeqCst);
    });
    wait_for("the end of the request", || bench.store().state().unwrap().in_flight == 0);
    assert!(fake.count(BLOCK_STATUS) <= 1, "{} questions", fake.count(BLOCK_STATUS));
}

/// A server with blocks of one byte may describe any range. A sector with data in it is data.
#[test]
fn extents_of_a_server_are_rounded_to_sectors() {
    let fake = Fake::start(4096, MANY_CONNECTIONS, |request| {
        // 700 bytes of data, a hole of 1,348, and so on; then one reply that ends within a sector.
        match request.offset {
            0 => Act::Status(vec![(700, 0), (1348, 3), (100, 0), (1000, 3)]),
            offset => Act::Status(vec![(u32::try_from(4096 - offset).unwrap(), 3)]),
        }
    });
    let bench = bench(&fake);
    let expected = [(0, 1024, false), (1024, 1024, true), (2048, 512, false), (2560, 1536, true)];
    assert_eq!(bench.extents(0, 4096, 2048).unwrap(), expected);
    let fake = Fake::start(4096, MANY_CONNECTIONS, |_| Act::Status(vec![(100, 3), (400, 0)]));
    let bench = self::bench(&fake);
    assert_eq!(bench.extents(0, 4096, 1).unwrap(), [(0, 512, false)]);
}
