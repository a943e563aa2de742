//! What statistics say of the layers that a volume shares: reads found there, for whichever volume they were loaded, and the
//! names of the layers.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{MIB, PAGE, PageMap, Rig, on_a_worker, read};
use ebb_block::BlockStore;
use ebb_cache::{
    BaseLayer, BaseLayers, CachedStore, Delta, Layers, Mode, SharedReads, plain_parent,
};
use ebb_image::Layout;
use ebb_store::{MemoryStore, Store, TestStore};

const SIZE: u64 = 16 * MIB;

/// The first half is in the volume's own layer, the second one in the base.
fn half_clone(rig: &Rig, name: &str, base: BaseLayer) -> Layers {
    let store = Store::Memory(MemoryStore::new(SIZE));
    let top = CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap();
    let half = SIZE / PAGE / 2;
    let layers = (0..2 * half).map(|page| usize::from(page >= half)).collect();
    Layers::stack(name, top, vec![base], Box::new(PageMap { layers, most: u64::MAX / PAGE / 4 }))
        .unwrap()
}

fn found(hit_bytes: u64, miss_bytes: u64) -> SharedReads {
    SharedReads { hit_bytes, miss_bytes }
}

#[test]
fn reads_of_shared_layers_count_as_found_if_they_are_in_memory_for_any_volume() {
    on_a_worker(Rig::new(64 << 20), async |io, rig| {
        let bases = BaseLayers::new(&rig.cache);
        let disk = TestStore::new(SIZE, 1);
        let base = || {
            let store = Store::Test(Arc::new(disk.open_anew()));
            bases.add("base", store, Mode::Writethrough).unwrap()
        };
        let (one, other) = (half_clone(&rig, "one", base()), half_clone(&rig, "other", base()));
        // Of its own layer: nothing.
        drop(read(&io, &one, MIB, 2 * PAGE).await);
        drop(read(&io, &one, MIB, 2 * PAGE).await);
        assert_eq!(one.shared_reads(), found(0, 0));
        let at = SIZE / 2;
        drop(read(&io, &one, at + 5 * MIB, 2 * PAGE).await);
        assert_eq!(one.shared_reads(), found(0, 2 * PAGE));
        // In memory for the first volume, and so for the second.
        drop(read(&io, &other, at + 5 * MIB, 2 * PAGE).await);
        drop(read(&io, &other, at + 5 * MIB + 512, 1024).await);
        assert_eq!(other.shared_reads(), found(2 * PAGE + 1024, 0));
        // A part is in memory; the read begins in the volume's own layer.
        drop(read(&io, &other, at + 5 * MIB - PAGE, 4 * PAGE).await);
        assert_eq!(other.shared_reads(), found(4 * PAGE + 1024, 2 * PAGE));
        drop(read(&io, &one, at - PAGE, 2 * PAGE).await);
        assert_eq!(one.shared_reads(), found(0, 3 * PAGE));
        // Longer than what is copied at once.
        let (long, before) = (3 * MIB, other.shared_reads());
        drop(read(&io, &other, at, long).await);
        let after = other.shared_reads();
        assert_eq!(after.hit_bytes + after.miss_bytes, before.hit_bytes + before.miss_bytes + long);
        drop(read(&io, &one, at, long).await);
        assert_eq!(one.shared_reads(), found(long, 3 * PAGE));
        assert_eq!(one.shared_cache_bytes(), one.below()[0].cache_bytes);
        assert!(one.shared_cache_bytes() >= long);
    });
}

#[test]
fn the_layers_of_a_volume_have_the_names_of_its_snapshots() {
    on_a_worker(Rig::new(16 << 20), async |io, rig| {
        let size = 4 * MIB;
        let bases = BaseLayers::new(&rig.cache);
        let disk = || Store::Test(Arc::new(TestStore::new(size, 1)));
        let delta_store =
            || Store::Test(Arc::new(TestStore::new(Layout::new(size).unwrap().store_size(), 2)));
        let top = |name: &str| {
            CachedStore::new(&rig.cache, name, delta_store(), Mode::Writethrough).unwrap()
        };
        let (first, base) = (top("first"), bases.add("base", disk(), Mode::Writethrough).unwrap());
        let parent = plain_parent(&io, &CachedStore::from(disk())).await.unwrap();
        let delta = Delta::create(&io, &first, size, parent, [9; 16]).await.unwrap();
        let layers =
            Layers::overlay("disk", first, vec![base], vec![Arc::new(delta)], false).unwrap();
        assert_eq!((layers.depth(), layers.below().len()), (2, 1));
        assert_eq!(layers.below()[0].snapshot, None);
        drop(read(&io, &layers, 0, PAGE).await);
        let next = top("next");
        let mut parent = layers.top_as_parent(&io).await.unwrap();
        parent.place = "/srv/disk.delta@monday".into();
        let delta = Delta::create(&io, &next, size, parent, [8; 16]).await.unwrap();
        let limit = Duration::from_secs(30);
        layers.push(&io, ("disk", &bases), next, delta, limit).await.unwrap();
        let below = layers.below();
        let names: Vec<_> = below.iter().map(|layer| layer.snapshot.as_deref()).collect();
        assert_eq!((layers.depth(), names), (3, vec![Some("monday"), None]));
        assert_eq!(below[0].place, "/srv/disk.delta@monday");
        // What was read before the snapshot counts, too.
        assert_eq!(layers.shared_reads(), found(0, PAGE));
        drop(read(&io, &layers, 0, PAGE).await);
        assert_eq!(layers.shared_reads(), found(PAGE, PAGE));
        layers.release();
    });
}
