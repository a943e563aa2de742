//! Freeing and reclaiming never allocate, and the warm hit path does not use the heap.

use std::time::{Duration, Instant};

use counting_allocator::calls;
use ebb_mem::{Block, Memory, MemoryOptions, PagePool, PoolParameters, Reclaim};

/// Heap allocations this thread makes while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = calls();
    work();
    calls() - before
}

#[test]
fn freeing_and_reclaiming_never_allocate() {
    let now = Instant::now();
    let memory = Memory::new(MemoryOptions::new(256 << 20, now)).unwrap();
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    for len in [4096usize, 65536, 1 << 20, 5 << 20] {
        let blocks: Vec<Block> =
            (0..(64usize << 20) / len).map_while(|_| worker.alloc(len, owner).ok()).collect();
        // The first time, with empty caches.
        assert_eq!(allocations(|| blocks.into_iter().for_each(|b| worker.free(b))), 0, "{len}");
    }
    // The same after the depots have dropped their spare buckets.
    let blocks: Vec<Block> = (0..4000).map(|_| worker.alloc(4096, owner).unwrap()).collect();
    memory.reclaim(Reclaim::Trim, now);
    assert_eq!(allocations(|| blocks.into_iter().for_each(|b| worker.free(b))), 0);
    let pool = PagePool::new(&worker, owner, &PoolParameters::default());
    let blocks: Vec<Block> = (0..3000).map(|_| pool.take(4096).unwrap()).collect();
    let work = || {
        blocks.into_iter().for_each(|block| pool.put(block));
        pool.done(now);
        worker.poll(now);
        worker.poll(now + Duration::from_millis(200));
        memory.tick(now + Duration::from_secs(1));
        memory.reclaim(Reclaim::Trim, now);
        memory.squeeze(now);
        worker.poll(now);
        memory.reclaim(Reclaim::Drain, now);
        memory.reclaim(Reclaim::DrainWorkers, now);
        worker.poll(now);
        memory.calm();
    };
    assert_eq!(allocations(work), 0);
}

#[test]
fn the_warm_hit_path_does_not_use_the_heap() {
    let memory = Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap();
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    let mut held: Vec<Block> = Vec::with_capacity(512);
    let mut cycle = || {
        for index in 0..512usize {
            held.push(worker.alloc(4096 << (index % 5), owner).unwrap());
        }
        held.drain(..).for_each(|block| worker.free(block));
    };
    cycle();
    cycle();
    assert_eq!(allocations(|| (0..100).for_each(|_| cycle())), 0);
}
