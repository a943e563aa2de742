//! No request to a remote store allocates once its connection is warm: a real server, eight
//! requests at a time, and an allocator that counts the allocations of the worker's thread.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

mod common;
#[path = "common/nbd.rs"]
mod server;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use common::Bench;
use ebb_block::BlockStore;
use ebb_store::{NbdAddress, NbdOptions, NbdStore, Store};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// True on the thread whose allocations count, while they count.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

fn note() {
    if COUNTS.try_with(Cell::get) == Ok(true) {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        if std::env::var_os("EBB_SHOW_ALLOCATIONS").is_some() {
            COUNTS.set(false);
            println!("{}", std::backtrace::Backtrace::force_capture());
            COUNTS.set(true);
        }
    }
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
            ALLOCATIONS.store(0, Ordering::SeqCst);
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
                                    COUNTS.set(true);
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
                                COUNTS.set(false);
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
            });
            ALLOCATIONS.load(Ordering::SeqCst)
        })
        .collect();
    assert!(counts.contains(&0), "allocations for {} requests each: {counts:?}", COUNTED * 8);
}
