//! A store with a cache keeps the contract of a store, in each mode.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{MIB, Rig, WholeLayer};
use ebb_block::{Tracked, conformance};
use ebb_cache::{BaseLayers, CachedStore, FixedLimit, LayerMap, LayerRun, Layers, Mode};
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
                // A volume of one layer. It checks the ranges, as a volume does.
                conformance::check(&io, &Tracked(Layers::from(store))).await
            });
            assert_eq!(checked, Some(Ok(())), "{mode}, store {number}");
        }
    }
}

/// 12 KiB of the top layer, 20 KiB of the base, and so on.
#[derive(Debug)]
struct Stripes;

const STRIPES: [(u64, usize); 2] = [(12 << 10, 0), (20 << 10, 1)];
const STRIPE: u64 = 32 << 10;

impl LayerMap for Stripes {
    fn run(&self, offset: u64, length: u64) -> LayerRun {
        let (into, (first, _)) = (offset % STRIPE, STRIPES[0]);
        let (end, layer) = if into < first { (first, 0) } else { (STRIPE, 1) };
        LayerRun { layer, length: (end - into).min(length) }
    }
}

#[test]
fn a_stack_of_two_layers_conforms_as_a_read_only_store() {
    for mode in [Mode::None, Mode::Writethrough] {
        for maps in 0..3 {
            let rig = Rig::new(MIB / 2);
            let worker = Worker::start("conformance", &rig.memory).unwrap();
            let byte = |at: u64| u8::try_from((at / 7 + at / 512) % 251).unwrap();
            let top: Vec<u8> = (0..2 * MIB).map(byte).collect();
            // Shorter than the volume.
            let base: Vec<u8> =
                top[..usize::try_from(MIB - 512).unwrap()].iter().map(|b| !b).collect();
            let store = |content: &[u8]| {
                let test = TestStore::new(content.len() as u64, 1);
                test.change(0, content);
                test.waits.store(2, Ordering::Relaxed);
                Store::Test(Arc::new(test))
            };
            let bases = BaseLayers::new(&rig.cache);
            let below = bases.add("base", store(&base), mode).unwrap();
            let own = CachedStore::new(&rig.cache, "disk", store(&top), mode).unwrap();
            let map: Box<dyn LayerMap> = match maps {
                0 => Box::new(Stripes),
                which => Box::new(WholeLayer(which - 1)),
            };
            let content: Vec<u8> = (0..conformance::AREA)
                .map(|at| {
                    let layer = map.run(at, 1).layer;
                    let at = usize::try_from(at).unwrap();
                    if layer == 0 { top[at] } else { base.get(at).copied().unwrap_or(0) }
                })
                .collect();
            let layers = Layers::stack("disk", own, vec![below], map).unwrap();
            let checked = worker.handle().block_on(move |io| async move {
                conformance::check_read_only(&io, &Tracked(layers), &content).await
            });
            assert_eq!(checked, Some(Ok(())), "{mode}, map {maps}");
        }
    }
}
