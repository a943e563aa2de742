//! Shared by the tests of the cache: a rig, a random source, and a simulation of the kernel's reclaim.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "tests, each of which uses a part"
)]

pub mod remains;

use std::sync::Arc;
use std::time::Instant;

use ebb_block::{BlockStore, Buf};
use ebb_cache::{Cache, CacheOptions, LayerMap, LayerRun, Mode, StoreCache};
use ebb_io::{Io, Worker};
use ebb_mem::Memory;
use ebb_store::{MemoryStore, Store, TestStore};
pub use seeded::Random;

pub const MIB: u64 = 1 << 20;

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

/// A map by which one layer holds everything: with 1, an overlay that is still empty.
#[derive(Debug)]
pub struct WholeLayer(pub usize);

impl LayerMap for WholeLayer {
    fn run(&self, _offset: u64, length: u64) -> LayerRun {
        LayerRun { layer: self.0, length }
    }
}

/// Which layer holds each 4 KiB, and for how many bytes it answers at most.
#[derive(Clone, Debug)]
pub struct PageMap {
    pub layers: Vec<usize>,
    pub most: u64,
}

impl LayerMap for PageMap {
    fn run(&self, offset: u64, length: u64) -> LayerRun {
        let first = index(offset / PAGE);
        let layer = self.layers[first];
        let pages = self.layers[first..].iter().take_while(|other| **other == layer).count();
        let end = (offset / PAGE + (pages as u64).min(self.most)) * PAGE;
        LayerRun { layer, length: (end - offset).min(length) }
    }
}

pub const PAGE: u64 = 4096;

pub fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

/// Runs `play` on a worker; its panic is that of the test.
pub fn on_a_worker<Fut: Future<Output = ()> + 'static>(
    rig: Rig,
    play: impl FnOnce(Io, Arc<Rig>) -> Fut + Send + 'static,
) {
    let rig = Arc::new(rig);
    let worker = Worker::start("layers", &rig.memory).unwrap();
    let done = worker.handle().block_on(move |io| play(io, rig));
    assert!(done.is_some(), "the run panicked; see above");
}

/// A read that succeeds.
pub async fn read(io: &Io, store: &impl BlockStore, offset: u64, length: u64) -> Buf {
    let mut buf = io.pool().take(index(length)).await;
    buf.fill(0xee);
    let (result, buf) = store.read(io, buf, offset).await;
    result.unwrap();
    assert_eq!(buf.len() as u64, length);
    buf
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
