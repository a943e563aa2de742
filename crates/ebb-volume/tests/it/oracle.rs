//! Compares a volume with a byte array: after the same operations both read the same.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;
use std::sync::Arc;

use ebb_io::Worker;
use ebb_store::{
    Direct, FileStore, MemoryStore, NbdAddress, NbdOptions, NbdStore, OpenOptions, Store,
};
use ebb_volume::{ErrorKind, Io, Volume, VolumeOptions, ZeroFlags};
use proptest::prelude::*;

const SIZE: u64 = 256 << 10;
const SECTORS: u64 = SIZE / 512;

#[derive(Clone, Debug)]
enum Action {
    Read {
        sector: u64,
        count: u64,
    },
    Write {
        sector: u64,
        count: u64,
        seed: u8,
        fua: bool,
    },
    Discard {
        sector: u64,
        count: u64,
    },
    Zero {
        sector: u64,
        count: u64,
        may_unmap: bool,
        fua: bool,
    },
    Flush,
    Extents {
        sector: u64,
        count: u64,
        limit: usize,
    },
    /// Several concurrent writes to different places, which are then awaited.
    Together(Vec<(u64, u64, u8)>),
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    // Mostly within the volume; sometimes just past its end.
    (0..SECTORS, 1..64u64)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => range().prop_map(|(sector, count)| Action::Read { sector, count }),
        6 => (range(), any::<u8>(), any::<bool>())
            .prop_map(|((sector, count), seed, fua)| Action::Write { sector, count, seed, fua }),
        2 => range().prop_map(|(sector, count)| Action::Discard { sector, count }),
        2 => (range(), any::<bool>(), any::<bool>()).prop_map(
            |((sector, count), may_unmap, fua)| Action::Zero { sector, count, may_unmap, fua }
        ),
        1 => Just(Action::Flush),
        2 => (range(), 1..20usize)
            .prop_map(|((sector, count), limit)| Action::Extents { sector, count, limit }),
        1 => prop::collection::vec((0..32u64, 1..16u64, any::<u8>()), 1..8).prop_map(|list| {
            // Each in its own eighth of the volume, so that they do not overlap.
            Action::Together(
                list.into_iter()
                    .enumerate()
                    .map(|(i, (sector, count, seed))| (i as u64 * 64 + sector, count, seed))
                    .collect(),
            )
        }),
    ]
}

fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|i| seed.wrapping_add(u8::try_from(i % 251).unwrap())).collect()
}

fn bytes(sector: u64, count: u64) -> (u64, usize) {
    (sector * 512, usize::try_from(count * 512).unwrap())
}

struct Pair {
    volume: Arc<Volume>,
    oracle: Vec<u8>,
    io: Io,
}

impl Pair {
    fn slice(&mut self, offset: u64, length: usize) -> Option<&mut [u8]> {
        let start = usize::try_from(offset).unwrap();
        self.oracle.get_mut(start..start + length)
    }

    async fn apply(&mut self, action: Action) {
        match action {
            Action::Read { sector, count } => self.read(sector, count).await,
            Action::Write { sector, count, seed, fua } => {
                self.write(sector, count, seed, fua).await;
            }
            Action::Discard { sector, count } => self.discard(sector, count).await,
            Action::Zero { sector, count, may_unmap, fua } => {
                let (offset, length) = bytes(sector, count);
                let flags = ZeroFlags { may_unmap, fast_only: false };
                let result =
                    self.volume.write_zeroes(&self.io, offset, length as u64, flags, fua).await;
                match self.slice(offset, length) {
                    Some(part) => {
                        result.unwrap();
                        part.fill(0);
                    }
                    None => assert_eq!(result.unwrap_err().kind, ErrorKind::OutOfRange),
                }
            }
            Action::Flush => self.volume.flush(&self.io).await.unwrap(),
            Action::Extents { sector, count, limit } => self.extents(sector, count, limit).await,
            Action::Together(writes) => self.together(writes).await,
        }
    }

    async fn read(&mut self, sector: u64, count: u64) {
        let (offset, length) = bytes(sector, count);
        let mut buf = self.io.pool().get_for_test(length);
        buf.fill(0xee);
        let (result, buf) = self.volume.read(&self.io, buf, offset).await;
        match self.slice(offset, length) {
            Some(part) => {
                result.unwrap();
                assert!(*part == *buf, "read of {length} at {offset} differs");
            }
            None => assert_eq!(result.unwrap_err().kind, ErrorKind::OutOfRange),
        }
    }

    async fn write(&mut self, sector: u64, count: u64, seed: u8, fua: bool) {
        let (offset, length) = bytes(sector, count);
        let mut buf = self.io.pool().get_for_test(length);
        buf.copy_from_slice(&pattern(seed, length));
        let (result, _) = self.volume.write(&self.io, buf, offset, fua).await;
        match self.slice(offset, length) {
            Some(part) => {
                result.unwrap();
                part.copy_from_slice(&pattern(seed, length));
            }
            None => assert_eq!(result.unwrap_err().kind, ErrorKind::OutOfRange),
        }
    }

    /// The content of a discarded range is unspecified: the oracle reads it from the volume.
    async fn discard(&mut self, sector: u64, count: u64) {
        let (offset, length) = bytes(sector, count);
        let result = self.volume.discard(&self.io, offset, length as u64, false).await;
        if self.slice(offset, length).is_none() {
            assert_eq!(result.unwrap_err().kind, ErrorKind::OutOfRange);
            return;
        }
        result.unwrap();
        let (result, buf) =
            self.volume.read(&self.io, self.io.pool().get_for_test(length), offset).await;
        result.unwrap();
        self.slice(offset, length).unwrap().copy_from_slice(&buf);
    }

    async fn extents(&mut self, sector: u64, count: u64, limit: usize) {
        let (offset, length) = bytes(sector, count);
        let result = self.volume.extents(&self.io, offset, length as u64, limit).await;
        if self.slice(offset, length).is_none() {
            assert_eq!(result.unwrap_err().kind, ErrorKind::OutOfRange);
            return;
        }
        let list = result.unwrap();
        assert!(!list.is_empty() && list.len() <= limit);
        let mut at = offset;
        for extent in list {
            assert_eq!(extent.offset, at, "extents are adjacent");
            assert!(extent.length > 0);
            at += extent.length;
            assert!(at <= offset + length as u64);
            let part = self.slice(extent.offset, usize::try_from(extent.length).unwrap()).unwrap();
            assert!(!extent.hole || part.iter().all(|b| *b == 0), "a hole reads as zeroes");
        }
    }

    async fn together(&mut self, writes: Vec<(u64, u64, u8)>) {
        let tasks: Vec<_> = writes
            .into_iter()
            .map(|(sector, count, seed)| {
                let (offset, length) = bytes(sector, count);
                self.slice(offset, length).unwrap().copy_from_slice(&pattern(seed, length));
                let mut buf = self.io.pool().get_for_test(length);
                buf.copy_from_slice(&pattern(seed, length));
                let (volume, io) = (self.volume.clone(), self.io.clone());
                self.io.spawn(async move { volume.write(&io, buf, offset, false).await.0.unwrap() })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }
}

fn compare(make: impl Fn() -> Store, actions: Vec<Action>) {
    let worker = Worker::start_alone("oracle").unwrap();
    run(&worker, &Volume::new("oracle", make(), VolumeOptions::default()), actions);
}

fn compare_cached(make: impl Fn() -> Store, actions: Vec<Action>) {
    let now = std::time::Instant::now();
    let memory = ebb_mem::Memory::new(ebb_mem::MemoryOptions::new(64 << 20, now)).unwrap();
    let worker = Worker::start("oracle", &memory).unwrap();
    let cache = ebb_cache::Cache::start(&memory, ebb_cache::CacheOptions::new(now)).unwrap();
    let mode = ebb_volume::Mode::Writethrough;
    let store = ebb_cache::CachedStore::new(&cache, "oracle", make(), mode).unwrap();
    run(&worker, &Volume::new("oracle", store, VolumeOptions::default()), actions);
}

fn run(worker: &Worker, volume: &Arc<Volume>, actions: Vec<Action>) {
    let for_run = volume.clone();
    let run = worker.handle().block_on(move |io| async move {
        let oracle = vec![0; usize::try_from(SIZE).unwrap()];
        let mut pair = Pair { volume: for_run, oracle, io };
        for action in actions {
            pair.apply(action).await;
        }
        pair.read(0, SECTORS).await;
        pair.volume.close(&pair.io).await.unwrap();
    });
    assert!(run.is_some(), "the run panicked; see above");
}

fn file(folder: &Path, direct: Direct) -> FileStore {
    let path = folder.join("image");
    let _ = std::fs::remove_file(&path);
    let options = OpenOptions { create: Some(SIZE), direct, ..OpenOptions::default() };
    FileStore::open(&path, &options).unwrap().0
}

/// A directory on a file system that supports O_DIRECT.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// An NBD server over memory; killed when dropped.
struct Remote {
    child: std::process::Child,
    folder: tempfile::TempDir,
}

impl Remote {
    fn start(arguments: &[&str]) -> Remote {
        let folder = tempfile::tempdir().unwrap();
        let child = std::process::Command::new("nbdkit")
            .arg("-fU")
            .arg(folder.path().join("socket"))
            .args(arguments)
            .spawn()
            .expect("these tests need nbdkit: run testbed/install");
        let remote = Remote { child, folder };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(90);
        while std::os::unix::net::UnixStream::connect(remote.socket()).is_err() {
            assert!(std::time::Instant::now() < deadline, "nbdkit does not listen");
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        }
        remote
    }

    fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("socket")
    }

    fn store(&self) -> Store {
        let options = NbdOptions::new(NbdAddress::Unix(self.socket()), "");
        Store::Nbd(NbdStore::open(options).unwrap().0)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    prop::collection::vec(action(), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn memory_matches_the_model(list in actions()) {
        compare(|| Store::Memory(MemoryStore::new(SIZE)), list);
    }

    #[test]
    fn memory_behind_a_cache_matches_the_model(list in actions()) {
        compare_cached(|| Store::Memory(MemoryStore::new(SIZE)), list);
    }

    #[test]
    fn file_with_large_sectors_behind_a_cache_matches_the_model(list in actions()) {
        let folder = folder();
        compare_cached(
            || Store::File(file(folder.path(), Direct::Auto).assume_alignment(4096)),
            list,
        );
    }

    #[test]
    fn file_through_the_page_cache_matches_the_model(list in actions()) {
        let folder = folder();
        compare(|| Store::File(file(folder.path(), Direct::Off)), list);
    }

    #[test]
    fn file_with_direct_io_matches_the_model(list in actions()) {
        let folder = folder();
        compare(|| Store::File(file(folder.path(), Direct::Auto)), list);
    }

    #[test]
    fn file_with_large_sectors_matches_the_model(list in actions()) {
        let folder = folder();
        compare(|| Store::File(file(folder.path(), Direct::Auto).assume_alignment(4096)), list);
    }

    #[test]
    fn remote_export_matches_the_model(list in actions()) {
        let remote = Remote::start(&["memory", "256k"]);
        compare(|| remote.store(), list);
    }

    #[test]
    fn remote_with_large_blocks_and_simple_replies_matches_the_model(list in actions()) {
        let remote = Remote::start(&[
            "--no-sr",
            "--filter=blocksize-policy",
            "memory",
            "256k",
            "blocksize-minimum=4096",
            "blocksize-preferred=4096",
            "blocksize-maximum=8192",
            "blocksize-error-policy=error",
        ]);
        compare(|| remote.store(), list);
    }
}
