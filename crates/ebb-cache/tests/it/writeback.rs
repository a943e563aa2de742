//! Writeback step by step: acknowledged from memory, clustered in order of offset, kept on failure, reported
//! once.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Disk, MIB, Rig};
use ebb_block::{BlockStore, ErrorKind, Operation, ZeroFlags};
use ebb_cache::{FixedLimit, Mode, WritebackControl, WritebackOrder};
use ebb_io::{Io, Worker};
use ebb_mem::pressure::Level;
use ebb_store::Record;

const SIZE: u64 = 8 * MIB;

fn play<Fut: Future<Output = ()> + 'static>(
    act: impl FnOnce(Io, Arc<Rig>, Disk) -> Fut + Send + 'static,
) {
    let rig = Arc::new(Rig::new(16 * MIB));
    let worker = Worker::start("back", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", SIZE, 1, Mode::Writeback);
    let done = worker.handle().block_on(move |io| act(io, rig, disk));
    assert!(done.is_some(), "the run panicked; see above");
}

async fn write(io: &Io, disk: &Disk, offset: u64, length: usize, byte: u8, fua: bool) -> bool {
    let mut buf = io.pool().get_for_test(length);
    buf.fill(byte);
    disk.cached.write(io, buf, offset, fua).await.0.is_ok()
}

/// What the store has, stable or not.
fn on_store(disk: &Disk, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    disk.test.look(offset, &mut bytes);
    bytes
}

async fn flush(io: &Io, disk: &Disk) -> bool {
    disk.cached.flush(io).await.is_ok()
}

async fn read(io: &Io, disk: &Disk, offset: u64, length: usize) -> Vec<u8> {
    let (result, buf) = disk.cached.read(io, io.pool().get_for_test(length), offset).await;
    result.unwrap();
    buf.to_vec()
}

#[test]
fn writes_stay_in_memory_until_a_flush_and_go_in_clusters() {
    play(|io, _rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        disk.test.start_record();
        // Backwards, so that the order of writing is not that of the offsets.
        for page in (0..64u64).rev() {
            assert!(write(&io, &disk, page * 4096, 4096, 7, false).await);
        }
        assert!(write(&io, &disk, MIB, 4096, 8, false).await);
        assert_eq!(disk.test.writes.load(Ordering::Relaxed), 0);
        assert_eq!(disk.cached.dirty(), 65 * 4096);
        assert_eq!(read(&io, &disk, 0, 4096).await, [7; 4096]);
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.cached.dirty(), 0);
        let record: Vec<(u64, usize)> = disk
            .test
            .take_record()
            .iter()
            .map(|record| match record {
                Record::Write { offset, data, .. } => (*offset, data.len()),
                Record::Flush { .. } | Record::Left { .. } => (u64::MAX, 0),
            })
            .collect();
        assert_eq!(record, [(0, 64 * 4096), (MIB, 4096), (u64::MAX, 0)]);
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.test.writes.load(Ordering::Relaxed), 2, "some data was written twice");
    });
}

#[test]
fn a_failed_writeback_fails_its_flush_and_keeps_its_data() {
    play(|io, rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        assert!(write(&io, &disk, 0, 65536, 3, false).await);
        disk.test.write_faults.store(1000, Ordering::Relaxed);
        assert!(!flush(&io, &disk).await);
        assert_eq!(disk.cached.dirty(), 65536);
        // No level of pressure evicts it.
        rig.cache.pressure(Level::L3, rig.start);
        let mut reclaimer = ebb_cache::Reclaimer::new(&rig.cache, Box::new(|| None));
        reclaimer.run_once(&rig.cache, rig.start);
        assert_eq!(read(&io, &disk, 0, 65536).await, vec![3; 65536]);
        disk.test.write_faults.store(0, Ordering::Relaxed);
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.test.content()[..65536], vec![3; 65536]);
    });
}

/// A client of a daemon that is just starting.
#[test]
fn a_write_before_the_control_is_set_goes_through_and_a_later_control_applies() {
    play(|io, _rig, disk| async move {
        assert!(write(&io, &disk, 0, 8192, 1, false).await);
        assert_eq!(disk.cached.dirty(), 0, "there is no reservation without a control");
        assert_eq!(disk.test.content()[..8192], [1; 8192]);
        let room = Arc::new(Full(AtomicU64::new(4 * 4096)));
        disk.cached.set_control(room.clone());
        assert!(write(&io, &disk, 0, 8192, 2, false).await);
        assert_eq!((room.0.load(Ordering::SeqCst), disk.cached.dirty()), (2 * 4096, 8192));
        assert_eq!(disk.test.content()[..8192], [1; 8192]);
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.test.content()[..8192], [2; 8192]);
    });
}

/// Writes back dirty data at once.
struct Eager;

impl WritebackControl for Eager {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        Duration::ZERO
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Write(1 << 20)
    }
}

#[test]
fn a_flush_succeeds_after_a_failed_writeback_if_all_is_written() {
    play(|io, _rig, disk| async move {
        disk.cached.set_control(Arc::new(Eager));
        let flusher = io.spawn(disk.cached.clone().run_flusher(io.clone()));
        assert!(write(&io, &disk, 0, 1 << 20, 5, false).await);
        while disk.cached.dirty() > 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(disk.test.content()[..1 << 20], vec![5; 1 << 20]);
        disk.test.write_faults.store(1000, Ordering::Relaxed);
        assert!(write(&io, &disk, 0, 4096, 6, false).await);
        while disk.test.writes.load(Ordering::Relaxed) < 2 {
            io.sleep(Duration::from_millis(1)).await;
        }
        disk.test.write_faults.store(0, Ordering::Relaxed);
        io.sleep(Duration::from_millis(1)).await;
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.test.content()[..4096], [6; 4096]);
        drop(flusher);
    });
}

/// Grants reservations for this many bytes at most.
struct Full(AtomicU64);

impl WritebackControl for Full {
    fn reserve(&self, _: Instant, _: Instant, bytes: u64, _: u64) -> Duration {
        let left = |room: u64| room.checked_sub(bytes);
        match self.0.try_update(Ordering::SeqCst, Ordering::SeqCst, left) {
            Ok(_) => Duration::ZERO,
            Err(_) => Duration::from_millis(1),
        }
    }
    fn unused(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::SeqCst);
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Wait(Duration::from_secs(1))
    }
}

#[test]
fn dirty_pages_are_overwritten_without_a_reservation() {
    play(|io, _rig, disk| async move {
        let room = Arc::new(Full(AtomicU64::new(4 * 4096)));
        disk.cached.set_control(room.clone());
        assert!(write(&io, &disk, 0, 4 * 4096, 1, false).await);
        assert_eq!(room.0.load(Ordering::SeqCst), 0);
        // There is no room for more dirty data, and none is needed.
        for turn in 2..10 {
            assert!(write(&io, &disk, 4096, 2 * 4096, turn, false).await);
            assert!(write(&io, &disk, 512, 512, turn, false).await);
        }
        assert_eq!((room.0.load(Ordering::SeqCst), disk.cached.dirty()), (0, 4 * 4096));
        // A write with one page more than the dirty ones waits for a reservation.
        let (other, late) = (disk.clone(), io.clone());
        let more = io.spawn(async move { write(&late, &other, 0, 5 * 4096, 11, false).await });
        io.sleep(Duration::from_millis(20)).await;
        assert_eq!(disk.cached.dirty(), 4 * 4096);
        room.0.store(4096, Ordering::SeqCst);
        disk.cached.retry_reservation();
        assert!(more.await);
        assert_eq!((room.0.load(Ordering::SeqCst), disk.cached.dirty()), (0, 5 * 4096));
        assert_eq!(read(&io, &disk, 4 * 4096, 4096).await, [11; 4096]);
    });
}

#[test]
fn fua_zeroes_and_extents_see_what_is_in_memory() {
    play(|io, _rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        assert!(write(&io, &disk, 0, 8192, 1, false).await);
        assert!(write(&io, &disk, 4096, 4096, 2, true).await);
        let content = disk.test.content();
        assert_eq!(content[4096], 2, "adjacent data of the frame may be written, too");
        assert_eq!(disk.test.flushes.load(Ordering::Relaxed), 1);
        // Part of a dirty page is zeroed: the remainder is not lost.
        let flags = ZeroFlags::default();
        disk.cached.write_zeroes(&io, 512, 512, flags).await.unwrap();
        let data = read(&io, &disk, 0, 4096).await;
        assert_eq!((data[0], data[512], data[1024]), (1, 0, 1));
        assert!(write(&io, &disk, MIB, 512, 4, false).await, "a part of a page");
        disk.cached.extents(&io, MIB, 4096, 8).await.unwrap();
        assert_eq!(disk.test.content()[usize::try_from(MIB).unwrap()], 4);
        let data = read(&io, &disk, MIB, 4096).await;
        assert_eq!((data[0], data[512]), (4, 0));
    });
}

#[test]
fn the_fixed_limit_pauses_writers_and_wakes_the_flusher() {
    let control = FixedLimit::default();
    let now = Instant::now();
    assert_eq!(control.reserve(now, now, 4096, 0), Duration::ZERO);
    assert!(control.reserve(now, now, 4096, control.dirty_max) > Duration::ZERO);
    assert_eq!(control.next(now, 4096, control.age_max), WritebackOrder::Write(control.cluster));
    assert!(matches!(control.next(now, 4096, Duration::ZERO), WritebackOrder::Wait(_)));
    assert!(matches!(
        control.next(now, control.dirty_max, Duration::ZERO),
        WritebackOrder::Write(_)
    ));
}

/// A limit of a few pages, and a short wait for a full store.
struct Small(FixedLimit);

impl WritebackControl for Small {
    fn reserve(&self, requested: Instant, now: Instant, bytes: u64, dirty: u64) -> Duration {
        self.0.reserve(requested, now, bytes, dirty)
    }
    fn next(&self, now: Instant, dirty: u64, age: Duration) -> WritebackOrder {
        self.0.next(now, dirty, age)
    }
    fn patience(&self) -> Duration {
        Duration::from_millis(50)
    }
}

#[test]
fn writeback_of_hanging_disks_leaves_the_memory_reserved_for_requests() {
    play(|io, rig, disk| async move {
        let second = rig.volume_as("second", disk.cached.size(), 2, Mode::Writeback);
        let (before, ceiling) = (io.pool().used_bytes(), rig.memory.arena_stats().ceiling);
        let mut flushers = Vec::new();
        for disk in [&disk, &second] {
            disk.test.hang();
            let limit = FixedLimit { age_max: Duration::ZERO, ..FixedLimit::default() };
            disk.cached.set_control(Arc::new(limit));
            let flusher = disk.cached.clone().run_flusher(io.clone());
            flushers.push(io.spawn(flusher));
            for number in 0..48 {
                // In every second frame, so that each is a write of its own.
                assert!(write(&io, disk, number * 131_072, 65_536, 1, false).await);
            }
        }
        let mut tasks = Vec::new();
        for disk in [&disk, &second] {
            for _ in 0..4 {
                let (late, other) = (io.clone(), disk.clone());
                tasks.push(io.spawn(async move { flush(&late, &other).await }));
            }
        }
        while disk.test.hanging() < 4 || second.test.hanging() < 2 {
            io.sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..50 {
            io.sleep(Duration::from_millis(1)).await;
        }
        let taken = io.pool().used_bytes() - before;
        // A sixteenth of it; besides, each flusher and each flush has a buffer of 64 KiB.
        assert!(taken <= ceiling / 16 + 10 * 65_536, "{} KiB of {}", taken >> 10, ceiling >> 10);
        for disk in [&disk, &second] {
            disk.test.release();
        }
        for task in tasks {
            assert!(task.await);
        }
        drop(flushers);
    });
}

#[test]
fn a_write_that_waits_too_long_for_a_full_store_fails_with_no_space() {
    play(|io, _rig, disk| async move {
        let limit = FixedLimit { dirty_max: 65536, ..FixedLimit::default() };
        disk.cached.set_control(Arc::new(Small(limit)));
        let flusher = io.spawn(disk.cached.clone().run_flusher(io.clone()));
        disk.test.set_room(Some(0));
        assert!(write(&io, &disk, 0, 65536, 1, false).await, "there is room in memory");
        let mut tasks = Vec::new();
        for number in 1..5u64 {
            let (late, other) = (io.clone(), disk.clone());
            tasks.push(io.spawn(async move {
                let mut buf = late.pool().get_for_test(65536);
                buf.fill(2);
                let offset = number * 65536;
                other.cached.write(&late, buf, offset, false).await.0
            }));
        }
        for task in tasks {
            assert_eq!(task.await.unwrap_err().kind, ErrorKind::NoSpace);
        }
        assert_eq!(disk.cached.dirty(), 65536, "acknowledged data is kept");
        // There is room again: writers continue, and the acknowledged data is there.
        disk.test.set_room(None);
        while !write(&io, &disk, 65536, 65536, 3, false).await {}
        while !flush(&io, &disk).await {}
        let stable = disk.test.stable_bytes();
        assert!(stable[..65536].iter().all(|byte| *byte == 1));
        assert!(stable[65536..131072].iter().all(|byte| *byte == 3));
        drop(flusher);
    });
}

#[test]
fn a_page_read_while_the_volume_is_truncated_within_it_is_read_again() {
    play(|io, _rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        // Part of each of two pages: both are read first, one after the other.
        let (start, second) = (10 * 4096 + 2048, 11 * 4096);
        disk.test.hang_only(&[Operation::Read]);
        let (late, other) = (io.clone(), disk.clone());
        let writer = io.spawn(async move { write(&late, &other, start, 4096, 7, false).await });
        while disk.test.hanging() == 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        // It runs before the write to the second page, which does not happen.
        let (late, other) = (io.clone(), disk.clone());
        let reader = io.spawn(async move {
            let buf = late.pool().get_for_test(4096);
            other.cached.read(&late, buf, second).await.0
        });
        disk.test.release();
        disk.test.hang_only(&[Operation::Read]);
        for _ in 0..10 {
            io.yield_now().await;
        }
        disk.cached.seal(second + 2048).await;
        drop(reader);
        for _ in 0..10 {
            io.yield_now().await;
        }
        disk.test.release();
        assert!(writer.await);
        assert_eq!(read(&io, &disk, start, 4096).await, [7; 4096]);
    });
}

async fn zero(io: &Io, disk: &Disk, offset: u64, length: u64) {
    let flags = ZeroFlags { may_unmap: true, fast_only: false };
    disk.cached.write_zeroes(io, offset, length, flags).await.unwrap();
}

/// The disk loses what was not flushed, and reads show the loss.
fn lose(disk: &Disk) {
    disk.test.lose();
    disk.test.evict();
}

#[test]
fn zeroes_that_a_failed_flush_may_have_lost_are_repeated_without_overwriting_newer_data() {
    for seed in 0..20 {
        play(move |io, rig, _disk| async move {
            let disk = rig.volume_as("other", SIZE, seed, Mode::Writeback);
            assert!(write(&io, &disk, 0, 2 << 20, 7, false).await);
            assert!(flush(&io, &disk).await);
            zero(&io, &disk, 4096, MIB).await;
            // Newer: a page that bypassed memory and is stable, without a flush of the store; and two in
            // memory.
            assert!(write(&io, &disk, 65536, 4096, 9, true).await);
            assert_eq!(disk.test.flushes.load(Ordering::Relaxed), 1);
            disk.cached.set_control(Arc::new(FixedLimit::default()));
            assert!(write(&io, &disk, 8192, 4096, 8, false).await);
            zero(&io, &disk, 4096, 4096).await;
            zero(&io, &disk, 131_072, MIB).await;
            assert!(write(&io, &disk, 262_144, 4096, 5, false).await);
            lose(&disk);
            read(&io, &disk, 131_072, 65536).await;
            assert!(flush(&io, &disk).await, "not all was written again");
            assert!(!disk.cached.is_lost());
            let stable = disk.test.stable_bytes();
            for (page, bytes) in stable[..2 << 20].chunks(4096).enumerate() {
                let byte = match page {
                    2 => 8,
                    16 => 9,
                    64 => 5,
                    1..=287 => 0,
                    _ => 7,
                };
                let wrong = bytes.iter().find(|b| **b != byte);
                assert_eq!(wrong, None, "page {page}, expected {byte}");
            }
            assert_eq!(read(&io, &disk, 131_072, 65536).await, vec![0; 65536]);
        });
    }
}

/// It is not among the data on the store when the flush failed, and so is not written after the zeroes.
#[test]
fn data_written_while_a_flush_fails_is_not_zeroed_again() {
    play(|io, _rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        assert!(write(&io, &disk, 0, 1 << 20, 7, false).await);
        assert!(flush(&io, &disk).await);
        zero(&io, &disk, 0, MIB).await;
        lose(&disk);
        disk.test.hang_only(&[Operation::Flush]);
        let (late, other) = (io.clone(), disk.clone());
        let flushing = io.spawn(async move { flush(&late, &other).await });
        while disk.test.hanging() == 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        assert!(write(&io, &disk, 8192, 4096, 8, false).await);
        disk.test.release();
        assert!(flushing.await && flush(&io, &disk).await);
        let stable = disk.test.stable_bytes();
        for (page, bytes) in stable[..1 << 20].chunks(4096).enumerate() {
            let byte = if page == 2 { 8 } else { 0 };
            let wrong = bytes.iter().find(|b| **b != byte);
            assert_eq!(wrong, None, "page {page}, expected {byte}");
        }
    });
}

/// Without room in memory; `partial_zeroes.rs` tests them with it.
#[test]
fn zeroes_of_part_of_a_page_without_room_cannot_be_repeated() {
    play(|io, rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        rig.cache.pressure(Level::L3, rig.start);
        zero(&io, &disk, 512, 8192).await;
        lose(&disk);
        for _ in 0..3 {
            assert!(!flush(&io, &disk).await);
        }
        assert!(disk.cached.is_lost());
    });
}

/// As a process that was killed after it wrote: only its memory had the data, too.
async fn leave_unflushed(io: &Io, disk: &Disk) {
    let mut buf = io.pool().get_for_test(4096);
    buf.fill(3);
    disk.test.open_anew().write(io, buf, 4096, false).await.0.unwrap();
    disk.cached.set_control(Arc::new(FixedLimit::default()));
}

#[test]
fn flushes_keep_failing_after_the_loss_of_what_an_earlier_process_left_unflushed() {
    for fua in [false, true] {
        play(move |io, _rig, disk| async move {
            leave_unflushed(&io, &disk).await;
            assert!(write(&io, &disk, 65536, 4096, 5, false).await);
            lose(&disk);
            for _ in 0..3 {
                match fua {
                    true => assert!(!write(&io, &disk, 65536, 4096, 6, true).await),
                    false => assert!(!flush(&io, &disk).await),
                }
            }
            assert!(disk.cached.is_lost());
        });
    }
}

#[test]
fn a_loss_after_the_flush_that_follows_opening_is_repaired() {
    for background in [false, true] {
        play(move |io, _rig, disk| async move {
            leave_unflushed(&io, &disk).await;
            let flusher = background.then(|| io.spawn(disk.cached.clone().run_flusher(io.clone())));
            assert!(background || flush(&io, &disk).await);
            let begun = Instant::now();
            while disk.test.flushes.load(Ordering::Relaxed) == 0 {
                assert!(begun.elapsed() < Duration::from_secs(60), "the store is not flushed");
                io.sleep(Duration::from_millis(1)).await;
            }
            assert!(write(&io, &disk, 65536, 4096, 5, false).await);
            lose(&disk);
            assert!(flush(&io, &disk).await && !disk.cached.is_lost());
            let stable = disk.test.stable_bytes();
            assert_eq!((stable[4096], stable[65536]), (3, 5));
            drop(flusher);
        });
    }
}

/// The first flush of a volume fails: nothing can be repaired from memory any more. It keeps writing, and its neighbour, which
/// shares the memory, still repairs a failed flush.
#[test]
fn a_lost_volume_keeps_only_dirty_data_and_its_neighbour_is_repaired() {
    play(|io, rig, other| async move {
        let disk = rig.volume_as("lost", 32 * MIB, 2, Mode::Writeback);
        for disk in [&disk, &other] {
            disk.cached.set_control(Arc::new(FixedLimit::default()));
        }
        assert!(flush(&io, &other).await);
        assert!(write(&io, &disk, 0, 65536, 1, false).await);
        lose(&disk);
        assert!(!flush(&io, &disk).await && disk.cached.is_lost());
        assert_eq!(disk.cached.unstable(), 0, "kept for a repair that cannot come");
        for at in 0..24 {
            assert!(write(&io, &disk, at * MIB, 512 << 10, 2, false).await);
            assert!(!flush(&io, &disk).await && disk.cached.is_lost());
            assert_eq!((disk.cached.unstable(), disk.cached.dirty()), (0, 0));
            assert_eq!(on_store(&disk, at * MIB, 512 << 10), [2; 512 << 10]);
        }
        // What the store does not have yet is kept, and written when it can be.
        assert!(write(&io, &disk, MIB, 8192, 3, false).await);
        disk.test.write_faults.store(1000, Ordering::Relaxed);
        assert!(!flush(&io, &disk).await);
        assert_eq!(disk.cached.dirty(), 8192);
        assert_eq!(read(&io, &disk, MIB, 8192).await, [3; 8192]);
        disk.test.write_faults.store(0, Ordering::Relaxed);
        assert!(!flush(&io, &disk).await);
        assert_eq!((disk.cached.dirty(), on_store(&disk, MIB, 8192)), (0, vec![3; 8192]));

        assert!(write(&io, &other, 0, 4096, 4, false).await);
        lose(&other);
        other.test.flush_faults.store(1000, Ordering::Relaxed);
        assert!(!flush(&io, &other).await);
        other.test.flush_faults.store(0, Ordering::Relaxed);
        assert!(flush(&io, &other).await && !other.cached.is_lost());
        assert_eq!(other.test.stable_bytes()[..4096], [4; 4096]);
    });
}

/// Zeroes of part of a page for which there is no room are not repeated: with them everything else
/// that was kept is let go, and zeroes that were listed do not appear over data that was written
/// after them.
#[test]
fn a_loss_that_cannot_be_repaired_ends_what_was_kept_before_it() {
    play(|io, rig, disk| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        assert!(flush(&io, &disk).await);
        zero(&io, &disk, MIB, 65536).await;
        disk.test.flush_faults.store(1000, Ordering::Relaxed);
        assert!(write(&io, &disk, MIB, 8192, 1, false).await);
        assert!(!flush(&io, &disk).await && !disk.cached.is_lost());
        assert_eq!(disk.cached.unstable(), 8192, "a flush that fails is repaired");
        disk.test.flush_faults.store(0, Ordering::Relaxed);
        rig.cache.pressure(Level::L3, rig.start);
        zero(&io, &disk, 512, 1024).await;
        rig.cache.pressure(Level::L0, rig.start);
        assert!(write(&io, &disk, 2 * MIB, 4096, 2, false).await);
        assert!(!flush(&io, &disk).await && disk.cached.is_lost());
        assert_eq!((disk.cached.unstable(), disk.cached.dirty()), (0, 0));
        assert!(write(&io, &disk, MIB + 8192, 4096, 3, false).await);
        assert!(!flush(&io, &disk).await && disk.cached.is_lost());
        assert_eq!(on_store(&disk, 2 * MIB, 4096), [2; 4096]);
        assert_eq!(on_store(&disk, MIB + 8192, 4096), [3; 4096]);
        assert_eq!(read(&io, &disk, MIB + 8192, 8192).await, [[3; 4096], [0; 4096]].concat());
    });
}
