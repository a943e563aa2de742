//! The volumes of the suite, and their administration from a worker that is not the export's.

use std::sync::Arc;
use std::time::Instant;

use ebb_cache::{
    BaseLayers, Cache, CacheOptions, CachedStore, Delta, Layers, Mode, NextLayers, plain_parent,
};
use ebb_io::{Io, Worker};
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{MemoryStore, Store, TestStore};
use ebb_volume::{Resize, Volume, VolumeOptions};

/// Bytes of a volume.
pub(crate) const SIZE: u64 = 4 << 20;
/// Bytes of a request.
pub(crate) const BLOCK: usize = 4096;

/// The daemon's memory and a worker for administration.
pub(crate) struct Host {
    pub(crate) memory: Arc<Memory>,
    worker: Worker,
}

impl Host {
    pub(crate) fn new() -> Host {
        let memory = Memory::new(MemoryOptions::new(128 << 20, Instant::now())).unwrap();
        let worker = Worker::start("guards", &memory).unwrap();
        Host { memory, worker }
    }

    /// Runs a future on the worker.
    pub(crate) fn run<T: Send + 'static, Fut: Future<Output = T> + 'static>(
        &self,
        call: impl FnOnce(Io) -> Fut + Send + 'static,
    ) -> T {
        // In a box: futures of unoptimized builds are large, and the worker's stack is small.
        let boxed = move |io| Box::pin(call(io));
        self.worker.handle().block_on(boxed).expect("the worker panicked")
    }

    pub(crate) fn resize(&self, volume: &Arc<Volume>, to: u64) {
        let (volume, order) = (volume.clone(), Resize { to: Some(to), shrink: true });
        self.run(move |io| async move { volume.resize(&io, order).await.map(|_| ()) }).unwrap();
    }

    pub(crate) fn flush(&self, volume: &Arc<Volume>) {
        let volume = volume.clone();
        self.run(move |io| async move { volume.flush(&io).await }).unwrap();
    }

    fn cache(&self) -> Arc<Cache> {
        let max_bytes = Some(8 << 20);
        let options = CacheOptions { max_bytes, ..CacheOptions::new(Instant::now()) };
        Cache::without_reclaimer(&self.memory, options)
    }

    /// A volume that acknowledges writes from memory. Each has a cache of its own, so that a second
    /// one over the same disk is as after a kill.
    pub(crate) fn written_back(&self, disk: &TestStore) -> Arc<Volume> {
        let store = Store::Test(Arc::new(disk.open_anew()));
        let cached = CachedStore::new(&self.cache(), "disk", store, Mode::Writeback).unwrap();
        Volume::new("disk", cached, VolumeOptions::default())
    }

    /// An overlay that writes through; the delta is created if it is `new`.
    pub(crate) fn overlay(&self, disks: &OverlayDisks, new: bool) -> Arc<Volume> {
        let cache = self.cache();
        let (delta, base) = (disks.delta.open_anew(), disks.base.open_anew());
        let plain = disks.base.open_anew();
        self.run(move |io| async move {
            let mode = Mode::Writethrough;
            let top = CachedStore::new(&cache, "disk", Store::Test(Arc::new(delta)), mode).unwrap();
            let plain = CachedStore::from(Store::Test(Arc::new(plain)));
            let parent = plain_parent(&io, &plain).await.unwrap();
            let delta = if new {
                Delta::create(&io, &top, SIZE, parent, [9; 16]).await.unwrap()
            } else {
                let delta = Delta::open(&io, &top).await.unwrap();
                delta.check_parent(&top, &parent).unwrap();
                delta.begin_writing(&io, &top).await.unwrap();
                delta
            };
            let bases = BaseLayers::new(&cache);
            let below = vec![bases.add("base", Store::Test(Arc::new(base)), mode).unwrap()];
            let layers = Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap();
            Volume::new("disk", layers, VolumeOptions::default())
        })
    }

    /// Begins a snapshot of the overlay: makes the delta above it, which is expected.
    pub(crate) fn begin_snapshot(&self, volume: &Arc<Volume>, disks: &OverlayDisks) {
        let (cache, next) = (self.cache(), Store::Test(Arc::new(disks.next.open_anew())));
        let volume = volume.clone();
        self.run(move |io| async move {
            let top = CachedStore::new(&cache, "next", next, Mode::Writethrough).unwrap();
            let parent = volume.layers().top_as_parent(&io).await.unwrap();
            Delta::create(&io, &top, SIZE, parent, [8; 16]).await.unwrap();
            volume.layers().note_next(NextLayers::Pushed(&top));
        });
    }

    /// The overlay with the layers of a snapshot that was begun, as opened by a new process.
    pub(crate) fn overlay_with_snapshot(&self, disks: &OverlayDisks) -> Arc<Volume> {
        let cache = self.cache();
        let open = |disk: &TestStore| Store::Test(Arc::new(disk.open_anew()));
        let (next, delta, base) = (open(&disks.next), open(&disks.delta), open(&disks.base));
        self.run(move |io| async move {
            let mode = Mode::Writethrough;
            let top = CachedStore::new(&cache, "disk", next, mode).unwrap();
            let own = Delta::open(&io, &top).await.unwrap();
            own.begin_writing(&io, &top).await.unwrap();
            let bases = BaseLayers::new(&cache);
            let layer = |name, store| bases.add(name, store, mode).unwrap();
            let below = vec![layer("delta", delta), layer("base", base)];
            let deltas = vec![Arc::new(own), below[0].delta(&io).await.unwrap()];
            let layers = Layers::overlay("disk", top, below, deltas, false).unwrap();
            Volume::new("disk", layers, VolumeOptions::default())
        })
    }
}

/// The disks of an overlay.
pub(crate) struct OverlayDisks {
    delta: Arc<TestStore>,
    base: Arc<TestStore>,
    /// The delta above it after a snapshot.
    next: Arc<TestStore>,
}

impl OverlayDisks {
    pub(crate) fn new() -> OverlayDisks {
        // Room for the blocks and their map.
        let delta = || Arc::new(TestStore::new(2 * SIZE + (1 << 20), 1));
        OverlayDisks { delta: delta(), base: Arc::new(TestStore::new(SIZE, 2)), next: delta() }
    }
}

pub(crate) fn disk() -> Arc<TestStore> {
    Arc::new(TestStore::new(SIZE, 1))
}

/// A volume on this disk, as opened by a new process.
pub(crate) fn volume_on(name: &str, disk: &TestStore) -> Arc<Volume> {
    let store = Store::Test(Arc::new(disk.open_anew()));
    Volume::new(name, store, VolumeOptions::default())
}

pub(crate) fn in_memory(name: &str) -> Arc<Volume> {
    Volume::new(name, Store::Memory(MemoryStore::new(SIZE)), VolumeOptions::default())
}

/// Content that depends on the seed.
pub(crate) fn pattern(seed: u8) -> Vec<u8> {
    (0..=250u8).cycle().take(BLOCK).map(|byte| byte ^ seed).collect()
}

/// The block at `at` of a disk.
pub(crate) fn content(disk: &TestStore, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    disk.look(at, &mut bytes);
    bytes
}
