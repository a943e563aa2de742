//! Overlays on disks that fail, with requests that overlap in time, and a power failure at the end: what a read may
//! return, and what a power failure may leave, by a model that knows sets of values.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::{Random, Rig, index, on_a_worker};
use ebb_block::{BlockStore, ZeroFlags};
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
    let flushes = if random.chance(400) { 60 } else { 0 };
    let faults = Faults {
        reads: rate(&mut random),
        writes: rate(&mut random),
        flushes,
        ..Faults::default()
    };
    // Then the flusher's own flushes fail, too.
    let in_background = mode == Mode::Writeback && flushes > 0;
    let base_faults = Faults { reads: rate(&mut random), ..Faults::default() };
    let mut model: BTreeMap<u64, Sector> = BTreeMap::new();
    let mut stamp = 0u64;
    let (mut good, mut bad) = (0, 0);
    let new = |sector: u64| {
        let first = BTreeSet::from([of_base(sector)]);
        Sector { seen: first.clone(), stable: first, fresh: false, lost: false }
    };
    for step in 0..60 {
        delta.faults(&faults);
        base.faults(&base_faults);
        let mut tasks = Vec::new();
        for _ in 0..1 + random.below(7) {
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
            let count = if random.chance(300) { 8 } else { 1 + random.below(14) };
            let first = if count == 8 { first / 8 * 8 } else { first };
            let (value, range): (u64, _) = match op {
                Op::Write => {
                    stamp += 1;
                    (stamp, first..first + count)
                }
                Op::Flush => (0, 0..0),
                _ => (0, first..first + count),
            };
            let (own, on) = (layers.clone(), io.clone());
            let (offset, length) = (first * SECTOR, count * SECTOR);
            let unmap = random.chance(500);
            let task = io.spawn(async move {
                match op {
                    Op::Write => {
                        let mut buf = on.pool().take(index(length)).await;
                        for chunk in buf.chunks_mut(8) {
                            chunk.copy_from_slice(&value.to_le_bytes());
                        }
                        own.write(&on, buf, offset, false).await.0.map(|()| Vec::new())
                    }
                    Op::Zero => own
                        .write_zeroes(
                            &on,
                            offset,
                            length,
                            ZeroFlags { may_unmap: unmap, fast_only: false },
                        )
                        .await
                        .map(|()| Vec::new()),
                    Op::Discard => own.discard(&on, offset, length).await.map(|()| Vec::new()),
                    Op::Read => {
                        let buf = on.pool().take(index(length)).await;
                        let (result, buf) = own.read(&on, buf, offset).await;
                        result.map(|()| buf.to_vec())
                    }
                    Op::Flush => own.flush(&on).await.map(|()| Vec::new()),
                }
            });
            for _ in 0..random.below(4) {
                io.yield_now().await;
            }
            tasks.push((op, value, range, Some(task)));
        }
        if cancel && random.chance(300) {
            for _ in 0..random.below(20) {
                io.yield_now().await;
            }
            let at = index(random.below(tasks.len() as u64));
            drop(tasks[at].3.take());
        }
        let before = model.clone();
        let mut batch: BTreeMap<u64, (BTreeSet<u64>, bool, bool)> = BTreeMap::new();
        let (mut flushed, mut failed) = (false, false);
        let mut reads = Vec::new();
        for (op, value, range, task) in tasks {
            let result = match task {
                Some(task) => Some(task.await),
                None => None,
            };
            let is_good = matches!(result, Some(Ok(_)));
            if is_good {
                good += 1;
            } else {
                bad += 1;
            }
            if let Ok(which) = std::env::var("TRACE") {
                let which: u64 = which.parse().unwrap();
                if range.contains(&which) || range.is_empty() {
                    println!(
                        "step {step}: {op:?} {range:?} ({:?}) {value:x} {:?}",
                        range.start / 8..=(range.end.max(1) - 1) / 8,
                        result.as_ref().map(|r| r.as_ref().map(|_| ()).map_err(|e| e.to_string()))
                    );
                }
            }
            match op {
                Op::Write | Op::Zero => {
                    for s in range {
                        let entry = batch.entry(s).or_default();
                        entry.0.insert(value);
                        entry.1 |= is_good;
                        entry.2 |= result.is_none();
                    }
                }
                Op::Discard => {
                    for s in range {
                        let entry = batch.entry(s).or_default();
                        entry.0.insert(0);
                        entry.2 = true;
                    }
                }
                Op::Read => {
                    if let Some(Ok(data)) = result {
                        reads.push((range, data));
                    }
                }
                Op::Flush if is_good => flushed = true,
                Op::Flush => failed = true,
            }
        }
        for (range, data) in reads {
            for (s, bytes) in range.zip(data.chunks(512)) {
                let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes.chunks(8).all(|c| *c == value.to_le_bytes()), "torn");
                let now = before.get(&s).cloned().unwrap_or_else(|| new(s));
                let is_lost = failed && (value == 0 || now.stable.contains(&value));
                assert!(
                    is_lost
                        || now.seen.contains(&value)
                        || batch.get(&s).is_some_and(|b| b.0.contains(&value)),
                    "seed {seed} {mode:?} step {step}: a read of sector {s} found {value:x}, not {:x?} {:x?}",
                    now.seen,
                    batch.get(&s)
                );
            }
        }
        // A first write of a part of a block has copied the rest.
        for block in batch.keys().map(|s| s / 8).collect::<BTreeSet<_>>() {
            for s in block * 8..block * 8 + 8 {
                model.entry(s).or_insert_with(|| new(s));
            }
        }
        let sectors: BTreeSet<u64> = model.keys().chain(batch.keys()).copied().collect();
        for s in sectors {
            let entry = model.entry(s).or_insert_with(|| new(s));
            let (values, acked, dropped) = batch.get(&s).cloned().unwrap_or_default();
            if flushed && entry.fresh {
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
            // A flush that fails loses data, in memory too.
            // What was dropped may still be carried out; and what was lost is whatever the delta held.
            entry.lost |= failed || dropped || in_background;
            if entry.lost {
                entry.seen.extend(&entry.stable);
            }
            if failed {
                entry.seen.insert(0);
            }
        }
        // A quiet look.
        delta.faults(&Faults::default());
        base.faults(&Faults::default());
        let must_reopen = failed && random.chance(500) || random.chance(40);
        for (s, entry) in &mut model {
            let buf = io.pool().take(512).await;
            let (result, buf) = layers.read(io, buf, s * SECTOR).await;
            if let Err(error) = result {
                panic!("seed {seed} {mode:?} step {step}: a quiet read failed: {error:?}");
            }
            let value = u64::from_le_bytes(buf[..8].try_into().unwrap());
            assert!(
                entry.seen.contains(&value),
                "seed {seed} {mode:?} step {step}: sector {s} holds {value:x}, not {:x?}",
                entry.seen
            );
            if !entry.lost {
                entry.seen = BTreeSet::from([value]);
            }
            if std::env::var("TRACE").is_ok_and(|w| w == s.to_string()) {
                println!("   holds {value:x}");
            }
        }
        if must_reopen {
            let weak = layers.top().downgrade();
            layers.top().end_writeback();
            drop(layers);
            while weak.strong_count() > 0 {
                io.yield_now().await;
            }
            layers = open(io, rig, &delta, mode, &base, false).await;
            for entry in model.values_mut() {
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
    for (s, entry) in &model {
        let buf = io.pool().take(512).await;
        let (result, buf) = layers.read(io, buf, s * SECTOR).await;
        result.unwrap();
        let value = u64::from_le_bytes(buf[..8].try_into().unwrap());
        assert!(
            entry.stable.contains(&value),
            "seed {seed} {mode:?}: after the crash sector {s} holds {value:x}, not {:x?}; seen {:x?}",
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
