//! What a request does between two looks at other tasks does not grow with its length, nor with what is
//! cached: polls are counted, not time.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "this is a test")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use common::{Disk, MIB, Rig};
use ebb_cache::{FixedLimit, Mode};
use ebb_io::{Io, Worker};
use ebb_store::ZeroFlags;

const SIZE: u64 = 1 << 30;

/// The result, and how often it was polled for that.
async fn polls<T>(future: impl Future<Output = T>) -> (T, u32) {
    let (mut future, mut count) = (pin!(future), 0);
    std::future::poll_fn(|cx| {
        count += 1;
        future.as_mut().poll(cx).map(|result| (result, count))
    })
    .await
}

fn play<Fut: Future<Output = ()> + 'static>(
    mode: Mode,
    act: impl FnOnce(Io, Disk) -> Fut + Send + 'static,
) {
    let rig = Arc::new(Rig::new(128 * MIB));
    let worker = Worker::start("bounded", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", SIZE, 1, mode);
    disk.cached.set_control(Arc::new(FixedLimit::default()));
    let done = worker.handle().block_on(move |io| act(io, disk));
    assert!(done.is_some(), "the run panicked; see above");
}

#[test]
fn long_requests_are_copied_a_mib_at_a_time() {
    for mode in [Mode::Writethrough, Mode::Writeback] {
        play(mode, |io, disk| async move {
            let mut buf = io.pool().get_for_test(16 << 20);
            buf.fill(7);
            let ((result, mut buf), count) =
                polls(disk.cached.write(&io, &disk.store, buf, 0, false)).await;
            result.unwrap();
            assert!(count >= 16, "{count} polls for a write of 16 MiB");
            buf.fill(0);
            let before = disk.cached.stats();
            let ((result, buf), count) = polls(disk.cached.read(&io, &disk.store, buf, 0)).await;
            result.unwrap();
            assert!(buf.iter().all(|byte| *byte == 7));
            assert_eq!(disk.cached.stats().hits - before.hits, 4096, "all of it was in memory");
            assert!(count >= 16, "{count} polls for a read of 16 MiB");
            disk.cached.flush(&io, &disk.store).await.unwrap();
        });
    }
}

#[test]
fn a_trim_of_much_drops_some_frames_at_a_time_and_looks_at_no_others() {
    for mode in [Mode::Writethrough, Mode::Writeback] {
        play(mode, |io, disk| async move {
            // A page in each of 8192 frames.
            for frame in 0..8192 {
                let buf = io.pool().get_for_test(4096);
                disk.cached.read(&io, &disk.store, buf, frame * 65536).await.0.unwrap();
            }
            assert_eq!(disk.cached.stats().bufspace, 8192 * 4096);
            let flags = ZeroFlags::default();
            // 32 MiB where nothing is cached: a few looks, and not one at each frame there is.
            let zero = disk.cached.write_zeroes(&io, &disk.store, 600 * MIB, 32 * MIB, flags);
            let (done, few) = polls(zero).await;
            done.unwrap();
            let (done, many) = polls(disk.cached.discard(&io, &disk.store, 0, SIZE)).await;
            done.unwrap();
            assert_eq!(disk.cached.stats().bufspace, 0);
            // Some 512 frames at a time.
            assert!(many >= 16, "{many} polls to drop 8192 frames");
            // Each shard's lock once, and 512 frames in 64s for each: 128 holds, 8 at a time.
            assert!(few <= 16 + 16 + 4, "{few} polls to drop nothing");
        });
    }
}
