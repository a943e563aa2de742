//! A remote export that grows: it is served with its former size until the store is resized, and then with the new
//! one, also on connections that were made before. (The server refuses what is beyond the size that a connection has
//! learnt.)

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Bench, KIB, MIB};
use ebb_block::{BlockStore, Resize, ResizeError};
use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, FLUSH, Fake, MANY_CONNECTIONS, ONE_CONNECTION, WRITE, wait_for};

const BLOCK: usize = 4096;

fn open(fake: &Fake, lost_writes: LostWrites) -> Bench {
    open_within(fake, lost_writes, 60)
}

fn open_within(fake: &Fake, lost_writes: LostWrites, seconds: u64) -> Bench {
    let address = NbdAddress::Unix(fake.socket().into());
    let reconnect = Duration::from_secs(seconds);
    let options = NbdOptions { lost_writes, reconnect, ..NbdOptions::new(address, "") };
    Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0))
}

fn resize(bench: &Bench, to: Option<u64>, shrink: bool) -> Result<u64, ResizeError> {
    bench.on(move |io, store| async move { store.resize(&io, Resize { to, shrink }).await })
}

/// With this way of handling lost writes a connection that is lost with unflushed changes fails the next flush.
#[test]
fn a_grown_export_is_used_after_a_resize_and_nothing_counts_as_lost() {
    for flags in [ONE_CONNECTION, MANY_CONNECTIONS] {
        let fake = Fake::start(MIB, flags, |_| Act::Good(7));
        let bench = open(&fake, LostWrites::Report);
        bench.write(0, &[7; BLOCK]).unwrap();
        assert_eq!((fake.accepted(), bench.store().size()), (2, MIB));
        fake.set_size(2 * MIB);
        let error = resize(&bench, Some(3 * MIB), false).unwrap_err();
        assert!(matches!(error, ResizeError::Server { size } if size == 2 * MIB), "{error:?}");
        assert_eq!(bench.store().size(), MIB, "it was not resized");
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        assert_eq!(bench.store().size(), 2 * MIB);
        // What fits is still sent on the old connection.
        assert_eq!(bench.read(0, BLOCK).unwrap(), [7; BLOCK]);
        let old = fake.requests().last().unwrap().connection;
        assert_eq!(fake.requests().iter().filter(|r| r.connection != old).count(), 0);
        bench.write(2 * MIB - 4 * KIB, &[7; BLOCK]).unwrap();
        let requests = fake.requests();
        let new = requests.last().unwrap();
        assert!(new.connection != old && new.command == WRITE, "{requests:?}");
        let commands: Vec<u16> = requests.iter().map(|request| request.command).collect();
        assert_eq!(commands, [WRITE, 0, FLUSH, WRITE], "the old connection was not flushed");
        assert_eq!(requests[2].connection, old);
        bench.flush().expect("a change counts as lost");
        wait_for("the old connection is closed", || fake.open() == 1);
        let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
        let state = store.state();
        assert_eq!((state.lost, state.reconnects, state.last_error), (0, 0, None));
    }
}

/// A client that repeats a request on a new connection cannot exclude that the server still executes it on the old one.
#[test]
fn requests_in_flight_complete_before_the_connection_is_replaced() {
    let held = Arc::new(AtomicBool::new(true));
    let gate = held.clone();
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| {
        if request.command == WRITE && request.offset == 0 {
            wait_for("the test releases the write", || !gate.load(Ordering::SeqCst));
        }
        Act::Good(7)
    });
    let bench = open(&fake, LostWrites::Flush);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| bench.write(0, &[7; BLOCK]));
        wait_for("the write is sent", || fake.count(WRITE) == 1);
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        let accepted = fake.accepted();
        let beyond = scope.spawn(|| bench.write(MIB, &[7; BLOCK]));
        let inside = scope.spawn(|| bench.write(MIB / 2, &[7; BLOCK]));
        // A slow server, longer than any limit that a connection attempt has.
        std::thread::park_timeout(Duration::from_secs(11));
        assert_eq!(fake.accepted(), accepted, "the connection was replaced too early");
        assert!(!beyond.is_finished());
        held.store(false, Ordering::SeqCst);
        for write in [slow, beyond, inside] {
            write.join().unwrap().unwrap();
        }
    });
    assert_eq!(fake.count(WRITE), 3, "a write was repeated: {:?}", fake.requests());
}

#[test]
fn a_server_that_comes_back_with_a_larger_export_is_served_with_the_former_size() {
    let end = Arc::new(AtomicBool::new(false));
    let hang_up = end.clone();
    let fake = Fake::start(MIB, ONE_CONNECTION, move |_| {
        if hang_up.swap(false, Ordering::SeqCst) { Act::HangUp } else { Act::Good(7) }
    });
    let bench = open(&fake, LostWrites::Flush);
    bench.write(0, &[7; BLOCK]).unwrap();
    fake.set_size(2 * MIB + 1);
    end.store(true, Ordering::SeqCst);
    assert_eq!(bench.read(0, BLOCK).unwrap(), [7; BLOCK], "served on a new connection");
    assert_eq!(bench.store().size(), MIB);
    let error = resize(&bench, None, false).unwrap_err();
    assert!(matches!(error, ResizeError::Remote(_)), "{error:?}");
    fake.set_size(2 * MIB);
    end.store(true, Ordering::SeqCst);
    bench.read(0, BLOCK).unwrap();
    // A server that permits one connection only would not accept another one, which asks for the size.
    fake.mute();
    assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
}

#[test]
fn a_smaller_export_is_used_only_if_shrinking_is_permitted() {
    let fake = Fake::start(2 * MIB, MANY_CONNECTIONS, |_| Act::Good(7));
    let bench = open(&fake, LostWrites::Flush);
    bench.write(0, &[7; BLOCK]).unwrap();
    fake.set_size(MIB);
    let error = resize(&bench, None, false).unwrap_err();
    assert!(matches!(error, ResizeError::Shrinks { .. }), "{error:?}");
    assert_eq!(resize(&bench, None, true).unwrap(), MIB);
    assert_eq!(bench.store().size(), MIB);
}

#[test]
fn without_a_reply_of_the_server_the_store_keeps_its_size() {
    let fake = Fake::start(MIB, MANY_CONNECTIONS, |_| Act::Good(7));
    let bench = open(&fake, LostWrites::Flush);
    fake.mute();
    let error = resize(&bench, None, false).unwrap_err();
    assert!(matches!(error, ResizeError::Remote(_)), "{error:?}");
    assert_eq!(bench.store().size(), MIB);
}

/// Neither for the time limit of requests without a server, nor for changes that a server without flush has acknowledged.
#[test]
fn a_connection_that_is_replaced_is_not_a_lost_one() {
    let without_flush = ONE_CONNECTION & !4;
    for (flags, lost_writes, reconnect) in
        [(ONE_CONNECTION, LostWrites::Flush, 0), (without_flush, LostWrites::Report, 60)]
    {
        let fake = Fake::start(MIB, flags, |_| Act::Good(7));
        let bench = open_within(&fake, lost_writes, reconnect);
        // With a limit of zero the first request may be refused until there is a connection.
        wait_for("the first connection", || bench.write(0, &[7; BLOCK]).is_ok());
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        bench.write(MIB, &[7; BLOCK]).unwrap();
        bench.flush().unwrap();
    }
}
