//! Overlays compared with a byte array, and after a power failure at any of more than ten thousand points: what was
//! flushed survives, whatever else is there was written or is the base's, and no block is a mix of both.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;

use common::remains::{Remains, stamped};
use common::{Random, Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, ErrorKind, ZeroFlags};
use ebb_cache::{
    BaseLayers, CachedStore, Delta, DeltaError, Layers, Mode, SnapshotError, plain_parent,
};
use ebb_image::{BLOCK, Layout};
use ebb_io::Io;
use ebb_store::{Store, TestStore};

const SECTOR: u64 = 512;

/// A base of random content.
fn base_disk(size: u64, seed: u64) -> (Arc<TestStore>, Vec<u8>) {
    let mut random = Random::new(seed);
    let content: Vec<u8> = (0..size).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
    let disk = TestStore::new(size, seed);
    disk.change(0, &content);
    (Arc::new(disk), content)
}

fn delta_disk(volume: u64, seed: u64) -> Arc<TestStore> {
    Arc::new(TestStore::new(Layout::new(volume).unwrap().store_size(), seed))
}

/// Opens an overlay of `size` bytes on `delta` above `base`; the delta is made if `new`.
async fn open(
    io: &Io,
    rig: &Rig,
    (delta, mode): (&Arc<TestStore>, Mode),
    base: &Arc<TestStore>,
    new: Option<u64>,
) -> Result<Layers, DeltaError> {
    let top = CachedStore::new(&rig.cache, "top", Store::Test(delta.clone()), mode).unwrap();
    let plain = CachedStore::from(Store::Test(base.clone()));
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
    let store = Store::Test(Arc::new(base.open_anew()));
    let below = vec![bases.add("base", store, Mode::Writethrough).unwrap()];
    Ok(Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap())
}

/// Sectors: offset and length.
fn part(random: &mut Random, size: u64) -> (u64, u64) {
    let sectors = size / SECTOR;
    let first = random.below(sectors);
    let most = if random.chance(700, 1000) { 20 } else { 200 };
    let mut count = 1 + random.below(most).min(sectors - first - 1);
    let mut first = first;
    if random.chance(400, 1000) && first + count + 8 < sectors {
        // Whole blocks.
        (first, count) = (first / 8 * 8, count.next_multiple_of(8));
    }
    (first * SECTOR, count.min(sectors - first) * SECTOR)
}

async fn play(io: &Io, rig: &Rig, seed: u64, mode: Mode) {
    let mut random = Random::new(seed);
    let base_size = (200 + random.below(200)) * SECTOR;
    let size =
        if random.chance(500, 1000) { base_size } else { base_size + random.below(300) * SECTOR };
    let (base, mut model) = base_disk(base_size, seed);
    let before = model.clone();
    model.resize(index(size), 0);
    let delta = delta_disk(size, seed);
    let mut layers = open(io, rig, (&delta, mode), &base, Some(size)).await.unwrap();
    assert_eq!(layers.size(), size);
    for step in 0..120 {
        let (offset, length) = part(&mut random, size);
        let range = index(offset)..index(offset + length);
        match random.below(100) {
            0..40 => {
                let mut buf = io.pool().take(index(length)).await;
                for byte in buf.iter_mut() {
                    *byte = u8::try_from(random.below(256)).unwrap();
                }
                model[range].copy_from_slice(&buf);
                layers.write(io, buf, offset, random.chance(200, 1000)).await.0.unwrap();
            }
            40..75 => {
                let found = read(io, &layers, offset, length).await;
                assert!(*found == model[range], "seed {seed}, step {step}: {length} at {offset}");
            }
            75..85 => {
                let flags = ZeroFlags { may_unmap: random.chance(500, 1000), fast_only: false };
                layers.write_zeroes(io, offset, length, flags).await.unwrap();
                model[range].fill(0);
            }
            85..88 => {
                layers.discard(io, offset, length).await.unwrap();
                let found = read(io, &layers, offset, length).await;
                model[range].copy_from_slice(&found);
            }
            88..93 => {
                let extents = layers.extents(io, offset, length, 100).await.unwrap();
                assert_eq!(extents[0].offset, offset);
                for extent in extents {
                    let range = index(extent.offset)..index(extent.offset + extent.length);
                    assert!(!extent.hole || model[range].iter().all(|byte| *byte == 0));
                }
            }
            93..97 => layers.flush(io).await.unwrap(),
            _ => {
                layers.flush(io).await.unwrap();
                drop(layers);
                layers = open(io, rig, (&delta, mode), &base, None).await.unwrap();
            }
        }
    }
    let found = read(io, &layers, 0, size).await;
    assert!(*found == model[..], "seed {seed}");
    let mut kept = vec![0; index(base_size)];
    base.look(0, &mut kept);
    assert!(kept == before, "the base was changed");
}

#[test]
fn an_overlay_is_a_copy_of_its_base_that_can_be_written() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        for seed in 1..=120u64 {
            let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
            play(&io, &rig, seed, mode).await;
        }
    });
}

#[test]
fn another_base_and_a_damaged_delta_are_refused() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = 300 * SECTOR;
        let (base, _) = base_disk(size, 1);
        let delta = delta_disk(size, 1);
        let mode = Mode::Writethrough;
        let empty = open(&io, &rig, (&delta, mode), &base, None).await.unwrap_err();
        assert!(matches!(empty, DeltaError::Header { .. }), "{empty}");
        let layers = open(&io, &rig, (&delta, mode), &base, Some(size)).await.unwrap();
        layers.flush(&io).await.unwrap();
        drop(layers);
        let (other, _) = base_disk(size, 2);
        let error = open(&io, &rig, (&delta, mode), &other, None).await.unwrap_err();
        assert!(matches!(error, DeltaError::OtherBase { .. }), "{error}");
        open(&io, &rig, (&delta, mode), &base, None).await.unwrap();
        delta.change(0, &[0xff; 8192]);
        let error = open(&io, &rig, (&delta, mode), &base, None).await.unwrap_err();
        assert!(matches!(error, DeltaError::Header { .. }), "{error}");
    });
}

#[test]
fn a_write_fails_where_the_base_cannot_be_read_and_changes_nothing() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = 300 * SECTOR;
        let (base, model) = base_disk(size, 1);
        let delta = delta_disk(size, 1);
        let layers = open(&io, &rig, (&delta, Mode::Writeback), &base, Some(size)).await.unwrap();
        // The layer has a disk of its own above the same bytes: errors are made there.
        drop(layers);
        let top = CachedStore::new(&rig.cache, "top", Store::Test(delta.clone()), Mode::Writeback);
        let top = top.unwrap();
        let map = Arc::new(Delta::open(&io, &top).await.unwrap());
        let failing = Arc::new(base.open_anew());
        let bases = BaseLayers::new(&rig.cache);
        let below = bases.add("base", Store::Test(failing.clone()), Mode::Writethrough).unwrap();
        let layers = Layers::overlay("disk", top, vec![below], vec![map], false).unwrap();
        failing.faults(&ebb_store::Faults { reads: 1000, ..Default::default() });
        let mut buf = io.pool().take(512).await;
        buf.fill(7);
        let (result, buf) = layers.write(&io, buf, 512, false).await;
        assert_eq!(result.unwrap_err().kind, ErrorKind::Io);
        failing.faults(&ebb_store::Faults::default());
        let found = read(&io, &layers, 0, 4096).await;
        assert!(*found == model[..4096]);
        layers.write(&io, buf, 512, false).await.0.unwrap();
        let found = read(&io, &layers, 0, 4096).await;
        assert!(found[..512] == model[..512] && found[512..1024] == [7; 512]);
        assert!(found[1024..] == model[1024..4096]);
    });
}

/// A map page that is damaged behind ebbd's back fails reads of what it is about, and never shows older data.
#[test]
fn a_damaged_map_page_is_never_believed() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = 300 * SECTOR;
        let (base, _) = base_disk(size, 1);
        let delta = delta_disk(size, 1);
        let mode = Mode::Writethrough;
        // The cache has no room for the page until it is damaged.
        rig.cache.set_max(Some(0));
        let layers = open(&io, &rig, (&delta, mode), &base, Some(size)).await.unwrap();
        let mut buf = io.pool().take(4096).await;
        buf.fill(7);
        layers.write(&io, buf, 0, false).await.0.unwrap();
        layers.flush(&io).await.unwrap();
        assert!(*read(&io, &layers, 0, 4096).await == [7; 4096]);
        let slot = Layout::new(size).unwrap().map_slot(0, 0);
        delta.change(slot, &[1; 512]);
        rig.cache.set_max(Some(8 << 20));
        for _ in 0..3 {
            let buf = io.pool().take(4096).await;
            let (result, _) = layers.read(&io, buf, 0).await;
            assert_eq!(result.unwrap_err().kind, ErrorKind::Io);
        }
    });
}

/// Sector values by time: the stamp, the length of the record when it was submitted, and when a flush promised it.
type Values = Vec<(u64, usize, usize)>;

const VOLUME: u64 = 15 << 20;
const BASE: u64 = 32 * BLOCK;
const POINTS_PER_RUN: usize = 900;
const RUNS: u64 = 12;

/// Where the test writes: blocks whose bits are in two sectors of the map page.
fn sector_of(random: &mut Random) -> u64 {
    let block = if random.chance(500, 1000) { random.below(24) } else { 3600 + random.below(24) };
    block * (BLOCK / SECTOR) + random.below(8)
}

async fn crash_run(io: &Io, rig: &Rig, seed: u64) -> usize {
    let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
    let mut random = Random::new(seed);
    let base = Arc::new(TestStore::new(BASE, seed));
    // The base's sectors have stamps, too; beyond its end are zeroes.
    let of_base = |sector: u64| if sector < BASE / SECTOR { 1 << 40 | sector } else { 0 };
    let content: Vec<u8> = (0..BASE / SECTOR).flat_map(|sector| stamped(of_base(sector))).collect();
    base.change(0, &content);
    let delta = delta_disk(VOLUME, seed);
    let layers = open(io, rig, (&delta, mode), &base, Some(VOLUME)).await.unwrap();
    layers.flush(io).await.unwrap();
    let size = delta.size();
    let mut remains = Remains::of(&delta);
    delta.start_record();
    let mut history: std::collections::BTreeMap<u64, Values> = Default::default();
    let mut stamp = 0;
    for _ in 0..150 {
        if random.chance(150, 1000) {
            layers.flush(io).await.unwrap();
            let at = delta.recorded();
            for (_, _, promised) in history.values_mut().filter_map(|values| values.last_mut()) {
                *promised = (*promised).min(at);
            }
            continue;
        }
        let first = sector_of(&mut random);
        let count = if random.chance(500, 1000) { 8 } else { 1 + random.below(12) };
        let first = if count == 8 { first / 8 * 8 } else { first };
        let zero = random.chance(150, 1000);
        stamp += 1;
        let value = if zero { 0 } else { stamp };
        let at = delta.recorded();
        for sector in first..first + count {
            history.entry(sector).or_default().push((value, at, usize::MAX));
        }
        let (offset, length) = (first * SECTOR, count * SECTOR);
        if zero {
            let flags = ZeroFlags { may_unmap: true, fast_only: false };
            layers.write_zeroes(io, offset, length, flags).await.unwrap();
        } else {
            let mut buf = io.pool().take(index(length)).await;
            for chunk in buf.chunks_mut(512) {
                chunk.copy_from_slice(&stamped(value));
            }
            layers.write(io, buf, offset, false).await.0.unwrap();
        }
    }
    layers.flush(io).await.unwrap();
    drop(layers);
    let record = delta.take_record();
    let mut points = 0;
    let each = POINTS_PER_RUN.div_ceil(record.len());
    for number in 0..=record.len() {
        for _ in 0..each {
            points += 1;
            let left = Arc::new(remains.crash(&mut random, size));
            let layers = open(io, rig, (&left, mode), &base, None).await.unwrap();
            for (sector, values) in &history {
                let last = values.iter().rposition(|(_, _, promised)| *promised <= number);
                let found = read(io, &layers, sector * SECTOR, SECTOR).await;
                let value = u64::from_le_bytes(found[..8].try_into().unwrap());
                assert!(*found == stamped(value)[..], "a torn sector");
                let mut allowed = values[last.unwrap_or(0)..]
                    .iter()
                    .filter(|(_, submitted, _)| *submitted <= number)
                    .map(|(value, _, _)| *value);
                let is_base = last.is_none() && value == of_base(*sector);
                assert!(
                    is_base || allowed.any(|one| one == value),
                    "seed {seed}: after {number} of {} requests sector {sector} holds {value:x}: {values:?}",
                    record.len()
                );
            }
        }
        if let Some(record) = record.get(number) {
            remains.take(number, record);
        }
    }
    points
}

#[test]
fn what_was_flushed_survives_a_power_failure_at_any_point() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let mut points = 0;
        for seed in 1..=RUNS {
            points += crash_run(&io, &rig, seed).await;
        }
        println!("{points} points");
        assert!(points >= 10_000, "{points} points only");
    });
}

/// The layers of a delta that was frozen, read-only, with what is below.
async fn open_frozen(
    io: &Io,
    rig: &Rig,
    chain: &[&Arc<TestStore>],
    base: &Arc<TestStore>,
) -> Layers {
    let bases = BaseLayers::new(&rig.cache);
    let plain = CachedStore::from(Store::Test(base.clone()));
    let mut parent = plain_parent(io, &plain).await.unwrap();
    let store = Store::Test(Arc::new(base.open_anew()));
    let mut below = vec![bases.add("base", store, Mode::Writethrough).unwrap()];
    let mut deltas = Vec::new();
    let (top, lower) = chain.split_first().unwrap();
    for disk in lower.iter().rev() {
        let store = Store::Test(Arc::new(disk.open_anew()));
        let layer = bases.add("delta", store, Mode::Writethrough).unwrap();
        let delta = layer.delta(io).await.unwrap();
        parent = layer.check_parent(&delta, &parent).unwrap();
        deltas.insert(0, delta);
        below.insert(0, layer);
    }
    let store = Store::Test(Arc::new(top.open_anew()));
    let top = CachedStore::new(&rig.cache, "top", store, Mode::Writethrough).unwrap();
    let delta = Delta::open(io, &top).await.unwrap();
    delta.check_parent(&top, &parent).unwrap();
    deltas.insert(0, Arc::new(delta));
    Layers::overlay("frozen", top, below, deltas, true).unwrap()
}

/// A snapshot while writes are in flight holds for each block a value that was written before or during it, and what was
/// acknowledged before is in it; later writes are not, and the volume reads as if there were none.
#[test]
fn a_snapshot_holds_what_was_written_before_it() {
    use std::cell::RefCell;
    use std::rc::Rc;

    const WRITERS: u64 = 8;
    const SECTORS: u64 = 16;
    on_a_worker(Rig::new(16 << 20), async |io, rig| {
        for seed in 1..=24u64 {
            let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
            let size = WRITERS * SECTORS * SECTOR;
            let (base, _) = base_disk(size, seed);
            let first = delta_disk(size, seed);
            let layers = open(&io, &rig, (&first, mode), &base, Some(size)).await.unwrap();
            let layers = Rc::new(layers);
            let bases = BaseLayers::new(&rig.cache);
            // For each sector what was submitted and what was acknowledged last.
            let sectors = index(WRITERS * SECTORS);
            let begun = Rc::new(RefCell::new(vec![0u64; sectors]));
            let done = Rc::new(RefCell::new(vec![0u64; sectors]));
            let ended = Rc::new(std::cell::Cell::new(0));
            for writer in 0..WRITERS {
                let (spawner, io, layers) = (io.clone(), io.clone(), layers.clone());
                let (begun, done, ended) = (begun.clone(), done.clone(), ended.clone());
                let mut random = Random::new(seed * 100 + writer);
                let task = async move {
                    for stamp in 1..=60 {
                        // Parts of writers share blocks.
                        let sector = random.below(SECTORS) * WRITERS + writer;
                        begun.borrow_mut()[index(sector)] = stamp;
                        let mut buf = io.pool().take(512).await;
                        buf.copy_from_slice(&stamped(stamp));
                        let fua = random.chance(50, 1000);
                        layers.write(&io, buf, sector * SECTOR, fua).await.0.unwrap();
                        done.borrow_mut()[index(sector)] = stamp;
                        if random.chance(100, 1000) {
                            layers.flush(&io).await.unwrap();
                        }
                        if random.chance(200, 1000) {
                            io.yield_now().await;
                        }
                    }
                    ended.set(ended.get() + 1);
                };
                spawner.spawn(task).detach();
            }
            let mut disks = vec![first.clone()];
            let mut seen = Vec::new();
            for number in 0..3 {
                for _ in 0..20 + 15 * seed {
                    io.yield_now().await;
                }
                let disk = delta_disk(size, seed);
                let top = CachedStore::new(&rig.cache, "next", Store::Test(disk.clone()), mode);
                let top = top.unwrap();
                let parent = layers.top_as_parent(&io).await.unwrap();
                let id = [number + 1; 16];
                let delta = Delta::create(&io, &top, size, parent, id).await.unwrap();
                let before = done.borrow().clone();
                let limit = std::time::Duration::from_secs(30);
                let pushed = layers.push(&io, ("disk", &bases), top, delta, limit).await;
                pushed.unwrap();
                let after = begun.borrow().clone();
                layers.flush(&io).await.unwrap();
                disks.insert(0, disk);
                seen.push((before, after));
            }
            while ended.get() < WRITERS {
                io.yield_now().await;
            }
            layers.flush(&io).await.unwrap();
            let last: Vec<u64> = done.borrow().clone();
            for (sector, last) in (0..).zip(&last) {
                let found = read(&io, &*layers, sector * SECTOR, SECTOR).await;
                assert!(*last == 0 || *found == stamped(*last)[..], "seed {seed}: sector {sector}");
            }
            drop(layers);
            for (number, (before, after)) in seen.iter().enumerate() {
                let chain: Vec<_> = disks[disks.len() - 1 - number..].iter().collect();
                let frozen = open_frozen(&io, &rig, &chain, &base).await;
                for sector in 0..WRITERS * SECTORS {
                    let found = read(&io, &frozen, sector * SECTOR, SECTOR).await;
                    let (least, most) = (before[index(sector)], after[index(sector)]);
                    let value = u64::from_le_bytes(found[..8].try_into().unwrap());
                    let is_one = *found == stamped(value)[..] && (least..=most).contains(&value);
                    assert!(
                        is_one || least == 0,
                        "seed {seed}, snapshot {number}, sector {sector}"
                    );
                }
                let mut buf = io.pool().take(512).await;
                buf.fill(1);
                let refused = frozen.write(&io, buf, 0, false).await.0.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::ReadOnly);
            }
        }
    });
}

/// A snapshot while a write hangs gives up, and the writes that waited for it go on; later it succeeds.
#[test]
fn a_snapshot_waits_for_the_writes_in_flight_and_gives_up_in_time() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = 300 * SECTOR;
        let (base, model) = base_disk(size, 1);
        let (first, second) = (delta_disk(size, 1), delta_disk(size, 2));
        let mode = Mode::Writethrough;
        let layers = open(&io, &rig, (&first, mode), &base, Some(size)).await.unwrap();
        let layers = std::rc::Rc::new(layers);
        let bases = BaseLayers::new(&rig.cache);
        let write = |sector: u64, byte: u8| {
            let (io, layers) = (io.clone(), layers.clone());
            async move {
                let mut buf = io.pool().take(512).await;
                buf.fill(byte);
                layers.write(&io, buf, sector * SECTOR, false).await.0.unwrap();
            }
        };
        first.hang_only(&[ebb_block::Operation::Write]);
        // Both complete their block from below.
        io.spawn(write(0, 7)).detach();
        while first.hanging() == 0 {
            io.yield_now().await;
        }
        let next = async || {
            let store = Store::Test(second.clone());
            let top = CachedStore::new(&rig.cache, "next", store, mode).unwrap();
            let parent = layers.top_as_parent(&io).await.unwrap();
            (Delta::create(&io, &top, size, parent, [4; 16]).await.unwrap(), top)
        };
        let (delta, top) = next().await;
        let limit = std::time::Duration::from_millis(20);
        let pushed = layers.push(&io, ("disk", &bases), top, delta, limit).await;
        assert!(matches!(pushed, Err(SnapshotError::Slow(_))), "{pushed:?}");
        let other = io.spawn(write(1, 8));
        first.release();
        other.await;
        let (delta, top) = next().await;
        let limit = std::time::Duration::from_secs(30);
        layers.push(&io, ("disk", &bases), top, delta, limit).await.unwrap();
        write(2, 9).await;
        let found = read(&io, &*layers, 0, 4096).await;
        assert!(found[..512] == [7; 512] && found[512..1024] == [8; 512]);
        assert!(found[1024..1536] == [9; 512] && found[1536..] == model[1536..4096]);
    });
}

/// Which of 40 blocks have changed between snapshots, asked for in parts.
async fn said_changes(
    io: &Io,
    layers: &Layers,
    names: (&str, Option<&str>),
    random: &mut Random,
) -> Vec<bool> {
    let mut said = Vec::new();
    while said.len() < 40 {
        let at = said.len() as u64 * BLOCK;
        let limit = 1 + index(random.below(4));
        let found = layers.changes(io, names, (at, 40 * BLOCK - at), limit).await.unwrap();
        assert!((1..=limit).contains(&found.len()));
        for (length, changed) in found {
            said.extend(std::iter::repeat_n(changed, index(length / BLOCK)));
        }
    }
    said
}

/// A thousand volumes with two snapshots: what is said to have changed since one is what was written since, and all that
/// differs.
#[test]
fn what_has_changed_since_a_snapshot_is_what_was_written_since() {
    on_a_worker(Rig::new(8 << 20), async |io, rig| {
        let size = 40 * BLOCK;
        for seed in 1..=1000u64 {
            let mut random = Random::new(seed);
            let (base, mut now) = base_disk(size, seed);
            let first = delta_disk(size, seed);
            let layers =
                open(&io, &rig, (&first, Mode::Writethrough), &base, Some(size)).await.unwrap();
            let bases = BaseLayers::new(&rig.cache);
            // The content and the blocks that were written, from each snapshot on.
            let mut since: Vec<(Vec<u8>, Vec<bool>)> = Vec::new();
            // Those that were written between the two snapshots.
            let mut between = Vec::new();
            for round in 0..3u8 {
                for _ in 0..random.below(6) {
                    let (offset, length) = part(&mut random, size);
                    let mut buf = io.pool().take(index(length)).await;
                    buf.fill(u8::try_from(random.below(256)).unwrap());
                    now[index(offset)..index(offset + length)].copy_from_slice(&buf);
                    layers.write(&io, buf, offset, false).await.0.unwrap();
                    for (_, written) in &mut since {
                        let blocks = offset / BLOCK..(offset + length).div_ceil(BLOCK);
                        blocks.for_each(|block| written[index(block)] = true);
                    }
                }
                if round == 2 {
                    break;
                }
                let store = Store::Test(delta_disk(size, seed));
                let mode = Mode::Writethrough;
                let top = CachedStore::new(&rig.cache, "next", store, mode).unwrap();
                let mut parent = layers.top_as_parent(&io).await.unwrap();
                parent.place = format!("/a/disk@s{round}");
                let id = [round + 1; 16];
                let delta = Delta::create(&io, &top, size, parent, id).await.unwrap();
                let limit = std::time::Duration::from_secs(30);
                layers.push(&io, ("disk", &bases), top, delta, limit).await.unwrap();
                between = since.first().map(|(_, written)| written.clone()).unwrap_or_default();
                since.push((now.clone(), vec![false; 40]));
            }
            assert_eq!(layers.snapshots(), ["s1", "s0"]);
            let said = said_changes(&io, &layers, ("s0", Some("s1")), &mut random).await;
            assert_eq!(said, between, "seed {seed}");
            for names in [("s1", Some("s0")), ("s0", Some("s0")), ("s0", Some("never"))] {
                let refused = layers.changes(&io, names, (0, size), 1).await.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::Invalid, "{names:?}");
            }
            for (round, (then, written)) in since.iter().enumerate() {
                let name = format!("s{round}");
                let said = said_changes(&io, &layers, (&name, None), &mut random).await;
                assert_eq!(&said, written, "seed {seed}, {name}");
                for (block, changed) in said.iter().enumerate() {
                    let bytes = block * 4096..(block + 1) * 4096;
                    assert!(*changed || then[bytes.clone()] == now[bytes], "seed {seed}, {block}");
                }
            }
            assert!(layers.changes(&io, ("never", None), (0, size), 1).await.is_err());
        }
    });
}
