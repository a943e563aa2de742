//! Flushes after failed flushes: random runs on a store that, when a flush fails, loses any subset of the data
//! that was not flushed, and reports that once. Data that a successful flush covered is stable and survives a
//! power failure: without a cache, and with one in writethrough and in writeback mode.
//!
//! Writers run concurrently, each in sectors of its own, which share pages. Of each sector a run records the
//! values that were written to it, in order, and which of them was last covered by a successful flush: that
//! one or a later one must be there.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_block::Resize;
use ebb_cache::{Cache, CacheOptions, CachedStore, Reclaimer, WritebackControl, WritebackOrder};
use ebb_io::Worker;
use ebb_mem::Memory;
use ebb_mem::pressure::Level;
use ebb_store::{Faults, Store, TestStore};
use ebb_volume::{ErrorKind, Io, Mode, Volume, VolumeOptions, ZeroFlags};
use seeded::Random;

const SECTOR: u64 = 512;
/// The number of sectors of a writer, for either size of the volume.
const PART: usize = 20;
const WRITERS: usize = 4;
const SECTORS: usize = PART * WRITERS;
const RUNS: u64 = 2_500;

#[derive(Clone, Copy, Debug)]
struct Value {
    stamp: u64,
    /// The write may have failed: the sector may hold any earlier value, or zeroes.
    any: bool,
    acknowledged: bool,
}

#[derive(Clone, Debug)]
struct History {
    /// The first is the value when the volume was opened.
    values: Vec<Value>,
    /// The index of the first value that may be found after a power failure.
    promised: usize,
}

impl History {
    fn of(stamp: u64) -> History {
        let first = Value { stamp, any: false, acknowledged: true };
        History { values: vec![first], promised: 0 }
    }
    fn acknowledged(&self) -> usize {
        self.values.iter().rposition(|value| value.acknowledged).unwrap()
    }
    /// Whether the sector may hold `stamp`, of the values from index `from` on.
    fn allows(&self, from: usize, stamp: u64) -> bool {
        let any = self.values[from..].iter().any(|value| value.any)
            && (stamp == 0 || self.values.iter().any(|value| value.stamp == stamp));
        any || self.values[from..].iter().any(|value| value.stamp == stamp)
    }
}

#[derive(Default, Debug)]
struct Counts {
    flushes: u64,
    failed: u64,
    lost: u64,
    /// Flushes that succeeded although data had been lost before.
    mended: u64,
    cuts: u64,
    promises: u64,
}

struct Run {
    seed: u64,
    test: RefCell<Arc<TestStore>>,
    sectors: RefCell<Vec<History>>,
    stamp: RefCell<u64>,
    counts: RefCell<Counts>,
}

impl Run {
    fn test(&self) -> Arc<TestStore> {
        self.test.borrow().clone()
    }

    fn acknowledged(&self) -> Vec<usize> {
        self.sectors.borrow().iter().map(History::acknowledged).collect()
    }

    /// Records a successful flush that began when these values were acknowledged.
    fn promise(&self, first: usize, until: &[usize]) {
        let stable = self.test().stable_bytes();
        let mut sectors = self.sectors.borrow_mut();
        for (sector, &until) in (first..).zip(until) {
            let Some(history) = sectors.get_mut(sector) else { return };
            history.promised = history.promised.max(until);
            let found = stamp_of(&stable, sector);
            let fits = history.allows(history.promised, found);
            assert!(fits, "seed {}: sector {sector} has {found} of {history:?}", self.seed);
        }
        self.counts.borrow_mut().promises += u64::try_from(until.len()).unwrap();
    }

    fn flushed(&self, result: &Result<(), ebb_volume::BlockError>, until: &[usize], losses: u64) {
        match result {
            Ok(()) => {
                self.promise(0, until);
                let mut counts = self.counts.borrow_mut();
                counts.flushes += 1;
                counts.mended += u64::from(losses > 0);
            }
            Err(error) => {
                let mut counts = self.counts.borrow_mut();
                counts.failed += 1;
                counts.lost += u64::from(error.kind == ErrorKind::Lost);
            }
        }
    }

    /// Simulates a power failure; then all data that a flush covered must be there.
    fn reboot(&self) {
        let next = Arc::new(self.test().reboot());
        *self.test.borrow_mut() = next;
        let content = self.test().content();
        let mut sectors = self.sectors.borrow_mut();
        sectors.resize(content.len() / 512, History::of(0));
        for (sector, history) in sectors.iter_mut().enumerate() {
            let found = stamp_of(&content, sector);
            let fits = history.allows(history.promised, found);
            assert!(fits, "seed {}: sector {sector} has {found} of {history:?}", self.seed);
            *history = History::of(found);
        }
        self.counts.borrow_mut().cuts += 1;
    }
}

fn stamp_of(bytes: &[u8], sector: usize) -> u64 {
    let bytes = &bytes[sector * 512..(sector + 1) * 512];
    let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|word| word == stamp.to_le_bytes()), "a torn sector");
    stamp
}

async fn writer(io: Io, volume: Arc<Volume>, run: Rc<Run>, number: usize, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..4 {
        let there = usize::try_from(volume.size() / SECTOR).unwrap();
        let (start, end) = (number * PART, ((number + 1) * PART).min(there));
        let kind = random.index(100);
        if kind < 22 || start >= end {
            let (until, losses) = (run.acknowledged(), run.test().losses.load(Ordering::Relaxed));
            run.flushed(&volume.flush(&io).await, &until, losses);
            continue;
        }
        let mut first = start + random.index(end - start);
        let mut count = 1 + random.index((end - first).min(12));
        let page = (start.next_multiple_of(8) + 8 * random.index(2)).min(end);
        if end - page >= 8 && random.chance(if (40..46).contains(&kind) { 80 } else { 20 }, 100) {
            // Whole pages: zeroes of these are written again.
            (first, count) = (page, 8);
        }
        let (offset, length) = (first as u64 * SECTOR, count as u64 * SECTOR);
        if kind < 40 {
            read(&io, &volume, &run, first, count).await;
            continue;
        }
        let stamp = {
            let mut stamp = run.stamp.borrow_mut();
            *stamp += 1;
            *stamp
        };
        let (zero, discard) = ((40..46).contains(&kind), (46..52).contains(&kind));
        let stamp = if zero || discard { 0 } else { stamp };
        for history in &mut run.sectors.borrow_mut()[first..first + count] {
            history.values.push(Value { stamp, any: discard, acknowledged: false });
        }
        let fua = random.chance(20, 100);
        let before = run.acknowledged();
        let done = if zero {
            volume.write_zeroes(&io, offset, length, ZeroFlags::default(), fua).await
        } else if discard {
            volume.discard(&io, offset, length, fua).await
        } else {
            let mut buf = io.pool().get_for_test(count * 512);
            buf.chunks_mut(8).for_each(|word| word.copy_from_slice(&stamp.to_le_bytes()));
            volume.write(&io, buf, offset, fua).await.0
        };
        if done.is_err() {
            continue;
        }
        for history in &mut run.sectors.borrow_mut()[first..first + count] {
            history.values.last_mut().unwrap().acknowledged = true;
        }
        if fua {
            let own = run.acknowledged()[first..first + count].to_vec();
            run.promise(first, &own);
            if zero || discard {
                // Zeroing and discarding with FUA flush the whole volume.
                run.promise(0, &before);
            }
        }
    }
}

async fn read(io: &Io, volume: &Volume, run: &Run, first: usize, count: usize) {
    let losses = run.test().losses.load(Ordering::Relaxed);
    let buf = io.pool().get_for_test(count * 512);
    let from = run.acknowledged();
    // Where zeroes were lost, a read may find the earlier value until they are written again.
    let promised: Vec<_> = run.sectors.borrow().iter().map(|history| history.promised).collect();
    let (result, buf) = volume.read(io, buf, first as u64 * SECTOR).await;
    if result.is_err() {
        return;
    }
    let lossless = losses == 0 && run.test().losses.load(Ordering::Relaxed) == 0;
    for (number, history) in run.sectors.borrow()[first..first + count].iter().enumerate() {
        let from = if lossless { from[first + number] } else { promised[first + number] };
        let found = stamp_of(&buf, number);
        assert!(history.allows(from, found), "seed {}: read {found} of {history:?}", run.seed);
    }
}

/// Writes back some of the dirty data from time to time.
struct Whim(u64);

impl WritebackControl for Whim {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        Duration::ZERO
    }
    fn next(&self, _: Instant, dirty: u64, _: Duration) -> WritebackOrder {
        if (dirty / 4096 + self.0).is_multiple_of(3) {
            return WritebackOrder::Wait(Duration::from_micros(100));
        }
        WritebackOrder::Write(16 << 10)
    }
}

struct Machine {
    cache: Arc<Cache>,
    reclaimer: Reclaimer,
    start: Instant,
}

impl Machine {
    fn open(&self, io: &Io, run: &Run, mode: Mode, whim: u64) -> Arc<Volume> {
        let (store, options) = (Store::Test(run.test()), VolumeOptions::default());
        let store = CachedStore::new(&self.cache, "disk", store, mode).unwrap();
        let volume = Volume::new("disk", store, options);
        volume.start_writeback(io, Arc::new(Whim(whim)));
        volume
    }

    /// Events beside requests.
    async fn disturb(&mut self, io: &Io, volume: &Volume, run: &Run, random: &mut Random) {
        let now = self.start + Duration::from_millis(random.next() % 10_000);
        match random.index(30) {
            0..3 => self.cache.pressure(Level::L2, now),
            3 => self.cache.pressure(Level::L3, now),
            4..9 => self.cache.pressure(Level::L0, now + Duration::from_secs(60)),
            9 => self.cache.set_max(Some(16 << 10)),
            10..15 => self.cache.set_max(Some(16 << 20)),
            15..19 => {
                let pages = SECTORS / 8;
                let to = (1 + random.index(pages)) as u64 * 4096;
                let to = to.min(SECTORS as u64 * SECTOR);
                let order = Resize { to: Some(to), shrink: random.chance(50, 100) };
                if let Ok(size) = volume.resize(io, order).await {
                    let sectors = usize::try_from(size / SECTOR).unwrap();
                    run.sectors.borrow_mut().resize(sectors, History::of(0));
                }
            }
            19 => run.test().evict(),
            20..22 => run.test().set_room(Some(random.next() % 32_768)),
            22..24 => run.test().set_room(None),
            _ => {}
        }
        if random.chance(30, 100) {
            self.reclaimer.run_once(&self.cache, now);
        }
    }
}

async fn play(io: &Io, machine: &mut Machine, seed: u64, mode: Mode) -> Counts {
    let mut random = Random::new(seed);
    let size = SECTORS as u64 * SECTOR;
    let run = Rc::new(Run {
        seed,
        test: RefCell::new(Arc::new(TestStore::new(size, seed))),
        sectors: RefCell::new(vec![History::of(0); SECTORS]),
        stamp: RefCell::new(0),
        counts: RefCell::default(),
    });
    run.test().waits.store(u32::try_from(random.index(4)).unwrap(), Ordering::Relaxed);
    let of = |random: &mut Random, all: &[u32]| all[random.index(all.len())];
    run.test().faults(&Faults {
        reads: of(&mut random, &[0, 0, 20]),
        writes: of(&mut random, &[0, 0, 20, 100]),
        flushes: of(&mut random, &[0, 50, 300]),
        writing_back: of(&mut random, &[0, 0, 20]),
        told_always: random.chance(20, 100),
        told_as_full: random.chance(30, 100),
        ..Faults::default()
    });
    let mut volume = machine.open(io, &run, mode, seed);
    for _ in 0..2 + random.index(3) {
        let tasks: Vec<_> = (0..WRITERS)
            .map(|number| {
                let seed = random.next();
                io.spawn(writer(io.clone(), volume.clone(), run.clone(), number, seed))
            })
            .collect();
        if random.chance(30, 100) {
            // A power failure of the host: requests in flight and its memory are lost.
            for _ in 0..random.index(40) {
                io.yield_now().await;
            }
            drop(tasks);
        } else {
            for task in tasks {
                task.await;
            }
            if random.chance(50, 100) {
                machine.disturb(io, &volume, &run, &mut random).await;
                continue;
            }
            let until = run.acknowledged();
            if random.chance(50, 100) && volume.close(io).await.is_ok() {
                run.promise(0, &until);
            }
        }
        if let Some(cache) = volume.cache() {
            cache.end_flusher();
        }
        run.reboot();
        volume = machine.open(io, &run, mode, seed);
    }
    if let Some(cache) = volume.cache() {
        cache.end_flusher();
    }
    Rc::try_unwrap(run).map(|run| run.counts.into_inner()).unwrap_or_default()
}

fn run_all(mode: Mode) -> Counts {
    let runs = seeded::scaled(RUNS);
    let first = std::env::var("EBBD_FLUSH_SEED").ok().and_then(|text| text.parse().ok());
    let first: u64 = first.unwrap_or(1);
    let start = Instant::now();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(256 << 20, start)).unwrap();
    let worker = Worker::start("flush", &memory).unwrap();
    let done = worker.handle().block_on(move |io| async move {
        let cache = Cache::without_reclaimer(&memory, CacheOptions::new(start));
        let reclaimer = Reclaimer::new(&cache, Box::new(|| None));
        let mut machine = Machine { cache, reclaimer, start };
        let mut all = Counts::default();
        for seed in first..first + runs {
            let counts = play(&io, &mut machine, seed, mode).await;
            all.flushes += counts.flushes;
            all.failed += counts.failed;
            all.lost += counts.lost;
            all.mended += counts.mended;
            all.cuts += counts.cuts;
            all.promises += counts.promises;
        }
        all
    });
    let counts = done.expect("a run panicked; see above");
    println!("{runs} runs in {:?}: {counts:?}", start.elapsed());
    assert!(counts.flushes > runs / 4 && counts.failed > runs / 8 && counts.cuts > runs / 4);
    assert!(counts.lost > runs / 32, "flushes are refused after a loss");
    counts
}

#[test]
fn without_a_cache_no_flush_says_ok_over_lost_data() {
    let counts = run_all(Mode::None);
    assert_eq!(counts.mended, 0, "a flush succeeded after a loss");
}

#[test]
fn with_writethrough_no_flush_says_ok_over_lost_data() {
    let counts = run_all(Mode::Writethrough);
    assert_eq!(counts.mended, 0, "a flush succeeded after a loss");
}

#[test]
fn with_writeback_no_flush_says_ok_over_lost_data() {
    let counts = run_all(Mode::Writeback);
    assert!(counts.mended > 0, "lost data is written again");
}
