//! Overlays on disks that fail, with requests that overlap in time, and a power failure at the end: what a read may
//! return, and what a power failure may leave, by a model that knows sets of values.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::{Random, Rig, index, on_a_worker, read};
use ebb_block::{BlockError, BlockStore, ZeroFlags};
use ebb_cache::{BaseLayers, CachedStore, Delta, Layers, Mode, plain_parent};
use ebb_image::{BLOCK, Layout};
use ebb_io::Io;
use ebb_store::{Faults, Store, TestStore};

const SECTOR: u64 = 512;
const SIZE: u64 = 2 << 20;
const BASE: u64 = 16 * BLOCK;

fn of_base(sector: u64) -> u64 {
    if sector < BASE / SECTOR { 1 << 40 | sector } else { 0 }
}

#[derive(Clone, Default)]
struct Sector {
    seen: BTreeSet<u64>,
    stable: BTreeSet<u64>,
    fresh: bool,
    /// A flush has failed since it was written: it may be lost when it leaves the memory.
    lost: bool,
}

async fn open(
    io: &Io,
    rig: &Rig,
    delta: &Arc<TestStore>,
    mode: Mode,
    base: &Arc<TestStore>,
    new: bool,
) -> Arc<Layers> {
    let top = CachedStore::new(&rig.cache, "top", Store::Test(Arc::new(delta.open_anew())), mode)
        .unwrap();
    let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
    let parent = plain_parent(io, &plain).await.unwrap();
    let delta = if new {
        Delta::create(io, &top, SIZE, parent, [9; 16]).await.unwrap()
    } else {
        let delta = Delta::open(io, &top).await.unwrap();
        delta.begin_writing(io, &top).await.unwrap();
        delta
    };
    let bases = BaseLayers::new(&rig.cache);
    let store = Store::Test(Arc::new(base.open_anew()));
    let below = vec![bases.add("base", store, Mode::Writethrough).unwrap()];
    if mode == Mode::Writeback {
        top.start_writeback(
            io,
            Arc::new(ebb_cache::FixedLimit {
                dirty_max: 64 << 10,
                age_max: std::time::Duration::from_millis(2),
                cluster: 1 << 20,
            }),
        );
    }
    Arc::new(Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap())
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Write,
    Zero,
    Discard,
    Read,
    Flush,
}

/// A request: what it writes, and the sectors that it is about.
#[derive(Clone, Debug)]
struct Planned {
    op: Op,
    value: u64,
    range: std::ops::Range<u64>,
    unmap: bool,
}

fn plan(random: &mut Random, stamp: &mut u64) -> Planned {
    let op = match random.below(20) {
        0..9 => Op::Write,
        9..12 => Op::Zero,
        12 => Op::Discard,
        13..17 => Op::Read,
        _ => Op::Flush,
    };
    let block = match random.below(3) {
        0 => random.below(4),
        1 => 14 + random.below(4),
        _ => 505 + random.below(4),
    };
    let first = block * 8 + random.below(8);
    let count = if random.chance(300, 1000) { 8 } else { 1 + random.below(14) };
    let first = if count == 8 { first / 8 * 8 } else { first };
    let (value, range) = match op {
        Op::Write => {
            *stamp += 1;
            (*stamp, first..first + count)
        }
        Op::Flush => (0, 0..0),
        _ => (0, first..first + count),
    };
    Planned { op, value, range, unmap: random.chance(500, 1000) }
}

/// Carries a request out; a read returns what it found.
async fn carry_out(io: Io, layers: Arc<Layers>, planned: Planned) -> Result<Vec<u8>, BlockError> {
    let Planned { op, value, range, unmap } = planned;
    let (offset, length) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
    let done = match op {
        Op::Write => {
            let mut buf = io.pool().take(index(length)).await;
            buf.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&value.to_le_bytes()));
            layers.write(&io, buf, offset, false).await.0
        }
        Op::Zero => {
            let flags = ZeroFlags { may_unmap: unmap, fast_only: false };
            layers.write_zeroes(&io, offset, length, flags).await
        }
        Op::Discard => layers.discard(&io, offset, length).await,
        Op::Read => {
            let buf = io.pool().take(index(length)).await;
            let (result, buf) = layers.read(&io, buf, offset).await;
            return result.map(|()| buf.to_vec());
        }
        Op::Flush => layers.flush(&io).await,
    };
    done.map(|()| Vec::new())
}

/// What requests that overlapped did to a sector: values written, whether one was acknowledged, or dropped.
type Batch = BTreeMap<u64, (BTreeSet<u64>, bool, bool)>;

/// The outcome of requests that overlapped.
#[derive(Default)]
struct Outcome {
    batch: Batch,
    reads: Vec<(std::ops::Range<u64>, Vec<u8>)>,
    flushed: bool,
    failed: bool,
}

impl Outcome {
    fn note(&mut self, planned: Planned, result: Option<Result<Vec<u8>, BlockError>>) {
        let is_good = matches!(result, Some(Ok(_)));
        match planned.op {
            Op::Write | Op::Zero => {
                for sector in planned.range {
                    let entry = self.batch.entry(sector).or_default();
                    entry.0.insert(planned.value);
                    entry.1 |= is_good;
                    entry.2 |= result.is_none();
                }
            }
            Op::Discard => {
                for sector in planned.range {
                    let entry = self.batch.entry(sector).or_default();
                    entry.0.insert(0);
                    entry.2 = true;
                }
            }
            Op::Read => {
                let found = result.and_then(Result::ok);
                self.reads.extend(found.map(|data| (planned.range, data)));
            }
            Op::Flush if is_good => self.flushed = true,
            Op::Flush => self.failed = true,
        }
    }
}

/// What each sector may hold.
#[derive(Default)]
struct Model(BTreeMap<u64, Sector>);

fn new_sector(sector: u64) -> Sector {
    let first = BTreeSet::from([of_base(sector)]);
    Sector { seen: first.clone(), stable: first, fresh: false, lost: false }
}

impl Model {
    fn check_reads(&self, outcome: &Outcome, what: &str) {
        for (range, data) in &outcome.reads {
            for (sector, bytes) in range.clone().zip(data.chunks(512)) {
                let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes.chunks(8).all(|c| *c == value.to_le_bytes()), "torn");
                let now = self.0.get(&sector).cloned().unwrap_or_else(|| new_sector(sector));
                let is_lost = outcome.failed && now.stable.contains(&value);
                let written = outcome.batch.get(&sector);
                let is_written = written.is_some_and(|batch| batch.0.contains(&value));
                assert!(
                    is_lost || is_written || now.seen.contains(&value),
                    "{what}: a read of sector {sector} found {value:x}, not {:x?} {written:x?}",
                    now.seen,
                );
            }
        }
    }

    fn adopt(&mut self, outcome: &Outcome, in_background: bool) {
        let Outcome { batch, flushed, failed, .. } = outcome;
        // A first write of a part of a block has copied the rest.
        for block in batch.keys().map(|sector| sector / 8).collect::<BTreeSet<_>>() {
            for sector in block * 8..block * 8 + 8 {
                self.0.entry(sector).or_insert_with(|| new_sector(sector));
            }
        }
        for (sector, entry) in &mut self.0 {
            let (values, acked, dropped) = batch.get(sector).cloned().unwrap_or_default();
            if *flushed && entry.fresh {
                entry.stable = entry.seen.clone();
                entry.fresh = false;
            }
            entry.stable.extend(&values);
            if acked {
                entry.seen = values;
                entry.fresh = true;
                entry.lost = false;
            } else {
                entry.seen.extend(&values);
            }
            // A flush that fails loses data, in memory too. A dropped write may still be made.
            entry.lost |= *failed || dropped || in_background;
            if entry.lost {
                entry.seen.extend(&entry.stable);
            }
        }
    }

    /// Compares all sectors with what they may hold while the disks work.
    async fn look(&mut self, io: &Io, layers: &Layers, what: &str) {
        for (sector, entry) in &mut self.0 {
            let found = read(io, layers, sector * SECTOR, 512).await;
            let value = u64::from_le_bytes(found[..8].try_into().unwrap());
            let may = &entry.seen;
            assert!(may.contains(&value), "{what}: sector {sector} holds {value:x}, not {may:x?}");
            if !entry.lost {
                entry.seen = BTreeSet::from([value]);
            }
        }
    }
}

async fn run(io: &Io, rig: &Rig, seed: u64, cancel: bool) -> (u64, u64) {
    let mut random = Random::new(seed);
    let mode = if seed.is_multiple_of(2) { Mode::Writethrough } else { Mode::Writeback };
    let base = Arc::new(TestStore::new(BASE, seed));
    let content: Vec<u8> =
        (0..BASE / SECTOR).flat_map(|s| of_base(s).to_le_bytes().repeat(64)).collect();
    base.change(0, &content);
    let delta = Arc::new(TestStore::new(Layout::new(SIZE).unwrap().store_size(), seed));
    delta.waits.store(3, std::sync::atomic::Ordering::Relaxed);
    let mut layers = open(io, rig, &delta, mode, &base, true).await;
    let rate = |random: &mut Random| u32::try_from(random.below(4) * 15).unwrap();
    let flushes = if random.chance(400, 1000) { 60 } else { 0 };
    let (failing_reads, writes) = (rate(&mut random), rate(&mut random));
    let faults = Faults { reads: failing_reads, writes, flushes, ..Faults::default() };
    // Then the flusher's own flushes fail, too.
    let in_background = mode == Mode::Writeback && flushes > 0;
    let base_faults = Faults { reads: rate(&mut random), ..Faults::default() };
    let (mut model, mut stamp) = (Model::default(), 0);
    let (mut good, mut bad) = (0, 0);
    for step in 0..60 {
        let what = format!("seed {seed} {mode:?} step {step}");
        delta.faults(&faults);
        base.faults(&base_faults);
        let mut tasks = Vec::new();
        for _ in 0..1 + random.below(7) {
            let planned = plan(&mut random, &mut stamp);
            let task = io.spawn(carry_out(io.clone(), layers.clone(), planned.clone()));
            for _ in 0..random.below(4) {
                io.yield_now().await;
            }
            tasks.push((planned, Some(task)));
        }
        if cancel && random.chance(300, 1000) {
            for _ in 0..random.below(20) {
                io.yield_now().await;
            }
            let at = index(random.below(tasks.len() as u64));
            drop(tasks[at].1.take());
        }
        let mut outcome = Outcome::default();
        for (planned, task) in tasks {
            let result = match task {
                Some(task) => Some(task.await),
                None => None,
            };
            *(if matches!(result, Some(Ok(_))) { &mut good } else { &mut bad }) += 1;
            outcome.note(planned, result);
        }
        model.check_reads(&outcome, &what);
        model.adopt(&outcome, in_background);
        delta.faults(&Faults::default());
        base.faults(&Faults::default());
        let must_reopen = outcome.failed && random.chance(500, 1000) || random.chance(40, 1000);
        model.look(io, &layers, &what).await;
        if must_reopen {
            let weak = layers.top().downgrade();
            layers.top().end_writeback();
            drop(layers);
            while weak.strong_count() > 0 {
                io.yield_now().await;
            }
            layers = open(io, rig, &delta, mode, &base, false).await;
            for entry in model.0.values_mut() {
                entry.seen.extend(&entry.stable);
                entry.fresh = false;
                entry.lost = true;
            }
        }
    }
    layers.top().end_writeback();
    drop(layers);
    let after = Arc::new(delta.reboot());
    after.faults(&Faults::default());
    let layers = open(io, rig, &after, mode, &base, false).await;
    for (sector, entry) in &model.0 {
        let found = read(io, &*layers, sector * SECTOR, 512).await;
        let value = u64::from_le_bytes(found[..8].try_into().unwrap());
        assert!(
            entry.stable.contains(&value),
            "seed {seed} {mode:?}: after the crash sector {sector} holds {value:x}, not {:x?}; seen {:x?}",
            entry.stable,
            entry.seen
        );
    }
    layers.top().end_writeback();
    (good, bad)
}

fn storm(max: u64, from: u64) {
    let from = std::env::var("SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(from);
    on_a_worker(Rig::new(max), async move |io, rig| {
        let (mut good, mut bad) = (0, 0);
        let count: u64 = std::env::var("STORM").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
        for seed in from..from + count {
            let (one, other) = run(&io, &rig, seed, seed % 3 == 0).await;
            (good, bad) = (good + one, bad + other);
        }
        println!("{good} good, {bad} bad");
    });
}

#[test]
fn with_memory() {
    storm(8 << 20, 1);
}

#[test]
fn with_little_memory() {
    storm(64 << 10, 10_000);
}

#[test]
fn without_memory() {
    storm(0, 20_000);
}
