//! The connections that remote stores have, and may have: numbers of the process.

use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdStore, RemoteConnections, Store};

use crate::common::Bench;
use crate::fake::{Act, Fake, MANY_CONNECTIONS, ONE_CONNECTION, wait_for};

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
    assert_eq!(counted(), (1, 1), "the one on which it was opened");
    let second = open(&many, LostWrites::Flush);
    assert_eq!(counted(), (1, 1 + WORKERS), "that of a server of several is closed");
    let third = open(&many, LostWrites::Report);
    assert_eq!(counted(), (1, 2 + WORKERS), "it uses one connection");
    wait_for("idle volumes hold none", || many.open() == 0);
    drop((first, third));
    let bench = Bench::new(Store::Nbd(second));
    bench.read(0, 4096).unwrap();
    assert_eq!((counted(), many.accepted()), ((1, WORKERS), 3));
    drop(bench);
    wait_for("nothing is counted", || counted() == (0, 0));
    wait_for("all are closed", || one.open() == 0 && many.open() == 0);
    // One that the server closes is noticed without a request.
    let bench = Bench::new(Store::Nbd(open(&one, LostWrites::Flush)));
    assert_eq!(counted(), (1, 1));
    one.hang_up();
    wait_for("the connection is closed here, too", || counted() == (0, 1));
    bench.read(0, 4096).unwrap();
    assert_eq!((counted(), one.accepted()), ((1, 1), 3));
}
