//! A power failure at any of twelve thousand points of a run under load: data that was acknowledged and
//! flushed survives, and no sector is torn.
//!
//! The store records its requests in order. At a point of that record it may have kept any subset, sector by
//! sector, of what no flush covers; a sector holds the last of its kept writes. The writers record when they
//! submitted each write, and when its stability was acknowledged.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Disk, Random, Rig};
use ebb_block::ZeroFlags;
use ebb_cache::{Mode, WritebackControl, WritebackOrder};
use ebb_io::{Io, Worker};
use ebb_store::Record;

const SECTOR: usize = 512;
const SECTORS: usize = 2048;
const RUNS: u64 = 4;
const POINTS: usize = 3000;
/// Writers, each in a part of its own, so that no two write one sector at once; parts share pages.
const WRITERS: usize = 8;
const PART: usize = SECTORS / WRITERS;
/// Requests of each writer.
const REQUESTS: usize = 600;

/// One value written to a sector.
#[derive(Clone, Copy, Debug)]
struct Value {
    stamp: u64,
    /// The length of the record when it was submitted, and when it was acknowledged as stable.
    submitted: usize,
    promised: usize,
    acknowledged: bool,
}

/// The values written to each sector, in order; the first is its initial value.
struct History {
    sectors: Vec<Vec<Value>>,
    stamp: u64,
}

impl History {
    fn new() -> History {
        let begin = Value { stamp: 0, submitted: 0, promised: 0, acknowledged: true };
        History { sectors: vec![vec![begin]; SECTORS], stamp: 0 }
    }

    fn submit(&mut self, sectors: std::ops::Range<usize>, zero: bool, at: usize) -> u64 {
        self.stamp += u64::from(!zero);
        let stamp = if zero { 0 } else { self.stamp };
        for sector in sectors {
            let value = Value { stamp, submitted: at, promised: usize::MAX, acknowledged: false };
            self.sectors[sector].push(value);
        }
        stamp
    }

    /// The last request to these sectors succeeded.
    fn acknowledge(&mut self, sectors: std::ops::Range<usize>) {
        for values in &mut self.sectors[sectors] {
            values.last_mut().unwrap().acknowledged = true;
        }
    }

    /// The lengths of the histories of a part, up to the values acknowledged by now.
    fn lengths(&self, part: std::ops::Range<usize>) -> Vec<usize> {
        let length =
            |values: &Vec<Value>| values.iter().rposition(|value| value.acknowledged).unwrap() + 1;
        self.sectors[part].iter().map(length).collect()
    }

    /// The values up to these lengths are stable as of `at`.
    fn promise(&mut self, part: std::ops::Range<usize>, lengths: &[usize], at: usize) {
        for (sector, &length) in part.zip(lengths) {
            let value = &mut self.sectors[sector][length - 1];
            value.promised = value.promised.min(at);
        }
    }
}

/// Writes back some dirty data from time to time.
struct Whim;

impl WritebackControl for Whim {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        Duration::ZERO
    }
    fn next(&self, now: Instant, dirty: u64, age: Duration) -> WritebackOrder {
        match (dirty / 4096
            + u64::from(age.subsec_nanos())
            + u64::from(now.elapsed().subsec_nanos()))
            % 3
        {
            0 => WritebackOrder::Wait(Duration::from_micros(200)),
            1 => WritebackOrder::Write(16 << 10),
            _ => WritebackOrder::Write(256 << 10),
        }
    }
}

/// Flushes fail in every second run.
fn lossy(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

async fn writer(io: Io, disk: Disk, history: Rc<RefCell<History>>, number: usize, seed: u64) {
    let mut random = Random::new(seed * 64 + number as u64 + 1);
    let part = number * PART..(number + 1) * PART;
    let below = |random: &mut Random, end: usize| {
        usize::try_from(random.below(u64::try_from(end).unwrap())).unwrap()
    };
    for _ in 0..REQUESTS {
        let at = || disk.test.recorded();
        let kind = random.below(100);
        if kind < 12 {
            let lengths = history.borrow().lengths(part.clone());
            if disk.cached.flush(&io).await.is_ok() {
                history.borrow_mut().promise(part.clone(), &lengths, at());
            }
            continue;
        }
        let most = if random.chance(800, 1000) { 16 } else { PART };
        let count = 1 + below(&mut random, most);
        let first = part.start + below(&mut random, PART - count.min(PART) + 1);
        let sectors = first..first + count.min(PART);
        let (offset, length) = ((first * SECTOR) as u64, sectors.len() * SECTOR);
        // Zeroes bypass memory and cannot be written again when a flush fails.
        let zero = kind < 16 && !lossy(seed);
        let stamp = history.borrow_mut().submit(sectors.clone(), zero, at());
        let fua = kind < 30;
        let done = if zero {
            let flags = ZeroFlags::default();
            let zeroes = disk.cached.write_zeroes(&io, offset, length as u64, flags);
            zeroes.await.is_ok()
        } else {
            let mut buf = io.pool().take(length).await;
            buf.chunks_mut(8).for_each(|word| word.copy_from_slice(&stamp.to_le_bytes()));
            disk.cached.write(&io, buf, offset, fua).await.0.is_ok()
        };
        if done {
            history.borrow_mut().acknowledge(sectors.clone());
        }
        if done && fua && !zero {
            let lengths = history.borrow().lengths(sectors.clone());
            history.borrow_mut().promise(sectors, &lengths, at());
        }
        if random.chance(100, 1000) {
            io.sleep(Duration::from_micros(random.below(400))).await;
        }
    }
}

/// The stamp a sector holds; a torn sector is an error.
fn stamp_of(bytes: &[u8]) -> u64 {
    let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|word| word == stamp.to_le_bytes()), "a torn sector");
    stamp
}

/// What each sector may hold after a crash: the last stable value, and later ones.
struct Remains {
    values: Vec<Vec<(usize, u64)>>,
}

impl Remains {
    fn take(&mut self, number: usize, record: &Record) {
        match record {
            Record::Write { offset, data, fua } => {
                let first = usize::try_from(*offset).unwrap() / SECTOR;
                for (sector, bytes) in (first..).zip(data.chunks(SECTOR)) {
                    if *fua {
                        self.values[sector].clear();
                    }
                    self.values[sector].push((number, stamp_of(bytes)));
                }
            }
            Record::Left { offset, data } => {
                let first = usize::try_from(*offset).unwrap() / SECTOR;
                for (sector, bytes) in (first..).zip(data.chunks(SECTOR)) {
                    self.values[sector] = vec![(number, stamp_of(bytes))];
                }
            }
            Record::Flush { covers } => {
                for values in &mut self.values {
                    let last = values.iter().rposition(|(number, _)| number < covers);
                    values.drain(..last.unwrap_or(0));
                }
            }
        }
    }
}

fn judge(history: &History, record: &[Record], seed: u64) -> u64 {
    let mut random = Random::new(seed + 77);
    let end = u64::try_from(record.len()).unwrap() + 1;
    let mut points: Vec<usize> =
        (0..POINTS).map(|_| usize::try_from(random.below(end)).unwrap()).collect();
    points.sort_unstable();
    let mut remains = Remains { values: vec![vec![(0, 0)]; SECTORS] };
    let (mut at, mut promised) = (0, 0);
    for point in points {
        while at < point {
            remains.take(at, &record[at]);
            at += 1;
        }
        for (sector, values) in remains.values.iter().enumerate() {
            let found = values[usize::try_from(random.below(values.len() as u64)).unwrap()].1;
            let given = &history.sectors[sector];
            // Acknowledged as stable before the crash: this value, or a newer one.
            let least = given.iter().rposition(|value| value.promised <= point).unwrap();
            promised += u64::from(least > 0);
            let fits = |value: &Value| value.stamp == found && value.submitted <= point;
            assert!(
                given[least..].iter().any(fits),
                "seed {seed}, after {point} of {}: sector {sector} holds {found}, was promised {:?}",
                record.len(),
                given[least],
            );
        }
    }
    promised
}

#[test]
fn flushed_data_survives_a_crash_at_any_point() {
    let mut promised = 0;
    for seed in 1..=RUNS {
        let rig = Arc::new(Rig::new(16 << 20));
        let worker = Worker::start("crash", &rig.memory).unwrap();
        let disk = rig.volume_as("disk", (SECTORS * SECTOR) as u64, seed, Mode::Writeback);
        let run = disk.clone();
        let result = worker.handle().block_on(move |io| async move {
            run.test.start_record();
            run.test.waits.store(6, Ordering::Relaxed);
            run.test.write_faults.store(15, Ordering::Relaxed);
            if lossy(seed) {
                // Each crash loses any subset of what was not flushed.
                run.test.flush_faults.store(100, Ordering::Relaxed);
            }
            run.cached.set_control(Arc::new(Whim));
            io.spawn(run.cached.clone().run_flusher(io.clone())).detach();
            let history = Rc::new(RefCell::new(History::new()));
            let writers: Vec<_> = (0..WRITERS)
                .map(|number| {
                    io.spawn(writer(io.clone(), run.clone(), history.clone(), number, seed))
                })
                .collect();
            for writer in writers {
                writer.await;
            }
            run.cached.end_flusher();
            let record = run.test.take_record();
            let history = history.replace(History::new());
            (history.sectors, record)
        });
        let (sectors, record) = result.expect("the run panicked; see above");
        let flushes = record.iter().filter(|r| matches!(r, Record::Flush { .. })).count();
        assert!(flushes > 200 && record.len() > 2 * flushes, "{flushes} of {}", record.len());
        assert_eq!(disk.test.losses.load(Ordering::Relaxed) > 10, lossy(seed));
        promised += judge(&History { sectors, stamp: 0 }, &record, seed);
    }
    // The test is meaningless if nothing was acknowledged as stable.
    assert!(promised > 1_000_000, "only {promised} sectors were acknowledged as stable");
    println!("{} points, {promised} promises kept", u64::try_from(POINTS).unwrap() * RUNS);
}
