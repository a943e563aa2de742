//! Zeroes and discards of parts of pages, and requests that fail, on a store that loses what was
//! not flushed: a loss stays repairable, and no acknowledged sector is read or flushed as older
//! data.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Disk, MIB, Random, Rig, index};
use ebb_block::{BlockStore, Operation, Resize, ZeroFlags};
use ebb_cache::{CachedStore, FixedLimit, Mode};
use ebb_io::{Io, Worker};
use ebb_store::{Store, TestStore};
use proptest::prelude::*;

const SECTOR: u64 = 512;

fn play<Fut: Future<Output = ()> + 'static>(
    size: u64,
    seed: u64,
    act: impl FnOnce(Io, Disk) -> Fut + Send + 'static,
) {
    let rig = Rig::new(16 * MIB);
    let worker = Worker::start("parts", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", size, seed, Mode::Writeback);
    let done = worker.handle().block_on(move |io| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        assert!(flush(&io, &disk).await);
        act(io, disk).await;
    });
    assert!(done.is_some(), "the run with seed {seed} panicked; see above");
}

async fn write(io: &Io, disk: &Disk, offset: u64, length: u64, byte: u8) -> bool {
    let mut buf = io.pool().take(index(length)).await;
    buf.fill(byte);
    disk.cached.write(io, buf, offset, false).await.0.is_ok()
}

async fn zero(io: &Io, disk: &Disk, offset: u64, length: u64) -> bool {
    let flags = ZeroFlags { may_unmap: true, fast_only: false };
    disk.cached.write_zeroes(io, offset, length, flags).await.is_ok()
}

async fn discard(io: &Io, disk: &Disk, offset: u64, length: u64) -> bool {
    disk.cached.discard(io, offset, length).await.is_ok()
}

async fn flush(io: &Io, disk: &Disk) -> bool {
    disk.cached.flush(io).await.is_ok()
}

async fn read(io: &Io, disk: &Disk, offset: u64, length: u64) -> Vec<u8> {
    let mut buf = io.pool().take(index(length)).await;
    buf.fill(0xee);
    let (result, buf) = disk.cached.read(io, buf, offset).await;
    result.unwrap();
    buf.to_vec()
}

/// Two flushes fail, and each loses data; reads show what the store has lost.
async fn fail_two_flushes(io: &Io, disk: &Disk) {
    disk.test.flush_faults.store(1000, Ordering::Relaxed);
    for _ in 0..2 {
        assert!(!flush(io, disk).await);
        disk.test.evict();
    }
    disk.test.flush_faults.store(0, Ordering::Relaxed);
}

/// The next flush succeeds, and these bytes are stable and read.
async fn must_recover(io: &Io, disk: &Disk, offset: u64, expected: &[u8]) {
    assert!(flush(io, disk).await && !disk.cached.is_lost(), "the loss is permanent");
    let stable = disk.test.stable_bytes();
    let range = index(offset)..index(offset) + expected.len();
    let wrong = stable[range].iter().zip(expected).position(|(is, was)| is != was);
    assert_eq!(wrong, None, "stable, offset from {offset}");
    let seen = read(io, disk, offset, expected.len() as u64).await;
    let wrong = seen.iter().zip(expected).position(|(is, was)| is != was);
    assert_eq!(wrong, None, "read, offset from {offset}");
}

/// A page with one sector of zeroes at this place.
fn page_but(byte: u8, sector: usize) -> Vec<u8> {
    let mut page = vec![byte; 4096];
    page[sector * 512..][..512].fill(0);
    page
}

#[test]
fn flushes_recover_after_part_of_a_page_was_zeroed() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            let start = 936 * SECTOR;
            assert!(write(&io, &disk, start, 4096, 7).await);
            assert!(zero(&io, &disk, 943 * SECTOR, SECTOR).await);
            fail_two_flushes(&io, &disk).await;
            must_recover(&io, &disk, start, &page_but(7, 7)).await;
        });
    }
}

#[test]
fn flushes_recover_after_unstable_pages_were_zeroed_in_part() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            disk.test.flush_faults.store(1000, Ordering::Relaxed);
            assert!(!flush(&io, &disk).await, "the data is on the store, and not stable");
            disk.test.evict();
            assert!(zero(&io, &disk, 512, 65_536 - 1024).await);
            fail_two_flushes(&io, &disk).await;
            let mut expected = vec![0; 65_536];
            expected[..512].fill(7);
            expected[65_024..].fill(7);
            must_recover(&io, &disk, 0, &expected).await;
        });
    }
}

#[test]
fn flushes_recover_after_part_of_a_page_was_discarded() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 8192, 7).await);
            assert!(flush(&io, &disk).await);
            assert!(write(&io, &disk, 0, 8192, 8).await);
            disk.test.flush_faults.store(1000, Ordering::Relaxed);
            assert!(!flush(&io, &disk).await);
            assert!(discard(&io, &disk, 3584, 1024).await);
            fail_two_flushes(&io, &disk).await;
            must_recover(&io, &disk, 0, &[8; 3584]).await;
            must_recover(&io, &disk, 4608, &[8; 3584]).await;
        });
    }
}

#[test]
fn discarding_part_of_a_page_writes_nothing() {
    play(MIB, 1, |io, disk| async move {
        assert!(write(&io, &disk, 0, 16_384, 7).await && flush(&io, &disk).await);
        let before = disk.test.writes.load(Ordering::Relaxed);
        disk.test.set_room(Some(0));
        assert!(discard(&io, &disk, 512, 1024).await, "within a page");
        assert!(discard(&io, &disk, 3584, 8192 + 1024).await, "with whole pages in between");
        assert_eq!(disk.cached.dirty(), 0);
        assert!(flush(&io, &disk).await);
        assert_eq!(disk.test.writes.load(Ordering::Relaxed), before);
        assert_eq!(disk.test.content()[4096..12_288], [0; 8192], "whole pages are discarded");
        let seen = read(&io, &disk, 0, 16_384).await;
        assert!(seen[..512] == [7; 512] && seen[12_800..] == [7; 3584]);
    });
}

#[test]
fn flushes_recover_after_a_write_into_a_page_of_zeroes() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            assert!(flush(&io, &disk).await);
            assert!(zero(&io, &disk, 0, 65_536).await);
            assert!(write(&io, &disk, 8192 + 512, 512, 9).await);
            fail_two_flushes(&io, &disk).await;
            let mut expected = vec![0; 65_536];
            expected[8704..9216].fill(9);
            must_recover(&io, &disk, 0, &expected).await;
        });
    }
}

/// Zeroes and discards fail, after which the store has any of their sectors.
#[test]
fn flushes_recover_after_a_request_for_unstable_pages_failed() {
    for seed in 0..32 {
        play(MIB, seed, move |io, disk| async move {
            assert!(write(&io, &disk, 0, 2 * 65_536, 7).await);
            disk.test.flush_faults.store(1000, Ordering::Relaxed);
            assert!(!flush(&io, &disk).await);
            disk.test.write_faults.store(1000, Ordering::Relaxed);
            match seed % 2 {
                0 => assert!(!zero(&io, &disk, 4096, 65_536).await),
                _ => assert!(!discard(&io, &disk, 4096, 65_536).await),
            }
            disk.test.write_faults.store(0, Ordering::Relaxed);
            if seed % 4 < 2 {
                fail_two_flushes(&io, &disk).await;
            }
            disk.test.flush_faults.store(0, Ordering::Relaxed);
            must_recover(&io, &disk, 0, &[7; 2 * 65_536]).await;
        });
    }
}

#[test]
fn zeroes_that_a_store_lost_are_read_as_zeroes() {
    for seed in 0..16 {
        play(4 * MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 2 * MIB, 7).await);
            assert!(flush(&io, &disk).await);
            assert!(zero(&io, &disk, 4096, MIB).await);
            disk.test.lose();
            disk.test.evict();
            let all = read(&io, &disk, 0, 2 * MIB).await;
            for (page, bytes) in all.chunks(4096).enumerate() {
                let byte = if (1..=256).contains(&page) { 0 } else { 7 };
                assert!(bytes.iter().all(|is| *is == byte), "page {page}");
            }
            assert_eq!(read(&io, &disk, 8192 + 512, 1024).await, [0; 1024]);
        });
    }
}

/// A read of data that the store has lost, and that goes around the cache since a sector next to it
/// cannot be read.
#[test]
fn reads_around_the_cache_return_what_a_store_lost() {
    for seed in 0..64 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            assert!(flush(&io, &disk).await);
            assert!(zero(&io, &disk, 4096, 4096).await);
            assert!(write(&io, &disk, 12_288, 4096, 9).await);
            disk.test.flush_faults.store(1000, Ordering::Relaxed);
            assert!(!flush(&io, &disk).await);
            disk.test.evict();
            disk.cached.pages().invalidate(32_768, 4096);
            disk.test.read_faults.store(500, Ordering::Relaxed);
            let buf = io.pool().take(65_536 - 512).await;
            let (result, buf) = disk.cached.read(&io, buf, 512).await;
            if result.is_ok() {
                assert!(buf[3584..7680] == [0; 4096], "zeroes");
                assert!(buf[11_776..15_872] == [9; 4096], "data");
            }
        });
    }
}

/// A flush is in flight while a zero request fails: the flush does not make the page's content
/// stable.
#[test]
fn a_flush_does_not_cover_a_page_that_is_in_doubt() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            disk.test.hang_only(&[Operation::Flush]);
            let (late, other) = (io.clone(), disk.clone());
            let flushing = io.spawn(async move { flush(&late, &other).await });
            while disk.test.hanging() == 0 {
                io.sleep(std::time::Duration::from_millis(1)).await;
            }
            disk.test.write_faults.store(1000, Ordering::Relaxed);
            assert!(!zero(&io, &disk, 0, 65_536).await);
            disk.test.write_faults.store(0, Ordering::Relaxed);
            disk.test.release();
            assert!(flushing.await);
            must_recover(&io, &disk, 0, &[7; 65_536]).await;
        });
    }
}

#[test]
fn a_write_waits_for_zeroes_in_flight_of_its_page() {
    for seed in 0..16 {
        play(MIB, seed, |io, disk| async move {
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            disk.test.hang_only(&[Operation::WriteZeroes]);
            let (late, other) = (io.clone(), disk.clone());
            let zeroing = io.spawn(async move { zero(&late, &other, 0, 65_536).await });
            while disk.test.hanging() == 0 {
                io.sleep(std::time::Duration::from_millis(1)).await;
            }
            let (late, other) = (io.clone(), disk.clone());
            let writing = io.spawn(async move { write(&late, &other, 4096 + 512, 512, 9).await });
            for _ in 0..10 {
                io.yield_now().await;
            }
            disk.test.release();
            assert!(zeroing.await && writing.await);
            fail_two_flushes(&io, &disk).await;
            let mut expected = vec![0; 65_536];
            expected[4608..5120].fill(9);
            must_recover(&io, &disk, 0, &expected).await;
        });
    }
}

/// What a sector may hold.
#[derive(Clone, Debug)]
enum Held {
    Any,
    One(BTreeSet<u8>),
}

impl Held {
    fn permits(&self, bytes: &[u8]) -> bool {
        match self {
            Held::Any => true,
            Held::One(some) => {
                bytes.iter().all(|byte| *byte == bytes[0]) && some.contains(&bytes[0])
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Write { byte: u8, fua: bool },
    Zero,
    Discard,
    Read,
    Flush,
}

impl Request {
    fn of(random: &mut Random) -> Request {
        let byte = 1 + u8::try_from(random.below(255)).unwrap();
        match random.below(20) {
            0..8 => Request::Write { byte, fua: random.chance(100, 1000) },
            8..13 => Request::Zero,
            13..15 => Request::Discard,
            15..18 => Request::Read,
            _ => Request::Flush,
        }
    }
}

async fn carry_out(io: Io, disk: Disk, request: Request, range: Range<u64>) -> Option<Vec<u8>> {
    let (offset, length) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
    let done = match request {
        Request::Read => return Some(read(&io, &disk, offset, length).await),
        Request::Write { byte, fua } => {
            let mut buf = io.pool().take(index(length)).await;
            buf.fill(byte);
            disk.cached.write(&io, buf, offset, fua).await.0.is_ok()
        }
        Request::Zero => zero(&io, &disk, offset, length).await,
        Request::Discard => discard(&io, &disk, offset, length).await,
        Request::Flush => flush(&io, &disk).await,
    };
    done.then(Vec::new)
}

/// Several requests at a time, for different sectors that share pages, on a disk whose requests and
/// flushes fail.
async fn random_run(io: Io, disk: Disk, seed: u64) {
    let mut random = Random::new(seed);
    let sectors = disk.cached.size() / SECTOR;
    let mut held = vec![Held::One(BTreeSet::from([0])); index(sectors)];
    disk.test.waits.store(3, Ordering::Relaxed);
    for _ in 0..60 {
        disk.test
            .flush_faults
            .store(if random.chance(400, 1000) { 700 } else { 0 }, Ordering::Relaxed);
        disk.test
            .write_faults
            .store(if random.chance(200, 1000) { 400 } else { 0 }, Ordering::Relaxed);
        let (mut taken, mut tasks) = (Vec::<Range<u64>>::new(), Vec::new());
        for _ in 0..1 + random.below(6) {
            let request = Request::of(&mut random);
            let most = if random.chance(800, 1000) { 24 } else { sectors };
            let first = random.below(sectors);
            let range = first..sectors.min(first + 1 + random.below(most));
            let is_change = !matches!(request, Request::Flush);
            if is_change && taken.iter().any(|r| r.start < range.end && range.start < r.end) {
                continue;
            }
            if is_change {
                taken.push(range.clone());
            }
            let task = io.spawn(carry_out(io.clone(), disk.clone(), request, range.clone()));
            tasks.push((request, range, task));
        }
        // What a flush of this round may leave.
        let mut later = held.clone();
        let mut is_flushed = false;
        for (request, range, task) in tasks {
            let result = task.await;
            for sector in range {
                let (now, after) = (&mut held[index(sector)], &mut later[index(sector)]);
                let value = match request {
                    Request::Read => {
                        let (data, at) = (result.as_ref().unwrap(), index(sector));
                        let first = taken.iter().find(|r| r.contains(&sector)).unwrap().start;
                        let at = (at - index(first)) * 512;
                        let bytes = &data[at..at + 512];
                        assert!(now.permits(bytes), "sector {sector}: {} {now:?}", bytes[0]);
                        continue;
                    }
                    Request::Flush => {
                        is_flushed |= result.is_some();
                        break;
                    }
                    Request::Discard => {
                        (*now, *after) = (Held::Any, Held::Any);
                        continue;
                    }
                    Request::Write { byte, .. } => byte,
                    Request::Zero => 0,
                };
                if let Held::One(some) = after {
                    some.insert(value);
                }
                match now {
                    Held::One(some) if result.is_none() => drop(some.insert(value)),
                    Held::Any if result.is_none() => {}
                    _ => *now = Held::One(BTreeSet::from([value])),
                }
            }
        }
        if is_flushed {
            must_be_stable(&disk, &later);
        }
        if random.chance(200, 1000) {
            disk.test.evict();
        }
        if random.chance(100, 1000) {
            disk.test.flush_faults.store(0, Ordering::Relaxed);
            disk.test.write_faults.store(0, Ordering::Relaxed);
            // The first one reports writes that failed in between.
            assert!(flush(&io, &disk).await || flush(&io, &disk).await, "the loss is permanent");
            must_be_stable(&disk, &held);
            must_be_stable(&disk, &held);
            disk.test.evict();
        }
    }
}

fn must_be_stable(disk: &Disk, held: &[Held]) {
    for (sector, (bytes, held)) in disk.test.stable_bytes().chunks(512).zip(held).enumerate() {
        assert!(held.permits(bytes), "stable sector {sector}: {} {held:?}", bytes[0]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_loss_is_permanent_and_no_older_data_is_stable(seed in any::<u64>(), odd in 0_u64..8) {
        play(4 * 65_536 + odd * SECTOR, seed, move |io, disk| random_run(io, disk, seed));
    }
}

/// Without writeback nothing can be written again, and a server reports the loss once.
#[test]
fn data_that_a_store_lost_is_not_read_from_a_writethrough_cache() {
    for seed in 0..16 {
        let rig = Rig::new(16 * MIB);
        let worker = Worker::start("parts", &rig.memory).unwrap();
        let disk = rig.volume("disk", MIB, seed);
        let done = worker.handle().block_on(move |io| async move {
            disk.test.report_once();
            assert!(write(&io, &disk, 0, 65_536, 7).await);
            assert!(flush(&io, &disk).await);
            assert!(write(&io, &disk, 0, 65_536, 8).await);
            disk.test.lose();
            disk.test.evict();
            assert!(!flush(&io, &disk).await);
            let mut truth = vec![0; 65_536];
            disk.test.look(0, &mut truth);
            assert!(read(&io, &disk, 0, 65_536).await == truth, "the cache has other data");
            assert!(write(&io, &disk, 0, 65_536, 9).await && flush(&io, &disk).await);
            assert!(read(&io, &disk, 0, 65_536).await == [9; 65_536]);
        });
        assert!(done.is_some(), "the run with seed {seed} panicked; see above");
    }
}

/// As `play`, with a store that is resized. Nothing writes back in the background.
fn play_resized<Fut: Future<Output = ()> + 'static>(
    size: u64,
    seed: u64,
    act: impl FnOnce(Io, CachedStore, Arc<TestStore>) -> Fut + Send + 'static,
) {
    let rig = Rig::new(16 * MIB);
    let worker = Worker::start("parts", &rig.memory).unwrap();
    let test = Arc::new(TestStore::new(size, seed));
    let store = Store::Test(test.clone());
    let store = CachedStore::new(&rig.cache, "disk", store, Mode::Writeback).unwrap();
    let done = worker.handle().block_on(move |io| async move {
        store.cache().unwrap().set_control(Arc::new(FixedLimit::default()));
        store.flush(&io).await.unwrap();
        act(io, store, test).await;
    });
    assert!(done.is_some(), "the run with seed {seed} panicked; see above");
}

/// Fills a range with data, or zeroes it, so that it is on the store and not stable.
async fn leave_unstable(io: &Io, store: &CachedStore, test: &TestStore, fill: (u64, u64, u8)) {
    let (offset, length, byte) = fill;
    if byte == 0 {
        store.write_zeroes(io, offset, length, ZeroFlags::default()).await.unwrap();
    } else {
        let mut buf = io.pool().take(index(length)).await;
        buf.fill(byte);
        store.write(io, buf, offset, false).await.0.unwrap();
    }
    test.flush_faults.store(1000, Ordering::Relaxed);
    store.flush(io).await.unwrap_err();
    test.evict();
}

/// The sizes that a volume of 1 MiB and 1536 bytes gets, within a page and at the end of one.
const SIZES: [u64; 4] = [2 * MIB, MIB + 512, MIB, MIB / 2];

#[test]
fn a_resize_whose_flush_fails_changes_nothing() {
    for (seed, byte) in (0..16).zip([7, 0].into_iter().cycle()) {
        for to in [2 * MIB, MIB + 512] {
            play_resized(MIB + 1536, seed, move |io, store, test| async move {
                test.change(0, &vec![3; index(MIB + 1536)]);
                let fill = (MIB - 8192, 8192 + 1536, byte);
                leave_unstable(&io, &store, &test, fill).await;
                let order = Resize { to: Some(to), shrink: true };
                assert!(store.resize(&io, order).await.is_err(), "its flush failed");
                assert_eq!((store.size(), store.cache().unwrap().size()), (MIB + 1536, MIB + 1536));
                test.flush_faults.store(0, Ordering::Relaxed);
                test.evict();
                store.flush(&io).await.expect("the loss is permanent");
                let stable = test.stable_bytes();
                assert!(stable[index(MIB - 8192)..].iter().all(|is| *is == byte));
                assert_eq!(store.resize(&io, order).await.unwrap(), to);
            });
        }
    }
}

#[test]
fn a_loss_after_a_resize_is_repaired() {
    for (seed, byte) in (0..8).zip([7, 0].into_iter().cycle()) {
        for to in SIZES {
            play_resized(MIB + 1536, seed, move |io, store, test| async move {
                test.change(0, &vec![3; index(MIB + 1536)]);
                let start = MIB / 2 - 8192;
                let fill = (start, MIB + 1536 - start, byte);
                leave_unstable(&io, &store, &test, fill).await;
                // The disk is well while it is resized.
                test.flush_faults.store(0, Ordering::Relaxed);
                let order = Resize { to: Some(to), shrink: true };
                assert_eq!(store.resize(&io, order).await.unwrap(), to);
                test.flush_faults.store(1000, Ordering::Relaxed);
                for _ in 0..2 {
                    store.flush(&io).await.unwrap_err();
                    test.evict();
                }
                test.flush_faults.store(0, Ordering::Relaxed);
                store.flush(&io).await.expect("the loss is permanent");
                let range = index(start)..index(to.min(MIB + 1536));
                assert!(test.stable_bytes()[range].iter().all(|is| *is == byte), "to {to}");
                // What was added reads as the store has it.
                let more = to.saturating_sub(MIB + 1536);
                if more > 0 {
                    let added = common::read(&io, &store, MIB + 1536, more).await;
                    assert!(added.iter().all(|is| *is == 0));
                }
            });
        }
    }
}
