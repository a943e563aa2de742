//! The worker, its memory, and the volume.

use std::sync::Arc;

use ebb_cache::{Cache, CacheOptions, CachedStore, FixedLimit, Mode};
use ebb_io::sim::SimWorker;
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{Direct, FileStore, NullStore, OpenOptions, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};
use tempfile::TempDir;

use super::Error;

/// Bytes of the volume: a multiple of each batch, and small, so that one pass writes all of it.
pub const SIZE: u64 = 1 << 20;
/// Bytes of memory for all uses.
const CEILING: usize = 128 << 20;
/// The volume's name.
pub(crate) const NAME: &str = "disk";

/// On what requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeKind {
    /// A null store.
    Null,
    /// A file in memory, without a cache.
    File,
    /// Such a file with a cache that writes back: all requests are served from memory.
    Cached,
}

impl VolumeKind {
    /// All of them.
    pub const ALL: [VolumeKind; 3] = [VolumeKind::Null, VolumeKind::File, VolumeKind::Cached];

    /// The name in the figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            VolumeKind::Null => "null",
            VolumeKind::File => "file",
            VolumeKind::Cached => "cached",
        }
    }
}

/// See the module.
pub struct Host {
    // First, so that it is dropped first: its tasks use the other fields.
    pub(crate) worker: SimWorker,
    pub(crate) volumes: Volumes,
    pub(crate) folder: TempDir,
    _cache: Option<Arc<Cache>>,
}

impl Host {
    /// A worker of this thread, and a volume of this kind.
    pub(crate) fn new(kind: VolumeKind) -> Result<Host, Error> {
        let now = ebb_mem::clock::now();
        let memory = Memory::new(MemoryOptions::new(CEILING, now))?;
        let worker = SimWorker::new("counted", &memory)?;
        // In memory: no disk's file system is the same on all machines.
        let folder = tempfile::tempdir_in("/dev/shm")?;
        let file = || -> Result<Store, Error> {
            let options =
                OpenOptions { create: Some(SIZE), direct: Direct::Off, ..OpenOptions::default() };
            Ok(Store::File(FileStore::open(&folder.path().join(NAME), &options)?.0))
        };
        let options = VolumeOptions::default();
        let (volume, cache) = match kind {
            VolumeKind::Null => {
                (Volume::new(NAME, Store::Null(NullStore::new(SIZE)), options), None)
            }
            VolumeKind::File => (Volume::new(NAME, file()?, options), None),
            VolumeKind::Cached => {
                let limits = CacheOptions { max_bytes: Some(4 * SIZE), ..CacheOptions::new(now) };
                let cache = Cache::without_reclaimer(&memory, limits);
                let store = CachedStore::new(&cache, NAME, file()?, Mode::Writeback)?;
                let volume = Volume::new(NAME, store, options);
                volume.start_writeback(worker.io(), Arc::new(FixedLimit::default()));
                (volume, Some(cache))
            }
        };
        let volumes = Volumes::default();
        volumes.add(volume, Arc::default());
        Ok(Host { worker, volumes, folder, _cache: cache })
    }
}
