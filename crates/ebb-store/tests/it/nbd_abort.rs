//! A store that is aborted, and requests that are dropped, while the server does not reply: all
//! waiting requests end, on all workers.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ebb_block::{BlockError, BlockStore, ErrorKind};
use ebb_io::Worker;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, Fake, MANY_CONNECTIONS, ONE_CONNECTION, wait_for};

const MIB: u64 = 1 << 20;
/// A time limit that only a hang exceeds.
const PATIENCE: Duration = Duration::from_secs(90);

fn store(fake: &Fake) -> Arc<Store> {
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    Arc::new(Store::Nbd(NbdStore::open(options).unwrap().0))
}

fn workers(count: usize) -> Vec<Worker> {
    (0..count).map(|number| Worker::start_alone(&format!("w{number}")).unwrap()).collect()
}

/// Starts `count` requests of each kind on a worker; the results arrive one by one.
fn start(
    worker: &Worker,
    store: &Arc<Store>,
    count: u64,
) -> Receiver<(&'static str, Result<(), BlockError>)> {
    let (sender, outcomes) = channel();
    let store = store.clone();
    worker.handle().spawn(move |io| async move {
        for number in 0..count {
            let at = number * 4096;
            for kind in ["read", "write", "flush", "status", "discard"] {
                let (own, store, sender) = (io.clone(), store.clone(), sender.clone());
                let task = async move {
                    let result = match kind {
                        "read" => store.read(&own, own.pool().take(4096).await, at).await.0,
                        "write" => {
                            store.write(&own, own.pool().take(4096).await, at, false).await.0
                        }
                        "flush" => store.flush(&own).await,
                        "status" => store.extents(&own, 0, MIB, 100).await.map(drop),
                        _ => store.discard(&own, at, 4096).await,
                    };
                    let _ = sender.send((kind, result));
                };
                io.spawn(task).detach();
            }
        }
    });
    outcomes
}

fn all_aborted(outcomes: &Receiver<(&'static str, Result<(), BlockError>)>, count: u64) {
    for number in 0..count * 5 {
        let (kind, result) = outcomes
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|e| panic!("{number} of {} ended: {e}", count * 5));
        let error = result.expect_err(kind);
        assert_eq!(error.kind, ErrorKind::Closing, "{kind}: {error:?}");
    }
}

/// 400 requests on each of two workers, of which 128 are sent and the other ones wait for a slot.
fn aborted_while_the_server_is_silent(flags: u16) {
    let fake = Fake::start(8 * MIB, flags, |_| Act::Silence);
    let store = store(&fake);
    let workers = workers(2);
    let outcomes: Vec<_> = workers.iter().map(|worker| start(worker, &store, 80)).collect();
    wait_for("requests at the server", || fake.requests().len() >= 128);
    for outcomes in &outcomes {
        assert!(outcomes.try_recv().is_err(), "a request to a silent server completed");
    }
    store.abort();
    for outcomes in &outcomes {
        all_aborted(outcomes, 80);
    }
    // The server may still be reading what was sent.
    wait_for("the end of the connections", || fake.open() == 0);
    // Later requests fail, too, without reaching the server.
    let requests = fake.requests().len();
    all_aborted(&start(&workers[0], &store, 2), 2);
    assert_eq!((fake.requests().len(), fake.open()), (requests, 0));
    assert_eq!(store.state().unwrap().in_flight, 0);
}

#[test]
fn an_aborted_store_fails_all_requests_that_wait_for_a_silent_server() {
    aborted_while_the_server_is_silent(MANY_CONNECTIONS);
}

#[test]
fn an_aborted_shared_connection_fails_the_requests_of_all_workers() {
    aborted_while_the_server_is_silent(ONE_CONNECTION);
}

/// The helper thread hangs in the handshake for seconds; aborting does not wait for it.
#[test]
fn aborting_a_store_does_not_wait_for_a_handshake() {
    let fake = Fake::start(8 * MIB, MANY_CONNECTIONS, |_| Act::Silence);
    let store = store(&fake);
    fake.mute();
    fake.hang_up();
    let workers = workers(1);
    let outcomes = start(&workers[0], &store, 40);
    wait_for("a connection in its handshake", || fake.accepted() == 2);
    store.abort();
    all_aborted(&outcomes, 40);
    assert!(fake.open() >= 1, "the handshake has ended: the abort has waited for it");
}

/// No server at all: requests wait between two attempts.
#[test]
fn a_store_aborted_between_attempts_fails_waiting_requests() {
    let fake = Fake::start(8 * MIB, MANY_CONNECTIONS, |_| Act::HangUp);
    let store = store(&fake);
    let socket = fake.socket().to_owned();
    std::fs::remove_file(socket).unwrap();
    let workers = workers(1);
    let outcomes = start(&workers[0], &store, 40);
    wait_for("a failed attempt", || store.state().unwrap().last_error.is_some());
    store.abort();
    all_aborted(&outcomes, 40);
}

/// Acknowledged writes that were not flushed are still counted when the store is aborted.
#[test]
fn aborting_does_not_hide_what_was_not_flushed() {
    let fake = Fake::start(8 * MIB, MANY_CONNECTIONS, |request| match request.command {
        fake::FLUSH => Act::Silence,
        _ => Act::Good(0),
    });
    for lost_writes in [ebb_store::LostWrites::Flush, ebb_store::LostWrites::Report] {
        let address = NbdAddress::Unix(fake.socket().into());
        let options = NbdOptions { lost_writes, ..NbdOptions::new(address, "") };
        let store = Arc::new(Store::Nbd(NbdStore::open(options).unwrap().0));
        let workers = workers(1);
        let own = store.clone();
        let written = workers[0].handle().block_on(move |io| async move {
            own.write(&io, io.pool().take(4096).await, 0, false).await.0.is_ok()
        });
        assert_eq!(written, Some(true));
        store.abort();
        let own = store.clone();
        let flushed = workers[0].handle().block_on(move |io| async move { own.flush(&io).await });
        assert_eq!(flushed.unwrap().unwrap_err().kind, ErrorKind::Closing);
        wait_for("the end of the connection", || store.state().unwrap().connections == 0);
        assert_eq!(store.state().unwrap().unflushed, 1);
    }
}

/// A read is dropped by its caller, its memory is allocated to another one, and then its reply
/// arrives.
#[test]
fn the_late_reply_to_a_dropped_read_reaches_no_other_buffer() {
    let late = Arc::new(AtomicBool::new(false));
    let gate = late.clone();
    let fake = Fake::start(8 * MIB, MANY_CONNECTIONS, move |request| {
        if request.offset < MIB {
            while !gate.load(Ordering::SeqCst) {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            return Act::Good(0xee);
        }
        Act::Good(0x11)
    });
    let store = store(&fake);
    let workers = workers(1);
    let (own, sent) = (store.clone(), late.clone());
    let clean = workers[0].handle().block_on(move |io| async move {
        let reads: Vec<_> = (0..8u64)
            .map(|number| {
                let (task_io, store) = (io.clone(), own.clone());
                io.spawn(async move {
                    let buf = task_io.pool().take(64 << 10).await;
                    store.read(&task_io, buf, number << 16).await.0.is_ok()
                })
            })
            .collect();
        // Until the server has received the first one.
        while own.state().unwrap().in_flight < 8 {
            io.sleep(Duration::from_millis(5)).await;
        }
        io.sleep(Duration::from_millis(50)).await;
        for read in reads {
            read.cancel().await;
        }
        // This would reuse the memory of the dropped ones if it had been freed too early.
        let mut bystanders = Vec::new();
        for _ in 0..16 {
            let mut buf = io.pool().take(64 << 10).await;
            buf.fill(0x77);
            bystanders.push(buf);
        }
        sent.store(true, Ordering::SeqCst);
        let (result, buf) = own.read(&io, io.pool().take(64 << 10).await, 2 * MIB).await;
        result.unwrap();
        buf.iter().all(|byte| *byte == 0x11)
            && bystanders.iter().all(|buf| buf.iter().all(|byte| *byte == 0x77))
    });
    assert_eq!(clean, Some(true));
    wait_for("the end of the dropped reads", || store.state().unwrap().in_flight == 0);
}
