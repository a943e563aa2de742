//! A remote export that grows: it is served with its former size until the store is resized, and then with the new
//! one, also on connections that were made before. (The server refuses what is beyond the size that a connection has
//! learnt.)

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Bench, KIB, MIB};
use ebb_block::{BlockStore, Resize, ResizeError};
use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, FLUSH, Fake, MANY_CONNECTIONS, ONE_CONNECTION, WRITE, wait_for};

const BLOCK: usize = 4096;
/// A write to this offset releases deferred replies.
const RELEASE: u64 = MIB / 2;

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
    // Of a server of several connections the first one is closed when the store is open.
    for (flags, accepted) in [(ONE_CONNECTION, 1), (MANY_CONNECTIONS, 2)] {
        let fake = Fake::start(MIB, flags, |_| Act::Good(7));
        let bench = open(&fake, LostWrites::Report);
        bench.write(0, &[7; BLOCK]).unwrap();
        assert_eq!((fake.accepted(), bench.store().size()), (accepted, MIB));
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

/// The time for which the server was connected does not count, whether that was short or long.
#[test]
fn a_connection_lost_after_a_replacement_is_lost_only_since_then() {
    lose_after_a_replacement(3);
    lose_after_a_replacement(10);
}

fn lose_after_a_replacement(reconnect: u64) {
    let once = AtomicBool::new(true);
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| {
        if request.offset == MIB && once.swap(false, Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_secs(reconnect + 1));
            return Act::HangUp;
        }
        Act::Good(7)
    });
    let bench = open_within(&fake, LostWrites::Flush, reconnect);
    bench.write(0, &[7; BLOCK]).unwrap();
    fake.set_size(2 * MIB);
    assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
    bench.write(MIB, &[7; BLOCK]).expect("it is sent again");
    assert_eq!(fake.count(WRITE), 3);
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    let state = store.state();
    assert_eq!((state.lost, state.reconnects, state.replayed), (1, 1, 1));
}

/// A server that does not reply to the first write at offset 0, and a store that closes the connection after `silence`.
fn first_write_is_silent(silence: Duration) -> (Fake, Bench) {
    let once = AtomicBool::new(true);
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| {
        let first = request.offset == 0 && request.command == WRITE;
        if first && once.swap(false, Ordering::SeqCst) { Act::Silence } else { Act::Good(7) }
    });
    let address = NbdAddress::Unix(fake.socket().into());
    let silence = Some(silence);
    let options = NbdOptions { silence, ..NbdOptions::new(address, "") };
    let bench = Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0));
    (fake, bench)
}

#[test]
fn a_connection_that_ends_while_it_is_replaced_is_a_lost_one() {
    let (fake, bench) = first_write_is_silent(Duration::from_secs(5));
    bench.write(MIB / 2, &[7; BLOCK]).unwrap();
    std::thread::scope(|scope| {
        let silent = scope.spawn(|| bench.write(0, &[7; BLOCK]));
        wait_for("the write is sent", || fake.count(WRITE) == 2);
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        bench.write(MIB, &[7; BLOCK]).unwrap();
        silent.join().unwrap().unwrap();
    });
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    let state = store.state();
    assert_eq!((state.lost, state.reconnects, state.replayed), (1, 1, 1));
    assert!(state.last_error.is_some());
}

#[test]
fn a_late_reply_delays_only_requests_beyond_the_former_size() {
    let once = AtomicBool::new(true);
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| match request.offset {
        0 if request.command == WRITE && once.swap(false, Ordering::SeqCst) => Act::Defer,
        RELEASE if request.command == WRITE => Act::Release,
        _ => Act::Good(7),
    });
    let bench = open(&fake, LostWrites::Flush);
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    bench.write(MIB / 4, &[7; BLOCK]).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| bench.write(0, &[7; BLOCK]));
        wait_for("the write is sent", || fake.count(WRITE) == 2);
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        let (accepted, in_flight) = (fake.accepted(), store.state().in_flight);
        let beyond = scope.spawn(|| bench.write(MIB, &[7; BLOCK]));
        wait_for("the write beyond the old end", || store.state().in_flight > in_flight);
        let within = scope.spawn(|| bench.read(MIB / 4, BLOCK));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !within.is_finished() && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        let (served, replaced) = (within.is_finished(), fake.accepted() > accepted);
        if !served {
            // So that the threads end.
            store.abort();
        }
        assert!(served && !replaced && !beyond.is_finished(), "{served} {replaced}");
        bench.write(RELEASE, &[7; BLOCK]).unwrap();
        for write in [first, beyond] {
            write.join().unwrap().unwrap();
        }
    });
    let state = store.state();
    assert_eq!((state.lost, state.replayed), (0, 0));
    let requests = fake.requests();
    let beyond: Vec<_> = requests.iter().filter(|request| request.offset == MIB).collect();
    assert_eq!(beyond.len(), 1, "{requests:?}");
    assert_ne!(beyond[0].connection, requests[0].connection);
}

#[test]
fn a_late_reply_counts_as_silence_although_other_requests_complete() {
    let (fake, bench) = first_write_is_silent(Duration::from_secs(8));
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    bench.write(MIB / 2, &[7; BLOCK]).unwrap();
    std::thread::scope(|scope| {
        let silent = scope.spawn(|| bench.write(0, &[7; BLOCK]));
        wait_for("the write is sent", || fake.count(WRITE) == 2);
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        let beyond = scope.spawn(|| bench.write(MIB, &[7; BLOCK]));
        let deadline = Instant::now() + Duration::from_secs(120);
        while !beyond.is_finished() && Instant::now() < deadline {
            bench.read(MIB / 4, BLOCK).unwrap();
            std::thread::park_timeout(Duration::from_millis(100));
        }
        let served = beyond.is_finished();
        if !served {
            // So that the threads end.
            store.abort();
        }
        assert!(served, "it waits without limit");
        for write in [silent, beyond] {
            write.join().unwrap().unwrap();
        }
    });
    assert_eq!(store.state().lost, 1);
}

/// A flush that is sent beside it could succeed although this one reports a loss.
#[test]
fn no_flush_is_sent_beside_the_one_before_a_replacement() {
    let fake = Fake::start(MIB, ONE_CONNECTION, move |request| {
        if request.command == FLUSH { Act::Silence } else { Act::Good(7) }
    });
    let bench = open(&fake, LostWrites::Flush);
    let Store::Nbd(store) = bench.store() else { unreachable!("it is a remote store") };
    bench.write(MIB / 4, &[7; BLOCK]).unwrap();
    std::thread::scope(|scope| {
        fake.set_size(2 * MIB);
        assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
        let beyond = scope.spawn(|| bench.write(MIB, &[7; BLOCK]));
        wait_for("the link's flush", || fake.count(FLUSH) == 1);
        let flush = scope.spawn(|| bench.flush());
        wait_for("the other flush", || store.state().in_flight >= 2);
        // Longer than requests wait for late replies.
        std::thread::park_timeout(Duration::from_secs(7));
        let sent = fake.count(FLUSH);
        store.abort();
        assert_eq!(sent, 1);
        assert!(beyond.join().unwrap().is_err() && flush.join().unwrap().is_err());
    });
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

/// It may end when its client leaves.
#[test]
fn unused_connection_to_a_server_of_one_client_is_not_closed() {
    let fake = Fake::start(MIB, ONE_CONNECTION, |_| Act::Good(7));
    let bench = open(&fake, LostWrites::Flush);
    fake.set_size(2 * MIB);
    assert_eq!(resize(&bench, None, false).unwrap(), 2 * MIB);
    wait_for("the one with the former size is closed", || fake.open() == 1);
    fake.mute();
    let error = resize(&bench, None, false).unwrap_err();
    assert!(error.to_string().contains("may serve one client at a time"), "{error}");
    bench.write(2 * MIB - 4 * KIB, &[7; BLOCK]).unwrap();
    assert_eq!(fake.requests()[0].connection, 1, "the kept one was closed");
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
