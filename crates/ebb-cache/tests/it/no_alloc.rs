//! A warm hit allocates nothing, nor does a miss once the tables have their size.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counting_allocator::{bytes, calls};
use ebb_block::BlockStore;
use ebb_cache::{
    BaseLayers, CachedStore, LayerMap, LayerRun, Layers, Mode, Reclaimer, WritebackControl,
    WritebackOrder,
};
use ebb_io::Worker;
use ebb_store::{MemoryStore, Store};

use crate::common::{MIB, Random, Rig, WholeLayer};

#[test]
fn a_warm_cache_does_not_touch_the_heap() {
    let rig = Arc::new(Rig::new(8 * MIB));
    let worker = Worker::start("warm", &rig.memory).unwrap();
    let disk = rig.volume("disk", 16 * MIB, 1);
    let done = worker.handle().block_on(move |io| async move {
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(|| Some(0)));
        let mut random = Random::new(1);
        let mut random_page = move |end: u64| random.below(end) * 4096;
        let read = async |offset: u64, length: usize| {
            let mut buf = io.pool().get_for_test(length);
            if !disk.cached.try_read_cached(&mut buf, offset) {
                disk.cached.read(&io, buf, offset).await.0.unwrap();
            }
        };
        let write = async |offset: u64| {
            let buf = io.pool().get_for_test(4096);
            disk.cached.write(&io, buf, offset, false).await.0.unwrap();
        };
        // Hits, wired and lent.
        for offset in (0..4 * MIB).step_by(65536) {
            read(offset, 65536).await;
        }
        for lent in [false, true] {
            if lent {
                for turn in 0..40 {
                    reclaimer.run_once(&rig.cache, rig.start + Duration::from_millis(100 * turn));
                }
                rig.memory.settle();
                assert_eq!(rig.cache.stats().total.bufwiredspace, 0);
            }
            for length in [4096, 65536, 1 << 20] {
                read(0, length).await;
            }
            let misses = disk.cached.stats().misses;
            let before = calls();
            for _ in 0..2000 {
                read(random_page(1024 - 16), 4096).await;
                read(random_page(1024 - 16), 65536).await;
            }
            read(0, 1 << 20).await;
            assert_eq!(calls() - before, 0, "hits, lent: {lent}");
            assert_eq!(disk.cached.stats().misses, misses, "some reads were misses");
        }
        // Misses, writes and evictions: only the growth of tables allocates, less and less often.
        let mut last = u64::MAX;
        for _ in 0..20 {
            let before = calls();
            for _ in 0..2000 {
                read(random_page(4096), 4096).await;
                write(random_page(4096)).await;
            }
            last = calls() - before;
            if last == 0 {
                break;
            }
        }
        assert_eq!(last, 0, "misses and writes of a warm cache");
    });
    assert!(done.is_some(), "the run panicked; see above");
}

/// Pages of the top layer and of the one below it in turn.
#[derive(Debug)]
struct Turns;

impl LayerMap for Turns {
    fn run(&self, offset: u64, length: u64) -> LayerRun {
        let layer = usize::try_from(offset / 4096 % 2).unwrap();
        LayerRun { layer, length: length.min(4096 - offset % 4096) }
    }
}

#[test]
fn hits_of_a_stack_of_layers_do_not_touch_the_heap() {
    let rig = Arc::new(Rig::new(32 * MIB));
    let worker = Worker::start("stack", &rig.memory).unwrap();
    let done = worker.handle().block_on(move |io| async move {
        let bases = BaseLayers::new(&rig.cache);
        let memory = || Store::Memory(MemoryStore::new(4 * MIB));
        let maps: [Box<dyn LayerMap>; 2] = [Box::new(WholeLayer(1)), Box::new(Turns)];
        for map in maps {
            let top = CachedStore::new(&rig.cache, "disk", memory(), Mode::Writethrough).unwrap();
            let below = bases.add("base", memory(), Mode::Writethrough).unwrap();
            let layers = Layers::stack("disk", top, vec![below], map).unwrap();
            let mut random = Random::new(1);
            let (mut before, mut misses) = (0, 0);
            // The first round fills the cache.
            for _ in 0..2 {
                misses = rig.cache.stats().total.misses;
                before = calls();
                for _ in 0..5000 {
                    for length in [4096, 65536] {
                        let sector = random.below((4 * MIB - length as u64) / 512);
                        let buf = io.pool().get_for_test(length);
                        layers.read(&io, buf, sector * 512).await.0.unwrap();
                    }
                }
            }
            assert_eq!(calls() - before, 0);
            assert_eq!(rig.cache.stats().total.misses, misses, "some reads were misses");
        }
    });
    assert!(done.is_some(), "the run panicked; see above");
}

/// Writes back dirty data at once.
struct Eager;

impl WritebackControl for Eager {
    fn reserve(&self, _: Instant, _: Instant, _: u64, _: u64) -> Duration {
        Duration::ZERO
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Write(65536)
    }
}

#[test]
fn a_warm_flusher_does_not_touch_the_heap() {
    let rig = Arc::new(Rig::new(16 * MIB));
    let worker = Worker::start("flusher", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", 8 * MIB, 1, Mode::Writeback);
    let done = worker.handle().block_on(move |io| async move {
        disk.cached.set_control(Arc::new(Eager));
        let flusher = io.spawn(disk.cached.clone().run_flusher(io.clone()));
        // A timer allocates a tree node, except the first few: waits are not part of the count.
        let clock = io.clone();
        let timer = io.spawn(async move { clock.sleep(Duration::from_secs(3600)).await });
        let mut random = Random::new(2);
        let mut last = u64::MAX;
        for _ in 0..40 {
            let (before, written) = (calls(), disk.test.writes.load(Ordering::Relaxed));
            for _ in 0..200 {
                let mut buf = io.pool().get_for_test(4096);
                buf.fill(7);
                let offset = random.below(512) * 4096;
                disk.cached.write(&io, buf, offset, false).await.0.unwrap();
                if random.below(4) == 0 {
                    io.sleep(Duration::from_micros(50)).await;
                }
            }
            while disk.cached.dirty() > 0 {
                io.sleep(Duration::from_micros(100)).await;
            }
            last = calls() - before;
            assert!(disk.test.writes.load(Ordering::Relaxed) > written, "the flusher writes");
            if last == 0 {
                break;
            }
        }
        assert_eq!(last, 0, "writes of a warm flusher");
        drop((flusher, timer));
    });
    assert!(done.is_some(), "the run panicked; see above");
}

#[test]
fn concurrent_flushes_build_one_long_list_at_a_time() {
    const FRAMES: u64 = 20_000;
    let rig = Arc::new(Rig::new(128 * MIB));
    let worker = Worker::start("flushes", &rig.memory).unwrap();
    let disk = rig.memory_volume("disk", FRAMES * 65536, Mode::Writeback);
    let done = worker.handle().block_on(move |io| async move {
        disk.cached.set_control(Arc::new(Eager));
        for frame in 0..FRAMES {
            let buf = io.pool().get_for_test(4096);
            disk.cached.write(&io, buf, frame * 65536, false).await.0.unwrap();
        }
        assert_eq!(disk.cached.dirty(), FRAMES * 4096);
        // The first flush shows how much the store and its marks allocate.
        let before = bytes();
        disk.cached.flush(&io).await.unwrap();
        let alone = bytes() - before;
        for frame in 0..FRAMES {
            let buf = io.pool().get_for_test(4096);
            disk.cached.write(&io, buf, frame * 65536, false).await.0.unwrap();
        }
        assert_eq!(disk.cached.dirty(), FRAMES * 4096);
        let before = bytes();
        let flush = || {
            let (cached, on) = (disk.cached.clone(), io.clone());
            io.spawn(async move { cached.flush(&on).await.unwrap() })
        };
        let flushes: Vec<_> = (0..32).map(|_| flush()).collect();
        for flush in flushes {
            flush.await;
        }
        let together = bytes() - before;
        assert_eq!((disk.cached.dirty(), disk.cached.unstable()), (0, 0));
        assert!(together < alone + 16 * FRAMES * 8, "{together} bytes, and {alone} for one");
    });
    assert!(done.is_some(), "the run panicked; see above");
}
