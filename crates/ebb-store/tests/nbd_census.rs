//! The connections that remote stores have, and may have. Alone in its process, because these numbers are the process's.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
#[path = "common/fake.rs"]
mod fake;

use common::Bench;
use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, RemoteConnections, Store};
use fake::{Act, Fake, MANY_CONNECTIONS, ONE_CONNECTION, wait_for};

const WORKERS: usize = 5;

fn counted() -> (usize, usize) {
    let RemoteConnections { established, most } = RemoteConnections::count(WORKERS);
    (established, most)
}

#[test]
fn remote_stores_count_the_connections_that_they_may_make() {
    let open = |fake: &Fake, lost_writes| {
        let address = NbdAddress::Unix(fake.socket().into());
        let options = NbdOptions { lost_writes, ..NbdOptions::new(address, "") };
        NbdStore::open(options).unwrap().0
    };
    let one = Fake::start(1 << 20, ONE_CONNECTION, |_| Act::Good(1));
    let many = Fake::start(1 << 20, MANY_CONNECTIONS, |_| Act::Good(1));
    let first = open(&one, LostWrites::Flush);
    assert_eq!(counted(), (0, 1));
    let second = open(&many, LostWrites::Flush);
    assert_eq!(counted(), (0, 1 + WORKERS));
    let third = open(&many, LostWrites::Report);
    assert_eq!(counted(), (0, 2 + WORKERS), "it uses one connection");
    drop((first, third));
    let bench = Bench::new(Store::Nbd(second));
    bench.read(0, 4096).unwrap();
    assert_eq!(counted(), (1, WORKERS));
    drop(bench);
    wait_for("nothing is counted", || counted() == (0, 0));
}
