//! Memory pressure on overlays: pages of a shared base and of block maps are given back, and no clone fails.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{MIB, Random, Rig, on_a_worker, read};
use ebb_block::BlockStore;
use ebb_cache::{
    BaseLayers, CachedStore, Delta, Layers, Mode, Reclaimer, pages_discarded_by_kernel,
    plain_parent,
};
use ebb_image::{BLOCK, Layout};
use ebb_io::Io;
use ebb_mem::pressure::Level;
use ebb_store::{MemoryStore, Store, TestStore};

/// An overlay of `size` bytes on a new delta above a base.
async fn clone_of(
    io: &Io,
    rig: &Rig,
    bases: &BaseLayers,
    base: &Arc<TestStore>,
    (number, size): (u8, u64),
) -> Layers {
    let bytes = Layout::new(size).unwrap().store_size();
    let store = Store::Memory(MemoryStore::new(bytes));
    let name = format!("clone{number}");
    let top = CachedStore::new(&rig.cache, &name, store, Mode::Writethrough).unwrap();
    let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
    let parent = plain_parent(io, &plain).await.unwrap();
    let delta = Delta::create(io, &top, size, parent, [number; 16]).await.unwrap();
    let below = bases.add("base", Store::Test(base.clone()), Mode::Writethrough).unwrap();
    Layers::overlay(&name, top, vec![below], vec![Arc::new(delta)], false).unwrap()
}

fn byte_of(block: u64) -> u8 {
    u8::try_from(block % 251).unwrap() + 1
}

#[test]
fn pressure_takes_the_pages_that_clones_share_and_none_of_them_fails() {
    const CLONES: u8 = 16;
    const BASE: u64 = 16 * MIB;
    on_a_worker(Rig::new(64 * MIB), async |io, rig| {
        let base = Arc::new(TestStore::new(BASE, 1));
        for block in 0..BASE / BLOCK {
            base.change(block * BLOCK, &[byte_of(block); 4096]);
        }
        let bases = BaseLayers::new(&rig.cache);
        let mut clones = Vec::new();
        for number in 1..=CLONES {
            let layers = clone_of(&io, &rig, &bases, &base, (number, BASE)).await;
            let mut buf = io.pool().take(4096).await;
            buf.fill(number);
            layers.write(&io, buf, u64::from(number) * BLOCK, false).await.0.unwrap();
            clones.push(layers);
        }
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let mut clock = Duration::ZERO;
        for level in [None, Some(Level::L2), Some(Level::L3), Some(Level::L0)] {
            for (number, layers) in (1..).zip(&clones) {
                for offset in (0..BASE).step_by(65536) {
                    let found = read(&io, layers, offset, 65536).await;
                    for (block, bytes) in (offset / BLOCK..).zip(found.chunks(4096)) {
                        let own = u64::from(number) == block;
                        let expected = if own { number } else { byte_of(block) };
                        assert!(bytes.iter().all(|b| *b == expected), "{level:?}: block {block}");
                    }
                }
            }
            let Some(level) = level else {
                let held = rig.cache.stats().total.bufspace;
                assert!((BASE..BASE + 2 * MIB).contains(&held), "{held} bytes for all clones");
                assert_eq!(clones[0].shared_cache_bytes(), BASE);
                continue;
            };
            rig.cache.pressure(level, rig.start + clock);
            clock += Duration::from_millis(100);
            reclaimer.run_once(&rig.cache, rig.start + clock);
            rig.memory.settle();
            let (held, shared) = (rig.cache.stats().total.bufspace, clones[0].shared_cache_bytes());
            println!("after {level:?}: {held} bytes, of the base {shared}");
            match level {
                Level::L2 => assert!(shared <= BASE / 2 + MIB, "{shared}"),
                Level::L3 => assert_eq!((held, shared), (0, 0)),
                _ => {}
            }
        }
    });
}

/// Random writes all over an overlay of 1 TiB: after pressure its map takes no memory that is pinned beside the blocks whose
/// bits are not stable, which a flush releases.
#[test]
fn the_map_of_a_large_overlay_is_given_back() {
    const SIZE: u64 = 1 << 40;
    on_a_worker(Rig::new(64 * MIB), async |io, rig| {
        let base = Arc::new(TestStore::new(MIB, 1));
        let bases = BaseLayers::new(&rig.cache);
        let layers = clone_of(&io, &rig, &bases, &base, (1, SIZE)).await;
        let mut random = Random::new(3);
        for _ in 0..3000 {
            let mut buf = io.pool().take(4096).await;
            buf.fill(7);
            let block = random.below(SIZE / BLOCK);
            layers.write(&io, buf, block * BLOCK, false).await.0.unwrap();
        }
        layers.flush(&io).await.unwrap();
        let before = rig.cache.stats().total.bufspace;
        assert!(before > 8 * MIB, "{before} bytes of data and map pages are cached");
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        for step in 1..=40 {
            let now = rig.start + Duration::from_millis(100 * step);
            if step % 10 == 1 {
                rig.cache.pressure(Level::L2, now);
            }
            reclaimer.run_once(&rig.cache, now);
        }
        rig.memory.settle();
        let after = rig.cache.stats().total;
        println!("{before} bytes before, {} after, {} wired", after.bufspace, after.bufwiredspace);
        assert!(after.bufwiredspace <= MIB, "{} bytes are pinned", after.bufwiredspace);
        assert!(after.bufspace <= before / 8, "{} of {before}", after.bufspace);
        let block = Random::new(3).below(SIZE / BLOCK);
        let found = read(&io, &layers, block * BLOCK, 4096).await;
        assert!(found.iter().all(|byte| *byte == 7));
    });
}
