//! Many volumes on a server that accepts connections and sends no greeting: they wait for each other, and nothing else
//! waits for them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::fake;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ebb_block::BlockStore;
use ebb_io::Worker;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};
use fake::{Act, Fake, MANY_CONNECTIONS, wait_for};

const MIB: u64 = 1 << 20;
/// A time limit that only a hang exceeds.
const PATIENCE: Duration = Duration::from_secs(90);

fn open(fake: &Fake, export: usize, reconnect: u64) -> Arc<Store> {
    let address = NbdAddress::Unix(fake.socket().into());
    let mut options = NbdOptions::new(address, &format!("export{export}"));
    options.reconnect = Duration::from_secs(reconnect);
    Arc::new(Store::Nbd(NbdStore::open(options).unwrap().0))
}

/// Reads from each store on one worker; the results arrive one by one.
fn read(worker: &Worker, stores: Vec<Arc<Store>>) -> Receiver<bool> {
    let (sender, outcomes) = channel();
    worker.handle().spawn(move |io| async move {
        for store in stores {
            let (own, sender) = (io.clone(), sender.clone());
            let task = async move {
                let buf = own.pool().take(4096).await;
                let _ = sender.send(store.read(&own, buf, 0).await.0.is_ok());
            };
            io.spawn(task).detach();
        }
    });
    outcomes
}

/// The pool of the `blocking` crate, which all system calls of other volumes use, has 500 threads.
#[test]
fn many_volumes_on_a_server_that_does_not_reply_delay_neither_another_server_nor_system_calls() {
    const VOLUMES: usize = 600;
    let dead = Fake::start(MIB, MANY_CONNECTIONS, |_| Act::Good(1));
    let good = Fake::start(MIB, MANY_CONNECTIONS, |_| Act::Good(1));
    let stores: Vec<_> = (0..VOLUMES).map(|export| open(&dead, export, 600)).collect();
    let healthy = open(&good, 0, 600);
    dead.mute();
    dead.hang_up();
    let worker = Worker::start_alone("w").unwrap();
    let outcomes = read(&worker, stores.clone());
    wait_for("attempts to connect", || dead.accepted() > VOLUMES);
    assert!(read(&worker, vec![healthy]).recv_timeout(PATIENCE).unwrap());
    let called = worker.handle().block_on(|io| async move { io.offload(|| true).await });
    assert_eq!(called, Some(true));
    // Eight at first, and four after each ten seconds.
    let attempts = dead.accepted() - VOLUMES;
    assert!(attempts < VOLUMES / 6, "{attempts} attempts to connect came first");
    assert!(outcomes.try_recv().is_err(), "a read from a dead server has ended");
    stores.iter().for_each(|store| store.abort());
    for _ in 0..VOLUMES {
        assert!(!outcomes.recv_timeout(PATIENCE).unwrap());
    }
}

/// The time limit of the requests is longer than that of an attempt, so that it ends while attempts wait for their turn.
#[test]
fn requests_fail_in_time_although_their_volumes_wait_for_their_turn_to_connect() {
    const VOLUMES: usize = 300;
    let dead = Fake::start(MIB, MANY_CONNECTIONS, |_| Act::Good(1));
    let stores: Vec<_> = (0..VOLUMES).map(|export| open(&dead, export, 11)).collect();
    dead.mute();
    dead.hang_up();
    let worker = Worker::start_alone("w").unwrap();
    let outcomes = read(&worker, stores.clone());
    for _ in 0..VOLUMES {
        assert!(!outcomes.recv_timeout(PATIENCE).unwrap());
    }
    let attempts = dead.accepted() - VOLUMES;
    assert!(attempts < VOLUMES, "each has waited for its turn: {attempts}");
    stores.iter().for_each(|store| store.abort());
}
