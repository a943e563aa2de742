//! Shared by the tests of the stores.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_block::{BlockError, BlockStore, Extent, Io, ZeroFlags};
use ebb_io::Worker;
use ebb_store::{Direct, FileStore, OpenError, OpenOptions, Store};

/// A store on a worker of its own, used from a test's thread.
pub(crate) struct Bench {
    worker: Worker,
    store: Arc<Store>,
}

impl Bench {
    pub(crate) fn new(store: impl Into<StoreOf>) -> Bench {
        Bench { worker: Worker::start_alone("store").unwrap(), store: Arc::new(store.into().0) }
    }

    pub(crate) fn on<F, Fut, T>(&self, what: F) -> T
    where
        F: FnOnce(Io, Arc<Store>) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let store = self.store.clone();
        self.worker.handle().block_on(move |io| what(io, store)).expect("see the panic above")
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>, BlockError> {
        self.on(move |io, store| async move {
            let mut buf = io.pool().get_for_test(length);
            buf.fill(0xee);
            let (result, buf) = store.read(&io, buf, offset).await;
            result.map(|()| buf.to_vec())
        })
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        let data = data.to_vec();
        self.on(move |io, store| async move {
            let mut buf = io.pool().get_for_test(data.len());
            buf.copy_from_slice(&data);
            store.write(&io, buf, offset, false).await.0
        })
    }

    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        self.on(|io, store| async move { store.flush(&io).await })
    }

    pub(crate) fn discard(&self, offset: u64, length: u64) -> Result<(), BlockError> {
        self.on(move |io, store| async move { store.discard(&io, offset, length).await })
    }

    pub(crate) fn zero(
        &self,
        offset: u64,
        length: u64,
        may_unmap: bool,
        fast_only: bool,
    ) -> Result<(), BlockError> {
        let flags = ZeroFlags { may_unmap, fast_only };
        self.on(
            move |io, store| async move { store.write_zeroes(&io, offset, length, flags).await },
        )
    }

    /// Extents as (offset, length, hole).
    pub(crate) fn extents(
        &self,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<(u64, u64, bool)>, BlockError> {
        let list = self
            .on(move |io, store| async move { store.extents(&io, offset, length, limit).await })?;
        let plain = |e: Extent| (e.offset, e.length, e.hole);
        Ok(list.into_iter().map(plain).collect())
    }
}

pub(crate) struct StoreOf(Store);

impl From<Store> for StoreOf {
    fn from(store: Store) -> StoreOf {
        StoreOf(store)
    }
}

impl From<FileStore> for StoreOf {
    fn from(store: FileStore) -> StoreOf {
        StoreOf(Store::File(store))
    }
}

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// A directory on the file system of the build, which is not tmpfs.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory on tmpfs, which supports neither zeroing ranges nor disk blocks.
pub(crate) fn tmpfs_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").expect("these tests need a tmpfs at /dev/shm")
}

pub(crate) fn create(path: &Path, size: u64, direct: Direct) -> FileStore {
    let options = OpenOptions { create: Some(size), direct, ..OpenOptions::default() };
    FileStore::open(path, &options).unwrap().0
}

pub(crate) fn open(path: &Path) -> Result<FileStore, OpenError> {
    FileStore::open(path, &OpenOptions::default()).map(|(store, _)| store)
}

pub(crate) fn file(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    folder.path().join(name)
}

/// Bytes of disk behind a file.
pub(crate) fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    file.metadata().unwrap().blocks() * 512
}
