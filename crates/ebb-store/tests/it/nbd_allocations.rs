//! No request to a remote store allocates once its connection is warm: a real server, eight
//! requests at a time, and an allocator that counts the allocations of the worker's thread.

use counting_allocator::{mark_thread, marked_calls};
use ebb_block::BlockStore;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};

use crate::common::Bench;
use crate::server;

const WARM: u64 = 300;
const COUNTED: u64 = 300;
/// Rounds, of which one must have no allocation: the worker also runs other tasks.
const GOES: u32 = 5;

#[test]
fn a_warm_connection_allocates_nothing() {
    let server = server::Server::nbdkit(&["memory", "8M"]);
    let options = NbdOptions::new(NbdAddress::Unix(server.socket().into()), "");
    let bench = Bench::new(Store::Nbd(NbdStore::open(options).unwrap().0));
    let counts: Vec<u64> = (0..GOES)
        .map(|_| {
            let before = marked_calls();
            bench.on(|io, store| async move {
                let tasks: Vec<_> = (0..8u64)
                    .map(|task| {
                        let (own, store) = (io.clone(), store.clone());
                        io.spawn(async move {
                            let mut buf = own.pool().take(16 << 10).await;
                            // The other tasks run longer, so that all are active throughout.
                            let rounds = WARM + COUNTED + if task == 0 { 0 } else { WARM };
                            for round in 0..rounds {
                                if task == 0 && round == WARM {
                                    mark_thread(true);
                                }
                                let offset = (task * 16 + round % 16) * (16 << 10);
                                let (result, back) = if round % 2 == 0 {
                                    store.write(&own, buf, offset, round % 8 == 0).await
                                } else {
                                    store.read(&own, buf, offset).await
                                };
                                result.unwrap();
                                buf = back;
                                if round % 50 == 49 {
                                    store.flush(&own).await.unwrap();
                                }
                            }
                            if task == 0 {
                                mark_thread(false);
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
            });
            marked_calls() - before
        })
        .collect();
    assert!(counts.contains(&0), "allocations for {} requests each: {counts:?}", COUNTED * 8);
}
