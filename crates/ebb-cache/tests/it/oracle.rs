//! The cache against a byte array: a million operations on a slow store with faults, several at a time, under
//! pressure, and with a kernel that discards lent pages.
//!
//! A run is a sequence of rounds. The requests of a round are in flight together: writes do not
//! overlap each other by a byte (they often share pages), reads overlap anything. A sector that was
//! read while it was being written is the old or the new one. After a failed write the content of
//! the store is the reference; with writeback its sectors may hold either data until they are
//! replaced.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Disk, MIB, Random, Rig};
use ebb_block::ZeroFlags;
use ebb_cache::{Mode, Reclaimer};
use ebb_io::{Io, Worker};
use ebb_mem::pressure::Level;

const SECTOR: u64 = 512;
const PAGE: u64 = 4096;
/// Rounds of one run: all runs together make more than a million requests.
const ROUNDS: usize = 6_600;
/// Requests of a round.
const AT_ONCE: usize = 16;

#[derive(Clone, Debug)]
enum Request {
    Read { offset: u64, length: u64 },
    Write { offset: u64, length: u64, mark: u8, fua: bool },
    Zero { offset: u64, length: u64 },
    Discard { offset: u64, length: u64 },
    Flush,
    Prefetch { offset: u64, length: u64 },
}

impl Request {
    /// The range that it changes.
    fn changes(&self) -> Option<(u64, u64)> {
        match *self {
            Request::Write { offset, length, .. }
            | Request::Zero { offset, length }
            | Request::Discard { offset, length } => Some((offset, length)),
            _ => None,
        }
    }

    /// The part of that range whose data changes if the request succeeds: a volume with writeback
    /// discards whole pages only.
    fn replaces(&self, disk: &Disk) -> Option<(u64, u64)> {
        let (offset, length) = self.changes()?;
        if !matches!(self, Request::Discard { .. }) || disk.cached.mode() != Mode::Writeback {
            return Some((offset, length));
        }
        let end = offset + length;
        let last = if end == disk.cached.size() { end } else { end / PAGE * PAGE };
        let first = offset.next_multiple_of(PAGE);
        (first < last).then(|| (first, last - first))
    }
}

/// The result of a request: its data, or an error.
type Outcome = Result<Option<Vec<u8>>, ()>;

fn pattern(mark: u8, offset: u64, length: u64) -> Vec<u8> {
    let mut data = vec![0; usize::try_from(length).unwrap()];
    for (sector, bytes) in (offset / SECTOR..).zip(data.chunks_mut(512)) {
        bytes.fill(mark ^ u8::try_from(sector % 251).unwrap());
    }
    data
}

fn range(random: &mut Random, size: u64) -> (u64, u64) {
    let most = match random.below(200) {
        0..150 => 16,
        150..195 => 100,
        195..199 => 600,
        _ => 3000,
    };
    // Mostly within one part, so that there are hits.
    let sectors = if random.chance(700, 1000) { size / SECTOR / 4 } else { size / SECTOR };
    let mut length = 1 + random.below(most);
    let mut sector = random.below(sectors);
    if random.chance(600, 1000) {
        (length, sector) = (length.next_multiple_of(8), sector / 8 * 8);
    }
    let length = length.min(size / SECTOR - sector);
    (sector * SECTOR, length * SECTOR)
}

fn request(random: &mut Random, size: u64, taken: &mut Vec<(u64, u64)>) -> Request {
    let (offset, length) = range(random, size);
    let request = match random.below(100) {
        0..62 => Request::Read { offset, length },
        62..88 => {
            let mark = u8::try_from(random.below(256)).unwrap();
            Request::Write { offset, length, mark, fua: random.chance(100, 1000) }
        }
        88..92 => Request::Zero { offset, length },
        92..95 => Request::Discard { offset, length },
        95..97 => Request::Flush,
        _ => Request::Prefetch { offset, length },
    };
    if let Some((offset, length)) = request.changes() {
        if taken.iter().any(|&(start, end)| offset < end && start < offset + length) {
            return Request::Read { offset, length };
        }
        taken.push((offset, offset + length));
    }
    request
}

async fn carry_out(io: Io, disk: Disk, request: Request) -> Outcome {
    let cached = &disk.cached;
    match request {
        Request::Read { offset, length } => {
            let mut buf = io.pool().take(usize::try_from(length).unwrap()).await;
            buf.fill(0xee);
            if cached.read_cached(&io, &mut buf, offset) {
                return Ok(Some(buf.to_vec()));
            }
            let (result, buf) = cached.read(&io, buf, offset).await;
            result.map(|()| Some(buf.to_vec())).map_err(drop)
        }
        Request::Write { offset, length, mark, fua } => {
            let mut buf = io.pool().take(usize::try_from(length).unwrap()).await;
            buf.copy_from_slice(&pattern(mark, offset, length));
            cached.write(&io, buf, offset, fua).await.0.map(|()| None).map_err(drop)
        }
        Request::Zero { offset, length } => {
            let zeroed = cached.write_zeroes(&io, offset, length, ZeroFlags::default());
            zeroed.await.map(|()| None).map_err(drop)
        }
        Request::Discard { offset, length } => {
            cached.discard(&io, offset, length).await.map(|()| None).map_err(drop)
        }
        Request::Flush => cached.flush(&io).await.map(|()| None).map_err(drop),
        Request::Prefetch { offset, length } => {
            cached.prefetch(&io, offset, length).await.map(|()| None).map_err(drop)
        }
    }
}

/// The byte array, and the check of the last round's requests and results against it.
struct Oracle {
    bytes: Vec<u8>,
    /// Sectors of failed writes that nothing has replaced since, with what else they may hold: the
    /// data of the failed write, or the data of before.
    unsure: HashMap<usize, Vec<Vec<u8>>>,
}

fn span(offset: u64, length: u64) -> std::ops::Range<usize> {
    usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap()
}

impl Oracle {
    /// Notes how a change of a range has ended, whose data was `old`.
    fn note(&mut self, request: &Request, is_ok: bool, (range, old): &(Range<usize>, Vec<u8>)) {
        for (number, old) in old.chunks(512).enumerate() {
            let at = range.start + number * 512;
            if is_ok {
                self.unsure.remove(&at);
                continue;
            }
            let new = match request {
                Request::Write { mark, .. } => pattern(*mark, at as u64, SECTOR),
                _ => vec![0; 512],
            };
            self.unsure.entry(at).or_default().extend([old.to_vec(), new]);
        }
    }

    fn may_hold(&self, at: usize, sector: &[u8]) -> bool {
        self.unsure.get(&at).is_some_and(|all| all.iter().any(|data| data == sector))
    }

    /// Checks the store after a flush that succeeded.
    fn is_stable(&self, content: &[u8]) -> bool {
        let sectors = self.bytes.chunks(512).zip(content.chunks(512)).enumerate();
        sectors
            .into_iter()
            .all(|(number, (have, stable))| have == stable || self.may_hold(number * 512, stable))
    }

    async fn judge(&mut self, io: &Io, disk: &Disk, round: &[(Request, Outcome)]) {
        // Reads of this round may have met what its changes replace.
        let unsure = self.unsure.clone();
        let was_unsure = |at: usize, sector: &[u8]| {
            unsure.get(&at).is_some_and(|all| all.iter().any(|data| data == sector))
        };
        // The previous content of the changed ranges.
        let mut old = Vec::new();
        for (request, outcome) in round {
            let Some((offset, length)) = request.replaces(disk) else { continue };
            let range = span(offset, length);
            let before = (range.clone(), self.bytes[range.clone()].to_vec());
            if disk.cached.mode() == Mode::Writeback {
                self.note(request, outcome.is_ok(), &before);
            }
            old.push(before);
            match (request, outcome) {
                (Request::Write { mark, .. }, Ok(_)) => {
                    self.bytes[range].copy_from_slice(&pattern(*mark, offset, length));
                }
                (_, Ok(_)) => self.bytes[range].fill(0),
                // The content after a failed write: in writeback mode it may be the new data, which is kept.
                _ if disk.cached.mode() == Mode::Writeback => {
                    let data = loop {
                        let read = Request::Read { offset, length };
                        let read = carry_out(io.clone(), disk.clone(), read).await;
                        if let Ok(Some(data)) = read {
                            break data;
                        }
                    };
                    self.bytes[range].copy_from_slice(&data);
                }
                _ => disk.test.look(offset, &mut self.bytes[range]),
            }
        }
        for (request, outcome) in round {
            let (Request::Read { offset, length }, Ok(Some(data))) = (request, outcome) else {
                continue;
            };
            if *data == self.bytes[span(*offset, *length)] {
                continue;
            }
            for (number, sector) in data.chunks(512).enumerate() {
                let at = span(offset + number as u64 * SECTOR, SECTOR);
                let was = |(range, bytes): &(std::ops::Range<usize>, Vec<u8>)| {
                    range.contains(&at.start)
                        && bytes[at.start - range.start..at.end - range.start] == *sector
                };
                assert!(
                    *sector == self.bytes[at.clone()]
                        || self.may_hold(at.start, sector)
                        || was_unsure(at.start, sector)
                        || old.iter().any(was)
                        || round
                            .iter()
                            .any(|(request, _)| Self::may_show(request, at.start, sector)),
                    "sector {} of {request:?} is neither old nor new; round {round:?}",
                    at.start / 512,
                    round = round.iter().map(|(request, _)| request).collect::<Vec<_>>(),
                );
            }
        }
    }

    /// A failed write may have shown any of its data.
    fn may_show(change: &Request, at: usize, sector: &[u8]) -> bool {
        let Some((offset, length)) = change.changes() else { return false };
        span(offset, length).contains(&at)
            && match change {
                Request::Write { mark, .. } => pattern(*mark, at as u64, SECTOR) == sector,
                _ => sector.iter().all(|byte| *byte == 0),
            }
    }
}

/// Events of a round besides requests.
async fn disturb(
    rig: &Rig,
    reclaimer: &mut Reclaimer,
    disk: &Disk,
    random: &mut Random,
    clock: &mut Duration,
) {
    *clock += Duration::from_millis(random.below(150));
    let now = rig.start + *clock;
    match random.below(400) {
        0..4 => rig.cache.pressure(Level::L1, now),
        4..6 => rig.cache.pressure(Level::L2, now),
        6 => rig.cache.pressure(Level::L3, now),
        7..20 => rig.cache.pressure(Level::L0, now),
        20..40 if disk.cached.mode() != Mode::Writeback => {
            let (offset, length) = range(random, disk.cached.size());
            disk.cached.invalidate(offset, length);
        }
        42..46 => rig.cache.set_max(Some(MIB << random.below(5))),
        _ => {}
    }
    if random.chance(300, 1000) {
        reclaimer.run_once(&rig.cache, now);
    }
}

async fn flush(io: &Io, disk: &Disk) -> bool {
    disk.cached.flush(io).await.is_ok()
}

struct Run {
    seed: u64,
    rounds: usize,
    size: u64,
    max: u64,
    mode: Mode,
}

fn run(Run { seed, rounds, size, max, mode }: Run) -> ebb_cache::VolumeCacheStats {
    println!("seed {seed}");
    let rig = Arc::new(Rig::new(max));
    let worker = Worker::start("oracle", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", size, seed, mode);
    disk.cached.set_control(Arc::new(ebb_cache::FixedLimit::default()));
    disk.test.waits.store(2, Ordering::Relaxed);
    disk.test.read_faults.store(3, Ordering::Relaxed);
    disk.test.write_faults.store(10, Ordering::Relaxed);
    let (for_run, rig_run) = (disk.clone(), rig.clone());
    let done = worker.handle().block_on(move |io| async move {
        let (disk, rig) = (for_run, rig_run);
        let mut random = Random::new(seed);
        let mut reclaimer =
            Reclaimer::new(&rig.cache, Box::new(ebb_cache::pages_discarded_by_kernel));
        let bytes = vec![0; usize::try_from(size).unwrap()];
        let mut oracle = Oracle { bytes, unsure: HashMap::new() };
        let mut clock = Duration::ZERO;
        let started = std::time::Instant::now();
        let mapping = ebb_mem::testing::range(io.pool().memory());
        let flusher = (mode == Mode::Writeback)
            .then(|| io.spawn(disk.cached.clone().run_flusher(io.clone())));
        for round in 0..rounds {
            let mut taken = Vec::new();
            let mut tasks = Vec::new();
            for _ in 0..AT_ONCE {
                let request = request(&mut random, size, &mut taken);
                let task = io.spawn(carry_out(io.clone(), disk.clone(), request.clone()));
                tasks.push((request, task));
            }
            disturb(&rig, &mut reclaimer, &disk, &mut random, &mut clock).await;
            if round % 20 == 0 {
                rig.memory.settle();
                common::reclaim(mapping);
            }
            let mut results = Vec::new();
            for (request, task) in tasks {
                results.push((request, task.await));
            }
            oracle.judge(&io, &disk, &results).await;
            // From time to time: flushed data is on the store.
            if mode == Mode::Writeback && round % 50 == 49 && flush(&io, &disk).await {
                assert!(oracle.is_stable(&disk.test.content()), "round {round}");
            }
        }
        println!("{rounds} rounds in {:?}", started.elapsed());
        disk.test.write_faults.store(0, Ordering::Relaxed);
        // A failed write with FUA may have lost other writes: then no flush succeeds any more.
        while !flush(&io, &disk).await && !disk.store.is_lost() {}
        assert!(oracle.is_stable(&disk.test.content()), "the store's content differs");
        assert_eq!(disk.cached.stats().dirty, 0);
        flusher.into_iter().for_each(drop);
    });
    assert!(done.is_some(), "the run with seed {seed} panicked; see above");
    let stats = disk.cached.stats();
    println!("{stats:?}");
    stats
}

/// Runs of several seeds, two at a time.
fn run_all(seeds: std::ops::Range<u64>, mode: Mode, rounds: usize) {
    let next = std::sync::atomic::AtomicU64::new(seeds.start);
    let lost = std::sync::atomic::AtomicU64::new(0);
    let work = || loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= seeds.end {
            break;
        }
        // A volume of an odd number of sectors, sometimes larger than the cache may be.
        let size = (2 + seed % 8) * MIB + 512 * (seed % 7);
        let stats = run(Run { seed, rounds, size, max: 3 * MIB, mode });
        assert!(stats.hits > 0 && stats.misses > 0 && stats.evictions > 0);
        lost.fetch_add(stats.lost_hits + stats.reclaimed, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
    });
    let lost = lost.load(Ordering::Relaxed);
    assert!(lost > 0, "the kernel discarded no page, so that was not tested");
}

#[test]
fn reads_return_what_was_written() {
    run_all(1..9, Mode::Writethrough, ROUNDS);
}

/// The same with writes that are acknowledged from memory.
#[test]
fn reads_return_what_was_written_in_writeback_mode() {
    run_all(101..105, Mode::Writeback, ROUNDS / 2);
}

/// Writes that also overlap by bytes: the result depends on the store, and the cache agrees with it.
#[test]
fn after_overlapping_writes_the_cache_equals_the_store() {
    const SIZE: u64 = MIB / 4;
    let rig = Arc::new(Rig::new(MIB));
    let worker = Worker::start("oracle", &rig.memory).unwrap();
    let disk = rig.volume("disk", SIZE, 7);
    disk.test.waits.store(3, Ordering::Relaxed);
    let for_run = disk.clone();
    let done = worker.handle().block_on(move |io| async move {
        let mut random = Random::new(7);
        for round in 0..3000 {
            let mut tasks = Vec::new();
            for _ in 0..4 {
                let request = loop {
                    let request = request(&mut random, SIZE / 4, &mut Vec::new());
                    if !matches!(request, Request::Read { length, .. } if length > 4096) {
                        break request;
                    }
                };
                tasks.push(io.spawn(carry_out(io.clone(), for_run.clone(), request)));
            }
            for task in tasks {
                task.await.unwrap();
            }
            let length = SIZE / 4;
            let all = Request::Read { offset: 0, length };
            let data = carry_out(io.clone(), for_run.clone(), all).await.unwrap().unwrap();
            let mut truth = vec![0; data.len()];
            for_run.test.look(0, &mut truth);
            let wrong = data.iter().zip(&truth).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "round {round}");
        }
    });
    assert!(done.is_some(), "the run panicked; see above");
    assert!(disk.cached.stats().hits > 1000);
}
