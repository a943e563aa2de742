//! Closing a volume: requests in flight, failures, and the lock of the store.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::fs::TryLockError;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, CachedStore, Mode, WritebackControl, WritebackOrder};
use ebb_io::Worker;
use ebb_mem::Memory;
use ebb_store::{FileStore, OpenOptions, TestStore};
use ebb_volume::{ErrorKind, Io, Operation, Store, Volume, VolumeOptions};

/// The process may keep running, with its descriptors open, while the kernel holds a request of another store.
#[test]
fn the_image_of_a_closed_volume_can_be_opened_by_a_successor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    for read_only in [false, true] {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let (store, _) = FileStore::open(&path, &options).unwrap();
        let volume = Volume::new(
            "disk",
            Store::File(store),
            VolumeOptions { read_only, ..VolumeOptions::default() },
        );
        let successor = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(matches!(successor.try_lock(), Err(TryLockError::WouldBlock)));
        let closing = volume.clone();
        let worker = Worker::start_alone("close").unwrap();
        let closed = worker.handle().block_on(move |io| async move { closing.close(&io).await });
        closed.unwrap().unwrap();
        successor.try_lock().unwrap();
        drop((volume, successor));
    }
}

/// All data that was acknowledged before the close ended is on the store, and stable.
#[test]
fn closing_waits_for_requests_in_flight_and_refuses_new_ones() {
    let test = Arc::new(TestStore::new(1 << 20, 1));
    let volume = Volume::new("disk", Store::Test(test.clone()), VolumeOptions::default());
    let worker = Worker::start_alone("close").unwrap();
    let done = worker.handle().block_on(move |io| async move {
        test.hang_only(&[Operation::Write]);
        let write = async |volume: Arc<Volume>, io: Io, offset| {
            let mut buf = io.pool().take(4096).await;
            buf.fill(7);
            volume.write(&io, buf, offset, false).await.0.map_err(|error| error.kind)
        };
        let writing = io.spawn(write(volume.clone(), io.clone(), 0));
        while test.hanging() == 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        let (own, closing) = (io.clone(), volume.clone());
        let closing = io.spawn(async move { closing.close(&own).await });
        while !volume.is_closing() {
            io.sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..20 {
            io.sleep(Duration::from_millis(1)).await;
            assert!(!closing.is_finished(), "the volume is closed while a write is in flight");
        }
        assert_eq!(write(volume.clone(), io.clone(), 4096).await, Err(ErrorKind::Closing));
        assert_eq!(test.flushes.load(Ordering::Relaxed), 0, "the flush does not cover the write");
        test.release();
        closing.await.unwrap();
        assert_eq!(test.stable_bytes()[..4096], [7; 4096]);
        assert_eq!(writing.await, Ok(()));
    });
    done.expect("the worker panicked");
}

/// Writes everything back at once.
struct AtOnce;

impl WritebackControl for AtOnce {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        Duration::ZERO
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Write(1 << 20)
    }
}

/// A flush reports a background failure once; a stop must not report a volume of which no data is missing.
#[test]
fn a_background_failure_that_was_repaired_does_not_fail_the_close() {
    let start = Instant::now();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(start));
    let worker = Worker::start("close", &memory).unwrap();
    let test = Arc::new(TestStore::new(1 << 20, 1));
    let store = Store::Test(test.clone());
    let store = CachedStore::new(&cache, "disk", store, Mode::Writeback).unwrap();
    let cached = store.cache().unwrap().clone();
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let closed = worker.handle().block_on(move |io| async move {
        volume.start_writeback(&io, Arc::new(AtOnce));
        test.set_room(Some(0));
        let mut buf = io.pool().take(4096).await;
        buf.fill(7);
        volume.write(&io, buf, 0, false).await.0.unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while test.writes.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < deadline, "the data is not written back");
            io.sleep(Duration::from_millis(1)).await;
        }
        test.set_room(None);
        while cached.dirty() > 0 {
            assert!(Instant::now() < deadline, "the data is not written back again");
            io.sleep(Duration::from_millis(1)).await;
        }
        let closed = volume.close(&io).await;
        assert_eq!(test.stable_bytes()[..4096], [7; 4096]);
        closed
    });
    closed.expect("the worker panicked").unwrap();
}
