//! The work of a request between two yields does not grow with its length or with the amount of cached data:
//! polls are counted, not time.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Disk, MIB, Rig};
use ebb_block::ZeroFlags;
use ebb_cache::{FixedLimit, Mode};
use ebb_io::{Io, Worker};

const SIZE: u64 = 1 << 30;

/// The result, and the number of polls it took.
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
    let rig = Rig::new(128 * MIB);
    let disk = rig.volume_as("disk", SIZE, 1, mode);
    play_on(&rig, disk, act);
}

fn play_on<Fut: Future<Output = ()> + 'static>(
    rig: &Rig,
    disk: Disk,
    act: impl FnOnce(Io, Disk) -> Fut + Send + 'static,
) {
    let worker = Worker::start("bounded", &rig.memory).unwrap();
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
            let ((result, mut buf), count) = polls(disk.cached.write(&io, buf, 0, false)).await;
            result.unwrap();
            assert!(count >= 16, "{count} polls for a write of 16 MiB");
            buf.fill(0);
            let before = disk.cached.stats();
            let ((result, buf), count) = polls(disk.cached.read(&io, buf, 0)).await;
            result.unwrap();
            assert!(buf.iter().all(|byte| *byte == 7));
            assert_eq!(disk.cached.stats().hits - before.hits, 4096, "all of it was in memory");
            assert!(count >= 16, "{count} polls for a read of 16 MiB");
            disk.cached.flush(&io).await.unwrap();
        });
    }
}

#[test]
fn a_large_trim_drops_frames_in_steps_and_visits_no_uncached_frames() {
    for mode in [Mode::Writethrough, Mode::Writeback] {
        play(mode, |io, disk| async move {
            // A page in each of 8192 frames.
            for frame in 0..8192 {
                let buf = io.pool().get_for_test(4096);
                disk.cached.read(&io, buf, frame * 65536).await.0.unwrap();
            }
            assert_eq!(disk.cached.stats().bufspace, 8192 * 4096);
            let flags = ZeroFlags::default();
            // 32 MiB where nothing is cached: a few yields, and not one for each frame of the range.
            let zero = disk.cached.write_zeroes(&io, 600 * MIB, 32 * MIB, flags);
            let (done, few) = polls(zero).await;
            done.unwrap();
            let (done, many) = polls(disk.cached.discard(&io, 0, SIZE)).await;
            done.unwrap();
            assert_eq!(disk.cached.stats().bufspace, 0);
            // About 512 frames between two yields.
            assert!(many >= 16, "{many} polls to drop 8192 frames");
            // Each shard's lock once, and 512 frames in steps of 64 for each: 128 acquisitions, 8 between two
            // yields.
            assert!(few <= 16 + 16 + 4, "{few} polls to drop nothing");
        });
    }
}

/// A dirty page in each of many frames.
const DIRTY: u64 = 8192;

async fn dirty_frames(io: &Io, disk: &Disk) {
    // Backwards, so that there is something to sort.
    for frame in (0..DIRTY).rev() {
        let buf = io.pool().get_for_test(4096);
        disk.cached.write(io, buf, frame * 65536, false).await.0.unwrap();
    }
    assert_eq!(disk.cached.dirty(), DIRTY * 4096);
}

/// With a store that never waits, so that all yields are the cache's own.
fn play_at_once<Fut: Future<Output = ()> + 'static>(
    act: impl FnOnce(Io, Disk) -> Fut + Send + 'static,
) {
    let rig = Rig::new(128 * MIB);
    let disk = rig.memory_volume("disk", SIZE, Mode::Writeback);
    play_on(&rig, disk, act);
}

#[test]
fn a_flush_of_many_frames_yields_between_steps() {
    play_at_once(|io, disk| async move {
        dirty_frames(&io, &disk).await;
        let (done, writing) = polls(disk.cached.flush(&io)).await;
        done.unwrap();
        assert_eq!((disk.cached.dirty(), disk.cached.unstable()), (0, 0));
        // 16 writes of two frames each between two yields.
        assert!(writing >= 200, "{writing} polls to write {DIRTY} frames");
        let (done, nothing) = polls(disk.cached.flush(&io)).await;
        done.unwrap();
        // It drops the entries of clean frames, and has nothing to write.
        assert!(nothing <= 16, "{nothing} polls to write nothing");
    });
}

#[test]
fn marking_frames_stable_or_clean_yields_between_steps() {
    play_at_once(|io, disk| async move {
        dirty_frames(&io, &disk).await;
        // Block status writes everything back and leaves it unstable.
        disk.cached.extents(&io, 0, SIZE, 1).await.unwrap();
        assert_eq!((disk.cached.dirty(), disk.cached.unstable()), (0, DIRTY * 4096));
        let (done, stable) = polls(disk.cached.flush(&io)).await;
        done.unwrap();
        assert_eq!(disk.cached.unstable(), 0);
        // It drops the entries of clean frames, and marks frames before and after the store is flushed.
        assert!(stable >= 3 * 5, "{stable} polls to mark {DIRTY} frames");
        dirty_frames(&io, &disk).await;
        disk.cached.extents(&io, 0, SIZE, 1).await.unwrap();
        let flusher = disk.cached.clone().run_flusher(io.clone());
        let (ended, on) = (disk.cached.clone(), io.clone());
        io.spawn(async move {
            // By then it has visited all frames.
            for _ in 0..256 {
                on.yield_now().await;
            }
            ended.end_flusher();
        })
        .detach();
        let ((), cleaned) = polls(flusher).await;
        assert!(cleaned >= 5, "{cleaned} polls to forget {DIRTY} frames that are clean");
    });
}

/// Reads of other volumes, whose stores hang, hold the memory for temporary buffers.
#[test]
fn a_read_without_a_temporary_buffer_reads_its_range_from_the_store_once() {
    let rig = Rig::new(128 * MIB);
    let hung: Vec<Disk> = (0..6).map(|n| rig.volume(&format!("hung{n}"), SIZE, 1)).collect();
    let disk = rig.volume("disk", SIZE, 1);
    play_on(&rig, disk, |io, disk| async move {
        let mut waiting = Vec::new();
        for hung in &hung {
            hung.cached.set_control(Arc::new(FixedLimit::default()));
            hung.test.hang();
            for number in 0..16 {
                let (own, hung) = (io.clone(), hung.clone());
                waiting.push(io.spawn(async move {
                    let buf = own.pool().get_for_test((1 << 20) + 4096);
                    hung.cached.read(&own, buf, number * 2 * MIB).await.0
                }));
            }
        }
        while hung.iter().map(|hung| hung.test.hanging()).sum::<usize>() < waiting.len() {
            io.yield_now().await;
        }
        let (result, _) = disk.cached.read(&io, io.pool().get_for_test(8 << 20), 0).await;
        result.unwrap();
        let (reads, bytes) = (&disk.test.reads, &disk.test.read_bytes);
        assert_eq!((reads.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed)), (1, 8 * MIB));
        hung.iter().for_each(|hung| hung.test.release());
        for read in waiting {
            read.await.unwrap();
        }
    });
}
