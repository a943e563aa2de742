//! Reads of an overlay's blocks whose data a disk lost before a flush.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, ErrorKind, Operation, ZeroFlags};
use ebb_cache::{BaseLayers, CachedStore, Delta, Layers, Mode};
use ebb_image::{BLOCK, BLOCKS_PER_PAGE, Layout};
use ebb_io::Io;
use ebb_store::{MemoryStore, Store, TestStore};

const SECTOR: u64 = 512;
const SIZE: u64 = 8 << 20;

fn delta_disk(seed: u64) -> Arc<TestStore> {
    Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed))
}

fn top_on(rig: &Rig, disk: &Arc<TestStore>) -> CachedStore {
    let store = Store::Test(Arc::new(disk.open_anew()));
    CachedStore::new(&rig.cache, "top", store, Mode::Writethrough).unwrap()
}

/// An overlay that is new, on a base of ones.
async fn new_overlay(io: &Io, rig: &Rig, disk: &Arc<TestStore>) -> (Layers, BaseLayers) {
    let base = TestStore::new(SIZE, 1);
    base.change(0, &vec![1; index(SIZE)]);
    let bases = BaseLayers::new(&rig.cache);
    let base = bases.add("base", Store::Test(Arc::new(base)), Mode::Writethrough).unwrap();
    let parent = base.as_parent(io).await.unwrap();
    let top = top_on(rig, disk);
    let delta = Delta::create(io, &top, SIZE, parent, [9; 16]).await.unwrap();
    let deltas = vec![Arc::new(delta)];
    (Layers::overlay("disk", top, vec![base], deltas, false).unwrap(), bases)
}

async fn put(io: &Io, layers: &Layers, (offset, length): (u64, u64), value: u8) {
    let mut buf = io.pool().take(index(length)).await;
    buf.fill(value);
    layers.write(io, buf, offset, false).await.0.unwrap();
}

/// Fails if a sector of a block has another value than these.
async fn check(io: &Io, layers: &Layers, block: u64, values: &[u8], what: &str) {
    let found = read(io, layers, block * BLOCK, BLOCK).await;
    for (sector, bytes) in found.chunks(index(SECTOR)).enumerate() {
        let value = bytes[0];
        assert!(values.contains(&value), "{what}: sector {sector} of block {block} is {value}");
    }
}

/// The rest of the block was copied from the base, which no client has changed.
#[test]
fn after_a_failed_flush_a_lost_block_reads_as_the_base() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..40 {
            let disk = delta_disk(seed);
            let (layers, _bases) = new_overlay(&io, &rig, &disk).await;
            put(&io, &layers, (8 * BLOCK, BLOCK), 7).await;
            layers.flush(&io).await.unwrap();
            put(&io, &layers, (SECTOR, SECTOR), 9).await;
            put(&io, &layers, (8 * BLOCK, SECTOR), 9).await;
            disk.lose();
            disk.evict();
            layers.flush(&io).await.unwrap_err();
            let what = format!("seed {seed}");
            check(&io, &layers, 0, &[1], &what).await;
            check(&io, &layers, 8, &[7, 9], &what).await;
            // Later writes are read.
            put(&io, &layers, (SECTOR, SECTOR), 8).await;
            let found = read(&io, &layers, 0, BLOCK).await;
            assert_eq!((found[0], found[512]), (1, 8), "{what}");
            assert!(layers.is_lost());
            layers.flush(&io).await.unwrap_err();
        }
    });
}

/// The disk reports its loss once. Later flushes, which have nothing pending, fail nevertheless.
#[test]
fn no_flush_succeeds_after_blocks_were_forgotten() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let disk = delta_disk(1);
        let (layers, _bases) = new_overlay(&io, &rig, &disk).await;
        disk.report_once();
        put(&io, &layers, (0, BLOCK), 7).await;
        disk.lose();
        layers.flush(&io).await.unwrap_err();
        assert!(!layers.loses_by_kill());
        for _ in 0..3 {
            assert_eq!(layers.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
        }
        put(&io, &layers, (0, BLOCK), 7).await;
        assert_eq!(layers.flush(&io).await.unwrap_err().kind, ErrorKind::Lost);
    });
}

/// As a remote store whose server is out of reach: nothing is lost, and the next flush covers all.
#[test]
fn a_flush_without_a_reply_loses_no_blocks() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let disk = delta_disk(1);
        let (layers, _bases) = new_overlay(&io, &rig, &disk).await;
        put(&io, &layers, (0, BLOCK), 7).await;
        disk.silent.store(true, Ordering::SeqCst);
        layers.flush(&io).await.unwrap_err();
        check(&io, &layers, 0, &[7], "while the store does not reply").await;
        disk.silent.store(false, Ordering::SeqCst);
        layers.flush(&io).await.unwrap();
        assert!(!layers.loses_by_kill() && !layers.is_lost());
        check(&io, &layers, 0, &[7], "after the next flush").await;
    });
}

/// The first flush that fails finds no blocks that are not saved; the second tells of no other
/// loss.
#[test]
fn what_is_written_after_a_loss_is_read() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let disk = delta_disk(1);
        let (layers, _bases) = new_overlay(&io, &rig, &disk).await;
        put(&io, &layers, (8 * BLOCK, BLOCK), 7).await;
        layers.flush(&io).await.unwrap();
        put(&io, &layers, (8 * BLOCK, BLOCK), 5).await;
        disk.lose();
        layers.flush(&io).await.unwrap_err();
        put(&io, &layers, (0, BLOCK), 6).await;
        for _ in 0..2 {
            layers.flush(&io).await.unwrap_err();
            check(&io, &layers, 0, &[6], "a write after the loss").await;
        }
    });
}

/// Its first part is on the disk, and lost, when the second part is written.
#[test]
fn a_first_write_during_a_loss_fails() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let disk = delta_disk(3);
        let (layers, _bases) = new_overlay(&io, &rig, &disk).await;
        let layers = Arc::new(layers);
        put(&io, &layers, (64 * BLOCK, BLOCK), 7).await;
        disk.hang_only(&[Operation::Write]);
        let (own, on) = (layers.clone(), io.clone());
        let write = io.spawn(async move {
            let mut buf = on.pool().take(index(BLOCK)).await;
            buf.fill(9);
            own.write(&on, buf, BLOCK / 2, false).await.0
        });
        while disk.hanging() == 0 {
            io.yield_now().await;
        }
        disk.lose();
        layers.flush(&io).await.unwrap_err();
        disk.release();
        assert_eq!(write.await.unwrap_err().kind, ErrorKind::Lost);
        for block in 0..2 {
            check(&io, &layers, block, &[1], "a write that failed").await;
        }
    });
}

/// A write of a part of a block has copied the rest from a frozen layer that has lost it.
#[test]
fn what_was_copied_from_a_lost_layer_is_not_read() {
    // Without memory: the copy is made from what the disk has.
    on_a_worker(Rig::new(0), async |io, rig| {
        for seed in 1..20 {
            let disks = [delta_disk(seed), delta_disk(seed + 100)];
            let (layers, bases) = new_overlay(&io, &rig, &disks[0]).await;
            put(&io, &layers, (SECTOR, SECTOR), 7).await;
            let parent = layers.top_as_parent(&io).await.unwrap();
            let top = top_on(&rig, &disks[1]);
            let delta = Delta::create(&io, &top, SIZE, parent, [2; 16]).await.unwrap();
            let limit = Duration::from_secs(30);
            layers.push(&io, ("disk", &bases), top, delta, limit).await.unwrap();
            disks[0].lose();
            disks[0].evict();
            put(&io, &layers, (3 * SECTOR, SECTOR), 8).await;
            layers.flush(&io).await.unwrap_err();
            check(&io, &layers, 0, &[1], &format!("seed {seed}")).await;
            // Blocks are forgotten once: later writes are read, also after the next flush.
            put(&io, &layers, (3 * SECTOR, SECTOR), 6).await;
            layers.flush(&io).await.unwrap_err();
            let found = read(&io, &layers, 3 * SECTOR, SECTOR).await;
            assert_eq!(found[0], 6, "seed {seed}");
        }
    });
}

/// A snapshot of a volume: a delta of `size` bytes is above the others, on `store`.
async fn push(
    io: &Io,
    rig: &Rig,
    (layers, bases): (&Layers, &BaseLayers),
    store: Store,
    size: u64,
) {
    let parent = layers.top_as_parent(io).await.unwrap();
    let top = CachedStore::new(&rig.cache, "top", store, Mode::Writethrough).unwrap();
    let delta = Delta::create(io, &top, size, parent, [2; 16]).await.unwrap();
    layers.push(io, ("disk", bases), top, delta, Duration::from_secs(30)).await.unwrap();
}

/// The flush that fails began before the snapshot, and knows of no layer above.
#[test]
fn a_flush_of_before_a_snapshot_finds_the_loss() {
    on_a_worker(Rig::new(0), async |io, rig| {
        for seed in 1..20 {
            let disks = [delta_disk(seed), delta_disk(seed + 100)];
            let (layers, bases) = new_overlay(&io, &rig, &disks[0]).await;
            let layers = Arc::new(layers);
            put(&io, &layers, (SECTOR, SECTOR), 7).await;
            disks[0].hang_only(&[Operation::Flush]);
            let (own, on) = (layers.clone(), io.clone());
            let flush = io.spawn(async move { own.flush(&on).await });
            while disks[0].hanging() == 0 {
                io.yield_now().await;
            }
            let above = Store::Test(Arc::new(disks[1].open_anew()));
            push(&io, &rig, (&layers, &bases), above, SIZE).await;
            disks[0].lose();
            disks[0].evict();
            put(&io, &layers, (3 * SECTOR, SECTOR), 8).await;
            disks[0].release();
            flush.await.unwrap_err();
            check(&io, &layers, 0, &[1], &format!("seed {seed}")).await;
            layers.flush(&io).await.unwrap_err();
        }
    });
}

/// The frozen layer has no block to forget, and its failure keeps the flush from the top layer.
#[test]
fn loss_of_a_frozen_layer_reveals_that_of_the_top_one() {
    on_a_worker(Rig::new(0), async |io, rig| {
        for seed in 1..20 {
            let disks = [delta_disk(seed), delta_disk(seed + 100)];
            let (layers, bases) = new_overlay(&io, &rig, &disks[0]).await;
            put(&io, &layers, (BLOCK, BLOCK), 7).await;
            layers.flush(&io).await.unwrap();
            put(&io, &layers, (BLOCK, BLOCK), 5).await;
            let above = Store::Test(Arc::new(disks[1].open_anew()));
            push(&io, &rig, (&layers, &bases), above, SIZE).await;
            put(&io, &layers, (SECTOR, SECTOR), 8).await;
            for disk in &disks {
                disk.lose();
                disk.evict();
            }
            layers.flush(&io).await.unwrap_err();
            check(&io, &layers, 0, &[1], &format!("seed {seed}")).await;
        }
    });
}

/// The bits of a layer would be saved because they are many, while the one below has lost data.
#[test]
fn many_blocks_above_a_lost_layer_are_not_saved() {
    const PAGES: u64 = 140;
    on_a_worker(Rig::new(0), async |io, rig| {
        for seed in 1..10 {
            let disk = delta_disk(seed);
            let (layers, bases) = new_overlay(&io, &rig, &disk).await;
            put(&io, &layers, (SECTOR, SECTOR), 7).await;
            // Large, so that the map of what it holds is.
            let size = PAGES * BLOCKS_PER_PAGE * BLOCK;
            let store = MemoryStore::new(Layout::new(size).unwrap().store_size());
            push(&io, &rig, (&layers, &bases), Store::Memory(store), size).await;
            disk.lose();
            disk.evict();
            put(&io, &layers, (3 * SECTOR, SECTOR), 8).await;
            let flags = ZeroFlags { may_unmap: true, fast_only: false };
            for page in 1..PAGES {
                let offset = page * BLOCKS_PER_PAGE * BLOCK;
                layers.write_zeroes(&io, offset, 2000 * BLOCK, flags).await.unwrap();
            }
            layers.flush(&io).await.unwrap_err();
            check(&io, &layers, 0, &[1], &format!("seed {seed}")).await;
        }
    });
}
