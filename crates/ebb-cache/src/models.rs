//! Concurrency models under shuttle: thousands of schedules of real threads over this crate's fills, writes
//! and waits, with a store whose requests take several steps.
//!
//! Run with `cargo test -p ebb-cache --features shuttle --lib models`.

#![allow(clippy::unwrap_used, reason = "a model may panic")]

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ebb_mem::{Memory, WorkerMemory};
use ebb_store::{NullStore, Store};
use shuttle::sync::Mutex as ModelMutex;
use shuttle::thread;

use crate::abort_signal::AbortSignal;
use crate::cache::{Cache, CacheOptions};
use crate::pages::parts;
use crate::read::{FRAMES, InflightWait, PendingPages, copy_loaded};
use crate::shard::{FreeBatch, SHARDS};
use crate::stats::Mode;
use crate::volume::StoreCache;
use crate::write::{ChangeOutcome, InflightWrite};

const SCHEDULES: usize = 800;
/// Bytes of the volume: a page.
const SIZE: usize = 4096;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let scheduler = shuttle::scheduler::RandomScheduler::new(SCHEDULES);
    let mut config = shuttle::Config::new();
    config.stack_size = 512 << 10;
    shuttle::Runner::new(scheduler, config).run(model);
}

/// Shared by all schedules: creating it starts a thread.
fn memory() -> Arc<Memory> {
    static MEMORY: OnceLock<Arc<Memory>> = OnceLock::new();
    let make = || Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    MEMORY.get_or_init(make).clone()
}

/// A volume of one page, whose store holds a version number in each half of it.
struct Model {
    cached: StoreCache,
    store: ModelMutex<[u8; 2]>,
    /// The acknowledged version, and the one being written.
    acknowledged: ModelMutex<u8>,
    begun: ModelMutex<u8>,
}

impl Model {
    fn new() -> Arc<Model> {
        let mut options = CacheOptions::new(Instant::now());
        options.max_bytes = Some(1 << 20);
        let cache = Cache::without_reclaimer(&memory(), options);
        // Never read or written: the model has a store of its own.
        let unused = Arc::new(Store::Null(NullStore::new(SIZE as u64)));
        let cached = cache.volume("model", &unused, Mode::Writethrough).unwrap();
        let number = || ModelMutex::new(0);
        let store = ModelMutex::new([0; 2]);
        Arc::new(Model { cached, store, acknowledged: number(), begun: number() })
    }

    fn worker(&self) -> WorkerMemory {
        self.cached.memory.worker(|| ())
    }

    /// The store's read: half by half.
    fn load(&self) -> [u8; SIZE] {
        let mut data = [0; SIZE];
        for half in [0, 1] {
            data[half * SIZE / 2..(half + 1) * SIZE / 2].fill(self.store.lock().unwrap()[half]);
            thread::yield_now();
        }
        data
    }

    /// As [`StoreCache::read`](crate::StoreCache::read), from this store. `give_up`: the first fill is dropped.
    fn read(&self, worker: &WorkerMemory, mut give_up: bool) -> [u8; SIZE] {
        let mut buf = [0xee; SIZE];
        if self.cached.try_read_cached(&mut buf, 0) {
            return buf;
        }
        let mut todo = PendingPages { first: 0, pages: [0; FRAMES] };
        todo.pages[0] = 1;
        loop {
            let round = self.cached.round(&mut buf, 0, &mut todo, true);
            if !round.load.is_empty() {
                if std::mem::take(&mut give_up) {
                    thread::yield_now();
                    drop(round);
                    continue;
                }
                let data = self.load();
                copy_loaded(&mut buf, 0, &mut todo, &data, &(0..SIZE as u64));
                round.keep(worker, 0, &data, 0);
            } else if let Some((shard, fill)) = round.wait {
                drop(round);
                let wait = InflightWait { volume: &self.cached, shard, fill, waiter: None };
                shuttle::future::block_on(wait);
            } else {
                return buf;
            }
        }
    }

    /// As [`StoreCache::write`](crate::StoreCache::write), of the whole page.
    fn write(&self, worker: &WorkerMemory, version: u8) {
        let data = [version; SIZE];
        let write = InflightWrite::begin(&self.cached, 0, SIZE as u64);
        for half in [0, 1] {
            self.store.lock().unwrap()[half] = version;
            thread::yield_now();
        }
        for part in parts(0, SIZE) {
            self.cached.keep_written(worker, write.id, &part, &data);
        }
        write.end(worker, ChangeOutcome::Kept);
    }

    /// A client's read: never older than what was acknowledged before, never newer than what was begun.
    fn check_read(&self, worker: &WorkerMemory, give_up: bool) {
        let oldest = *self.acknowledged.lock().unwrap();
        let data = self.read(worker, give_up);
        let newest = *self.begun.lock().unwrap();
        for half in [data[0], data[SIZE - 1]] {
            assert!((oldest..=newest).contains(&half), "{half} of {oldest} to {newest}");
        }
    }

    fn check_end(&self) {
        let worker = self.worker();
        let store = *self.store.lock().unwrap();
        for _ in 0..2 {
            let data = self.read(&worker, false);
            assert_eq!([data[0], data[SIZE - 1]], store, "what is cached is what the store has");
        }
    }
}

#[test]
fn one_read_fills_and_all_waiting_reads_are_woken() {
    check(|| {
        let model = Model::new();
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let model = model.clone();
                // The future of one of them is dropped during its fill.
                thread::spawn(move || model.check_read(&model.worker(), reader == 0))
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        model.check_end();
    });
}

#[test]
fn a_read_concurrent_with_a_write_leaves_no_stale_page() {
    check(|| {
        let model = Model::new();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let model = model.clone();
                thread::spawn(move || {
                    let worker = model.worker();
                    model.check_read(&worker, false);
                    model.check_read(&worker, false);
                })
            })
            .collect();
        let writer = {
            let model = model.clone();
            thread::spawn(move || {
                let worker = model.worker();
                for version in 1..=2 {
                    *model.begun.lock().unwrap() = version;
                    model.write(&worker, version);
                    *model.acknowledged.lock().unwrap() = version;
                }
            })
        };
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        writer.join().unwrap();
        model.check_end();
    });
}

#[test]
fn after_two_concurrent_writes_the_cache_equals_the_store() {
    check(|| {
        let model = Model::new();
        let writers: Vec<_> = (1..=2)
            .map(|version| {
                let model = model.clone();
                thread::spawn(move || model.write(&model.worker(), version))
            })
            .collect();
        let reader = {
            let model = model.clone();
            thread::spawn(move || {
                let _ = model.read(&model.worker(), false);
            })
        };
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        reader.join().unwrap();
        model.check_end();
    });
}

#[test]
fn the_reclaimer_and_concurrent_requests_do_not_interfere() {
    check(|| {
        let model = Model::new();
        let reclaimer = {
            let model = model.clone();
            thread::spawn(move || {
                let worker = model.worker();
                for _ in 0..2 {
                    for shard in 0..SHARDS {
                        let mut batch = FreeBatch::new();
                        model.cached.lock(shard).lend(&worker, 0, 0, true, 8);
                        thread::yield_now();
                        model.cached.lock(shard).evict(1, &mut batch);
                        batch.free(&worker, false);
                    }
                    model.cached.invalidate(0, SIZE as u64);
                }
            })
        };
        let writer = {
            let model = model.clone();
            thread::spawn(move || {
                *model.begun.lock().unwrap() = 1;
                model.write(&model.worker(), 1);
                *model.acknowledged.lock().unwrap() = 1;
            })
        };
        let worker = model.worker();
        for _ in 0..3 {
            model.check_read(&worker, false);
        }
        drop(worker);
        reclaimer.join().unwrap();
        writer.join().unwrap();
        model.check_end();
        let stats = model.cached.stats();
        assert!(stats.bufkvaspace <= SIZE as u64, "nothing is kept twice: {stats:?}");
    });
}

#[test]
fn an_abort_ends_the_waits_of_concurrent_requests() {
    check(|| {
        let signal = Arc::new(AbortSignal::default());
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let signal = signal.clone();
                thread::spawn(move || {
                    let wait = std::pin::pin!(std::future::pending::<()>());
                    assert_eq!(shuttle::future::block_on(signal.race(wait)), None);
                })
            })
            .collect();
        signal.raise();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}
