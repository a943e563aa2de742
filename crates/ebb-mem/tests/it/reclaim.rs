//! Reclaim under memory pressure and without it: working sets, purges, decay, and growth afterwards.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ebb_mem::{Block, Memory, MemoryOptions, OwnerId, Reclaim, WorkerMemory};

const MIB: usize = 1 << 20;

fn memory(ceiling: usize) -> (Arc<Memory>, OwnerId, Instant) {
    let now = Instant::now();
    let memory = Memory::new(MemoryOptions::new(ceiling, now)).unwrap();
    let owner = memory.owner("test").unwrap();
    (memory, owner, now)
}

fn hold(worker: &WorkerMemory, owner: OwnerId, len: usize, bytes: usize) -> Vec<Block> {
    (0..bytes / len).map(|_| worker.alloc(len, owner).unwrap()).collect()
}

fn free(worker: &WorkerMemory, blocks: Vec<Block>) {
    blocks.into_iter().for_each(|block| worker.free(block));
}

/// Allocates and frees `bytes` in blocks of `len`.
fn run(worker: &WorkerMemory, owner: OwnerId, len: usize, bytes: usize) {
    free(worker, hold(worker, owner, len, bytes));
}

fn depot_bytes(memory: &Memory, len: usize) -> usize {
    let stats = memory.stats();
    let zone = stats.zones.iter().find(|zone| zone.item_bytes == len).unwrap();
    usize::try_from(zone.depot).unwrap() * len
}

fn classes() -> Vec<usize> {
    (0..9).map(|class| 4096 << class).collect()
}

#[test]
fn each_worker_is_purged_once_for_all_zones() {
    let (memory, owner, now) = memory(256 * MIB);
    let woken = Arc::new(AtomicUsize::new(0));
    let workers: Vec<WorkerMemory> = (0..3)
        .map(|_| {
            let woken = woken.clone();
            memory.worker(move || _ = woken.fetch_add(1, Ordering::Relaxed))
        })
        .collect();
    for worker in &workers {
        classes().into_iter().for_each(|len| run(worker, owner, len, 2 * len));
        assert!(worker.cached_bytes() > 4 * MIB / 2);
    }
    memory.reclaim(Reclaim::DrainWorkers, now);
    assert_eq!(woken.load(Ordering::Relaxed), 3, "one request per worker for all zones");
    for worker in &workers {
        assert!(worker.needs_poll());
        worker.poll(now);
        assert_eq!(worker.cached_bytes(), 0, "all zones in one poll");
        assert!(!worker.needs_poll());
    }
    assert_eq!(memory.stats().purges, 3);
    memory.settle();
    assert_eq!(memory.stats().arena.resident(), 0);
    // Purges are rate-limited.
    memory.reclaim(Reclaim::DrainWorkers, now + Duration::from_millis(999));
    assert_eq!(woken.load(Ordering::Relaxed), 3);
    memory.reclaim(Reclaim::DrainWorkers, now + Duration::from_millis(1001));
    assert_eq!(woken.load(Ordering::Relaxed), 6);
}

#[test]
fn reclaim_treats_all_zones_alike_whatever_the_order_of_creation() {
    let mut kept = Vec::new();
    for reverse in [false, true] {
        let (memory, owner, now) = memory(512 * MIB);
        let worker = memory.worker(|| ());
        let mut sizes = vec![4096, 8192, 16384, 32768, 65536];
        if reverse {
            sizes.reverse();
        }
        for &len in &sizes {
            run(&worker, owner, len, 16 * MIB);
        }
        // A working set of a quarter of the cached blocks in each zone.
        for &len in &sizes {
            run(&worker, owner, len, 4 * MIB);
        }
        memory.reclaim(Reclaim::Trim, now);
        sizes.sort_unstable();
        let shares: Vec<usize> = sizes.iter().map(|&len| depot_bytes(&memory, len)).collect();
        let (low, high) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(*low >= 3 * MIB && *high <= 5 * MIB, "each keeps its own working set: {shares:?}");
        assert!(
            (high - low) * 10 <= 16 * MIB,
            "spread at most 10 % of the cached blocks: {shares:?}"
        );
        kept.push(shares);
    }
    assert_eq!(kept[0], kept[1], "independent of the order of creation");
}

#[test]
fn a_trim_acts_before_memory_is_short() {
    // 5 % of the ceiling is in use: memory is not short, and the first sign has an effect already.
    let (memory, owner, now) = memory(640 * MIB);
    let worker = memory.worker(|| ());
    run(&worker, owner, 16384, 32 * MIB);
    let before = memory.stats().arena.wired;
    assert!(before >= 32 * MIB);
    memory.reclaim(Reclaim::Trim, now);
    assert!(memory.stats().arena.wired < before / 10);
    assert!(!worker.needs_poll(), "workers are not involved");
}

#[test]
fn the_zone_that_ran_out_of_cache_longest_ago_is_reclaimed_first() {
    let (memory, owner, now) = memory(64 * MIB);
    let worker = memory.worker(|| ());
    let (stale, busy) = (4096, 65536);
    for len in [stale, busy] {
        run(&worker, owner, len, 16 * MIB);
        run(&worker, owner, len, 6 * MIB);
    }
    memory.tick(now + Duration::from_secs(1));
    run(&worker, owner, stale, MIB);
    // The busy zone runs out of cache.
    run(&worker, owner, busy, 20 * MIB);
    memory.tick(now + Duration::from_secs(2));
    let stats = memory.stats();
    let timin = |len| stats.zones.iter().find(|zone| zone.item_bytes == len).unwrap().timin;
    assert!(timin(stale) > timin(busy), "{} > {}", timin(stale), timin(busy));
    let before = (depot_bytes(&memory, stale), depot_bytes(&memory, busy));
    assert!(before.0 > 3 * MIB && before.1 > 3 * MIB, "{before:?}");
    let room = stats.arena.ceiling - stats.arena.wired;
    let held = hold(&worker, owner, MIB, room + 2 * MIB);
    let after = (depot_bytes(&memory, stale), depot_bytes(&memory, busy));
    assert!(after.0 < before.0, "the stale zone was reclaimed: {before:?} {after:?}");
    assert_eq!(after.1, before.1, "the busy one was not");
    free(&worker, held);
}

#[test]
fn the_time_since_a_zone_ran_out_is_counted_per_zone() {
    let (memory, owner, now) = memory(64 * MIB);
    let worker = memory.worker(|| ());
    run(&worker, owner, 4096, MIB);
    for second in 1..=5 {
        memory.tick(now + Duration::from_secs(second));
    }
    let timin = |memory: &Memory, class: usize| memory.stats().zones[class].timin;
    assert!(timin(&memory, 0) >= 4);
    let held = hold(&worker, owner, 4096, 4 * MIB);
    memory.tick(now + Duration::from_secs(6));
    assert_eq!(timin(&memory, 0), 0);
    assert!(timin(&memory, 3) >= 5, "other zones keep theirs");
    free(&worker, held);
}

#[test]
fn idle_memory_is_released_without_memory_pressure() {
    // Temporary use of a very large zone, then none: no pressure, no event, only time.
    let (memory, owner, now) = memory(256 * MIB);
    let worker = memory.worker(|| ());
    run(&worker, owner, 131_072, 64 * MIB);
    assert!(memory.stats().arena.wired >= 64 * MIB);
    for second in 1..=40 {
        let now = now + Duration::from_secs(second);
        memory.tick(now);
        worker.poll(now);
    }
    memory.settle();
    let arena = memory.stats().arena;
    assert!(arena.wired <= MIB, "lent without pressure: {arena:?}");
    assert!(arena.unwired >= 60 * MIB, "the kernel may use it for its page cache");
    // After a longer idle time it is returned, so that RSS does not include it.
    for second in 41..=140 {
        memory.tick(now + Duration::from_secs(second));
    }
    memory.settle();
    assert!(memory.stats().arena.resident() <= MIB);
}

#[test]
fn a_quarter_of_the_unneeded_blocks_is_returned_each_period() {
    let (memory, owner, now) = memory(256 * MIB);
    let worker = memory.worker(|| ());
    run(&worker, owner, 4096, MIB);
    // Within the floor the surplus rule of the tick leaves it alone; the idle rule does not.
    let mut last = usize::MAX;
    for second in 1..=200 {
        memory.tick(now + Duration::from_secs(second));
        let cached = depot_bytes(&memory, 4096);
        assert!(cached <= last);
        last = cached;
    }
    assert!(last <= 131_072, "down to a bucket: {last}");
}

#[test]
fn repeated_trims_reduce_the_cache_further() {
    let (memory, owner, now) = memory(256 * MIB);
    let worker = memory.worker(|| ());
    run(&worker, owner, 16384, 32 * MIB);
    run(&worker, owner, 16384, 16 * MIB);
    let mut cached = depot_bytes(&memory, 16384);
    let start = cached;
    for _ in 0..6 {
        memory.reclaim(Reclaim::Trim, now);
        let less = depot_bytes(&memory, 16384);
        assert!(less < cached, "each trim reclaims more: {less} of {cached}");
        cached = less;
    }
    assert!(cached * 4 < start);
}

#[test]
fn the_cache_grows_again_after_calm() {
    let (memory, owner, now) = memory(256 * MIB);
    let worker = memory.worker(|| ());
    let misses = |memory: &Memory| memory.stats().zones[2].misses;
    run(&worker, owner, 16384, 16 * MIB);
    memory.reclaim(Reclaim::DrainWorkers, now);
    worker.poll(now);
    // Under pressure nothing is cached.
    run(&worker, owner, 16384, 16 * MIB);
    assert_eq!(depot_bytes(&memory, 16384) + worker.cached_bytes(), 0);
    memory.calm();
    run(&worker, owner, 16384, 16 * MIB);
    let before = misses(&memory);
    run(&worker, owner, 16384, 16 * MIB);
    assert!(misses(&memory) - before <= 1, "the caches hold the load again");
}

#[test]
fn caches_do_not_grow_for_a_second_after_an_event() {
    let (memory, owner, now) = memory(256 * MIB);
    let worker = memory.worker(|| ());
    let load = || run(&worker, owner, 16384, 16 * MIB);
    load();
    let full = depot_bytes(&memory, 16384);
    for (over, what) in [(1000, "a second has passed"), (0, "it is calm")] {
        memory.reclaim(Reclaim::Drain, now);
        let buckets = memory.stats().zones[2].bucket;
        load();
        assert_eq!(depot_bytes(&memory, 16384), 0, "paused: freed memory is lent");
        assert!(memory.stats().zones[2].bucket <= buckets);
        if over == 0 {
            memory.calm();
        } else {
            // The first tick after the second ends the pause; earlier ones do not.
            let at = |ms| now + Duration::from_millis(ms);
            memory.tick(at(over - 1));
            load();
            assert_eq!(depot_bytes(&memory, 16384), 0, "still paused");
            memory.tick(at(2 * over));
        }
        load();
        load();
        let again = depot_bytes(&memory, 16384);
        assert!(again * 2 > full, "regrown once {what}: {again} of {full}");
    }
}

#[test]
fn buckets_shrink_at_each_low_memory_event_and_have_a_ceiling_tied_to_ram() {
    let (memory, _, now) = memory(256 * MIB);
    let bucket = |memory: &Memory| memory.stats().zones[0].bucket;
    let start = bucket(&memory);
    memory.reclaim(Reclaim::Trim, now);
    assert_eq!(bucket(&memory), start - 1);
    memory.reclaim(Reclaim::Drain, now);
    assert_eq!(bucket(&memory), start - 2);
    memory.reclaim(Reclaim::DrainWorkers, now);
    assert_eq!(bucket(&memory), (start - 2) / 2);
    (0..100).for_each(|_| memory.reclaim(Reclaim::Trim, now));
    assert_eq!(bucket(&memory), 1, "never none");
    let max = |mib| self::memory(mib * MIB).0.stats().zones[0].bucket_max * 4096;
    assert!(max(4) <= 4 * MIB / 256 && max(16) <= 16 * MIB / 256, "a share of the ceiling");
    assert!(max(4) < max(16));
}

#[test]
fn the_load_may_stop_and_start_a_thousand_times() {
    let (memory, owner, now) = memory(64 * MIB);
    let worker = memory.worker(|| ());
    for round in 0..1000u64 {
        let now = now + Duration::from_secs(2 * round);
        run(&worker, owner, 65536, 2 * MIB);
        memory.reclaim(Reclaim::DrainWorkers, now);
        worker.poll(now);
        assert_eq!(memory.stats().arena.wired, 0);
        memory.calm();
    }
}
