//! Pitfalls of lending memory from user space: locked memory, fork, gauges, idle workers. (Allocations while freeing: `no_alloc.rs`.)

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_mem::{
    Block, Memory, MemoryOptions, Offers, OwnerId, PagePool, Reclaim, SmallBuffer, WorkerMemory,
    testing,
};

const MIB: usize = 1 << 20;

/// These tests read figures of the whole process: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> impl Drop {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Rig {
    memory: Arc<Memory>,
    worker: WorkerMemory,
    owner: OwnerId,
    now: Instant,
}

fn rig_with(change: impl FnOnce(&mut MemoryOptions)) -> Rig {
    let now = Instant::now();
    let mut options = MemoryOptions::new(64 * MIB, now);
    change(&mut options);
    let memory = Memory::new(options).unwrap();
    let owner = memory.owner("test").unwrap();
    Rig { worker: memory.worker(|| ()), memory, owner, now }
}

fn rig() -> Rig {
    rig_with(|_| ())
}

/// One field (bytes) of the mapping at `address`, and its flags.
fn mapping(address: *const u8, field: &str) -> (usize, String) {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut value, mut flags) = (false, 0, String::new());
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        if let Some((low, high)) = range
            && let (Ok(low), Ok(high)) =
                (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16))
        {
            inside = (low..high).contains(&address.addr());
        } else if inside && line.starts_with(field) {
            value = line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024;
        } else if inside && line.starts_with("VmFlags:") {
            flags = line.to_owned();
        }
    }
    (value, flags)
}

fn rollup(field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// Runs one test alone in a child process with `EBB_MEM_CHILD` set.
fn in_a_child(test: &str) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("EBB_MEM_CHILD", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn locked_memory_cannot_be_lent_and_is_returned_instead() {
    if std::env::var_os("EBB_MEM_CHILD").is_none() {
        return in_a_child("lending::locked_memory_cannot_be_lent_and_is_returned_instead");
    }
    // SAFETY: no preconditions. On fault: the reservation itself must not become resident.
    let locked = unsafe { libc::mlockall(libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    assert_eq!(locked, 0, "needs a little lockable memory: raise `ulimit -l`");
    let Rig { memory, worker, owner, now } = rig_with(|options| {
        options.ceiling_bytes = MIB;
        options.reserve_bytes = 2 * MIB;
    });
    assert!(!memory.lending());
    let mut block = worker.alloc(256 << 10, owner).unwrap();
    block.fill(1);
    let address = block.as_ptr();
    assert!(mapping(address, "Rss:").0 >= 256 << 10);
    worker.free(block);
    memory.reclaim(Reclaim::DrainWorkers, now);
    worker.poll(now);
    memory.settle();
    assert_eq!(mapping(address, "Rss:").0, 0, "returned to the kernel");
    assert_eq!(memory.stats().arena.resident(), 0);
}

#[test]
fn a_child_does_not_share_the_arena() {
    let _alone = alone();
    let Rig { worker, owner, .. } = rig();
    let mut block = worker.alloc(65536, owner).unwrap();
    block.fill(1);
    let (_, flags) = mapping(block.as_ptr(), "Rss:");
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "not copied on fork: {flags}");
    worker.free(block);
}

#[test]
fn small_pages_stay_small() {
    let _alone = alone();
    let Rig { worker, owner, .. } = rig();
    let mut block = worker.alloc(4096, owner).unwrap();
    block.fill(1);
    let (rss, flags) = mapping(block.as_ptr(), "Rss:");
    assert!(flags.split_whitespace().any(|flag| flag == "nh"), "{flags}");
    assert_eq!(rss, 4096, "one page touched, one page used");
    worker.free(block);
}

#[test]
fn loss_is_detected_by_the_sentinel_not_by_return_codes() {
    let _alone = alone();
    let Rig { memory, worker, owner, .. } = rig();
    let mut buffer = SmallBuffer::new(worker.alloc(65536, owner).unwrap()).unwrap();
    buffer.bytes_mut(0..16).unwrap().fill(9);
    let address = buffer.bytes(0..1).unwrap().as_ptr();
    assert_eq!(buffer.unwire(&worker, buffer.all()), buffer.all());
    Offers::new(&memory).add(&buffer);
    memory.settle();
    // The kernel discards pages 4..8; its return code does not report that.
    testing::take(address.addr() + 4 * 4096, 4 * 4096);
    let lost = buffer.rewire(&worker, buffer.all()).unwrap();
    for page in 0..16 {
        let bytes = buffer.bytes(page..page + 1).unwrap();
        let whole = bytes.iter().all(|&byte| byte == 9);
        assert_eq!(whole, lost >> page & 1 == 0, "page {page}");
    }
    assert_eq!(lost & !0xf0, 0, "only discarded pages: {lost:b}");
    buffer.free(&worker);
}

#[test]
fn the_kernel_never_shows_more_lent_memory_than_the_gauge() {
    let _alone = alone();
    let Rig { memory, worker, owner, now } = rig();
    // The kernel batches some freed pages per CPU first: our figure is the larger one.
    let before = rollup("LazyFree:");
    let mut blocks: Vec<Block> = (0..20).map(|_| worker.alloc(4096, owner).unwrap()).collect();
    blocks.iter_mut().for_each(|block| block[0] = 1);
    blocks.into_iter().for_each(|block| worker.free(block));
    memory.reclaim(Reclaim::Trim, now);
    worker.poll(now);
    worker.poll(now + Duration::from_secs(2));
    memory.settle();
    let unwired = memory.stats().arena.unwired;
    assert_eq!(unwired, 20 * 4096);
    assert!(rollup("LazyFree:").saturating_sub(before) <= unwired);
}

#[test]
fn memory_lent_for_long_is_returned_so_that_rss_shows_what_is_in_use() {
    let _alone = alone();
    let Rig { memory, worker, owner, now } = rig();
    let mut blocks: Vec<Block> = (0..256).map(|_| worker.alloc(65536, owner).unwrap()).collect();
    blocks.iter_mut().for_each(|block| block.fill(1));
    let address = blocks[0].as_ptr();
    blocks.into_iter().for_each(|block| worker.free(block));
    memory.reclaim(Reclaim::Trim, now);
    worker.poll(now);
    worker.poll(now + Duration::from_secs(2));
    memory.settle();
    assert!(mapping(address, "Rss:").0 >= 8 * MIB, "lent memory is still in the RSS");
    (1..=100).for_each(|second| memory.tick(now + Duration::from_secs(second)));
    memory.settle();
    assert_eq!(mapping(address, "Rss:").0, 0);
}

#[test]
fn without_lending_everything_is_returned() {
    let _alone = alone();
    let Rig { memory, worker, owner, now } = rig_with(|options| options.lend = false);
    let mut block = worker.alloc(MIB, owner).unwrap();
    block.fill(1);
    let address = block.as_ptr();
    worker.free(block);
    let pool = PagePool::new(&worker, owner, &ebb_mem::PoolParameters::default());
    let mut pooled = pool.take(65536).unwrap();
    pooled.fill(2);
    pool.put(pooled);
    (0..20).for_each(|look| worker.poll(now + look * ebb_mem::POOL_INTERVAL));
    assert_eq!(pool.free_pages(), (16, 0), "a pool keeps what cannot be lent");
    memory.reclaim(Reclaim::Trim, now);
    memory.squeeze(now);
    worker.poll(now);
    memory.settle();
    assert_eq!((mapping(address, "Rss:").0, mapping(address, "LazyFree:").0), (0, 0));
}

#[test]
fn a_pool_in_use_keeps_a_wired_floor() {
    let _alone = alone();
    let Rig { worker, owner, now, .. } = rig();
    let pool = PagePool::new(&worker, owner, &ebb_mem::PoolParameters::default());
    for look in 0..50 {
        // Few requests on a pool that was large before.
        let count = if look == 0 { 500 } else { 1 };
        let blocks: Vec<Block> = (0..count).map(|_| pool.take(4096).unwrap()).collect();
        blocks.into_iter().for_each(|block| pool.put(block));
        worker.poll(now + look * ebb_mem::POOL_INTERVAL);
    }
    assert_eq!(pool.free_pages(), (64, 436));
}

#[test]
fn data_read_once_can_be_lent_at_once() {
    let _alone = alone();
    let Rig { memory, worker, owner, .. } = rig();
    let mut buffers = Vec::new();
    for _ in 0..32 {
        let mut buffer = SmallBuffer::new(worker.alloc(65536, owner).unwrap()).unwrap();
        buffer.bytes_mut(0..16).unwrap().fill(1);
        assert_eq!(buffer.unwire(&worker, buffer.all()), buffer.all());
        Offers::new(&memory).add(&buffer);
        buffers.push(buffer);
    }
    let stats = memory.stats();
    assert_eq!((stats.owners[1].wired, stats.owners[1].unwired), (0, 32 * 65536));
    buffers.into_iter().for_each(|buffer| buffer.free(&worker));
}

#[test]
fn a_worker_that_ends_or_is_idle_frees_its_caches() {
    let _alone = alone();
    let Rig { memory, worker, owner, now } = rig();
    let run = |worker: &WorkerMemory| {
        let blocks: Vec<Block> = (0..40).map(|_| worker.alloc(4096, owner).unwrap()).collect();
        blocks.into_iter().for_each(|block| worker.free(block));
        assert!(worker.cached_bytes() > 0);
    };
    run(&worker);
    worker.poll(now);
    let due = worker.next_deadline().unwrap();
    assert!(due <= now + ebb_mem::QUIET_AFTER);
    worker.poll(due);
    assert_eq!(worker.cached_bytes(), 0, "an idle worker frees its caches by itself");
    assert_eq!(worker.next_deadline(), None);
    run(&worker);
    let (used, free) = {
        drop(worker);
        let zone = memory.stats().zones[0];
        (zone.used, zone.free - zone.depot)
    };
    assert_eq!((used, free), (0, 0), "a dropped worker leaves nothing in its buckets");
}

#[test]
fn events_in_quick_succession_do_not_empty_the_caches() {
    let _alone = alone();
    let Rig { memory, worker, owner, now } = rig();
    let run = |bytes: usize| {
        let blocks: Vec<Block> =
            (0..bytes / 16384).map(|_| worker.alloc(16384, owner).unwrap()).collect();
        blocks.into_iter().for_each(|block| worker.free(block));
    };
    run(16 * MIB);
    // Intermittent pressure with a steady load: each trim keeps the working set, so that the load still
    // hits the caches.
    let misses = || memory.stats().zones[2].misses;
    run(4 * MIB);
    memory.reclaim(Reclaim::Trim, now);
    let mut before = misses();
    for event in 0..20 {
        if event == 10 {
            // The buckets have their smallest size.
            before = misses();
        }
        run(4 * MIB);
        memory.reclaim(Reclaim::Trim, now + Duration::from_millis(100 * event));
        memory.calm();
    }
    let per_run = (misses() - before) / 10;
    assert!(per_run * 16 < 4 * MIB as u64 / 16384, "{per_run} misses of 256 a run");
}
