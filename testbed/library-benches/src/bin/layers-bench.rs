//! What a read of a stack of two layers costs, an overlay that is still empty above a base, beside a read of the base
//! alone: 4 KiB at random from the cache, one at a time, in the library.
//!
//! `layers-bench [ROUNDS [READS]]`: a line for each figure, `name ours peer ratio bar ok|short`; a volume of one layer is
//! compared with the store and its cache alone, too. In each round all read READS times, in the order A B C C B A.
//! `layers-bench count plain|one|two READS` only reads, to be counted by `perf stat`.

#![allow(clippy::unwrap_used, reason = "a bench: figures go to stdout")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_block::BlockStore;
use ebb_cache::{
    BaseLayers, Cache, CacheOptions, CachedStore, LayerMap, LayerRun, Layers, Mode, ReadStep,
};
use ebb_io::{Io, Worker};
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{MemoryStore, Store};
use library_benches::{median, result};
use rustix::time::{ClockId, clock_gettime};

/// Bytes of a volume, and of what is read: it fits into a processor's cache, so that copies hide as little as they can.
const SIZE: u64 = 64 << 20;
const READ: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// The map of an overlay without data of its own.
#[derive(Debug)]
struct Empty;

impl LayerMap for Empty {
    fn run(&self, _offset: u64, length: u64) -> LayerRun {
        LayerRun { layer: 1, length }
    }
}

/// What is read.
enum Subject {
    /// A store with a cache, without layers.
    Plain(CachedStore),
    /// The same as a volume of one layer, and below an empty overlay.
    Layers(Layers),
}

const NAMES: [&str; 3] = ["two", "one", "plain"];

fn subject(cache: &Arc<Cache>, name: &str) -> Subject {
    let memory = || Store::Memory(MemoryStore::new(SIZE));
    let own = CachedStore::new(cache, "disk", memory(), Mode::Writethrough).unwrap();
    match name {
        "plain" => Subject::Plain(own),
        "one" => Subject::Layers(own.into()),
        _ => {
            let bases = BaseLayers::new(cache);
            let base = bases.add("base", memory(), Mode::Writethrough).unwrap();
            let map = Box::new(Empty);
            Subject::Layers(Layers::stack("disk", own, vec![base], map).unwrap())
        }
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}

/// Nanoseconds per read: of a clock, and of CPU time.
async fn reads(io: &Io, subject: &Subject, count: u32) -> [f64; 2] {
    let mut buf = io.pool().take(4096).await;
    let mut state = 1u64;
    let (start, cpu) = (Instant::now(), cpu_time());
    for _ in 0..count {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (state >> 33) % (READ / PAGE) * PAGE;
        let result;
        (result, buf) = match subject {
            Subject::Plain(store) => store.read(io, buf, offset).await,
            // As a volume does it.
            Subject::Layers(layers) => match layers.start_read(io, &mut buf, offset) {
                ReadStep::Layer(layer) => layer.read(io, buf, offset).await,
                ReadStep::Store(store) => store.read(io, buf, offset).await,
                ReadStep::Complete => (Ok(()), buf),
                ReadStep::Remaining(remaining) => remaining.read(io, buf).await,
            },
        };
        result.unwrap();
    }
    let times = [start.elapsed(), cpu_time().saturating_sub(cpu)];
    times.map(|time| time.as_secs_f64() * 1e9 / f64::from(count))
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: u32| arguments.get(at).map_or(default, |n| n.parse().unwrap());
    let memory = Memory::new(MemoryOptions::new(512 << 20, Instant::now())).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(Instant::now()));
    let worker = Worker::start("bench", &memory).unwrap();
    if arguments.first().is_some_and(|first| first == "count") {
        let subject = subject(&cache, &arguments[1]);
        let count = number(2, 1_000_000);
        let run = move |io: Io| async move { reads(&io, &subject, count).await };
        result(format_args!("{:.1?} ns per read", worker.handle().block_on(run).unwrap()));
        return;
    }
    let (rounds, count) = (number(0, 20), number(1, 500_000));
    let all = NAMES.map(|name| subject(&cache, name));
    let run = move |io: Io| async move {
        // The rates and CPU times of each.
        let mut found: [[Vec<f64>; 2]; 3] = Default::default();
        for subject in &all {
            reads(&io, subject, 10_000).await;
        }
        for _ in 0..rounds {
            for which in [0, 1, 2, 2, 1, 0] {
                let [wall, cpu] = reads(&io, &all[which], count).await;
                found[which][0].push(1e9 / wall);
                found[which][1].push(cpu);
            }
        }
        found
    };
    let [two, one, plain] = worker.handle().block_on(run).unwrap().map(|all| all.map(median));
    let line = |name: &str, [ours, peer]: [f64; 2], bar: &str, ok: fn(f64) -> bool| {
        let ratio = ours / peer;
        let verdict = if ok(ratio) { "ok" } else { "short" };
        result(format_args!("{name} {ours:.1} {peer:.1} {ratio:.3} {bar} {verdict}"));
    };
    let most: fn(f64) -> bool = |ratio| ratio <= 1.05;
    line("cache_stack_of_two_reads_per_s", [two[0], one[0]], ">=0.95x", |ratio| ratio >= 0.95);
    line("cache_stack_of_two_cpu_ns_per_read", [two[1], one[1]], "<=1.05x", most);
    line("cache_one_layer_cpu_ns_per_read", [one[1], plain[1]], "<=1.05x", most);
}
