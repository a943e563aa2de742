//! Several workers on one volume, a reclaimer thread, pressure, and a kernel that discards lent pages, all at
//! once. Each task owns some sectors, which share pages with those of other tasks, and knows their content.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Disk, MIB, Random};
use ebb_block::ZeroFlags;
use ebb_cache::{Cache, CacheOptions, FixedLimit, Mode, VolumeCacheStats};
use ebb_io::{Io, Worker};
use ebb_mem::Memory;
use ebb_mem::pressure::Level;
use ebb_store::{Store, TestStore};

const SECTOR: u64 = 512;
const SIZE: u64 = 4 * MIB;
const WORKERS: u64 = 3;
const OWNERS: u64 = 2 * WORKERS;
const OPERATIONS: u32 = 15_000;
const ROUNDS: usize = 20;

/// The owner of a sector: in the first half of the volume stripes of 1 KiB, in the second whole frames.
fn owner(sector: u64) -> u64 {
    if sector < SIZE / SECTOR / 2 { sector / 2 % OWNERS } else { sector / 128 % OWNERS }
}

/// A range of `owner`'s sectors: first sector and number.
fn own_range(random: &mut Random, owner: u64) -> (u64, u64) {
    let half = SIZE / SECTOR / 2;
    if random.chance(500, 1000) {
        let stripe = random.below(half / 2 / OWNERS) * OWNERS + owner;
        let first = random.below(2);
        return (stripe * 2 + first, 1 + random.below(2 - first));
    }
    let frames = half / 128;
    let frame = loop {
        let frame = frames + random.below(frames);
        if frame % OWNERS == owner {
            break frame;
        }
    };
    let mut first = random.below(128);
    let mut count = 1 + random.below(128 - first);
    if random.chance(500, 1000) {
        (first, count) = (first / 8 * 8, count.next_multiple_of(8).min(128 - first / 8 * 8));
    }
    (frame * 128 + first, count)
}

struct Task {
    io: Io,
    disk: Disk,
    owner: u64,
    random: Random,
    /// The content of the sectors that belong to this task.
    known: Vec<u8>,
}

fn bytes(sector: u64, count: u64) -> std::ops::Range<usize> {
    usize::try_from(sector * SECTOR).unwrap()..usize::try_from((sector + count) * SECTOR).unwrap()
}

impl Task {
    async fn run(mut self) {
        for number in 0..OPERATIONS {
            match self.random.below(20) {
                0..9 => self.change(number).await,
                9 if self.disk.cached.mode() == Mode::Writeback => {
                    // The flush may report a failure; the data is kept.
                    let _ = self.disk.cached.flush(&self.io).await;
                }
                9 if self.random.chance(200, 1000) => {
                    let offset = self.random.below(SIZE);
                    self.disk.cached.invalidate(offset, self.random.below(SIZE - offset));
                }
                _ => self.read().await,
            }
        }
    }

    async fn change(&mut self, number: u32) {
        let (sector, count) = own_range(&mut self.random, self.owner);
        let range = bytes(sector, count);
        let Disk { cached, test, .. } = &self.disk;
        let result = if self.random.chance(100, 1000) {
            let length = count * SECTOR;
            let flags = ZeroFlags::default();
            let result = cached.write_zeroes(&self.io, sector * SECTOR, length, flags).await;
            self.known[range.clone()].fill(0);
            result
        } else {
            let mut buf = self.io.pool().get_for_test(range.len());
            for (at, sector) in buf.chunks_mut(512).enumerate() {
                sector.fill(u8::try_from((u64::from(number) + at as u64) % 251).unwrap() + 1);
            }
            self.known[range.clone()].copy_from_slice(&buf);
            cached.write(&self.io, buf, sector * SECTOR, false).await.0
        };
        if result.is_err() && cached.mode() == Mode::Writethrough {
            test.look(sector * SECTOR, &mut self.known[range]);
        } else if result.is_err() {
            // In writeback mode the new data may have been kept: compare with what is read now.
            loop {
                let buf = self.io.pool().get_for_test(range.len());
                let read = cached.read(&self.io, buf, sector * SECTOR).await;
                if let (Ok(()), buf) = read {
                    break self.known[range].copy_from_slice(&buf);
                }
            }
        }
    }

    async fn read(&mut self) {
        let count = if self.random.chance(900, 1000) { 16 } else { 600 };
        let (sector, _) = own_range(&mut self.random, self.owner);
        let count = (1 + self.random.below(count)).min(SIZE / SECTOR - sector);
        let range = bytes(sector, count);
        let cached = &self.disk.cached;
        let mut buf = self.io.pool().get_for_test(range.len());
        if !cached.read_cached(&self.io, &mut buf, sector * SECTOR) {
            let (result, back) = cached.read(&self.io, buf, sector * SECTOR).await;
            buf = back;
            if result.is_err() {
                return;
            }
        }
        for at in 0..count {
            if owner(sector + at) == self.owner {
                let part = bytes(at, 1);
                let known = &self.known[bytes(sector + at, 1)];
                assert!(buf[part] == *known, "owner {}, sector {}", self.owner, sector + at);
            }
        }
    }
}

#[test]
fn tasks_on_several_workers_find_what_they_wrote() {
    until_all_was_met(11, Mode::Writethrough);
}

#[test]
fn tasks_on_several_workers_find_their_dirty_data() {
    until_all_was_met(12, Mode::Writeback);
}

/// Repeats until hits, discarded pages and evictions have all occurred, which depends on the machine, too.
fn until_all_was_met(seed: u64, mode: Mode) {
    let mut met = [0; 3];
    for seed in (seed..).step_by(100).take(ROUNDS) {
        let stats = run(seed, mode);
        let found = [stats.hits, stats.lost_hits + stats.reclaimed, stats.evictions];
        met.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
        if met.iter().all(|count| *count > 0) {
            return;
        }
    }
    panic!("hits, discarded pages and evictions in {ROUNDS} rounds: {met:?}");
}

fn run(seed: u64, mode: Mode) -> VolumeCacheStats {
    println!("seed {seed}, {mode}");
    let now = Instant::now();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(256 << 20, now)).unwrap();
    let mut options = CacheOptions::new(now);
    options.max_bytes = Some(3 * MIB);
    let cache = Cache::start(&memory, options).unwrap();
    let test = Arc::new(TestStore::new(SIZE, seed));
    test.waits.store(2, Ordering::Relaxed);
    test.read_faults.store(2, Ordering::Relaxed);
    test.write_faults.store(5, Ordering::Relaxed);
    let store = Arc::new(Store::Test(test.clone()));
    let cached = cache.volume("disk", &store, mode).unwrap();
    let disk = Disk { store, test, cached };
    let workers: Vec<Worker> =
        (0..WORKERS).map(|n| Worker::start(&format!("worker-{n}"), &memory).unwrap()).collect();
    if mode == Mode::Writeback {
        let age_max = Duration::from_millis(5);
        let control = FixedLimit { age_max, ..FixedLimit::default() };
        disk.cached.set_control(Arc::new(control));
        // Two flushers, more than the daemon ever runs, so that they contend.
        for worker in &workers[..2] {
            let cached = disk.cached.clone();
            worker.handle().spawn(move |io| cached.run_flusher(io));
        }
    }
    let ended = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..OWNERS)
        .map(|owner| {
            let handle = workers[usize::try_from(owner % WORKERS).unwrap()].handle();
            let disk = disk.clone();
            std::thread::spawn(move || {
                handle.block_on(move |io| {
                    let known = vec![0; usize::try_from(SIZE).unwrap()];
                    let random = Random::new(seed * 100 + owner);
                    Task { io, disk, owner, random, known }.run()
                })
            })
        })
        .collect();
    let disturber = {
        let (cache, memory, ended) = (cache.clone(), memory.clone(), ended.clone());
        let mapping = workers[0]
            .handle()
            .block_on(|io| async move { ebb_mem::testing::range(io.pool().memory()) });
        std::thread::spawn(move || {
            let mut random = Random::new(seed);
            while !ended.load(Ordering::Relaxed) {
                let level = match random.below(40) {
                    0..6 => Some(Level::L1),
                    6..8 => Some(Level::L2),
                    8 => Some(Level::L3),
                    9..20 => Some(Level::L0),
                    _ => None,
                };
                // As if more time had passed, so that the limit grows again.
                let ahead = Duration::from_secs(random.below(100));
                level.into_iter().for_each(|level| cache.pressure(level, now + ahead));
                memory.settle();
                common::reclaim(mapping.unwrap());
            }
        })
    };
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    ended.store(true, Ordering::Relaxed);
    disturber.join().unwrap();
    assert!(results.iter().all(Option::is_some), "a task panicked; see above");
    if mode == Mode::Writeback {
        // Only the content is checked below: an injected fault would be reported without meaning.
        disk.test.write_faults.store(0, Ordering::Relaxed);
        disk.test.read_faults.store(0, Ordering::Relaxed);
        let cached = disk.cached.clone();
        let flushed = workers[2].handle().block_on(move |io| async move {
            while cached.flush(&io).await.is_err() {}
            let mut buf = io.pool().get_for_test(usize::try_from(SIZE).unwrap());
            for at in (0..SIZE).step_by(65536) {
                let part = io.pool().get_for_test(65536);
                let (result, part) = cached.read(&io, part, at).await;
                result.unwrap();
                let range = bytes(at / SECTOR, 128);
                buf[range].copy_from_slice(&part);
            }
            buf.to_vec()
        });
        assert!(flushed.unwrap() == disk.test.content(), "the store's content differs");
        assert_eq!(disk.cached.dirty(), 0);
    }
    let stats = disk.cached.stats();
    println!("{stats:?}");
    stats
}
