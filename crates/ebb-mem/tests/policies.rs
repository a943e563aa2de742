//! The other ways to keep idle memory, [`Policy`]: each does what it says, and no more.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_mem::{Memory, Options, PagePool, Policy, PoolParameters, Reclaim, Worker};

const MIB: usize = 1 << 20;

struct Rig {
    memory: Arc<Memory>,
    worker: Worker,
    pool: PagePool,
    now: Instant,
}

fn rig(policy: Policy, ceiling: usize) -> Rig {
    let now = Instant::now();
    let lend = policy == Policy::Elastic;
    let options = Options { policy, lend, ..Options::new(ceiling, now) };
    let memory = Memory::new(options).unwrap();
    let owner = memory.owner("disk").unwrap();
    let worker = memory.worker(|| ());
    let pool = PagePool::new(&worker, owner, Arc::new(PoolParameters::default()));
    Rig { memory, worker, pool, now }
}

impl Rig {
    /// `count` requests of 64 KiB at once, then none.
    fn burst(&self, count: usize) {
        let blocks: Vec<_> = (0..count).map(|_| self.pool.take(64 << 10).unwrap()).collect();
        blocks.into_iter().for_each(|block| self.pool.put(block));
        self.pool.done(self.now);
    }

    /// Minutes in which nothing happens.
    fn idle(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.memory.tick(self.now);
            self.worker.poll(self.now);
        }
        self.memory.settle();
    }

    /// A sign of pressure, as the daemon answers it.
    fn pressure(&mut self, level: Reclaim) {
        self.now += Duration::from_secs(2);
        self.memory.squeeze(self.now);
        self.memory.reclaim(level, self.now);
        while self.worker.needs_poll() {
            self.worker.poll(self.now);
        }
        self.memory.settle();
    }

    /// (wired, unwired) bytes.
    fn held(&self) -> (usize, usize) {
        let arena = self.memory.stats().arena;
        (arena.wired, arena.unwired)
    }
}

const ALL: [Reclaim; 3] = [Reclaim::Trim, Reclaim::Drain, Reclaim::DrainWorkers];

#[test]
fn static_memory_stays_whatever_the_pressure() {
    let mut rig = rig(Policy::Static, 256 * MIB);
    // Twice what the pool keeps: the rest stays wired in the caches and slabs below.
    rig.burst(128);
    rig.idle(120);
    assert_eq!(rig.held(), (8 * MIB, 0));
    for level in ALL {
        rig.pressure(level);
        rig.idle(3);
        assert_eq!(rig.held(), (8 * MIB, 0), "{level:?}");
    }
    rig.memory.calm();
    rig.burst(128);
    assert_eq!(rig.held(), (8 * MIB, 0), "used again, not taken anew");
}

#[test]
fn told_memory_stays_until_the_first_sign_and_goes_then() {
    let mut rig = rig(Policy::Told, 256 * MIB);
    rig.burst(128);
    rig.idle(120);
    assert_eq!(rig.held(), (8 * MIB, 0), "time alone takes nothing");
    rig.pressure(Reclaim::Trim);
    let (wired, unwired) = rig.held();
    assert_eq!(unwired, 0, "nothing is lent");
    assert!(wired <= MIB / 2, "{wired} bytes left after a squeeze: a worker's own buckets at most");
    rig.pressure(Reclaim::DrainWorkers);
    assert_eq!(rig.held(), (0, 0));
}

#[test]
fn uncached_memory_goes_as_soon_as_requests_are_done() {
    let mut rig = rig(Policy::Uncached, 256 * MIB);
    rig.burst(128);
    rig.memory.settle();
    let (wired, _) = rig.held();
    assert_eq!((wired, rig.pool.free_pages()), (0, (0, 0)));
    rig.idle(2);
    assert_eq!(rig.held(), (0, 0));
}

#[test]
fn memory_that_is_kept_never_stands_in_the_way_of_other_sizes() {
    for policy in [Policy::Static, Policy::Told] {
        let rig = rig(policy, 8 * MIB);
        rig.burst(128);
        rig.worker.poll(rig.now);
        drop(rig.pool);
        // All of the ceiling is idle in blocks of 64 KiB; now others are wanted.
        let owner = rig.memory.owner("other").unwrap();
        let blocks: Vec<_> = (0..1024)
            .map(|_| {
                // The advisor may be at some of it; what it has returned is free.
                rig.memory.settle();
                rig.worker.alloc(4096, owner).unwrap()
            })
            .collect();
        blocks.into_iter().for_each(|block| rig.worker.free(block));
    }
}
