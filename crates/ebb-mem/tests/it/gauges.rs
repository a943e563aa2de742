//! The gauges compared with the kernel's figures for the process.

use std::time::Instant;

use ebb_mem::{
    Block, Memory, MemoryOptions, Offers, PagePool, PoolParameters, Reclaim, SmallBuffer,
};

/// (resident, lazily freed) bytes of this process.
fn kernel() -> (i64, i64) {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")
        .expect("/proc/self/smaps_rollup is readable: mount proc");
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).expect("the kernel counts it");
        let kib: i64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib * 1024
    };
    (field("Rss:"), field("LazyFree:"))
}

fn touch(block: &mut Block) {
    block.chunks_mut(4096).for_each(|page| page[0] = 1);
}

/// Memory of the process in addition (heap, statistics, the kernel's batching of freed pages).
const SLACK: i64 = 1 << 20;

#[test]
fn gauges_agree_with_the_kernel() {
    let now = Instant::now();
    let memory = Memory::new(MemoryOptions::new(512 << 20, now)).unwrap();
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    if !memory.lending() {
        panic!("this kernel cannot lend memory: run where MADV_FREE works");
    }
    let base = kernel();
    let agree = |what: &str| {
        memory.settle();
        let (rss, lazy) = kernel();
        let arena = memory.stats().arena;
        let wired = i64::try_from(arena.wired).unwrap();
        let unwired = i64::try_from(arena.unwired).unwrap();
        let (rss, lazy) = (rss - base.0, lazy - base.1);
        println!("{what}: kernel {rss} {lazy}, ours {wired} {unwired}");
        assert!((rss - lazy - wired).abs() <= SLACK, "{what}: wired {wired}, {rss} - {lazy}");
        assert!((lazy - unwired).abs() <= SLACK, "{what}: unwired {unwired}, lazyfree {lazy}");
    };
    agree("nothing");

    let mut blocks = Vec::new();
    for index in 0..2000usize {
        let mut block = worker.alloc(4096 << (index % 6), owner).unwrap();
        touch(&mut block);
        blocks.push(block);
    }
    let mut run = worker.alloc(33 << 20, owner).unwrap();
    touch(&mut run);
    agree("in use");

    let half = blocks.split_off(1000);
    half.into_iter().for_each(|block| worker.free(block));
    agree("cached");
    memory.reclaim(Reclaim::Trim, now);
    agree("trimmed");

    let pool = PagePool::new(&worker, owner, &PoolParameters::default());
    let mut pooled: Vec<Block> = (0..1000).map(|_| pool.take(4096).unwrap()).collect();
    pooled.iter_mut().for_each(touch);
    pooled.into_iter().for_each(|block| pool.put(block));
    for look in 0..20 {
        worker.poll(now + look * ebb_mem::POOL_INTERVAL);
    }
    assert!(pool.free_pages().1 >= 900, "lent in place: {:?}", pool.free_pages());
    agree("a pool lends");

    let mut buffers: Vec<SmallBuffer> = (0..64)
        .map(|_| SmallBuffer::new(worker.alloc(64 << 10, owner).unwrap()).unwrap())
        .collect();
    for buffer in &mut buffers {
        buffer.bytes_mut(0..16).unwrap().fill(7);
        assert_eq!(buffer.unwire(&worker, 0x0ffc), 0x0ffc);
        Offers::new(&memory).add(buffer);
    }
    agree("buffers partly lent");
    for buffer in &mut buffers {
        while buffer.rewire(&worker, buffer.all()).is_err() {}
        assert!(buffer.bytes(0..16).is_some());
    }
    agree("and rewired");
    buffers.into_iter().for_each(|buffer| buffer.free(&worker));

    // Every byte is accounted to an owner or a cache.
    let stats = memory.stats();
    let owners: i64 = stats.owners.iter().map(|owner| owner.wired).sum();
    let cached: u64 = stats.zones.iter().map(|zone| zone.free * zone.item_bytes as u64).sum();
    assert_eq!(
        owners + i64::try_from(cached).unwrap(),
        i64::try_from(stats.arena.wired).unwrap(),
        "in use and in pools, plus in caches, is what is wired"
    );

    blocks.into_iter().for_each(|block| worker.free(block));
    worker.free(run);
    drop(pool);
    memory.reclaim(Reclaim::DrainWorkers, now);
    worker.poll(now);
    agree("drained");
    assert_eq!(memory.stats().arena.resident(), 0);
}
