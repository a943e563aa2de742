//! The policies for idle memory other than [`IdlePolicy::Elastic`].
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_mem::{IdlePolicy, Memory, MemoryOptions, PagePool, PoolParameters, Reclaim, WorkerMemory};

const MIB: usize = 1 << 20;

struct Rig {
    memory: Arc<Memory>,
    worker: WorkerMemory,
    pool: PagePool,
    now: Instant,
}

fn rig(policy: IdlePolicy, ceiling: usize) -> Rig {
    let now = Instant::now();
    let lend = policy == IdlePolicy::Elastic;
    let options = MemoryOptions { policy, lend, ..MemoryOptions::new(ceiling, now) };
    let memory = Memory::new(options).unwrap();
    let owner = memory.owner("disk").unwrap();
    let worker = memory.worker(|| ());
    let pool = PagePool::new(&worker, owner, &PoolParameters::default());
    Rig { memory, worker, pool, now }
}

impl Rig {
    /// `count` requests of 64 KiB at once, then none.
    fn burst(&self, count: usize) {
        let blocks: Vec<_> = (0..count).map(|_| self.pool.take(64 << 10).unwrap()).collect();
        blocks.into_iter().for_each(|block| self.pool.put(block));
        self.pool.done(self.now);
    }

    /// Time without requests.
    fn idle(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.memory.tick(self.now);
            self.worker.poll(self.now);
        }
        self.memory.settle();
    }

    /// The daemon's response to a sign of pressure.
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
fn policy_static_keeps_memory_under_any_pressure() {
    let mut rig = rig(IdlePolicy::Static, 256 * MIB);
    // Twice the limit of the pool: the remainder stays wired in the caches and slabs.
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
    assert_eq!(rig.held(), (8 * MIB, 0), "reused, no new memory");
}

#[test]
fn policy_until_pressure_keeps_memory_until_the_first_sign() {
    let mut rig = rig(IdlePolicy::UntilPressure, 256 * MIB);
    rig.burst(128);
    rig.idle(120);
    assert_eq!(rig.held(), (8 * MIB, 0), "time alone releases nothing");
    rig.pressure(Reclaim::Trim);
    let (wired, unwired) = rig.held();
    assert_eq!(unwired, 0, "nothing is lent");
    assert!(wired <= MIB / 2, "{wired} bytes left after a squeeze: a worker's own buckets at most");
    rig.pressure(Reclaim::DrainWorkers);
    assert_eq!(rig.held(), (0, 0));
}

#[test]
fn policy_uncached_releases_memory_when_requests_have_completed() {
    let mut rig = rig(IdlePolicy::Uncached, 256 * MIB);
    rig.burst(128);
    rig.memory.settle();
    let (wired, _) = rig.held();
    assert_eq!((wired, rig.pool.free_pages()), (0, (0, 0)));
    rig.idle(2);
    assert_eq!(rig.held(), (0, 0));
}

#[test]
fn kept_memory_is_released_for_other_sizes_at_the_ceiling() {
    for policy in [IdlePolicy::Static, IdlePolicy::UntilPressure] {
        let rig = rig(policy, 8 * MIB);
        rig.burst(128);
        rig.worker.poll(rig.now);
        drop(rig.pool);
        // All of the ceiling is idle in blocks of 64 KiB; now blocks of another size are needed.
        let owner = rig.memory.owner("other").unwrap();
        let blocks: Vec<_> = (0..1024)
            .map(|_| {
                // Some of it may be advised; returned memory is free.
                rig.memory.settle();
                rig.worker.alloc(4096, owner).unwrap()
            })
            .collect();
        blocks.into_iter().for_each(|block| rig.worker.free(block));
    }
}
