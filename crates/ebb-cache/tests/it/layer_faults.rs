//! Stacks of layers whose stores hang, fail or break their contract; and the bounds of what a request does at once.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{MIB, PAGE, PageMap, Rig, WholeLayer, index, on_a_worker, read};
use ebb_block::{BlockStore, BufResult, ErrorKind, Operation};
use ebb_cache::{BaseLayers, CachedStore, LayerMap, LayerRun, Layers, LayersError, Mode};
use ebb_io::Io;
use ebb_store::{Direct, FileStore, MemoryStore, NullStore, OpenOptions, Store, TestStore};

/// The output of a future that must not wait for ever.
async fn soon<T>(io: &Io, future: impl Future<Output = T>) -> T {
    let (mut future, mut end) = (pin!(future), pin!(io.sleep(Duration::from_secs(60))));
    poll_fn(|cx| {
        let hangs = end.as_mut().poll(cx).is_ready();
        assert!(!hangs, "it hangs");
        future.as_mut().poll(cx)
    })
    .await
}

/// Waits until `count` requests hang in the store.
async fn until_hanging(io: &Io, test: &TestStore, count: usize) {
    soon(io, async {
        while test.hanging() != count {
            io.sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// How often a future is polled until it completes.
async fn polls<T>(future: impl Future<Output = T>) -> (T, usize) {
    let (mut future, mut polls) = (pin!(future), 0);
    let output = poll_fn(|cx| {
        polls += 1;
        future.as_mut().poll(cx)
    })
    .await;
    (output, polls)
}

fn memory(size: u64) -> CachedStore {
    Store::Memory(MemoryStore::new(size)).into()
}

/// Pages of the top layer and of the base in turn.
fn turns(pages: usize) -> Box<PageMap> {
    Box::new(PageMap { layers: (0..pages).map(|page| page % 2).collect(), most: 1 })
}

fn spawn_read(
    io: &Io,
    layers: &Arc<Layers>,
    offset: u64,
    length: usize,
) -> impl Future<Output = BufResult> + use<> {
    let (layers, own) = (layers.clone(), io.clone());
    io.spawn(async move {
        let buf = own.pool().get_for_test(length);
        layers.read(&own, buf, offset).await
    })
}

#[test]
fn an_aborted_volume_ends_its_requests_on_a_base_that_others_use() {
    for mode in [Mode::None, Mode::Writethrough] {
        // Too small for read-ahead.
        on_a_worker(Rig::new(8 * MIB), move |io, rig| async move {
            let bases = BaseLayers::new(&rig.cache);
            let test = Arc::new(TestStore::new(MIB, 1));
            test.change(0, &[7; 1 << 20]);
            let user = |map: Box<dyn LayerMap>| {
                let base = bases.add("base", Store::Test(test.clone()), mode).unwrap();
                Arc::new(Layers::stack("disk", memory(MIB), vec![base], map).unwrap())
            };
            let (first, second) = (user(turns(256)), user(Box::new(WholeLayer(1))));
            test.alignment.store(4096, Ordering::Relaxed);
            test.hang();
            // One that reads into the buffer, one through a bounce buffer, and one that may wait for the first.
            let hanging = [(PAGE, 8192), (0x10200, 8192), (PAGE, 4096)];
            let reads = hanging.map(|(offset, length)| spawn_read(&io, &first, offset, length));
            let other = spawn_read(&io, &second, PAGE, 4096);
            let at_store = if mode == Mode::None { 4 } else { 2 };
            until_hanging(&io, &test, at_store).await;
            first.abort();
            for (read, (offset, length)) in reads.into_iter().zip(hanging) {
                let (result, buf) = soon(&io, read).await;
                let error = result.unwrap_err();
                assert_eq!((error.kind, error.operation), (ErrorKind::Closing, Operation::Read));
                assert_eq!((error.offset, error.length), (offset, length as u64));
                assert_eq!(buf.len(), length);
            }
            let late = soon(&io, spawn_read(&io, &first, 0x20000, 8192)).await;
            assert_eq!(late.0.unwrap_err().kind, ErrorKind::Closing);
            // The other volume goes on.
            until_hanging(&io, &test, 1).await;
            assert_eq!(test.aborts.load(Ordering::Relaxed), 0);
            test.release();
            let (result, buf) = soon(&io, other).await;
            result.unwrap();
            assert!(buf.iter().all(|byte| *byte == 7));
        });
    }
}

#[test]
fn an_aborted_base_keeps_its_lock_until_its_last_user_is_closed() {
    on_a_worker(Rig::new(MIB), |_io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let options = OpenOptions {
            read_only: true,
            direct: Direct::Auto,
            create: None,
            existing: true,
            only_new: false,
            any_size: false,
        };
        let is_locked = || std::fs::File::open(&path).unwrap().try_lock().is_err();
        let user = || {
            let store = Store::File(FileStore::open(&path, &options).unwrap().0);
            let base = bases.add("base", store, Mode::Writethrough).unwrap();
            Layers::stack("disk", memory(MIB), vec![base], Box::new(WholeLayer(1))).unwrap()
        };
        let (first, second) = (user(), user());
        first.abort();
        second.abort();
        assert!(is_locked(), "reads may be in flight");
        second.release();
        assert!(is_locked(), "reads of the first one may be in flight");
        first.release();
        assert!(!is_locked());
    });
}

#[test]
fn a_base_that_was_aborted_is_not_used_again_and_modes_are_kept_apart() {
    on_a_worker(Rig::new(MIB), |_io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let add = |mode| bases.add("base", Store::Test(test.clone()), mode).unwrap();
        let stack =
            |base| Layers::stack("disk", memory(MIB), vec![base], Box::new(WholeLayer(1))).unwrap();
        let user = stack(add(Mode::Writethrough));
        let find = |mode| bases.find(&test.identity(), MIB, mode);
        assert!(find(Mode::Writethrough).is_some() && find(Mode::None).is_none());
        assert!(add(Mode::None).cache().is_none());
        user.abort();
        assert_eq!(test.aborts.load(Ordering::Relaxed), 1);
        assert!(find(Mode::Writethrough).is_none(), "its requests would fail");
        let next = stack(add(Mode::Writethrough));
        assert!(find(Mode::Writethrough).is_some());
        user.release();
        drop(next);
        assert_eq!(test.aborts.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_page_that_cannot_be_read_fails_all_that_wait_for_it_at_once() {
    // Too small for read-ahead.
    on_a_worker(Rig::new(8 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let user = || {
            let base = bases.add("base", Store::Test(test.clone()), Mode::Writethrough).unwrap();
            let map = Box::new(WholeLayer(1));
            Arc::new(Layers::stack("disk", memory(MIB), vec![base], map).unwrap())
        };
        test.read_faults.store(1000, Ordering::Relaxed);
        test.hang();
        let users: Vec<_> = (0..8).map(|_| user()).collect();
        let reads: Vec<_> = users.iter().map(|user| spawn_read(&io, user, 8192, 4096)).collect();
        until_hanging(&io, &test, 1).await;
        // The first read fails; the other seven do not wait for each other.
        test.release();
        test.hang();
        until_hanging(&io, &test, 7).await;
        test.release();
        for read in reads {
            assert_eq!(soon(&io, read).await.0.unwrap_err().kind, ErrorKind::Io);
        }
        assert_eq!(test.reads.load(Ordering::Relaxed), 8);
    });
}

#[test]
fn a_page_of_a_volume_that_cannot_be_read_fails_all_that_wait_for_it_at_once() {
    for mode in [Mode::Writethrough, Mode::Writeback] {
        // Too small for read-ahead.
        on_a_worker(Rig::new(8 * MIB), move |io, rig| async move {
            let disk = rig.volume_as("disk", MIB, 1, mode);
            disk.test.read_faults.store(1000, Ordering::Relaxed);
            disk.test.hang();
            let reads: Vec<_> = (0..8)
                .map(|_| {
                    let (cached, own) = (disk.cached.clone(), io.clone());
                    io.spawn(async move {
                        let buf = own.pool().get_for_test(4096);
                        cached.read(&own, buf, 8192).await
                    })
                })
                .collect();
            until_hanging(&io, &disk.test, 1).await;
            disk.test.release();
            disk.test.hang();
            until_hanging(&io, &disk.test, 7).await;
            disk.test.release();
            for read in reads {
                assert_eq!(soon(&io, read).await.0.unwrap_err().kind, ErrorKind::Io);
            }
            assert_eq!(disk.test.reads.load(Ordering::Relaxed), 8);
        });
    }
}

#[test]
fn a_read_by_blocks_yields_to_other_tasks() {
    on_a_worker(Rig::new(64 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(8 * MIB, 1));
        test.alignment.store(4096, Ordering::Relaxed);
        let base = bases.add("base", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let map = PageMap { layers: (0..2048).map(|page| page.min(1)).collect(), most: 4096 };
        let layers = Layers::stack("disk", memory(8 * MIB), vec![base], Box::new(map)).unwrap();
        drop(read(&io, &layers, 0, 8 * MIB).await);
        // All but the first page is of the base, in memory, and not aligned in the buffer.
        let buf = io.pool().get_for_test(4 << 20);
        let ((result, _), polls) = polls(layers.read(&io, buf, 512)).await;
        result.unwrap();
        assert!(polls >= 16, "{polls} polls for a read of 4 MiB");
    });
}

#[test]
fn only_direct_io_needs_parts_that_are_aligned_in_memory() {
    on_a_worker(Rig::new(16 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        for (indirect, reads) in [(true, 1), (false, 8)] {
            let test = Arc::new(TestStore::new(MIB, 1));
            test.alignment.store(4096, Ordering::Relaxed);
            test.indirect.store(indirect, Ordering::Relaxed);
            let base = bases.add("base", Store::Test(test.clone()), Mode::None).unwrap();
            let map = PageMap { layers: (0..256).map(|page| page.min(1)).collect(), most: 999 };
            let layers = Layers::stack("disk", memory(MIB), vec![base], Box::new(map)).unwrap();
            // 3,584 bytes of the top layer, then 32 KiB of the base.
            drop(read(&io, &layers, 512, 3584 + 32768).await);
            assert_eq!(test.reads.load(Ordering::Relaxed), reads, "indirect: {indirect}");
        }
    });
}

#[test]
fn the_error_of_a_part_names_the_range_of_the_request_and_the_base() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        for mode in [Mode::None, Mode::Writethrough] {
            let test = Arc::new(TestStore::new(MIB, 1));
            let base = bases.add("base", Store::Test(test.clone()), mode).unwrap();
            let layers = Layers::stack("disk", memory(MIB), vec![base], turns(256)).unwrap();
            test.read_faults.store(1000, Ordering::Relaxed);
            let (result, buf) = layers.read(&io, io.pool().get_for_test(16384), 8192).await;
            let error = result.unwrap_err();
            assert_eq!((error.offset, error.length, buf.len()), (8192, 16384, 16384));
            assert_eq!(error.kind, ErrorKind::Io);
            assert!(error.full_text().contains("base a test"), "{}", error.full_text());
        }
    });
}

#[test]
fn a_store_that_returns_another_buffer_fails_the_request() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let base = bases.add("base", Store::Test(test.clone()), Mode::None).unwrap();
        let layers = Layers::stack("disk", memory(MIB), vec![base], turns(256)).unwrap();
        test.other_buffers.store(true, Ordering::Relaxed);
        for length in [4096, 65536, 1 << 20] {
            let (result, _) = layers.read(&io, io.pool().get_for_test(length), 0).await;
            let error = result.err().map(|error| (error.kind, error.offset, error.length));
            let expected = (length > 4096).then_some((ErrorKind::Io, 0, length as u64));
            assert_eq!(error, expected);
        }
    });
}

#[test]
fn a_hole_beyond_a_short_base_is_one_extent_and_an_empty_range_is_no_request() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let base = bases.add("base", Store::Test(test), Mode::None).unwrap();
        let top = CachedStore::from(Store::Null(NullStore::new(1 << 40)));
        let alone = CachedStore::from(Store::Null(NullStore::new(1 << 40)));
        let layers = Layers::stack("disk", top, vec![base], Box::new(WholeLayer(1))).unwrap();
        let list = layers.extents(&io, 0, 1 << 40, 9).await.unwrap();
        let found: Vec<_> = list.iter().map(|extent| (extent.length, extent.hole)).collect();
        assert_eq!(found, [(MIB, false), ((1 << 40) - MIB, true)]);
        let empty = layers.extents(&io, MIB, 0, 9).await.unwrap();
        assert_eq!(empty, alone.extents(&io, MIB, 0, 9).await.unwrap());
        layers.prefetch(&io, MIB, 0).await.unwrap();
    });
}

#[test]
fn a_prefetch_of_several_parts_loads_at_most_a_quarter_of_the_cache() {
    on_a_worker(Rig::new(16 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(64 * MIB, 1));
        let base = bases.add("base", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let map = Box::new(PageMap { layers: vec![1; 16384], most: 256 });
        let layers = Layers::stack("disk", memory(64 * MIB), vec![base], map).unwrap();
        layers.prefetch(&io, 0, 64 * MIB).await.unwrap();
        let loaded = test.read_bytes.load(Ordering::Relaxed);
        assert!((MIB..=4 * MIB).contains(&loaded), "{loaded} bytes");
        let before = test.reads.load(Ordering::Relaxed);
        drop(read(&io, &layers, 0, MIB).await);
        assert_eq!(test.reads.load(Ordering::Relaxed), before);
    });
}

#[test]
fn a_base_twice_in_a_stack_and_a_writeback_cache_above_one_are_refused() {
    on_a_worker(Rig::new(MIB), |_io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let add = || bases.add("base", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let map = || Box::new(WholeLayer(1));
        let twice = Layers::stack("disk", memory(MIB), vec![add(), add()], map()).err();
        assert!(matches!(twice, Some(LayersError::Twice { .. })), "{twice:?}");
        let store = Store::Memory(MemoryStore::new(MIB));
        let top = CachedStore::new(&rig.cache, "disk", store, Mode::Writeback).unwrap();
        let writeback = Layers::stack("disk", top, vec![add()], map()).err();
        assert!(matches!(writeback, Some(LayersError::Writeback { .. })), "{writeback:?}");
    });
}

/// A map whose runs end within a block.
#[derive(Debug)]
struct Sectors;

impl LayerMap for Sectors {
    fn run(&self, _offset: u64, length: u64) -> LayerRun {
        LayerRun { layer: 1, length: length.min(512) }
    }
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "the run panicked")]
fn a_map_whose_runs_end_within_a_block_is_found_while_testing() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let base = bases.add("base", Store::Test(test), Mode::None).unwrap();
        let layers = Layers::stack("disk", memory(MIB), vec![base], Box::new(Sectors)).unwrap();
        let buf = read(&io, &layers, 0, 4096).await;
        assert_eq!(buf.len(), index(4096));
    });
}
