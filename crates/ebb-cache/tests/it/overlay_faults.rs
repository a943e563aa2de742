//! Overlays on disks that fail: what a flush promised holds, and what is damaged is not used.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, Operation, Resize};
use ebb_cache::{
    BaseLayers, CachedStore, Delta, DeltaError, FillFrom, FixedLimit, Layers, Mode, plain_parent,
};
use ebb_image::{BLOCK, Layout, map_page};
use ebb_io::Io;
use ebb_store::{Faults, Store, TestStore};

const SECTOR: u64 = 512;
const SIZE: u64 = 8 << 20;

fn base_disk(size: u64, value: u8) -> Arc<TestStore> {
    let disk = TestStore::new(size, 1);
    disk.change(0, &vec![value; index(size)]);
    Arc::new(disk)
}

fn delta_disk(volume: u64) -> Arc<TestStore> {
    Arc::new(TestStore::new(Layout::new(volume).unwrap().store_size(), 1))
}

async fn open(
    io: &Io,
    rig: &Rig,
    (delta, mode): (&Arc<TestStore>, Mode),
    base: &Arc<TestStore>,
    new: Option<u64>,
) -> Result<Layers, DeltaError> {
    let below = Arc::new(base.open_anew());
    open_above(io, rig, (delta, mode), (base, &below), new).await
}

/// As [`open`], with the layer of the base on `below`.
async fn open_above(
    io: &Io,
    rig: &Rig,
    (delta, mode): (&Arc<TestStore>, Mode),
    (base, below): (&Arc<TestStore>, &Arc<TestStore>),
    new: Option<u64>,
) -> Result<Layers, DeltaError> {
    let top = CachedStore::new(&rig.cache, "top", Store::Test(delta.clone()), mode).unwrap();
    let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
    let parent = plain_parent(io, &plain).await?;
    let delta = match new {
        Some(size) => Delta::create(io, &top, size, parent, [9; 16]).await?,
        None => {
            let delta = Delta::open(io, &top).await?;
            delta.check_parent(&top, &parent)?;
            delta.begin_writing(io, &top).await?;
            delta
        }
    };
    let bases = BaseLayers::new(&rig.cache);
    let store = Store::Test(below.clone());
    let below = vec![bases.add("base", store, Mode::Writethrough).unwrap()];
    Ok(Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap())
}

async fn put(io: &Io, layers: &Layers, offset: u64, length: u64, value: u8) {
    let mut buf = io.pool().take(index(length)).await;
    buf.fill(value);
    layers.write(io, buf, offset, false).await.0.unwrap();
}

/// A flush that makes the data stable, writes the map and fails then: the disk loses some of the map.
async fn fail_to_save(io: &Io, delta: &TestStore, layers: &Arc<Layers>) {
    delta.hang_only(&[Operation::Write]);
    let (own, on) = (layers.clone(), io.clone());
    let flush = io.spawn(async move { own.flush(&on).await });
    while delta.hanging() == 0 {
        io.yield_now().await;
    }
    delta.faults(&Faults { flushes: 1000, ..Faults::default() });
    delta.release();
    flush.await.unwrap_err();
    delta.faults(&Faults::default());
    layers.flush(io).await.unwrap_err();
}

#[test]
fn what_was_flushed_is_read_after_a_later_flush_has_failed() {
    // Without memory the map is read from the disk each time.
    on_a_worker(Rig::new(0), async |io, rig| {
        for seed in 1..40 {
            let base = base_disk(SIZE, 1);
            let delta = Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed));
            let mode = Mode::Writethrough;
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            let layers = Arc::new(layers);
            for block in 0..2 {
                put(&io, &layers, block * BLOCK, BLOCK, 7).await;
                layers.flush(&io).await.unwrap();
            }
            put(&io, &layers, 2 * BLOCK, BLOCK, 7).await;
            fail_to_save(&io, &delta, &layers).await;
            let found = read(&io, &*layers, BLOCK, BLOCK).await;
            assert!(found.iter().all(|byte| *byte == 7), "seed {seed}: {}", found[0]);
            // A write of a part must not copy the rest from the base.
            put(&io, &layers, BLOCK, SECTOR, 8).await;
            let found = read(&io, &*layers, BLOCK, BLOCK).await;
            assert_eq!((found[0], found[512]), (8, 7), "seed {seed}");
        }
    });
}

#[test]
fn a_page_of_the_last_generation_fails_the_flush_only() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let layers =
            open(&io, &rig, (&delta, Mode::Writethrough), &base, Some(SIZE)).await.unwrap();
        drop(layers);
        let mut page = vec![0; map_page::BYTES];
        map_page::seal(&mut page, 0, [9; 16], u64::MAX);
        delta.change(Layout::new(SIZE).unwrap().map_slot(0, 0), &page);
        let layers = open(&io, &rig, (&delta, Mode::Writethrough), &base, None).await.unwrap();
        put(&io, &layers, 0, BLOCK, 7).await;
        let flushed = layers.flush(&io).await;
        drop(layers);
        let layers = open(&io, &rig, (&delta, Mode::Writethrough), &base, None).await.unwrap();
        let found = read(&io, &layers, 0, BLOCK).await;
        assert!(flushed.is_err() || found[0] == 7);
    });
}

/// After a flush failed and the volume was opened anew, a flush that succeeds makes the bits stable, too, that only the
/// kernel's cache still has.
async fn reopen_after_loss(io: &Io, rig: &Rig, seed: u64) {
    let base = base_disk(SIZE, 1);
    let delta = Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed));
    let mode = Mode::Writethrough;
    let layers = open(io, rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
    layers.flush(io).await.unwrap();
    put(io, &layers, 0, BLOCK, 7).await;
    let layers = Arc::new(layers);
    fail_to_save(io, &delta, &layers).await;
    drop(layers);
    let again = Arc::new(delta.open_anew());
    let layers = open(io, rig, (&again, mode), &base, None).await.unwrap();
    read(io, &layers, 0, BLOCK).await;
    put(io, &layers, 0, SECTOR, 8).await;
    layers.flush(io).await.unwrap();
    drop(layers);
    let after = Arc::new(again.reboot());
    let layers = open(io, rig, (&after, mode), &base, None).await.unwrap();
    let found = read(io, &layers, 0, SECTOR).await;
    assert_eq!(found[0], 8, "seed {seed}: a flush succeeded after this was written");
}

#[test]
fn a_flush_after_a_loss_and_a_reopening_promises_what_it_says() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..40 {
            reopen_after_loss(&io, &rig, seed).await;
        }
    });
}

#[test]
fn a_damaged_map_page_is_never_used() {
    on_a_worker(Rig::new(1 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let mode = Mode::Writethrough;
        let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
        put(&io, &layers, 0, BLOCK, 7).await;
        layers.flush(&io).await.unwrap();
        assert_eq!(read(&io, &layers, 0, 512).await[0], 7);
        // The page leaves the cache.
        for at in (65536..SIZE).step_by(65536) {
            read(&io, &layers, at, 65536).await;
        }
        rig.cache.set_max(Some(0));
        for at in (65536..SIZE).step_by(65536) {
            read(&io, &layers, at, 65536).await;
        }
        rig.cache.set_max(Some(8 << 20));
        let layout = Layout::new(SIZE).unwrap();
        let mut page = vec![0; map_page::BYTES];
        delta.look(layout.map_slot(0, 0), &mut page);
        page[map_page::HEADER] = 0;
        delta.change(layout.map_slot(0, 0), &page);
        for _ in 0..3 {
            let buf = io.pool().take(512).await;
            let (result, buf) = layers.read(&io, buf, 0).await;
            assert!(result.is_err() || buf[0] == 7);
        }
    });
}

/// Both copies of a page, while the volume is closed: the base is not read in place of what was written.
#[test]
fn a_map_page_without_a_valid_copy_fails_requests_after_a_reopening() {
    on_a_worker(Rig::new(1 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let mode = Mode::Writethrough;
        let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
        for block in 0..2 {
            put(&io, &layers, block * BLOCK, BLOCK, 7).await;
            layers.flush(&io).await.unwrap();
        }
        drop(layers);
        let layout = Layout::new(SIZE).unwrap();
        for slot in 0..2 {
            delta.change(layout.map_slot(0, slot) + 100, &[1]);
        }
        let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
        for _ in 0..3 {
            let buf = io.pool().take(512).await;
            assert!(layers.read(&io, buf, 0).await.0.is_err());
            let mut buf = io.pool().take(512).await;
            buf.fill(1);
            let written = layers.write(&io, buf, 0, false).await.0;
            assert!(written.is_err() || layers.flush(&io).await.is_err());
        }
    });
}

/// A copy that waits for a base that hangs: writes of whole blocks complete, and are not replaced by what is copied.
#[test]
fn a_copy_that_waits_for_the_base_holds_up_no_write() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let below = Arc::new(base.open_anew());
        let (on, disks) = ((&delta, Mode::Writethrough), (&base, &below));
        let layers = Arc::new(open_above(&io, &rig, on, disks, Some(SIZE)).await.unwrap());
        for (first, dropped) in [(0, false), (64, true)] {
            below.hang_only(&[Operation::Read]);
            let (own, on) = (layers.clone(), io.clone());
            let length = 16 * BLOCK;
            let copy =
                io.spawn(async move { own.fill(&on, first * BLOCK, length, FillFrom::All).await });
            while below.hanging() == 0 {
                io.yield_now().await;
            }
            for block in [0, 5, 15] {
                let written = put(&io, &layers, (first + block) * BLOCK, BLOCK, 7);
                let limit = Duration::from_secs(30);
                assert!(io.timeout(limit, written).await.is_some(), "block {block} waits");
            }
            if dropped {
                drop(copy);
                below.release();
            } else {
                below.release();
                // What was written in between ends the run.
                let copied = copy.await.unwrap();
                assert!(copied > 0 && copied <= length, "{copied}");
                let mut at = copied;
                while at < length {
                    at += layers.fill(&io, at, length - at, FillFrom::All).await.unwrap();
                }
            }
            for block in 0..16 {
                let expected = if [0, 5, 15].contains(&block) { 7 } else { 1 };
                let found = read(&io, &*layers, (first + block) * BLOCK, 4096).await;
                assert!(*found == [expected; 4096], "block {block}");
            }
        }
    });
}

#[test]
fn a_dropped_save_may_still_be_carried_out() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let mode = Mode::Writethrough;
        let layers = Arc::new(open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap());
        put(&io, &layers, 0, BLOCK, 7).await;
        delta.hang_only(&[Operation::Write]);
        {
            let mut flush = std::pin::pin!(layers.flush(&io));
            for _ in 0..100 {
                let waker = std::task::Waker::noop();
                assert!(
                    flush.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending()
                );
                io.yield_now().await;
                if delta.hanging() > 0 {
                    break;
                }
            }
            assert_eq!(delta.hanging(), 1);
        }
        delta.release();
        // What it was writing.
        let layout = Layout::new(SIZE).unwrap();
        let mut page = vec![0; map_page::BYTES];
        page[map_page::HEADER] = 1;
        map_page::seal(&mut page, 0, [9; 16], 1);
        put(&io, &layers, BLOCK, BLOCK, 8).await;
        let flushed = layers.flush(&io).await;
        // The first write is carried out now.
        delta.change(layout.map_slot(0, 0), &page);
        drop(layers);
        let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
        let found = read(&io, &layers, BLOCK, 512).await;
        assert!(flushed.is_err() || found[0] == 8, "found {}", found[0]);
    });
}

/// A stack of two deltas: the lower one is shorter than its base, the upper one as long as that.
#[test]
fn beyond_the_end_of_a_shorter_base_are_zeroes() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let base = base_disk(SIZE, 1);
        let mode = Mode::Writethrough;
        let short = SIZE / 2 + SECTOR;
        let middle = delta_disk(short);
        let layers = open(&io, &rig, (&middle, mode), &base, Some(short)).await.unwrap();
        assert_eq!(layers.size(), short);
        drop(layers);
        let bases = BaseLayers::new(&rig.cache);
        let store = Store::Test(Arc::new(base.open_anew()));
        let plain = bases.add("base", store, mode).unwrap();
        let parent = plain.as_parent(&io).await.unwrap();
        let store = Store::Test(Arc::new(middle.open_anew()));
        let lower = bases.add("middle", store, mode).unwrap();
        let map = lower.delta(&io).await.unwrap();
        let parent = lower.check_parent(&map, &parent).unwrap();
        assert_eq!(parent.size, short);
        let top = delta_disk(SIZE);
        let top = CachedStore::new(&rig.cache, "top", Store::Test(top), mode).unwrap();
        let own = Delta::create(&io, &top, SIZE, parent, [8; 16]).await.unwrap();
        let below = vec![lower, plain];
        let layers = Layers::overlay("disk", top, below, vec![Arc::new(own), map], false).unwrap();
        let found = read(&io, &layers, 0, SIZE).await;
        let ones = found.iter().filter(|byte| **byte == 1).count() as u64;
        assert_eq!(ones, short, "bytes of the base");
    });
}

/// The write of the header of a delta that is flattened fails, or the flush after it: a snapshot names the header that the disk
/// has, or is refused.
#[test]
fn a_snapshot_after_a_header_that_may_not_be_stable_can_be_opened() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..20 {
            let base = base_disk(SIZE, 1);
            let delta = Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed));
            let mode = Mode::Writethrough;
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            let layers = Arc::new(layers);
            let mut at = 0;
            while at < SIZE {
                at += layers.fill(&io, at, 1 << 20, FillFrom::All).await.unwrap();
            }
            layers.flush(&io).await.unwrap();
            let (own, on) = (layers.clone(), io.clone());
            let detach = async move { own.detach(&on, "disk", Duration::from_secs(9)).await };
            if seed % 2 == 0 {
                // A part of it is written.
                delta.faults(&Faults { writes: 1000, ..Faults::default() });
                detach.await.unwrap_err();
            } else {
                delta.hang_only(&[Operation::Write]);
                let detach = io.spawn(detach);
                while delta.hanging() == 0 {
                    io.yield_now().await;
                }
                delta.faults(&Faults { flushes: 1000, ..Faults::default() });
                delta.release();
                detach.await.unwrap_err();
            }
            layers.top_as_parent(&io).await.unwrap_err();
            delta.faults(&Faults::default());
            // After a failed flush no other one succeeds.
            let parent = layers.top_as_parent(&io).await;
            assert_eq!(parent.is_ok(), seed % 2 == 0, "seed {seed}: {parent:?}");
            let Ok(parent) = parent else { continue };
            layers.flush(&io).await.unwrap();
            drop(layers);
            let store = Store::Test(Arc::new(delta.reboot()));
            let store = CachedStore::new(&rig.cache, "disk@one", store, mode).unwrap();
            let found = Delta::open(&io, &store).await.unwrap().as_parent(&store);
            assert!(parent.is(&found), "seed {seed}: {parent:?}, and there is {found:?}");
        }
    });
}

/// A copy into the top layer waits for memory without the lock that writes wait for, since these hold memory.
#[test]
fn a_write_completes_while_a_copy_waits_for_memory() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
        let mode = Mode::Writethrough;
        let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
        let layers = Arc::new(layers);
        // The map is in memory.
        read(&io, &*layers, 0, BLOCK).await;
        let mut buf = io.pool().take(index(BLOCK)).await;
        buf.fill(7);
        let held: Vec<_> = std::iter::from_fn(|| io.pool().try_take(1 << 20)).collect();
        let (own, on) = (layers.clone(), io.clone());
        let fill = io.spawn(async move { own.fill(&on, 0, 1 << 20, FillFrom::All).await });
        for _ in 0..100 {
            io.yield_now().await;
        }
        let write = io.timeout(Duration::from_secs(20), layers.write(&io, buf, 0, false)).await;
        write.expect("it waits for the copy").0.unwrap();
        drop(held);
        fill.await.unwrap();
        let found = read(&io, &*layers, 0, 2 * BLOCK).await;
        assert_eq!((found[0], found[4096]), (7, 1));
    });
}

/// A server whose lost writes are reported once: later flushes succeed. The bits of blocks whose data is lost would hide the
/// base below, also of sectors that no client wrote.
#[test]
fn bits_are_not_saved_after_their_data_was_lost() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..20 {
            let base = base_disk(SIZE, 1);
            let delta = Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed));
            let mode = Mode::Writethrough;
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            put(&io, &layers, 8 * BLOCK, BLOCK, 7).await;
            layers.flush(&io).await.unwrap();
            delta.report_once();
            put(&io, &layers, SECTOR, SECTOR, 9).await;
            assert!(layers.loses_by_kill() && layers.unstable() == BLOCK);
            delta.lose();
            layers.flush(&io).await.unwrap_err();
            layers.save_map(&io).await;
            layers.flush(&io).await.unwrap_err();
            assert!(layers.is_lost() && layers.loss().is_some());
            drop(layers);
            let delta = Arc::new(delta.reboot());
            let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
            let found = read(&io, &layers, 0, BLOCK).await;
            assert!(found.iter().all(|byte| *byte == 1), "seed {seed}: base data is destroyed");
            let found = read(&io, &layers, 8 * BLOCK, BLOCK).await;
            assert!(found.iter().all(|byte| *byte == 7), "seed {seed}: flushed data is lost");
            // The delta opened again flushes again.
            put(&io, &layers, SECTOR, SECTOR, 9).await;
            layers.flush(&io).await.unwrap();
        }
    });
}

/// The flush of a resize takes the only report of a loss.
#[test]
fn bits_are_not_saved_after_a_resize_whose_flush_failed() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for (seed, to) in (1..20).zip([SIZE / 2, 2 * SIZE, SIZE / 2 + 512].into_iter().cycle()) {
            let base = base_disk(SIZE, 1);
            let room = Layout::new(2 * SIZE).unwrap().store_size();
            let delta = Arc::new(TestStore::new(room, seed));
            let mode = Mode::Writethrough;
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            layers.flush(&io).await.unwrap();
            delta.report_once();
            put(&io, &layers, SECTOR, SECTOR, 9).await;
            delta.lose();
            let order = Resize { to: Some(to), shrink: true };
            assert!(layers.resize(&io, order).await.is_err());
            layers.flush(&io).await.unwrap_err();
            assert!(layers.is_lost());
            drop(layers);
            let delta = Arc::new(delta.reboot());
            let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
            let found = read(&io, &layers, 0, BLOCK).await;
            assert!(found.iter().all(|byte| *byte == 1), "seed {seed}: base data is destroyed");
        }
    });
}

/// The header is not in the cache, which can write again everything else that was lost.
#[test]
fn an_overlay_recovers_from_a_resize_whose_flush_failed() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for (seed, to) in (1..20).zip([SIZE / 2, 2 * SIZE, SIZE / 2 + 512].into_iter().cycle()) {
            let base = base_disk(SIZE, 1);
            let room = Layout::new(2 * SIZE).unwrap().store_size();
            let delta = Arc::new(TestStore::new(room, seed));
            let mode = Mode::Writeback;
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            layers.flush(&io).await.unwrap();
            layers.top().cache().unwrap().set_control(Arc::new(FixedLimit::default()));
            put(&io, &layers, SECTOR, SECTOR, 9).await;
            delta.faults(&Faults { flushes: 1000, ..Faults::default() });
            let order = Resize { to: Some(to), shrink: true };
            assert!(layers.resize(&io, order).await.is_err());
            assert_eq!(layers.size(), SIZE);
            delta.faults(&Faults::default());
            delta.evict();
            layers.flush(&io).await.expect("the loss is permanent");
            assert!(!layers.is_lost());
            drop(layers);
            let delta = Arc::new(delta.reboot());
            let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
            assert_eq!(layers.size(), SIZE, "seed {seed}");
            let found = read(&io, &layers, 0, BLOCK).await;
            assert_eq!((found[0], found[512], found[1024]), (1, 9, 1), "seed {seed}");
        }
    });
}

/// Without a flush of a client.
#[test]
fn saved_map_survives_a_power_cut() {
    for mode in [Mode::Writethrough, Mode::Writeback] {
        on_a_worker(Rig::new(8 << 20), async move |io, rig| {
            let (base, delta) = (base_disk(SIZE, 1), delta_disk(SIZE));
            let layers = open(&io, &rig, (&delta, mode), &base, Some(SIZE)).await.unwrap();
            put(&io, &layers, 0, 2 * BLOCK, 7).await;
            assert!(layers.loses_by_kill());
            layers.save_map(&io).await;
            assert_eq!(layers.loses_by_kill(), mode == Mode::Writeback);
            assert_eq!((layers.dirty(), layers.unstable()), (0, 0));
            drop(layers);
            let delta = Arc::new(delta.reboot());
            let layers = open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
            let found = read(&io, &layers, 0, 3 * BLOCK).await;
            let (own, below) = found.split_at(index(2 * BLOCK));
            assert!(own.iter().all(|byte| *byte == 7) && below.iter().all(|byte| *byte == 1));
        });
    }
}
