//! Shrinking a volume in use: requests beyond the new end complete before the store is truncated, dirty data
//! below it reaches the store, and no discarded data reappears.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_cache::{Cache, CacheOptions, CachedStore, Mode, WritebackControl, WritebackOrder};
use ebb_io::{Io, Worker};
use ebb_mem::Memory;
use ebb_store::TestStore;
use ebb_volume::{ErrorKind, Resize, ResizeError, Store, Volume, VolumeOptions, ZeroFlags};
use seeded::Random;

const MIB: u64 = 1 << 20;
const MODES: [Mode; 3] = [Mode::None, Mode::Writethrough, Mode::Writeback];

/// Counts dirty bytes, and writes nothing back by itself.
#[derive(Default)]
struct Ledger(AtomicU64);

impl WritebackControl for Ledger {
    fn reserve(&self, _: Instant, _: Instant, bytes: u64, _: u64) -> Duration {
        self.0.fetch_add(bytes, Ordering::SeqCst);
        Duration::ZERO
    }
    fn unused(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::SeqCst);
    }
    fn written(&self, _: Instant, bytes: u64, _: Instant, saved: bool) {
        if saved {
            self.0.fetch_sub(bytes, Ordering::SeqCst);
        }
    }
    fn next(&self, _: Instant, _: u64, _: Duration) -> WritebackOrder {
        WritebackOrder::Wait(Duration::from_millis(5))
    }
}

/// A volume on a store whose requests can be stalled.
#[derive(Clone)]
struct Scene {
    volume: Arc<Volume>,
    test: Arc<TestStore>,
    dirty: Arc<Ledger>,
}

fn play<Fut: Future<Output = ()> + 'static>(
    mode: Mode,
    size: u64,
    act: impl FnOnce(Io, Scene) -> Fut + Send + 'static,
) {
    println!("{mode}");
    let start = Instant::now();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, start)).unwrap();
    let cache = Cache::without_reclaimer(&memory, CacheOptions::new(start));
    let worker = Worker::start("shrink", &memory).unwrap();
    let (test, dirty) = (Arc::new(TestStore::new(size, 1)), Arc::<Ledger>::default());
    let (store, options) = (Store::Test(test.clone()), VolumeOptions::default());
    let store = CachedStore::new(&cache, "disk", store, mode).unwrap();
    store.cache().into_iter().for_each(|cached| cached.set_control(dirty.clone()));
    let volume = Volume::new("disk", store, options);
    let scene = Scene { volume, test, dirty };
    let done = worker.handle().block_on(move |io| act(io, scene));
    assert!(done.is_some(), "the run panicked; see above");
}

impl Scene {
    async fn write(&self, io: &Io, offset: u64, length: usize, byte: u8) -> Result<(), ErrorKind> {
        let mut buf = io.pool().take(length).await;
        buf.fill(byte);
        self.volume.write(io, buf, offset, false).await.0.map_err(|error| error.kind)
    }

    async fn read(&self, io: &Io, offset: u64, length: usize) -> Result<Vec<u8>, ErrorKind> {
        let (result, buf) = self.volume.read(io, io.pool().take(length).await, offset).await;
        result.map(|()| buf.to_vec()).map_err(|error| error.kind)
    }

    async fn resize(&self, io: &Io, to: u64) -> Result<u64, ResizeError> {
        self.volume.resize(io, Resize { to: Some(to), shrink: true }).await
    }

    fn stall(&self, stalled: bool) {
        if stalled { self.test.hang() } else { self.test.release() }
    }
}

/// Runs a task beside the test.
fn beside<T: 'static>(
    io: &Io,
    scene: &Scene,
    act: impl AsyncFnOnce(Io, Scene) -> T + 'static,
) -> ebb_io::Task<T> {
    let (own, scene) = (io.clone(), scene.clone());
    io.spawn(async move { act(own, scene).await })
}

async fn a_moment(io: &Io) {
    io.sleep(Duration::from_millis(20)).await;
}

#[test]
fn requests_beyond_the_new_end_complete_before_the_store_is_truncated() {
    for mode in MODES {
        play(mode, 2 * MIB, move |io, scene| async move {
            scene.stall(mode != Mode::Writeback);
            let end = 2 * MIB - 4096;
            let mut write =
                beside(&io, &scene, async move |io, s| s.write(&io, end, 4096, 7).await);
            let mut read = beside(&io, &scene, async |io, s| s.read(&io, MIB, 65536).await);
            a_moment(&io).await;
            let mut flush = None;
            if mode == Mode::Writeback {
                assert_eq!(write.await, Ok(()), "the write is in memory");
                write = beside(&io, &scene, async |_, _| Ok(()));
                // Now its writeback is in flight.
                scene.stall(true);
                read = beside(&io, &scene, async |io, s| s.read(&io, MIB, 65536).await);
                flush = Some(beside(&io, &scene, async |io, s| s.volume.flush(&io).await.is_ok()));
                a_moment(&io).await;
            }
            let shrink = beside(&io, &scene, async |io, s| s.resize(&io, MIB).await);
            a_moment(&io).await;
            assert!(!shrink.is_finished(), "the store is truncated below a request in flight");
            assert_eq!(scene.test.content().len() as u64, 2 * MIB);
            // A new request is refused, and is not delayed.
            assert_eq!(scene.write(&io, MIB, 4096, 8).await, Err(ErrorKind::OutOfRange));
            assert_eq!(scene.volume.size(), MIB);
            scene.stall(false);
            assert_eq!(shrink.await.unwrap(), MIB);
            write.await.unwrap();
            read.await.unwrap();
            if let Some(flush) = flush {
                assert!(flush.await);
            }
            scene.volume.flush(&io).await.unwrap();
            assert_eq!(scene.test.content().len() as u64, MIB, "a write extended the store again");
            assert_eq!(scene.dirty.0.load(Ordering::SeqCst), 0);
            // Data that was read or written there does not reappear.
            scene.resize(&io, 2 * MIB).await.unwrap();
            assert_eq!(scene.read(&io, end, 4096).await.unwrap(), [0; 4096]);
        });
    }
}

#[test]
fn a_shrink_times_out_if_the_store_hangs() {
    for mode in MODES {
        play(mode, 2 * MIB, move |io, scene| async move {
            scene.write(&io, MIB, 4096, 3).await.unwrap();
            scene.write(&io, 0, 4096, 4).await.unwrap();
            scene.stall(true);
            let write = beside(&io, &scene, async move |io, s| match mode {
                Mode::Writeback => s.volume.flush(&io).await.map_err(|error| error.kind),
                _ => s.write(&io, MIB + 4096, 4096, 5).await,
            });
            a_moment(&io).await;
            let order = Resize { to: Some(MIB), shrink: true };
            let late = scene.volume.resize_within(&io, order, Duration::from_millis(50)).await;
            assert!(matches!(late, Err(ResizeError::Busy { .. })), "{late:?}");
            assert_eq!(scene.volume.size(), 2 * MIB);
            scene.stall(false);
            write.await.unwrap();
            // The shrink had no effect: all data is there.
            scene.volume.flush(&io).await.unwrap();
            assert_eq!(scene.read(&io, MIB, 4096).await.unwrap(), [3; 4096]);
            let content = scene.test.content();
            let at = |offset: u64| content[usize::try_from(offset).unwrap()];
            assert_eq!((at(0), at(MIB)), (4, 3));
            assert_eq!(scene.resize(&io, MIB).await.unwrap(), MIB);
        });
    }
}

#[test]
fn shrinking_writes_what_stays_and_frees_what_is_cut_off() {
    play(Mode::Writeback, 2 * MIB, |io, scene| async move {
        // The new end is within a page, so that a part of the page stays.
        let to = MIB + 1536;
        scene.write(&io, 0, 65536, 1).await.unwrap();
        scene.write(&io, MIB, 256 << 10, 2).await.unwrap();
        assert_eq!(scene.dirty.0.load(Ordering::SeqCst), 65536 + (256 << 10));
        assert_eq!(scene.resize(&io, to).await.unwrap(), to);
        let content = scene.test.content();
        assert_eq!(content.len() as u64, to);
        assert!(content[..65536].iter().all(|byte| *byte == 1));
        assert!(content[usize::try_from(MIB).unwrap()..].iter().all(|byte| *byte == 2));
        let cached = scene.volume.cache().unwrap().clone();
        assert_eq!((cached.dirty(), scene.dirty.0.load(Ordering::SeqCst)), (0, 0));
        assert!(cached.stats().bufspace <= to.next_multiple_of(4096));
        // It grows again, and the new area is empty, also in the page of the old end.
        scene.resize(&io, 2 * MIB).await.unwrap();
        let data = scene.read(&io, MIB, 8192).await.unwrap();
        assert!(data[..1536].iter().all(|byte| *byte == 2));
        assert!(data[1536..].iter().all(|byte| *byte == 0));
        // If the store fails, the volume keeps its data and its size.
        scene.write(&io, 0, 4096, 9).await.unwrap();
        scene.write(&io, MIB, 4096, 9).await.unwrap();
        scene.test.write_faults.store(1000, Ordering::Relaxed);
        let failed = scene.resize(&io, MIB).await;
        assert!(matches!(failed, Err(ResizeError::Unsaved(_))), "{failed:?}");
        assert_eq!((scene.volume.size(), cached.dirty()), (2 * MIB, 8192));
        scene.test.write_faults.store(0, Ordering::Relaxed);
        scene.volume.close(&io).await.unwrap();
        assert_eq!(scene.test.content()[usize::try_from(MIB).unwrap()], 9);
        assert_eq!(scene.dirty.0.load(Ordering::SeqCst), 0);
        let closed = scene.resize(&io, MIB).await;
        assert!(matches!(closed, Err(ResizeError::Unsupported { .. })), "{closed:?}");
    });
}

#[test]
fn a_volume_that_ends_within_a_page_follows_a_store_that_has_grown() {
    for mode in MODES {
        play(mode, MIB + 512, |io, scene| async move {
            scene.write(&io, MIB, 512, 1).await.unwrap();
            assert_eq!(scene.read(&io, MIB, 512).await.unwrap(), [1; 512]);
            // The store was extended from outside, and has data there.
            scene.test.set_size(MIB + 512 + 4096);
            scene.test.change(MIB + 512, &[5; 4096]);
            assert_eq!(scene.volume.size(), MIB + 512, "the growth was not requested yet");
            let grown = scene.volume.resize(&io, Resize::default()).await.unwrap();
            assert_eq!(grown, MIB + 512 + 4096);
            let data = scene.read(&io, MIB, 4608).await.unwrap();
            assert_eq!((&data[..512], &data[512..]), (&[1; 512][..], &[5; 4096][..]));
            scene.volume.close(&io).await.unwrap();
            let content = scene.test.content();
            assert_eq!(content[usize::try_from(MIB).unwrap()..], data[..]);
        });
    }
}

/// Zeroes bypass memory, and are repeated after a failed flush. The store may have grown meanwhile from outside, with data.
#[test]
fn zeroes_beyond_an_end_that_has_changed_are_not_repeated_after_a_failed_flush() {
    // The zeroed range; the size after a shrink, if any; where the store has data when it has grown.
    let cases = [
        (2 * MIB, MIB, 8192, Some(MIB)),
        (2 * MIB, MIB - 4096, 16384, Some(MIB + 1024)),
        (MIB + 512, MIB - 4096, 4608, None),
    ];
    for (size, offset, length, shrunk) in cases {
        play(Mode::Writeback, size, move |io, scene| async move {
            let flags = ZeroFlags { may_unmap: true, fast_only: false };
            scene.volume.write_zeroes(&io, offset, length, flags, false).await.unwrap();
            if let Some(to) = shrunk {
                scene.resize(&io, to).await.unwrap();
            }
            let end = shrunk.unwrap_or(size);
            scene.test.set_size(2 * MIB + 4096);
            let data = vec![5; usize::try_from(2 * MIB + 4096 - end).unwrap()];
            scene.test.change(end, &data);
            scene.volume.resize(&io, Resize::default()).await.unwrap();
            // A flush reports the loss, and a later one repairs it if that is possible.
            scene.test.lose();
            let mut failed = 0;
            while failed < 3 && scene.volume.flush(&io).await.is_err() {
                failed += 1;
            }
            assert!(scene.test.content()[usize::try_from(end).unwrap()..] == data, "of {end}");
            assert!(scene.read(&io, end, data.len()).await.unwrap() == data, "of {end}");
        });
    }
}

/// One operation on both the volume and the model; sometimes a resize.
async fn step(io: &Io, scene: &Scene, model: &mut Vec<u8>, random: &mut Random) {
    let size = model.len() as u64;
    let start = random.below(size / 512) * 512;
    let length = (1 + random.below(200)).min((size - start) / 512) * 512;
    let range = usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap();
    match random.below(20) {
        0 => {
            let to = 512 * (1 + random.below(1500));
            assert_eq!(scene.resize(io, to).await.unwrap(), to);
            model.resize(usize::try_from(to).unwrap(), 0);
        }
        1..9 => {
            let byte = u8::try_from(random.below(255)).unwrap();
            scene.write(io, start, range.len(), byte).await.unwrap();
            model[range].fill(byte);
        }
        9 => {
            let flags = ZeroFlags::default();
            scene.volume.write_zeroes(io, start, length, flags, false).await.unwrap();
            model[range].fill(0);
        }
        10 => scene.volume.flush(io).await.unwrap(),
        _ => {
            let data = scene.read(io, start, range.len()).await.unwrap();
            assert!(data == model[range], "{length} bytes at {start} of {size}");
        }
    }
}

#[test]
fn whatever_its_sizes_a_volume_reads_what_was_written_to_it() {
    for mode in MODES {
        for seed in 1..=4 {
            play(mode, 512 << 10, move |io, scene| async move {
                scene.test.waits.store(2, Ordering::Relaxed);
                let mut random = Random::new(seed);
                let mut model = vec![0; 512 << 10];
                for _ in 0..2000 {
                    step(&io, &scene, &mut model, &mut random).await;
                }
                scene.volume.close(&io).await.unwrap();
                assert!(scene.test.content() == model, "seed {seed}, {mode}");
                assert_eq!(scene.dirty.0.load(Ordering::SeqCst), 0);
            });
        }
    }
}
