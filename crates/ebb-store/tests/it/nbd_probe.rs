//! Idle connections, after another one has found that the server is shutting down or cannot be reached.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::fake;

use std::sync::Arc;

use ebb_block::BlockStore;
use ebb_io::Worker;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, ESHUTDOWN, FLUSH, Fake, MANY_CONNECTIONS, READ, wait_for};

const MIB: u64 = 1 << 20;

fn read(worker: &Worker, store: &Arc<Store>, offset: u64) -> bool {
    let store = store.clone();
    let read = worker.handle().block_on(move |io| async move {
        store.read(&io, io.pool().take(4096).await, offset).await.0.is_ok()
    });
    read.unwrap()
}

fn open(fake: &Fake) -> Arc<Store> {
    let options = NbdOptions::new(NbdAddress::Unix(fake.socket().into()), "");
    Arc::new(Store::Nbd(NbdStore::open(options).unwrap().0))
}

/// One connection is lost and cannot be established again: the idle one sends a probe, which
/// succeeds, so it stays.
#[test]
fn an_idle_connection_probes_when_another_cannot_be_established() {
    let fake = Fake::start(8 * MIB, MANY_CONNECTIONS, |request| {
        if request.command == READ && request.offset > 0 { Act::HangUp } else { Act::Good(1) }
    });
    let store = open(&fake);
    let workers: Vec<_> = ["a", "b"].map(|name| Worker::start_alone(name).unwrap()).into();
    assert!(read(&workers[0], &store, 0) && read(&workers[1], &store, 0));
    assert_eq!(fake.count(FLUSH), 0);
    std::fs::remove_file(fake.socket()).unwrap();
    let own = store.clone();
    workers[0].handle().spawn(move |io| async move {
        let _ = own.read(&io, io.pool().take(4096).await, 4096).await;
    });
    wait_for("the probe", || fake.count(FLUSH) > 0);
    let flushes: Vec<_> = fake.requests().into_iter().filter(|a| a.command == FLUSH).collect();
    assert!(flushes.iter().all(|request| request.connection == 2), "{flushes:?}");
    assert!(read(&workers[1], &store, 0), "it replies, and is kept");
    assert_eq!(fake.accepted(), 3);
    store.abort();
}

/// One connection receives `NBD_ESHUTDOWN`; the idle one sends a probe, receives it, and
/// disconnects.
#[test]
fn idle_connections_release_a_server_that_shuts_down() {
    let fake =
        Fake::start(8 * MIB, MANY_CONNECTIONS, |request| match (request.command, request.offset) {
            // The server that shuts down has the first two connections, its successor the later
            // ones.
            (FLUSH, _) | (READ, 4096) if request.connection < 3 => Act::Error(ESHUTDOWN),
            _ => Act::Good(1),
        });
    let store = open(&fake);
    let workers: Vec<_> = ["a", "b"].map(|name| Worker::start_alone(name).unwrap()).into();
    assert!(read(&workers[0], &store, 0) && read(&workers[1], &store, 0));
    assert!(read(&workers[0], &store, 4096), "the next connection replies");
    wait_for("both connections are re-established", || store.state().unwrap().reconnects == 2);
    assert!(
        fake.requests().iter().any(|request| request.command == FLUSH && request.connection == 2)
    );
    assert!(read(&workers[1], &store, 0));
}
