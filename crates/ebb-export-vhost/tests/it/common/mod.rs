//! A backend in this process, and frontends that drive it over its sockets.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "each test uses its part"
)]

pub mod driver;
pub mod frontend;
pub mod fuzzing;
pub mod guest;
pub mod load;
pub mod packed;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, CachedStore, Mode};
use ebb_export_vhost::{VhostBackend, VhostDisk, VhostOptions, VolumeSocket};
use ebb_io::{PollParameters, Worker};
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{Direct, FileStore, MemoryStore, OpenOptions, Store, TestStore};
use ebb_volume::{Volume, VolumeOptions, Volumes};

pub use driver::{Done, status};
pub use frontend::{Base, Frontend, Wishes};
pub use guest::{DATA, Guest};
pub use seeded::Random;

/// Bytes of the disks.
pub const SIZE: u64 = 16 << 20;

/// The time after which a test reports a hang.
pub const HANG: Duration = Duration::from_secs(90);

/// A host with a backend, workers and volumes.
pub struct Rig {
    pub backend: Option<VhostBackend>,
    pub workers: Vec<Worker>,
    pub volumes: Volumes,
    pub folder: tempfile::TempDir,
    /// The memory of all workers, if they share it.
    pub memory: Option<Arc<Memory>>,
}

impl Rig {
    /// A backend with one worker and no volumes.
    pub fn empty(workers: usize) -> Rig {
        let mut rig = Rig {
            backend: None,
            workers: Vec::new(),
            volumes: Volumes::default(),
            folder: tempfile::tempdir_in("/dev/shm").unwrap(),
            memory: None,
        };
        rig.start(workers);
        rig
    }

    /// A backend with a disk in memory, called `disk`.
    pub fn new() -> Rig {
        let rig = Rig::empty(1);
        rig.add(memory_volume("disk", SIZE, false));
        rig
    }

    /// A backend with a disk on a test store, called `disk`.
    pub fn on_test_store() -> (Rig, Arc<TestStore>) {
        let rig = Rig::empty(1);
        let store = Arc::new(TestStore::new(SIZE, 1));
        rig.add(volume_on("disk", &store));
        (rig, store)
    }

    /// A backend with a disk on a file in memory, called `disk`, whose sectors have `alignment` bytes.
    pub fn on_file(alignment: u32) -> Rig {
        let rig = Rig::empty(1);
        let path = rig.path("image");
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let options = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
        let store = FileStore::open(&path, &options).unwrap().0;
        let store = if alignment > 1 { store.assume_alignment(alignment) } else { store };
        rig.add(Volume::new("disk", Store::File(store), VolumeOptions::default()));
        rig
    }

    /// A backend with a disk on a test store, called `disk`, with a cache.
    pub fn cached() -> Rig {
        let mut rig = Rig::empty(1);
        rig.stop();
        let memory = Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap();
        rig.memory = Some(memory.clone());
        rig.start(1);
        let options =
            CacheOptions { max_bytes: Some(8 << 20), ..CacheOptions::new(Instant::now()) };
        let cache = Cache::without_reclaimer(&memory, options);
        let store = Store::Test(Arc::new(TestStore::new(SIZE, 1)));
        let cached = CachedStore::new(&cache, "disk", store, Mode::Writethrough).unwrap();
        rig.add(Volume::new("disk", cached, VolumeOptions::default()));
        rig
    }

    /// Starts a backend, with sockets for all volumes.
    pub fn start(&mut self, workers: usize) {
        let memory = || match &self.memory {
            Some(memory) => memory.clone(),
            None => Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap(),
        };
        let polling = Arc::new(PollParameters::unrestrained(0));
        let worker = |n| Worker::start_polling(&format!("vhost-{n}"), &memory(), &polling);
        self.workers = (0..workers).map(|n| worker(n).unwrap()).collect();
        let handles = self.workers.iter().map(Worker::handle).collect();
        let options = VhostOptions::new(handles, self.volumes.clone());
        self.backend = Some(VhostBackend::start(options).unwrap());
        self.volumes.list().iter().for_each(|volume| self.listen(volume.name()));
    }

    /// The path of a volume's socket.
    pub fn path(&self, volume: &str) -> PathBuf {
        self.folder.path().join(volume)
    }

    pub fn listen(&self, volume: &str) {
        let path = self.path(volume);
        let _ = std::fs::remove_file(&path);
        let socket = UnixListener::bind(&path).unwrap();
        let socket = VolumeSocket::new(socket.into(), &path, volume).unwrap();
        self.backend.as_ref().unwrap().listen(socket);
    }

    /// Adds a volume, or replaces the one of its name, which has no frontends.
    pub fn add(&self, volume: Arc<Volume>) {
        let name = volume.name().clone();
        self.volumes.add(volume, Arc::default());
        if self.backend.is_some() {
            self.listen(&name);
        }
    }

    /// A frontend of `disk` whose queues are served.
    pub fn disk(&self, wishes: Wishes) -> Frontend {
        let mut frontend = self.frontend("disk", wishes);
        frontend.start();
        frontend
    }

    /// A frontend that has negotiated and started no queue.
    pub fn frontend(&self, volume: &str, wishes: Wishes) -> Frontend {
        let mut frontend = Frontend::connect(&self.path(volume), Guest::new(wishes.queues), wishes);
        frontend.negotiate();
        frontend
    }

    /// The figures of the only disk that is served.
    pub fn figures(&self) -> VhostDisk {
        self.disks().find(|disk| disk.queues > 0).expect("a disk is served")
    }

    /// The frontends that are connected.
    pub fn disks(&self) -> impl Iterator<Item = VhostDisk> {
        self.backend.as_ref().unwrap().figures().read().into_iter()
    }

    /// How many disks are served.
    pub fn served(&self) -> usize {
        self.disks().filter(|disk| disk.queues > 0).count()
    }

    /// Stops as the daemon does.
    pub fn stop(&mut self) {
        drop(self.backend.take());
        self.workers.clear();
    }

    /// Ends as a kill would: what is in flight is not completed.
    pub fn kill(&mut self) {
        let backend = self.backend.take().unwrap();
        // So that no queue is started again while the workers end.
        backend.begin_stop();
        self.workers.clear();
        backend.stop(Instant::now() + HANG);
    }
}

/// A volume in memory.
pub fn memory_volume(name: &str, size: u64, read_only: bool) -> Arc<Volume> {
    let options = VolumeOptions { read_only, ..VolumeOptions::default() };
    Volume::new(name, Store::Memory(MemoryStore::new(size)), options)
}

/// A volume on a test store.
pub fn volume_on(name: &str, store: &Arc<TestStore>) -> Arc<Volume> {
    Volume::new(name, Store::Test(store.clone()), VolumeOptions::default())
}

/// A volume that acknowledges writes from the memory of this process.
pub fn written_back(
    memory: &Arc<Memory>,
    store: &Arc<TestStore>,
    options: VolumeOptions,
) -> Arc<Volume> {
    let cache = CacheOptions { max_bytes: Some(8 << 20), ..CacheOptions::new(Instant::now()) };
    let cache = Cache::without_reclaimer(memory, cache);
    let store = Store::Test(store.clone());
    let store = CachedStore::new(&cache, "disk", store, Mode::Writeback).unwrap();
    Volume::new("disk", store, options)
}

/// A number from the environment.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Waits until `condition` holds, for a bounded time.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < HANG, "{what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Lets others run for a while.
pub fn pause(time: Duration) {
    std::thread::park_timeout(time);
}

/// Bytes that depend on the seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    Random::new(seed).bytes(len)
}
