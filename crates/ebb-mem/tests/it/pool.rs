//! The page pool: its limits, squeezes, and lending of idle pages.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ebb_mem::{Memory, MemoryOptions, PagePool, PoolParameters, WorkerMemory};

struct Rig {
    memory: Arc<Memory>,
    worker: WorkerMemory,
    parameters: PoolParameters,
    pool: PagePool,
    woken: Arc<AtomicUsize>,
    now: Instant,
}

fn rig() -> Rig {
    let now = Instant::now();
    let memory = Memory::new(MemoryOptions::new(256 << 20, now)).unwrap();
    let owner = memory.owner("disk").unwrap();
    let woken = Arc::new(AtomicUsize::new(0));
    let count = woken.clone();
    let worker = memory.worker(move || _ = count.fetch_add(1, Ordering::Relaxed));
    let parameters = PoolParameters::default();
    let pool = PagePool::new(&worker, owner, &parameters);
    Rig { memory, worker, parameters, pool, woken, now }
}

impl Rig {
    /// A burst of `count` requests of one page each, all at once.
    fn burst(&self, count: usize) {
        let blocks: Vec<_> = (0..count).map(|_| self.pool.take(4096).unwrap()).collect();
        blocks.into_iter().for_each(|block| self.pool.put(block));
    }

    fn free(&self) -> usize {
        let (wired, lent) = self.pool.free_pages();
        wired + lent
    }

    fn after(&self, milliseconds: u64) -> Instant {
        self.now + Duration::from_millis(milliseconds)
    }
}

#[test]
fn the_pool_starts_from_zero_and_grows_on_demand() {
    let rig = rig();
    assert_eq!(rig.free(), 0);
    rig.burst(300);
    assert_eq!(rig.free(), 300);
    rig.burst(200);
    assert_eq!(rig.free(), 300, "and no further than demanded");
    let other = rig.pool.take(9000).unwrap();
    assert_eq!(other.pages(), 4);
    rig.pool.put(other);
    assert_eq!(rig.free(), 304, "counted in pages, whatever the block");
}

#[test]
fn the_pool_shrinks_to_its_limit_when_no_request_is_in_flight() {
    let rig = rig();
    rig.burst(3000);
    assert_eq!(rig.free(), 3000, "above the limit while requests are in flight");
    rig.pool.done(rig.now);
    assert_eq!(rig.free(), 1024, "max_buffer_pages by default");
}

#[test]
fn the_pool_shrinks_when_100_ms_have_passed() {
    let rig = rig();
    rig.worker.poll(rig.now);
    rig.burst(3000);
    let due = rig.worker.next_deadline().unwrap();
    assert_eq!(due, rig.after(100));
    rig.worker.poll(rig.after(99));
    assert_eq!(rig.free(), 3000);
    rig.worker.poll(due);
    assert_eq!(rig.free(), 1024);
}

#[test]
fn the_limit_can_be_changed_at_run_time() {
    let rig = rig();
    rig.burst(1000);
    rig.parameters.max_buffer_pages.set(10);
    rig.pool.done(rig.now);
    assert_eq!(rig.free(), 10);
    rig.parameters.max_buffer_pages.set(0);
    rig.pool.done(rig.now);
    assert_eq!(rig.free(), 0);
    rig.burst(50);
    rig.pool.done(rig.now);
    assert_eq!(rig.free(), 0, "0 is as if always squeezed");
}

#[test]
fn a_squeeze_returns_every_free_page_for_its_duration() {
    let rig = rig();
    rig.burst(800);
    rig.memory.squeeze(rig.after(1000));
    rig.worker.poll(rig.after(1000));
    assert_eq!(rig.free(), 0);
    rig.burst(800);
    rig.pool.done(rig.after(1009));
    assert_eq!(rig.free(), 0, "still squeezed 9 ms later");
    rig.burst(800);
    rig.pool.done(rig.after(1010));
    assert_eq!(rig.free(), 800, "10 ms by default");
}

#[test]
fn each_event_restarts_the_squeeze() {
    let rig = rig();
    rig.memory.squeeze(rig.after(0));
    rig.worker.poll(rig.after(0));
    rig.memory.squeeze(rig.after(8));
    rig.burst(100);
    rig.pool.done(rig.after(17));
    assert_eq!(rig.free(), 0);
    rig.burst(100);
    rig.pool.done(rig.after(18));
    assert_eq!(rig.free(), 100);
}

#[test]
fn a_changed_duration_does_not_alter_a_squeeze_in_progress() {
    let rig = rig();
    rig.memory.squeeze(rig.now);
    rig.worker.poll(rig.now);
    rig.parameters.buffer_squeeze_duration_ms.set(500);
    rig.burst(100);
    rig.pool.done(rig.after(11));
    assert_eq!(rig.free(), 100);
    rig.memory.squeeze(rig.after(20));
    rig.pool.done(rig.after(519));
    assert_eq!(rig.free(), 0);
}

#[test]
fn a_pool_created_during_a_squeeze_is_squeezed() {
    let rig = rig();
    rig.memory.squeeze(rig.now);
    let owner = rig.memory.owner("late").unwrap();
    let late = PagePool::new(&rig.worker, owner, &rig.parameters);
    for (at, free) in [(9, 0), (10, 1)] {
        let block = late.take(4096).unwrap();
        late.put(block);
        late.done(rig.after(at));
        assert_eq!(late.free_pages(), (free, 0));
    }
}

#[test]
fn an_idle_queue_is_woken_and_squeezed_even_if_it_polls_late() {
    let rig = rig();
    rig.burst(500);
    rig.memory.squeeze(rig.now);
    assert_eq!(rig.woken.load(Ordering::Relaxed), 1);
    assert!(rig.worker.needs_poll());
    // The squeeze of 10 ms has ended before the poll, and is carried out all the same.
    rig.worker.poll(rig.after(60));
    assert_eq!(rig.free(), 0);
    assert!(!rig.worker.needs_poll());
}

#[test]
fn a_large_pool_is_released_in_several_iterations() {
    let rig = rig();
    rig.parameters.max_buffer_pages.set(u32::MAX);
    rig.burst(20_000);
    rig.memory.squeeze(rig.now);
    let mut iterations = 0;
    while rig.worker.needs_poll() {
        // The squeeze has ended at the second poll; pages that were in the pool at the event are released.
        rig.worker.poll(rig.after(20 * iterations));
        iterations += 1;
    }
    assert_eq!(rig.free(), 0);
    assert!((2..50).contains(&iterations), "{iterations}");
}

#[test]
fn pages_in_use_are_not_touched() {
    let rig = rig();
    let mut blocks: Vec<_> = (0..64).map(|_| rig.pool.take(16384).unwrap()).collect();
    for (number, block) in blocks.iter_mut().enumerate() {
        block.fill(u8::try_from(number).unwrap());
    }
    rig.burst(100);
    rig.memory.squeeze(rig.now);
    rig.memory.reclaim(ebb_mem::Reclaim::DrainWorkers, rig.now);
    rig.worker.poll(rig.now);
    rig.memory.settle();
    let arena = rig.memory.stats().arena;
    assert_eq!((arena.wired, arena.unwired), (64 * 16384, 0), "only the blocks in use are wired");
    for (number, block) in blocks.iter().enumerate() {
        assert!(block.iter().all(|&byte| usize::from(byte) == number));
    }
    blocks.into_iter().for_each(|block| rig.worker.free(block));
}

#[test]
fn idle_pages_beyond_the_floor_are_lent_and_can_be_taken_back() {
    let rig = rig();
    rig.worker.poll(rig.after(0));
    rig.burst(1000);
    rig.worker.poll(rig.after(100));
    assert_eq!(rig.pool.free_pages(), (1000, 0), "all of them were just used");
    rig.burst(200);
    rig.worker.poll(rig.after(200));
    assert_eq!(rig.pool.free_pages(), (200, 800), "800 were not needed for 100 ms");
    rig.burst(1);
    rig.worker.poll(rig.after(300));
    assert_eq!(rig.pool.free_pages(), (64, 936), "all but the floor");
    rig.memory.settle();
    assert_eq!(rig.memory.stats().arena.unwired, 936 * 4096);
    rig.burst(1000);
    assert_eq!(rig.pool.free_pages(), (1000, 0), "lent blocks are allocated like wired ones");
    assert_eq!(rig.memory.stats().arena.unwired, 0);
}

#[test]
fn an_idle_pool_lends_its_floor_and_needs_no_more_polls() {
    let rig = rig();
    rig.burst(100);
    for look in 0..30 {
        rig.worker.poll(rig.after(100 * look));
    }
    rig.memory.settle();
    assert_eq!(rig.pool.free_pages(), (0, 100));
    assert_eq!(rig.worker.next_deadline(), None, "an idle worker sleeps");
    assert_eq!(rig.memory.stats().arena.wired, 0);
}

#[test]
fn a_dropped_pool_frees_everything() {
    let rig = rig();
    rig.burst(500);
    for look in 0..5 {
        rig.worker.poll(rig.after(100 * look));
    }
    let Rig { memory, worker, pool, .. } = rig;
    drop(pool);
    assert!(memory.stats().pools.is_empty());
    let disk = &memory.stats().owners[1];
    assert_eq!((disk.name.as_str(), disk.wired, disk.unwired), ("disk", 0, 0));
    drop(worker);
    assert_eq!(memory.stats().arena.wired, 0);
}

#[test]
fn gauges_of_a_pool_appear_in_the_statistics() {
    let rig = rig();
    rig.burst(100);
    rig.worker.poll(rig.after(0));
    rig.burst(1);
    rig.worker.poll(rig.after(100));
    rig.burst(1);
    rig.worker.poll(rig.after(200));
    let stats = rig.memory.stats();
    assert_eq!((stats.pools[0].free, stats.pools[0].lent), rig.pool.free_pages());
    assert_eq!(stats.owners[1].wired, 64 * 4096);
    assert_eq!(stats.owners[1].unwired, 36 * 4096);
    rig.memory.squeeze(rig.after(300));
    rig.worker.poll(rig.after(300));
    let stats = rig.memory.stats();
    assert_eq!((stats.pools[0].squeezes, stats.pools[0].squeezed_pages), (1, 100));
    assert_eq!((stats.owners[1].wired, stats.owners[1].unwired), (0, 0));
}

#[test]
fn a_hundred_false_alarms_leave_the_pool_full_and_purge_nothing() {
    // A burst of spurious events: blocks in use stay, and the pool fills again directly after.
    let rig = rig();
    let held: Vec<_> = (0..100).map(|_| rig.pool.take(4096).unwrap()).collect();
    for event in 0..100 {
        rig.memory.squeeze(rig.after(100 * event));
        rig.memory.reclaim(ebb_mem::Reclaim::Trim, rig.after(100 * event));
        rig.worker.poll(rig.after(100 * event));
        rig.burst(64);
        rig.pool.done(rig.after(100 * event + 50));
    }
    assert_eq!(rig.free(), 64);
    assert_eq!(rig.memory.stats().purges, 0, "no last resort");
    held.into_iter().for_each(|block| rig.pool.put(block));
}
