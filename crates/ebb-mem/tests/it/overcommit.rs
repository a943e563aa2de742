//! The kernel charges neither for memory that is not used yet nor for returned memory. The parts run one
//! after the other, since they measure the limits and mappings of the whole process.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use ebb_mem::{Block, Memory, MemoryOptions, Reclaim};

const MIB: usize = 1 << 20;

#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bytes of private writable memory of this process: what strict overcommit charges for.
fn writable() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// A memory whose threads have started. A new thread has its parent's name, and allocates a signal stack before it
/// takes its own name: if that fails, because the test has used up a limit by then, the process aborts.
fn started_memory(options: MemoryOptions) -> Arc<Memory> {
    let memory = Memory::new(options).unwrap();
    let own = std::fs::read("/proc/thread-self/comm").unwrap();
    let named_alike = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks
            .filter(|task| std::fs::read(task.path().join("comm")).is_ok_and(|name| name == own))
            .count()
    };
    while named_alike() > 1 {
        std::thread::yield_now();
    }
    memory
}

/// Limits the private writable memory of this process.
fn limit_data(bytes: Option<usize>) {
    let rlim_cur = bytes.map_or(libc::RLIM_INFINITY, |bytes| bytes as u64);
    let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a limit of this process, read from a structure on the stack.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) }, 0);
}

/// A large memory costs nothing; used memory is charged; returned memory is not.
fn charges_follow_use() {
    let before = (writable(), mappings());
    limit_data(Some(before.0 + 512 * MIB));
    let now = Instant::now();
    let memory = started_memory(MemoryOptions::new(12 << 30, now));
    let made = (writable() - before.0, mappings() - before.1);
    assert!(made.0 < 16 * MIB, "{} bytes are charged before any memory is used", made.0);
    assert!(made.1 < 30, "{} mappings", made.1);
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    let mut blocks: Vec<Block> = (0..200).map(|_| worker.alloc(MIB, owner).unwrap()).collect();
    blocks.iter_mut().for_each(|block| block[0] = 1);
    let mut run = worker.alloc(33 * MIB, owner).unwrap();
    run[32 * MIB] = 1;
    let used = writable() - before.0;
    assert!((233 * MIB..300 * MIB).contains(&used), "{used} bytes are charged");
    blocks.into_iter().for_each(|block| worker.free(block));
    worker.free(run);
    memory.reclaim(Reclaim::DrainWorkers, now);
    worker.poll(now);
    memory.settle();
    let arena = memory.stats().arena;
    assert_eq!((arena.resident(), arena.open), (0, 0));
    let left = writable() - before.0;
    assert!(left < 16 * MIB, "{left} bytes are still charged");
    // All of it can be allocated again.
    memory.calm();
    let mut block = worker.alloc(4096, owner).unwrap();
    block.fill(7);
    worker.free(block);
    limit_data(None);
}

/// A refusal of the kernel acts as the ceiling: allocations wait, and complete when memory is freed here or
/// by other processes.
fn a_refusal_is_a_ceiling() {
    let before = writable();
    limit_data(Some(before + 64 * MIB));
    let now = Instant::now();
    let memory = started_memory(MemoryOptions::new(12 << 30, now));
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    let mut blocks: Vec<Block> =
        std::iter::from_fn(|| worker.alloc(256 << 10, owner).ok()).collect();
    assert!((64..256).contains(&blocks.len()), "{} blocks", blocks.len());
    blocks.iter_mut().for_each(|block| block[0] = 1);
    assert!(worker.alloc(4096, owner).is_err());
    assert!(worker.alloc(4 * MIB, owner).is_err());

    let bell = Arc::<Bell>::default();
    let waker = Waker::from(bell.clone());
    let context = &mut Context::from_waker(&waker);
    let mut waiting = pin!(worker.alloc_wait(4096, owner));
    assert!(waiting.as_mut().poll(context).is_pending());
    // Freed by another process: the next tick makes waiting allocations try again.
    limit_data(None);
    let rung = bell.0.load(Ordering::Relaxed);
    memory.tick(now + Duration::from_secs(2));
    assert!(bell.0.load(Ordering::Relaxed) > rung);
    let Poll::Ready(Ok(block)) = waiting.as_mut().poll(context) else { panic!("there is room") };
    worker.free(block);

    // Freed here: blocks of another size, whose extents must become free first.
    limit_data(Some(before + 64 * MIB));
    blocks.extend(std::iter::from_fn(|| worker.alloc(256 << 10, owner).ok()));
    let mut waiting = pin!(worker.alloc_wait(MIB, owner));
    assert!(waiting.as_mut().poll(context).is_pending());
    blocks.drain(..).for_each(|block| worker.free(block));
    worker.poll(now);
    let Poll::Ready(Ok(block)) = waiting.as_mut().poll(context) else { panic!("it was freed") };
    worker.free(block);
    limit_data(None);
}

/// All mappings are in use (`vm.max_map_count`) by other parts of the process.
fn no_mapping_left_is_a_ceiling() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most: usize = text.trim().parse().unwrap();
    let now = Instant::now();
    let memory = started_memory(MemoryOptions::new(4 << 30, now));
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    let held = worker.alloc(4096, owner).unwrap();
    // Every other page of a separate range: adjacent mappings with equal flags would be merged.
    let bytes = 4096 * (most + 1024);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, which nothing else refers to.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let mut page = 0;
    loop {
        let at = start.wrapping_byte_add(page * 4096);
        // SAFETY: a page of the mapping just made.
        if unsafe { libc::mprotect(at, 4096, libc::PROT_READ) } != 0 {
            break;
        }
        page += 2;
        assert!(page * 4096 < bytes, "the kernel has a limit");
    }
    // Open memory is used as before; then allocations fail as at the ceiling.
    let mut blocks = Vec::new();
    while let Ok(block) = worker.alloc(64 << 10, owner) {
        blocks.push(block);
        assert!(blocks.len() < 1 << 20, "the kernel refuses at some point");
    }
    let served = blocks.len();
    let waker = Waker::from(Arc::<Bell>::default());
    let context = &mut Context::from_waker(&waker);
    let mut waiting = pin!(worker.alloc_wait(64 << 10, owner));
    assert!(waiting.as_mut().poll(context).is_pending());
    // Advice needs no mapping; freed memory is reused.
    blocks.drain(..served / 2).for_each(|block| worker.free(block));
    let Poll::Ready(Ok(block)) = waiting.as_mut().poll(context) else { panic!("it was freed") };
    blocks.push(block);
    memory.reclaim(Reclaim::Drain, now);
    memory.settle();
    memory.calm();
    // SAFETY: the mapping made above.
    assert_eq!(unsafe { libc::munmap(start, bytes) }, 0);
    let more: Vec<Block> = (0..4096).map(|_| worker.alloc(64 << 10, owner).unwrap()).collect();
    blocks.into_iter().chain(more).chain([held]).for_each(|block| worker.free(block));
}

/// The number of mappings of a memory is bounded, whatever the order of allocations and frees.
fn mappings_are_bounded() {
    let before = mappings();
    let limit = writable() + (3 << 30);
    limit_data(Some(limit));
    let now = Instant::now();
    let memory = started_memory(MemoryOptions::new(12 << 30, now));
    let owner = memory.owner("test").unwrap();
    let worker = memory.worker(|| ());
    let mut blocks: Vec<Option<Block>> =
        std::iter::from_fn(|| worker.alloc(2 * MIB, owner).ok()).map(Some).collect();
    assert!(blocks.len() > 1000, "{} blocks", blocks.len());
    // One of 16 extents stays in use: a scattered case.
    for (index, block) in blocks.iter_mut().enumerate() {
        if index % 16 != 0
            && let Some(block) = block.take()
        {
            worker.free(block);
        }
    }
    memory.reclaim(Reclaim::DrainWorkers, now);
    worker.poll(now);
    memory.settle();
    let scattered = mappings() - before;
    assert!(scattered < 2 * 4096 + 100, "{scattered} mappings");
    memory.calm();
    blocks.into_iter().flatten().for_each(|block| worker.free(block));
    memory.reclaim(Reclaim::DrainWorkers, now);
    memory.settle();
    let left = mappings() - before;
    assert!(left < 40, "{left} of {scattered} mappings remain");
    limit_data(None);
}

#[test]
fn charges_follow_use_and_refusals_act_as_the_ceiling() {
    charges_follow_use();
    a_refusal_is_a_ceiling();
    mappings_are_bounded();
    no_mapping_left_is_a_ceiling();
}
