//! Shared by the tests of the cache: a rig, a random source, and a simulation of the kernel's reclaim.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "tests, each of which uses a part"
)]

use std::sync::Arc;
use std::time::Instant;

use ebb_cache::{Cache, CacheOptions, Mode, VolumeCache};
use ebb_mem::Memory;
use ebb_store::{Store, TestStore};

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
        let cached = self.cache.volume_as(name, size, mode).unwrap();
        Disk { store: Arc::new(Store::Test(test.clone())), test, cached }
    }
}

/// A volume's cache and the store below it.
#[derive(Clone)]
pub struct Disk {
    pub store: Arc<Store>,
    pub test: Arc<TestStore>,
    pub cached: Arc<VolumeCache>,
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
