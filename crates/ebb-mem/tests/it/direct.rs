//! Direct I/O into memory that was lent before, while the kernel reclaims.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ebb_mem::{
    Block, Memory, MemoryOptions, OwnerId, POOL_INTERVAL, PagePool, PoolParameters, Reclaim,
    WorkerMemory, testing,
};

const LEN: usize = 64 << 10;

fn rig() -> (Arc<Memory>, OwnerId, WorkerMemory) {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    assert!(memory.lending(), "this kernel cannot lend memory: run where MADV_FREE works");
    (memory, owner, worker)
}

/// Ends the reclaimer, even if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A block that was lent in a pool, and allocated again.
fn back_from_pool(
    memory: &Memory,
    worker: &WorkerMemory,
    pool: &PagePool,
    at: &mut Instant,
) -> Block {
    let mut block = pool.take(LEN).unwrap();
    block.fill(7);
    testing::enter_pages();
    pool.put(block);
    // Idle for more than a second: then a pool lends its floor, too.
    for _ in 0..20 {
        *at += POOL_INTERVAL;
        worker.poll(*at);
    }
    assert!(pool.free_pages().1 > 0, "lent in place");
    memory.settle();
    pool.take(LEN).unwrap()
}

/// A block that was lent as free memory, and allocated again.
fn back_from_slabs(memory: &Memory, worker: &WorkerMemory, owner: OwnerId, at: Instant) -> Block {
    let mut block = worker.alloc(LEN, owner).unwrap();
    block.fill(7);
    testing::enter_pages();
    worker.free(block);
    memory.reclaim(Reclaim::DrainWorkers, at);
    worker.poll(at);
    memory.calm();
    let mut block = worker.alloc(LEN, owner).unwrap();
    block.fill(7);
    testing::enter_pages();
    worker.free(block);
    memory.reclaim(Reclaim::Trim, at);
    memory.settle();
    worker.alloc(LEN, owner).unwrap()
}

fn kept(block: &Block) -> bool {
    testing::take_everywhere(&[(block.as_ptr().addr(), LEN)]);
    block[..LEN].iter().all(|&byte| byte == 7)
}

#[test]
fn a_page_written_to_when_taken_back_is_no_longer_lent() {
    let (memory, owner, worker) = rig();
    let pool = PagePool::new(&worker, owner, &PoolParameters::default());
    let mut now = Instant::now();
    let mut lost = 0;
    for touch in [false, true] {
        testing::touch_on_return(&memory, touch);
        for _ in 0..20 {
            let block = back_from_pool(&memory, &worker, &pool, &mut now);
            let there = kept(&block);
            assert!(there || !touch, "discarded while in use");
            lost += u32::from(!there);
            pool.put(block);
        }
    }
    // Otherwise this test proves nothing.
    assert!(lost > 0, "a page that was not written to is still lent");
    drop(pool);
    let block = back_from_slabs(&memory, &worker, owner, now);
    assert!(kept(&block), "discarded while in use");
    worker.free(block);
}

/// Direct reads into memory that was just lent, beside a reclaimer: every kernel keeps the data.
#[test]
fn data_read_directly_into_memory_that_was_lent_is_kept() {
    let path = tempfile::Builder::new().tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let content: Vec<u8> = (0..LEN).map(|at| u8::try_from(at / 512 + 1).unwrap()).collect();
    path.as_file().write_all_at(&content, 0).unwrap();
    path.as_file().sync_all().unwrap();
    let open = |flags| File::options().read(true).custom_flags(flags).open(path.path());
    // Without direct I/O in the file system, the page cache is used: a weaker test.
    let file = open(libc::O_DIRECT).or_else(|_| open(0)).unwrap();
    let (memory, owner, worker) = rig();
    let pool = PagePool::new(&worker, owner, &PoolParameters::default());
    let (start, end) = testing::range(&memory);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                testing::take(start, (end - start).min(8 << 20));
            }
        });
        let _stop = Stop(&stop);
        let mut now = Instant::now();
        let wrong = (0..40).find(|_| {
            let mut block = back_from_pool(&memory, &worker, &pool, &mut now);
            file.read_exact_at(&mut block[..LEN], 0).unwrap();
            testing::take(block.as_ptr().addr(), LEN);
            let right = block[..LEN] == content[..];
            pool.put(block);
            !right
        });
        assert_eq!(wrong, None, "the data that was read is lost");
    });
}
