//! A closed volume leaves its store to a successor.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::fs::TryLockError;

use ebb_io::Worker;
use ebb_store::{FileStore, OpenOptions};
use ebb_volume::{Store, Volume, VolumeOptions};

/// The process may live on, with its descriptors, while the kernel holds a request of another store.
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
