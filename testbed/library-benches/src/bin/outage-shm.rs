//! What a store that hangs costs Xen guests on other volumes: two workers, four healthy volumes on files, and
//! one volume whose store hangs while its ring is full. Each step is measured beside it and alone, alternately.
//!
//! One line a figure: `name ours peer ratio bar ok|short`. `outage-shm [SECONDS [ROUNDS]]`.

#![allow(clippy::unwrap_used, reason = "a bench")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, CachedStore, FixedLimit, Mode};
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, device_number};
use ebb_io::Worker;
use ebb_mem::Memory;
use ebb_store::{FileStore, OpenOptions, Store, TestStore};
use ebb_volume::{Resize, Volume, VolumeOptions, Volumes};
use library_benches::{median, note, result};
use seeded::Random;

const HEALTHY: u16 = 4;
const SIZE: u64 = 64 << 20;
const DEPTH: usize = 32;
/// Written and not flushed before a stop, bytes.
const DIRTY: u64 = 8 << 20;

/// One figure of a round.
type Column = (&'static str, fn(&Round) -> f64);

struct Rig {
    world: World,
    backend: Backend,
    workers: Vec<Worker>,
    volumes: Volumes,
    cache: Arc<Cache>,
    dir: tempfile::TempDir,
    mode: Option<Mode>,
}

#[derive(Clone, Copy)]
struct Round {
    p99_us: f64,
    reload_s: f64,
    resize_s: f64,
    stop_s: f64,
}

impl Rig {
    fn new(mode: Option<Mode>) -> Rig {
        let begun = Instant::now();
        let memory = Memory::new(ebb_mem::MemoryOptions::new(512 << 20, begun)).unwrap();
        let cache = Cache::start(&memory, CacheOptions::new(begun)).unwrap();
        let workers: Vec<Worker> =
            (0..2).map(|n| Worker::start(&format!("bench-{n}"), &memory).unwrap()).collect();
        let (world, volumes) = (World::default(), Volumes::default());
        let handles = workers.iter().map(Worker::handle).collect();
        let options = BackendOptions::new(Arc::new(world.clone()), handles, volumes.clone());
        let backend = Backend::start(options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let rig = Rig { world, backend, workers, volumes, cache, dir, mode };
        for number in 0..HEALTHY {
            rig.add_file(&format!("h{number}"));
        }
        rig
    }

    fn add_file(&self, name: &str) {
        let path = self.dir.path().join(name);
        let options = OpenOptions { create: Some(SIZE), ..OpenOptions::default() };
        self.add(name, Store::File(FileStore::open(&path, &options).unwrap().0));
    }

    fn add(&self, name: &str, store: Store) {
        let options = VolumeOptions::default();
        let mode = self.mode.unwrap_or(Mode::None);
        let store = CachedStore::new(&self.cache, name, store, mode).unwrap();
        let volume = Volume::new(name, store, options);
        volume.join(self.cache.memory().shares(), name);
        let started = volume.clone();
        let start = move |io: ebb_io::Io| async move {
            started.start_writeback(&io, Arc::new(FixedLimit::default()));
        };
        self.workers[0].handle().block_on(start).unwrap();
        self.volumes.add(volume, Arc::default());
    }

    fn connect(&self, number: u16, volume: &str) -> Frontend {
        let guest = self.world.guest(number, 256).unwrap();
        let mut store = self.world.xenstore().unwrap();
        attach(&mut *store, number, &DiskSpec { volume, name: "xvdb", read_only: false }).unwrap();
        let device = device_number("xvdb").unwrap();
        let mut front = Frontend::new(&self.world, &guest, device, FrontendConfig::default());
        front.connect().unwrap();
        front
    }
}

fn one_page(front: &mut Frontend, operation: u8, offset: u64) {
    let page = front.pages(1)[0];
    let segment = Segment { gref: page, first: 0, last: 7 };
    let request = front.request(operation, offset / 512, &[segment]).1;
    assert_eq!(front.queues[0].call(request).unwrap(), 0);
    front.free_pages(&[page]);
}

/// Latencies of alternating single reads and writes of 4 KiB, until stopped.
fn drive(front: &mut Frontend, seed: u64, stop: &AtomicBool) -> Vec<Duration> {
    let mut random = Random::new(seed);
    let mut latencies = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let operation = if latencies.len() % 2 == 0 { op::WRITE } else { op::READ };
        let started = Instant::now();
        one_page(front, operation, random.below(SIZE / 2 / 4096) * 4096);
        latencies.push(started.elapsed());
    }
    latencies
}

fn round(mode: Option<Mode>, hanging: bool, span: Duration) -> Round {
    let rig = Rig::new(mode);
    let mut fronts: Vec<_> = (0..HEALTHY).map(|n| rig.connect(n + 1, &format!("h{n}"))).collect();
    let mut waiting = None;
    if hanging {
        let store = Arc::new(TestStore::new(SIZE, 1));
        rig.add("hanging", Store::Test(store.clone()));
        let mut front = rig.connect(100, "hanging");
        store.hang();
        let pages = front.pages(DEPTH);
        for (n, page) in pages.iter().enumerate() {
            let segment = Segment { gref: *page, first: 0, last: 7 };
            let operation = if n % 2 == 0 { op::WRITE } else { op::READ };
            let request = front.request(operation, 8 * n as u64, &[segment]).1;
            front.queues[0].put(request);
        }
        front.queues[0].push();
        waiting = Some((front, store));
    }
    let stop = AtomicBool::new(false);
    let mut all: Vec<Duration> = std::thread::scope(|scope| {
        let stop = &stop;
        let runs: Vec<_> = fronts
            .iter_mut()
            .enumerate()
            .map(|(n, front)| scope.spawn(move || drive(front, n as u64, stop)))
            .collect();
        std::thread::sleep(span);
        stop.store(true, Ordering::Relaxed);
        runs.into_iter().flat_map(|run| run.join().unwrap()).collect()
    });
    all.sort_unstable();
    let p99_us = all[all.len() * 99 / 100].as_secs_f64() * 1e6;
    let worker = rig.workers[1].handle();

    // As in a reload: one volume is withdrawn, another one is added and served.
    let begun = Instant::now();
    let volume = rig.volumes.remove("h3").unwrap();
    let draining = rig.backend.withdraw(&volume);
    let closing = volume.clone();
    let close = move |io: ebb_io::Io| async move {
        draining.drained().await;
        closing.close(&io).await
    };
    worker.block_on(close).unwrap().unwrap();
    rig.add_file("added");
    let mut added = rig.connect(50, "added");
    one_page(&mut added, op::READ, 0);
    let reload_s = begun.elapsed().as_secs_f64();

    let begun = Instant::now();
    let volume = rig.volumes.get("h0").unwrap().volume;
    let order = Resize { to: Some(2 * SIZE), shrink: false };
    worker
        .block_on(move |io| async move { volume.resize(&io, order).await.map(drop) })
        .unwrap()
        .unwrap();
    while fronts[0].size() != 2 * SIZE {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "the guest is not notified of the new size"
        );
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let resize_s = begun.elapsed().as_secs_f64();

    for front in &mut fronts[..3] {
        (0..DIRTY).step_by(4096).for_each(|offset| one_page(front, op::WRITE, offset));
    }
    let begun = Instant::now();
    let ending = Arc::new(rig.backend.begin_stop());
    let names = ["h0", "h1", "h2", "added"];
    let all: Vec<_> = names.iter().map(|name| rig.volumes.get(name).unwrap().volume).collect();
    let stopped = move |io: ebb_io::Io| async move {
        for volume in all {
            ending.of(volume.name()).drained().await;
            volume.close(&io).await.unwrap();
        }
    };
    worker.block_on(stopped).unwrap();
    let stop_s = begun.elapsed().as_secs_f64();
    if let Some((_, store)) = &waiting {
        store.release();
    }
    drop((rig.backend, waiting));
    Round { p99_us, reload_s, resize_s, stop_s }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().map_or(1.0, |text| text.parse().unwrap());
    let rounds: usize = arguments.next().map_or(3, |text| text.parse().unwrap());
    let span = Duration::from_secs_f64(seconds);
    let modes = [
        ("none", None),
        ("writethrough", Some(Mode::Writethrough)),
        ("writeback", Some(Mode::Writeback)),
    ];
    for (name, mode) in modes {
        let (mut beside, mut alone) = (Vec::new(), Vec::new());
        for number in 0..rounds {
            note(format_args!("{name}, round {number}"));
            beside.push(round(mode, true, span));
            alone.push(round(mode, false, span));
        }
        let columns: [Column; 4] = [
            ("p99_us", |round| round.p99_us),
            ("reload_s", |round| round.reload_s),
            ("resize_s", |round| round.resize_s),
            ("stop_s", |round| round.stop_s),
        ];
        for (what, of) in columns {
            let of_all = |rounds: &[Round]| median(rounds.iter().map(of).collect());
            let (ours, peer) = (of_all(&beside), of_all(&alone));
            let (bar, most) = match what {
                "p99_us" => ("<=1.50x".to_owned(), 1.5 * peer),
                _ => (format!("<={:.2}", 1.2 * peer + 0.2), 1.2 * peer + 0.2),
            };
            let ok = if ours <= most { "ok" } else { "short" };
            result(format_args!(
                "outage_shm_{name}_{what} {ours:.4} {peer:.4} {:.3} {bar} {ok}",
                ours / peer
            ));
        }
    }
}
