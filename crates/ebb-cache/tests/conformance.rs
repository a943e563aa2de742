//! A store with a cache keeps the contract of a store, in each mode.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{MIB, Rig};
use ebb_block::{Tracked, conformance};
use ebb_cache::{CachedStore, FixedLimit, Mode};
use ebb_io::Worker;
use ebb_store::{MemoryStore, Store, TestStore};

#[test]
fn a_store_conforms_with_and_without_a_cache() {
    for mode in [Mode::None, Mode::Writethrough, Mode::Writeback] {
        for number in 0..2 {
            // Less than the suite uses, so that pages are evicted.
            let rig = Rig::new(MIB / 2);
            let worker = Worker::start("conformance", &rig.memory).unwrap();
            let store = match number {
                0 => Store::Memory(MemoryStore::new(4 * MIB)),
                _ => {
                    let test = TestStore::new(4 * MIB, 1);
                    test.waits.store(2, Ordering::Relaxed);
                    Store::Test(Arc::new(test))
                }
            };
            let store = CachedStore::new(&rig.cache, "disk", store, mode).unwrap();
            let checked = worker.handle().block_on(move |io| async move {
                store.start_writeback(&io, Arc::new(FixedLimit::default()));
                // It checks the ranges, as a volume does.
                conformance::check(&io, &Tracked(store)).await
            });
            assert_eq!(checked, Some(Ok(())), "{mode}, store {number}");
        }
    }
}
