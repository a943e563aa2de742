//! Resizing a volume in use.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::sync::Arc;
use std::time::Duration;

use ebb_block::Operation;
use ebb_io::{Io, Worker};
use ebb_store::{FileStore, MemoryStore, NullStore, OpenOptions, TestStore};
use ebb_volume::{
    ErrorKind, RESIZE_LIMIT, Resize, ResizeError, Resized, Store, Volume, VolumeOptions,
};

const MIB: u64 = 1 << 20;

fn with<Fut>(act: impl FnOnce(Io) -> Fut + Send + 'static)
where
    Fut: Future<Output = ()> + 'static,
{
    let worker = Worker::start_alone("resize").unwrap();
    worker.handle().block_on(act).unwrap();
}

async fn write(io: &Io, volume: &Volume, offset: u64, byte: u8) -> Result<(), ErrorKind> {
    let mut buf = io.pool().take(4096).await;
    buf.fill(byte);
    volume.write(io, buf, offset, false).await.0.map_err(|error| error.kind)
}

async fn read(io: &Io, volume: &Volume, offset: u64) -> Result<u8, ErrorKind> {
    let buf = io.pool().take(4096).await;
    let (result, buf) = volume.read(io, buf, offset).await;
    result.map(|()| buf[4095]).map_err(|error| error.kind)
}

async fn grows_and_shrinks(io: Io, volume: Arc<Volume>) {
    let to = |to, shrink| Resize { to: Some(to), shrink };
    write(&io, &volume, 0, 1).await.unwrap();
    assert_eq!(write(&io, &volume, MIB, 2).await, Err(ErrorKind::OutOfRange));
    assert_eq!(volume.resize(&io, to(2 * MIB, false)).await.unwrap(), 2 * MIB);
    assert_eq!((volume.size(), read(&io, &volume, MIB).await), (2 * MIB, Ok(0)));
    write(&io, &volume, MIB, 2).await.unwrap();
    // Without `shrink` it is not made smaller.
    let refused = volume.resize(&io, to(MIB, false)).await;
    assert!(matches!(refused, Err(ResizeError::Shrinks { from, to }) if from > to), "{refused:?}");
    for odd in [0, 2 * MIB + 1] {
        let refused = volume.resize(&io, to(odd, true)).await;
        assert!(matches!(refused, Err(ResizeError::Sectors { .. })), "{refused:?}");
    }
    assert_eq!(read(&io, &volume, MIB).await, Ok(2));
    assert_eq!(volume.resize(&io, to(MIB, true)).await.unwrap(), MIB);
    assert_eq!(read(&io, &volume, MIB).await, Err(ErrorKind::OutOfRange));
    assert_eq!(read(&io, &volume, 0).await, Ok(1));
    // Data that was cut off does not reappear.
    volume.resize(&io, to(2 * MIB, false)).await.unwrap();
    assert_eq!(read(&io, &volume, MIB).await, Ok(0));
}

#[test]
fn each_of_two_concurrent_resizes_returns_the_size_that_it_changed() {
    let store = Arc::new(TestStore::new(4 * MIB, 1));
    let volume = Volume::new("test", Store::Test(store.clone()), VolumeOptions::default());
    with(|io| async move {
        let begin = |mib: u64, shrink: bool| {
            let (on, volume) = (io.clone(), volume.clone());
            let order = Resize { to: Some(mib * MIB), shrink };
            io.spawn(async move { volume.resize_within(&on, order, RESIZE_LIMIT).await.unwrap() })
        };
        // A read beyond the new end holds the first one up, and the others wait for it.
        store.hang_only(&[Operation::Read]);
        let (on, beyond) = (io.clone(), volume.clone());
        let reader = io.spawn(async move { read(&on, &beyond, 3 * MIB).await });
        while store.hanging() == 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        let (first, second, third) = (begin(1, true), begin(2, false), begin(3, false));
        for _ in 0..20 {
            io.yield_now().await;
        }
        store.release();
        assert_eq!(first.await, Resized { from: 4 * MIB, to: MIB });
        assert_eq!(second.await, Resized { from: MIB, to: 2 * MIB });
        assert_eq!(third.await, Resized { from: 2 * MIB, to: 3 * MIB });
        assert_eq!(reader.await, Ok(0));
    });
}

#[test]
fn memory_grows_and_shrinks() {
    let store = Store::Memory(MemoryStore::new(MIB));
    let volume = Volume::new("memory", store, VolumeOptions::default());
    with(|io| grows_and_shrinks(io, volume));
}

#[test]
fn a_file_grows_and_shrinks_and_its_outside_growth_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let (store, _) = FileStore::open(&path, &OpenOptions::default()).unwrap();
    let volume = Volume::new("file", Store::File(store), VolumeOptions::default());
    let again = volume.clone();
    with(|io| grows_and_shrinks(io, again));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * MIB);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3 * MIB).unwrap();
    assert_eq!(volume.size(), 2 * MIB, "the growth was not requested yet");
    with(move |io| async move {
        assert_eq!(volume.resize(&io, Resize::default()).await.unwrap(), 3 * MIB);
        assert_eq!(read(&io, &volume, 3 * MIB - 4096).await, Ok(0));
    });
}

#[test]
fn a_read_only_file_is_followed_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let (store, _) = FileStore::open(&path, &options).unwrap();
    let volume = Volume::new(
        "file",
        Store::File(store),
        VolumeOptions { read_only: true, ..VolumeOptions::default() },
    );
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
    with(move |io| async move {
        let order = Resize { to: Some(4 * MIB), shrink: false };
        let refused = volume.resize(&io, order).await;
        assert!(matches!(refused, Err(ResizeError::Unsupported { .. })), "{refused:?}");
        assert_eq!(volume.resize(&io, Resize::default()).await.unwrap(), 2 * MIB);
    });
}

#[test]
fn a_store_without_a_size_of_its_own_says_so() {
    let store = Store::Null(NullStore::new(MIB));
    let volume = Volume::new("null", store, VolumeOptions::default());
    with(move |io| async move {
        let refused = volume.resize(&io, Resize { to: Some(2 * MIB), shrink: false }).await;
        assert!(matches!(refused, Err(ResizeError::Unsupported { .. })), "{refused:?}");
    });
}
