//! A volume of several layers: read-only, and one of the users of its base.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_block::{ErrorKind, Operation, Resize, ZeroFlags};
use ebb_cache::{
    BaseLayers, Cache, CacheOptions, CachedStore, Delta, LayerMap, LayerRun, Layers, Mode,
    plain_parent,
};
use ebb_io::{Io, Worker};
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{MemoryStore, Store, TestStore};
use ebb_volume::{Volume, VolumeOptions};

const MIB: u64 = 1 << 20;

/// The map of an overlay that is still empty.
#[derive(Debug)]
struct Empty;

impl LayerMap for Empty {
    fn run(&self, _offset: u64, length: u64) -> LayerRun {
        LayerRun { layer: 1, length }
    }
}

/// The output of a future that must not wait for ever.
async fn within_a_minute<T>(io: &Io, future: impl Future<Output = T>) -> T {
    let (mut future, mut end) = (pin!(future), pin!(io.sleep(Duration::from_secs(60))));
    poll_fn(|cx| {
        assert!(end.as_mut().poll(cx).is_pending(), "it hangs");
        future.as_mut().poll(cx)
    })
    .await
}

#[test]
fn a_volume_of_several_layers_is_read_only_and_leaves_its_base_when_it_is_closed() {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(Instant::now()));
    let worker = Worker::start("layers", &memory).unwrap();
    let test = Arc::new(TestStore::new(MIB, 1));
    test.change(8192, &[7; 4096]);
    let bases = BaseLayers::new(&cache);
    let volume = |name: &str| {
        let store = Store::Memory(MemoryStore::new(MIB));
        let top = CachedStore::new(&cache, name, store, Mode::Writethrough).unwrap();
        let base = bases.add("base", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let layers = Layers::stack(name, top, vec![base], Box::new(Empty)).unwrap();
        Volume::new(name, layers, VolumeOptions::default())
    };
    let (one, two) = (volume("one"), volume("two"));
    let done = worker.handle().block_on(move |io| async move {
        assert!(one.read_only() && one.direct_access(&io).is_none());
        let refused = |result: Result<(), ebb_volume::BlockError>| {
            assert_eq!(result.unwrap_err().kind, ErrorKind::ReadOnly);
        };
        refused(one.write(&io, io.pool().get_for_test(4096), 0, false).await.0);
        refused(one.discard(&io, 0, 4096, false).await);
        refused(one.write_zeroes(&io, 0, 4096, ZeroFlags::default(), true).await);
        assert!(one.resize(&io, Resize { to: Some(2 * MIB), shrink: false }).await.is_err());
        one.flush(&io).await.unwrap();
        for volume in [&one, &two] {
            let (result, buf) = volume.read(&io, io.pool().get_for_test(8192), 4096).await;
            result.unwrap();
            assert!(buf[..4096].iter().all(|byte| *byte == 0));
            assert!(buf[4096..].iter().all(|byte| *byte == 7));
        }
        assert_eq!(test.read_bytes.load(Ordering::Relaxed), 8192);
        // One of two is aborted while the base hangs: its read ends, and it can be closed.
        test.hang();
        let read = |volume: &Arc<Volume>| {
            let (volume, own) = (volume.clone(), io.clone());
            io.spawn(async move {
                let buf = own.pool().get_for_test(4096);
                volume.read(&own, buf, 65536).await.0
            })
        };
        let (first, second) = (read(&one), read(&two));
        while test.hanging() == 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        one.abort();
        within_a_minute(&io, one.close(&io)).await.unwrap();
        assert_eq!(first.await.unwrap_err().kind, ErrorKind::Closing);
        // The other one goes on.
        test.release();
        within_a_minute(&io, second).await.unwrap();
        assert_eq!(test.aborts.load(Ordering::Relaxed), 0);
        two.close(&io).await.unwrap();
    });
    assert!(done.is_some(), "the run panicked; see above");
}

/// What a smaller overlay gives back is discarded after the resize is complete for requests.
#[test]
fn flushes_do_not_wait_for_the_space_that_a_smaller_overlay_gives_back() {
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(Instant::now()));
    let worker = Worker::start("layers", &memory).unwrap();
    let (base, disk) = (Arc::new(TestStore::new(MIB, 1)), Arc::new(TestStore::new(8 * MIB, 2)));
    let done = worker.handle().block_on(move |io| async move {
        let bases = BaseLayers::new(&cache);
        let parent =
            plain_parent(&io, &CachedStore::from(Store::Test(base.clone()))).await.unwrap();
        let top = Store::Test(disk.clone());
        let top = CachedStore::new(&cache, "top", top, Mode::Writethrough).unwrap();
        let delta = Delta::create(&io, &top, 2 * MIB, parent, [7; 16]).await.unwrap();
        delta.begin_writing(&io, &top).await.unwrap();
        let below = vec![bases.add("base", Store::Test(base), Mode::Writethrough).unwrap()];
        let layers = Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap();
        let volume = Volume::new("disk", layers, VolumeOptions::default());
        disk.device.store(true, Ordering::SeqCst);
        disk.hang_only(&[Operation::Discard]);
        let (one, on) = (volume.clone(), io.clone());
        let shrink = Resize { to: Some(MIB), shrink: true };
        let resize = io.spawn(async move { one.resize(&on, shrink).await });
        while disk.hanging() == 0 {
            assert!(!resize.is_finished(), "nothing was discarded");
            io.yield_iteration().await;
        }
        assert_eq!(volume.size(), MIB);
        volume.write(&io, io.pool().get_for_test(4096), 0, false).await.0.unwrap();
        within_a_minute(&io, volume.flush(&io)).await.unwrap();
        assert!(!resize.is_finished());
        disk.release();
        assert_eq!(resize.await.unwrap(), MIB);
    });
    assert!(done.is_some(), "the run panicked; see above");
}
