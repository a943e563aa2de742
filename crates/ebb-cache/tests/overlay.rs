//! Overlays compared with a byte array, and after a power failure at any of more than ten thousand points: what was
//! flushed survives, whatever else is there was written or is the base's, and no block is a mix of both.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

mod common;

use std::sync::Arc;

use common::{Random, Rig, index, on_a_worker, read};
use ebb_block::{BlockStore, ErrorKind, ZeroFlags};
use ebb_cache::{BaseLayers, CachedStore, Delta, DeltaError, Layers, Mode, plain_parent};
use ebb_image::{BLOCK, Layout};
use ebb_io::Io;
use ebb_store::{Record, Store, TestStore};

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
            let mut delta = Delta::open(io, &top).await?;
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
    let most = if random.chance(700) { 20 } else { 200 };
    let mut count = 1 + random.below(most).min(sectors - first - 1);
    let mut first = first;
    if random.chance(400) && first + count + 8 < sectors {
        // Whole blocks.
        (first, count) = (first / 8 * 8, count.next_multiple_of(8));
    }
    (first * SECTOR, count.min(sectors - first) * SECTOR)
}

async fn play(io: &Io, rig: &Rig, seed: u64, mode: Mode) {
    let mut random = Random::new(seed);
    let base_size = (200 + random.below(200)) * SECTOR;
    let size = if random.chance(500) { base_size } else { base_size + random.below(300) * SECTOR };
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
                layers.write(io, buf, offset, random.chance(200)).await.0.unwrap();
            }
            40..75 => {
                let found = read(io, &layers, offset, length).await;
                assert!(*found == model[range], "seed {seed}, step {step}: {length} at {offset}");
            }
            75..85 => {
                let flags = ZeroFlags { may_unmap: random.chance(500), fast_only: false };
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

/// What a crash may leave: for each sector the stable content, and what was written since, in order.
struct Remains {
    /// Zeroes elsewhere.
    stable: std::collections::BTreeMap<u64, Vec<u8>>,
    later: std::collections::BTreeMap<u64, Vec<(usize, Vec<u8>)>>,
}

impl Remains {
    fn take(&mut self, number: usize, record: &Record) {
        match record {
            Record::Write { offset, data, fua } => {
                assert!(!fua, "an overlay flushes");
                for (at, bytes) in (offset / SECTOR..).zip(data.chunks(index(SECTOR))) {
                    self.later.entry(at).or_default().push((number, bytes.to_vec()));
                }
            }
            Record::Left { .. } => panic!("no write fails"),
            Record::Flush { covers } => {
                for (sector, writes) in &mut self.later {
                    let count = writes.iter().take_while(|(number, _)| number < covers).count();
                    if let Some((_, data)) = writes.drain(..count).next_back() {
                        self.stable.insert(*sector, data);
                    }
                }
                self.later.retain(|_, writes| !writes.is_empty());
            }
        }
    }

    /// A store as a crash may leave it.
    fn crash(&self, random: &mut Random, size: u64) -> TestStore {
        let store = TestStore::new(size, 1);
        let change = |sector: &u64, data: &[u8]| store.change(sector * SECTOR, data);
        self.stable.iter().for_each(|(sector, data)| change(sector, data));
        let all = random.below(4);
        for (sector, writes) in &self.later {
            let kept = match all {
                0 => writes.len(),
                1 => 0,
                _ => index(random.below(writes.len() as u64 + 1)),
            };
            if let Some((_, data)) = kept.checked_sub(1).map(|last| &writes[last]) {
                change(sector, data);
            }
        }
        store
    }
}

/// Sector values by time: the stamp, the length of the record when it was submitted, and when a flush promised it.
type Values = Vec<(u64, usize, usize)>;

const VOLUME: u64 = 15 << 20;
const BASE: u64 = 32 * BLOCK;
const POINTS_PER_RUN: usize = 900;
const RUNS: u64 = 12;

/// Where the test writes: blocks whose bits are in two sectors of the map page.
fn sector_of(random: &mut Random) -> u64 {
    let block = if random.chance(500) { random.below(24) } else { 3600 + random.below(24) };
    block * (BLOCK / SECTOR) + random.below(8)
}

fn stamped(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(64)
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
    let content = delta.content();
    let size = content.len() as u64;
    let sectors = (0..).zip(content.chunks(index(SECTOR)).map(<[u8]>::to_vec));
    let stable = sectors.filter(|(_, data)| data.iter().any(|byte| *byte != 0)).collect();
    let mut remains = Remains { stable, later: Default::default() };
    delta.start_record();
    let mut history: std::collections::BTreeMap<u64, Values> = Default::default();
    let mut stamp = 0;
    for _ in 0..150 {
        if random.chance(150) {
            layers.flush(io).await.unwrap();
            let at = delta.recorded();
            for (_, _, promised) in history.values_mut().filter_map(|values| values.last_mut()) {
                *promised = (*promised).min(at);
            }
            continue;
        }
        let first = sector_of(&mut random);
        let count = if random.chance(500) { 8 } else { 1 + random.below(12) };
        let first = if count == 8 { first / 8 * 8 } else { first };
        let zero = random.chance(150);
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
