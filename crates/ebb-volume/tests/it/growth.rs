//! A writeback volume grows under load: writers write to the new area as soon as its size is visible.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ebb_cache::{Cache, CacheOptions, CachedStore, FixedLimit, Mode};
use ebb_io::{Io, Worker};
use ebb_mem::Memory;
use ebb_store::TestStore;
use ebb_volume::{Resize, Store, Volume, VolumeOptions};

const PAGE: u64 = 4096;
/// The number of pages before the volume grows, and how many of them are cached, each in a frame of its own.
const PAGES: u64 = 16 << 10;
const CACHED_EVERY: u64 = 16;
/// Pages per step of growth, and the number of steps.
const STEP: u64 = 256;
const STEPS: u64 = 16;
const WRITERS: u64 = 4;

/// The state that the writers, the flusher and the resizing task share.
struct Scene {
    volume: Arc<Volume>,
    written: AtomicU64,
    ended: AtomicBool,
}

fn stamp(page: u64) -> [u8; 8] {
    (page ^ 0x5a5a_0000_0000_0000).to_le_bytes()
}

async fn write(io: &Io, volume: &Volume, page: u64) {
    let mut buf = io.pool().take(4096).await;
    for word in buf.chunks_mut(8) {
        word.copy_from_slice(&stamp(page));
    }
    volume.write(io, buf, page * PAGE, false).await.0.unwrap();
}

/// Writes every fourth page of the new area, as soon as it is there.
async fn follow(io: Io, scene: Arc<Scene>, number: u64) {
    for page in (PAGES + number..PAGES + STEP * STEPS).step_by(4) {
        while scene.volume.size() <= page * PAGE {
            io.next_iteration().await;
        }
        write(&io, &scene.volume, page).await;
        scene.written.fetch_add(1, Ordering::SeqCst);
    }
}

async fn flush_all_the_time(io: Io, scene: Arc<Scene>) {
    while !scene.ended.load(Ordering::SeqCst) {
        scene.volume.flush(&io).await.unwrap();
        io.next_iteration().await;
    }
}

/// Grows by each step when all of the previous one is written, so that all writers wait for it.
async fn grow(io: Io, scene: Arc<Scene>) {
    for step in 1..=STEPS {
        let order = Resize { to: Some((PAGES + step * STEP) * PAGE), shrink: false };
        scene.volume.resize(&io, order).await.unwrap();
        while scene.written.load(Ordering::SeqCst) < step * STEP {
            io.next_iteration().await;
        }
    }
}

/// Grows one volume. Returns the number of pages whose data is not on the store at the end.
fn round(workers: &[Worker], cache: &Arc<Cache>, seed: u64) -> u64 {
    let test = Arc::new(TestStore::new(PAGES * PAGE, seed));
    let store = Store::Test(test.clone());
    let store = CachedStore::new(cache, "disk", store, Mode::Writeback).unwrap();
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let (written, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let scene = Arc::new(Scene { volume, written, ended });
    let first = workers[0].handle();
    let own = scene.clone();
    first.block_on(move |io| async move {
        own.volume.start_writeback(&io, Arc::new(FixedLimit::default()));
        for page in (0..PAGES).step_by(usize::try_from(CACHED_EVERY).unwrap()) {
            let buf = io.pool().take(4096).await;
            own.volume.read(&io, buf, page * PAGE).await.0.unwrap();
        }
    });
    let mut threads = Vec::new();
    for number in 0..WRITERS + 2 {
        let handle = workers[usize::try_from(number % 2).unwrap()].handle();
        let scene = scene.clone();
        threads.push(std::thread::spawn(move || {
            let done = handle.block_on(move |io| async move {
                match number {
                    0 => {
                        grow(io, scene.clone()).await;
                        scene.ended.store(true, Ordering::SeqCst);
                    }
                    1 => flush_all_the_time(io, scene).await,
                    writer => follow(io, scene, writer - 2).await,
                }
            });
            assert!(done.is_some(), "a task panicked; see above");
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let own = scene.clone();
    first.block_on(move |io| async move { own.volume.close(&io).await.unwrap() });
    let mut page_now = [0; 4096];
    let is_lost = |page: &u64| {
        test.look(page * PAGE, &mut page_now);
        page_now.chunks(8).any(|word| *word != stamp(*page))
    };
    (PAGES..PAGES + STEP * STEPS).filter(is_lost).count() as u64
}

#[test]
fn growth_under_load_loses_no_write() {
    let wanted = seeded::scaled(50_000);
    let start = Instant::now();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(256 << 20, start)).unwrap();
    let cache = Cache::start(&memory, CacheOptions::new(start)).unwrap();
    let workers = ["growth-0", "growth-1"].map(|name| Worker::start(name, &memory).unwrap());
    let rounds = wanted.div_ceil(STEP * STEPS);
    let lost: u64 = (0..rounds).map(|seed| round(&workers, &cache, seed)).sum();
    let writes = rounds * STEP * STEPS;
    println!("{lost} of {writes} writes lost");
    assert_eq!(lost, 0, "of {writes} acknowledged writes");
}
