//! Operations on overlays that hold little: the number of their steps depends on the held data,
//! not on the size of the volume.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Rig, index, on_a_worker, read};
use ebb_block::BlockStore;
use ebb_cache::{BaseLayers, CachedStore, Delta, FillFrom, Layers, Mode, plain_parent};
use ebb_image::{DeltaHeader, Layout};
use ebb_io::Io;
use ebb_store::{MemoryStore, Store};

const SIZE: u64 = 1 << 40;
/// Where something is held, and how much.
const AT: u64 = SIZE / 3 / 4096 * 4096;
const HELD: u64 = 64 << 10;
const AT_ONCE: u64 = 256 << 10;
const LIMIT: Duration = Duration::from_secs(30);
/// Of each operation. A page of the block map describes 126 MiB, so that there are 8,323 pages.
const STEPS: u64 = 20_000;

fn delta_store(rig: &Rig) -> CachedStore {
    let store = MemoryStore::new(Layout::new(SIZE).unwrap().store_size());
    CachedStore::new(&rig.cache, "delta", Store::Memory(store), Mode::Writethrough).unwrap()
}

async fn put(io: &Io, layers: &Layers, offset: u64, value: u8) {
    let mut buf = io.pool().take(index(HELD)).await;
    buf.fill(value);
    layers.write(io, buf, offset, false).await.0.unwrap();
}

async fn all_steps(step: impl AsyncFn(u64) -> u64) -> u64 {
    let (mut at, mut steps) = (0, 0);
    while at < SIZE {
        at += step(at).await;
        steps += 1;
        assert!(steps < STEPS, "{steps} steps up to {at}");
    }
    steps
}

#[test]
fn empty_parts_of_large_volumes_are_passed_over_quickly() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let bases = BaseLayers::new(&rig.cache);
        let base = Store::Memory(MemoryStore::new(1 << 20));
        let base = bases.add("base", base, Mode::Writethrough).unwrap();
        let plain = CachedStore::from(Store::Memory(MemoryStore::new(1 << 20)));
        let parent = plain_parent(&io, &plain).await.unwrap();
        let top = delta_store(&rig);
        let delta = Delta::create(&io, &top, SIZE, parent, [1; 16]).await.unwrap();
        let layers = Layers::overlay("disk", top, vec![base], vec![Arc::new(delta)], false);
        let layers = layers.unwrap();
        for number in 2..4 {
            put(&io, &layers, AT + u64::from(number) * HELD, number).await;
            let parent = layers.top_as_parent(&io).await.unwrap();
            let top = delta_store(&rig);
            let delta = Delta::create(&io, &top, SIZE, parent, [number; 16]).await.unwrap();
            layers.push(&io, ("disk", &bases), top, delta, LIMIT).await.unwrap();
            layers.flush(&io).await.unwrap();
        }
        // Two snapshots become one.
        let top = delta_store(&rig);
        let deltas = layers.deltas();
        let parent = deltas[2].header.parent.clone();
        let header = DeltaHeader { parent, ..deltas[1].header.clone() };
        let delta = Arc::new(Delta::create_as(&io, &top, header).await.unwrap());
        let merged = Layers::overlay("merged", top, Vec::new(), vec![delta], false).unwrap();
        let pair = layers.pair(1).unwrap();
        let copy = async |at| pair.copy_held(&io, (at, AT_ONCE), (&merged, false)).await.unwrap();
        all_steps(copy).await;
        merged.flush(&io).await.unwrap();
        layers.replace_pair(&io, ("disk", &bases), 1, &merged, LIMIT).await.unwrap();
        // The other one goes into the volume, and then nothing is below that.
        for from in [FillFrom::Next, FillFrom::All] {
            all_steps(async |at| layers.fill(&io, at, AT_ONCE, from).await.unwrap()).await;
        }
        layers.detach(&io, "disk", LIMIT).await.unwrap();
        for number in 2..4u8 {
            let found = read(&io, &layers, AT + u64::from(number) * HELD, HELD).await;
            assert!(found.iter().all(|byte| *byte == number), "{number}");
        }
    });
}
