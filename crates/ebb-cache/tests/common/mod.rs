//! Shared by the tests of the cache: a rig, a random source, and a simulation of the kernel's reclaim.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "tests, each of which uses a part"
)]

use std::sync::Arc;
use std::time::Instant;

use ebb_cache::{Cache, CacheOptions, Mode, StoreCache};
use ebb_mem::Memory;
use ebb_store::{MemoryStore, Store, TestStore};

pub const MIB: u64 = 1 << 20;

/// Numbers from a seed (xorshift).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn chance(&mut self, per_thousand: u64) -> bool {
        self.below(1000) < per_thousand
    }
}

/// A cache over one or more test stores. The test runs its reclaimer.
pub struct Rig {
    pub memory: Arc<Memory>,
    pub cache: Arc<Cache>,
    pub start: Instant,
}

impl Rig {
    pub fn new(max: u64) -> Rig {
        Rig::of(max, ebb_mem::IdlePolicy::Elastic)
    }

    pub fn of(max: u64, policy: ebb_mem::IdlePolicy) -> Rig {
        let start = Instant::now();
        let mut memory = ebb_mem::MemoryOptions::new(256 << 20, start);
        memory.policy = policy;
        let memory = Memory::new(memory).unwrap();
        let mut options = CacheOptions::new(start);
        options.max_bytes = Some(max);
        let cache = Cache::without_reclaimer(&memory, options);
        Rig { memory, cache, start }
    }

    pub fn volume(&self, name: &str, size: u64, seed: u64) -> Disk {
        self.volume_as(name, size, seed, Mode::Writethrough)
    }

    pub fn volume_as(&self, name: &str, size: u64, seed: u64, mode: Mode) -> Disk {
        let test = Arc::new(TestStore::new(size, seed));
        self.disk(name, Store::Test(test.clone()), test, mode)
    }

    /// A volume in memory, whose store never waits; its test store is not used.
    pub fn memory_volume(&self, name: &str, size: u64, mode: Mode) -> Disk {
        let unused = Arc::new(TestStore::new(512, 1));
        self.disk(name, Store::Memory(MemoryStore::new(size)), unused, mode)
    }

    fn disk(&self, name: &str, store: Store, test: Arc<TestStore>, mode: Mode) -> Disk {
        let store = Arc::new(store);
        let cached = self.cache.volume(name, &store, mode).unwrap();
        Disk { store, test, cached }
    }
}

/// A volume's cache and the store below it.
#[derive(Clone)]
pub struct Disk {
    pub store: Arc<Store>,
    pub test: Arc<TestStore>,
    pub cached: StoreCache,
}

/// Acts as the kernel under memory pressure: discards the lent pages of a mapping, keeps the others.
pub fn reclaim(mapping: (usize, usize)) {
    ebb_mem::testing::take_everywhere(&[(mapping.0, mapping.1 - mapping.0)]);
}

/// Resident pages of a mapping.
pub fn resident(mapping: (usize, usize)) -> u64 {
    let pages = (mapping.1 - mapping.0) / 4096;
    let mut there = vec![0u8; pages];
    // SAFETY: the mapping, and one byte for each of its pages.
    let result =
        unsafe { libc::mincore(mapping.0 as *mut _, mapping.1 - mapping.0, there.as_mut_ptr()) };
    assert_eq!(result, 0, "mincore");
    there.iter().map(|state| u64::from(state & 1)).sum()
}
