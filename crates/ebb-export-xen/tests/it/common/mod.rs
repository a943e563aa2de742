//! A host in this process with a backend and disks.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses its part")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::shm::{Guest, World};
use ebb_export_xen::{
    Backend, BackendOptions, DiskSpec, XenParameters, XenStats, attach, device_number,
};
use ebb_io::{PollParameters, Worker};
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};
use seeded::Random;

pub const SIZE: u64 = 16 << 20;

pub struct Rig {
    pub world: World,
    pub backend: Option<Backend>,
    pub workers: Vec<Worker>,
    pub volumes: Volumes,
    pub parameters: Arc<XenParameters>,
    pub polling: Arc<PollParameters>,
    pub journals: tempfile::TempDir,
    /// The memory of all workers, if they share it.
    pub memory: Option<Arc<Memory>>,
}

pub fn memory(name: &str, size: u64, read_only: bool) -> Arc<Volume> {
    let options = VolumeOptions { read_only, ..VolumeOptions::default() };
    Volume::new(name, Store::Memory(MemoryStore::new(size)), options)
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(1, |_| {})
    }

    pub fn with(workers: usize, change: impl Fn(&mut BackendOptions)) -> Rig {
        Rig::in_world(World::default(), workers, change)
    }

    pub fn in_world(world: World, workers: usize, change: impl Fn(&mut BackendOptions)) -> Rig {
        let volumes = Volumes::default();
        let mut rig = Rig {
            world,
            backend: None,
            workers: Vec::new(),
            volumes,
            parameters: Arc::default(),
            polling: Arc::new(PollParameters::unrestrained(100)),
            journals: tempfile::tempdir_in("/dev/shm").unwrap(),
            memory: None,
        };
        rig.add(memory("disk", SIZE, false));
        rig.start(workers, change);
        rig
    }

    pub fn add(&self, volume: Arc<Volume>) {
        self.volumes.add(volume, Arc::default());
    }

    pub fn start(&mut self, workers: usize, change: impl Fn(&mut BackendOptions)) {
        let memory = || match &self.memory {
            Some(memory) => memory.clone(),
            None => Memory::new(MemoryOptions::new(256 << 20, Instant::now())).unwrap(),
        };
        let worker = |n| Worker::start_polling(&format!("xen-{n}"), &memory(), &self.polling);
        self.workers = (0..workers).map(|n| worker(n).unwrap()).collect();
        let handles = self.workers.iter().map(Worker::handle).collect();
        let mut options =
            BackendOptions::new(Arc::new(self.world.clone()), handles, self.volumes.clone());
        options.parameters = self.parameters.clone();
        options.journals = Some(PathBuf::from(self.journals.path()));
        change(&mut options);
        self.backend = Some(Backend::start(options).unwrap());
    }

    pub fn guest(&self, number: u16, pages: u32) -> Arc<Guest> {
        self.world.guest(number, pages).unwrap()
    }

    /// Attaches a disk to a guest and returns its frontend, not connected yet.
    pub fn attach(
        &self,
        guest: &Arc<Guest>,
        name: &str,
        volume: &str,
        wishes: FrontendConfig,
    ) -> Frontend {
        self.attach_as(guest, name, volume, wishes, false)
    }

    pub fn attach_as(
        &self,
        guest: &Arc<Guest>,
        name: &str,
        volume: &str,
        wishes: FrontendConfig,
        read_only: bool,
    ) -> Frontend {
        let mut store = self.world.xenstore().unwrap();
        attach(&mut *store, guest.number(), &DiskSpec { volume, name, read_only }).unwrap();
        Frontend::new(&self.world, guest, device_number(name).unwrap(), wishes)
    }

    /// A connected disk of guest 1.
    pub fn disk(&self, wishes: FrontendConfig) -> Frontend {
        let guest = self.guest(1, 4096);
        let mut frontend = self.attach(&guest, "xvdb", "disk", wishes);
        frontend.connect().unwrap();
        frontend
    }

    pub fn stats(&self) -> XenStats {
        self.backend.as_ref().unwrap().stats()[0].stats
    }

    pub fn stop(&mut self) {
        drop(self.backend.take());
        self.workers.clear();
    }
}

/// The time after which a test reports a hang.
pub const HANG: Duration = Duration::from_secs(90);

/// Waits until `condition` holds, for a bounded time.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < HANG, "{what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Bytes that depend on their position and the seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    Random::new(seed).bytes(len)
}
