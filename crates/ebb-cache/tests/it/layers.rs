//! Stacks of layers: what they read, compared with a byte array; bases that are shared by volumes; shares.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{MIB, PAGE, PageMap, Random, Rig, WholeLayer, index, on_a_worker, read};
use ebb_block::{BlockStore, ErrorKind, Operation, Tracked, ZeroFlags};
use ebb_cache::{BaseLayer, BaseLayers, CachedStore, Layers, LayersError, Mode};
use ebb_io::Io;
use ebb_store::{Direct, FileStore, MemoryStore, NullStore, OpenOptions, Store, TestStore};
use proptest::prelude::*;

const SECTOR: u64 = 512;

/// A disk of random content.
fn disk(size: u64, seed: u64) -> (Arc<TestStore>, Vec<u8>) {
    let mut random = Random::new(seed);
    let content: Vec<u8> = (0..size).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
    let test = TestStore::new(size, seed);
    test.change(0, &content);
    (Arc::new(test), content)
}

fn base(bases: &BaseLayers, name: &str, disk: &TestStore, mode: Mode) -> BaseLayer {
    bases.add(name, Store::Test(Arc::new(disk.open_anew())), mode).unwrap()
}

/// A stack to be compared with a byte array.
#[derive(Clone, Debug)]
struct Stack {
    /// Sectors of each layer, the top first, and whether it has a cache.
    layers: Vec<(u64, bool)>,
    map: PageMap,
    /// Sectors: offset and length, within the volume.
    reads: Vec<(u64, u64)>,
    seed: u64,
}

const PAGES: u64 = 160;

fn stacks() -> impl Strategy<Value = Stack> {
    (2..=3usize).prop_flat_map(|count| {
        let sectors = prop_oneof![1..PAGES * 8, Just(PAGES * 8), PAGES * 8..PAGES * 16];
        // Runs of pages with the same layer, some of them long.
        let run = (0..count, prop_oneof![1..4usize, 1..40usize]);
        let layers = prop::collection::vec((sectors, any::<bool>()), count);
        let map =
            (prop::collection::vec(run, 330), prop_oneof![1..4u64, Just(u64::MAX / PAGE / 4)]);
        let read = (0..PAGES * 16, prop_oneof![1..20u64, 1..600u64]);
        (layers, map, prop::collection::vec(read, 40), any::<u64>()).prop_map(
            |(layers, (runs, most), reads, seed)| {
                let runs = runs.into_iter().flat_map(|(layer, pages)| vec![layer; pages]);
                let map = PageMap { layers: runs.collect(), most };
                let size = layers[0].0;
                let within = |(start, length): (u64, u64)| {
                    let start = start % size;
                    (start, length.min(size - start))
                };
                let reads = reads.into_iter().map(within).collect();
                Stack { layers, map, reads, seed }
            },
        )
    })
}

async fn compare(io: Io, rig: Arc<Rig>, stack: Stack) {
    let bases = BaseLayers::new(&rig.cache);
    let mode = |cached| if cached { Mode::Writethrough } else { Mode::None };
    let mut contents = Vec::new();
    let mut below = Vec::new();
    let mut top = None;
    for (number, (sectors, cached)) in stack.layers.iter().enumerate() {
        let (test, content) = disk(sectors * SECTOR, stack.seed ^ number as u64);
        test.waits.store(2, Ordering::Relaxed);
        contents.push(content);
        if number == 0 {
            let store = Store::Test(test);
            top = Some(CachedStore::new(&rig.cache, "top", store, mode(*cached)).unwrap());
        } else {
            below.push(base(&bases, &format!("base {number}"), &test, mode(*cached)));
        }
    }
    // What a read must return.
    let size = index(stack.layers[0].0 * SECTOR);
    let model: Vec<u8> = (0..size)
        .map(|at| contents[stack.map.layers[at / 4096]].get(at).copied().unwrap_or(0))
        .collect();
    let layers = Layers::stack("top", top.unwrap(), below, Box::new(stack.map.clone())).unwrap();
    let layers = Arc::new(Tracked(layers));
    assert_eq!(layers.size(), size as u64);
    let model = Arc::new(model);
    for round in 0..2 {
        // Some at a time.
        for reads in stack.reads.chunks(5) {
            let one = |&(start, length): &(u64, u64)| {
                let (io, own, layers, model) =
                    (io.clone(), io.clone(), layers.clone(), model.clone());
                io.spawn(async move {
                    let (offset, length) = (start * SECTOR, length * SECTOR);
                    let buf = read(&own, &*layers, offset, length).await;
                    let same = *buf == model[index(offset)..index(offset + length)];
                    assert!(same, "read of {length} at {offset}, round {round}");
                })
            };
            let tasks: Vec<_> = reads.iter().map(one).collect();
            for task in tasks {
                task.await;
            }
        }
        let (start, length) = stack.reads[round];
        layers.prefetch(&io, start * SECTOR, length * SECTOR).await.unwrap();
    }
    for &(start, length) in &stack.reads {
        let (mut at, end) = (start * SECTOR, (start + length) * SECTOR);
        while at < end {
            let list = layers.extents(&io, at, end - at, 3).await.unwrap();
            assert!(!list.is_empty() && list.len() <= 3);
            for extent in list {
                assert!(extent.offset == at && extent.length > 0);
                at += extent.length;
                let bytes = &model[index(extent.offset)..index(at)];
                assert!(!extent.hole || bytes.iter().all(|byte| *byte == 0), "{extent:?}");
            }
        }
        assert_eq!(at, end);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_stack_reads_what_the_layers_hold(stack in stacks()) {
        // Less than the layers hold together, so that pages are evicted.
        on_a_worker(Rig::new(MIB / 2), move |io, rig| compare(io, rig, stack));
    }
}

#[test]
fn a_stack_refuses_changes_and_keeps_its_size() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let (lower, content) = disk(MIB, 2);
        let below = vec![base(&bases, "base", &lower, Mode::Writethrough)];
        let top = CachedStore::from(Store::Memory(MemoryStore::new(MIB)));
        let layers = Layers::stack("disk", top, below, Box::new(WholeLayer(1))).unwrap();
        assert!(layers.capabilities().read_only && !layers.has_direct_access());
        let refused = |result: Result<(), ebb_block::BlockError>| {
            assert_eq!(result.unwrap_err().kind, ErrorKind::ReadOnly);
        };
        let buf = io.pool().get_for_test(4096);
        refused(layers.write(&io, buf, 0, true).await.0);
        refused(layers.discard(&io, 0, 4096).await);
        refused(layers.write_zeroes(&io, 0, 4096, ZeroFlags::default()).await);
        let order = ebb_block::Resize { to: Some(2 * MIB), shrink: false };
        assert!(layers.resize(&io, order).await.is_err());
        layers.flush(&io).await.unwrap();
        assert_eq!(*read(&io, &layers, 512, 8192).await, content[512..8704]);
        assert_eq!(lower.writes.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn parts_that_are_not_aligned_in_memory_are_read_by_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("base");
    let content: Vec<u8> = (0..MIB).map(|at| u8::try_from(at / 512 % 251).unwrap()).collect();
    std::fs::write(&path, &content).unwrap();
    let options = OpenOptions {
        read_only: true,
        direct: Direct::Auto,
        create: None,
        existing: true,
        only_new: false,
        any_size: false,
    };
    let open = move || {
        let file = FileStore::open(&path, &options).unwrap().0;
        Store::File(file.assume_alignment(4096))
    };
    for mode in [Mode::None, Mode::Writethrough] {
        let (open, content) = (open.clone(), content.clone());
        on_a_worker(Rig::new(4 * MIB), move |io, rig| async move {
            let below = vec![BaseLayers::new(&rig.cache).add("base", open(), mode).unwrap()];
            let top = CachedStore::from(Store::Null(NullStore::new(MIB)));
            // Pages of the base and of zeroes in turn, three of each.
            let map = PageMap { layers: (0..256).map(|page| page / 3 % 2).collect(), most: 99 };
            let layers = Layers::stack("disk", top, below, Box::new(map)).unwrap();
            let whole = layers.bounce_bytes(4096, 8192);
            assert_eq!((whole, layers.bounce_bytes(512, 4096)), (0, 8192));
            for offset in (0..128 * 512).step_by(512) {
                for length in [512, 4096, 60 * 1024] {
                    let buf = read(&io, &layers, offset, length).await;
                    for (at, byte) in (index(offset)..).zip(&*buf) {
                        let zero = at / 4096 / 3 % 2 == 0;
                        assert_eq!(*byte, if zero { 0 } else { content[at] }, "{offset} {at}");
                    }
                }
            }
        });
    }
}

#[test]
fn a_map_that_names_no_layer_fails_the_request_and_large_blocks_are_refused() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let (lower, _) = disk(MIB, 2);
        let below = vec![base(&bases, "base", &lower, Mode::None)];
        let top = CachedStore::from(Store::Null(NullStore::new(MIB)));
        let layers = Layers::stack("disk", top, below, Box::new(WholeLayer(2))).unwrap();
        let (result, buf) = layers.read(&io, io.pool().get_for_test(8192), 4096).await;
        let error = result.unwrap_err();
        assert_eq!((error.kind, error.offset, error.length), (ErrorKind::Io, 4096, 8192));
        assert!(error.full_text().contains("names layer 2"), "{}", error.full_text());
        assert_eq!(buf.len(), 8192);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let file = FileStore::open(&path, &OpenOptions::default()).unwrap().0;
        let below = vec![base(&bases, "base", &lower, Mode::None)];
        let top = CachedStore::from(Store::File(file.assume_alignment(8192)));
        let refused = Layers::stack("disk", top, below, Box::new(WholeLayer(0))).unwrap_err();
        assert!(matches!(refused, LayersError::Blocks { block: 8192, .. }), "{refused}");
    });
}

/// A volume without data of its own above a base.
fn clone_of(rig: &Rig, name: &str, base: BaseLayer, size: u64) -> Layers {
    let store = Store::Memory(MemoryStore::new(size));
    let top = CachedStore::new(&rig.cache, name, store, Mode::Writethrough).unwrap();
    Layers::stack(name, top, vec![base], Box::new(WholeLayer(1))).unwrap()
}

#[test]
fn volumes_above_one_base_read_and_hold_each_page_once() {
    on_a_worker(Rig::new(16 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let (lower, content) = disk(2 * MIB, 7);
        let first =
            clone_of(&rig, "one", base(&bases, "golden", &lower, Mode::Writethrough), 2 * MIB);
        let second =
            clone_of(&rig, "two", base(&bases, "golden", &lower, Mode::Writethrough), 2 * MIB);
        assert!(bases.find(&lower.identity(), 2 * MIB, Mode::Writethrough).is_some());
        assert!(bases.find(&lower.identity(), MIB, Mode::Writethrough).is_none(), "another size");
        // Both at the same time, in different order.
        let mut random = Random::new(1);
        for page in 0..2 * MIB / PAGE {
            let other = random.below(2 * MIB / PAGE);
            for (layers, page) in [(&first, page), (&second, other), (&second, page)] {
                let buf = read(&io, layers, page * PAGE, PAGE).await;
                assert!(*buf == content[index(page * PAGE)..index((page + 1) * PAGE)]);
            }
        }
        let stats = rig.cache.stats();
        assert_eq!(stats.total.bufspace, 2 * MIB, "held once");
        let by_name = |name: &str| {
            let mut found = stats.volumes.iter().filter(|(own, _)| own == name);
            (found.next().unwrap().1.bufspace, found.count())
        };
        assert_eq!(
            [by_name("golden"), by_name("one"), by_name("two")],
            [(2 * MIB, 0), (0, 0), (0, 0)]
        );
        // The last user closes it, once no read-ahead is in flight.
        drop(first);
        assert_eq!(rig.cache.stats().total.bufspace, 2 * MIB);
        drop(second);
        while rig.cache.stats().total.bufspace > 0 {
            io.sleep(Duration::from_millis(1)).await;
        }
        assert!(bases.find(&lower.identity(), 2 * MIB, Mode::Writethrough).is_none());
    });
}

#[test]
fn a_base_is_read_from_its_store_once_for_all_volumes() {
    on_a_worker(Rig::new(16 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(4 * MIB, 7));
        test.waits.store(3, Ordering::Relaxed);
        let below = bases.add("golden", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let first = Arc::new(clone_of(&rig, "one", below, 4 * MIB));
        let below = bases.add("other", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let second = Arc::new(clone_of(&rig, "two", below, 4 * MIB));
        for offset in (0..4 * MIB).step_by(65536) {
            let tasks = [&first, &second, &first, &second].map(|layers| {
                let (layers, own) = (layers.clone(), io.clone());
                io.spawn(async move { drop(read(&own, &*layers, offset, 65536).await) })
            });
            for task in tasks {
                task.await;
            }
        }
        assert_eq!(test.read_bytes.load(Ordering::Relaxed), 4 * MIB);
        assert_eq!(rig.cache.stats().total.bufspace, 4 * MIB);
    });
}

#[test]
fn a_base_is_released_and_aborted_by_its_last_user() {
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
        let open = || Store::File(FileStore::open(&path, &options).unwrap().0);
        let is_locked = || std::fs::File::open(&path).unwrap().try_lock().is_err();
        let user = |name: &str| {
            clone_of(&rig, name, bases.add("base", open(), Mode::Writethrough).unwrap(), MIB)
        };
        let (first, second) = (user("one"), user("two"));
        first.release();
        first.release();
        assert!(is_locked(), "the second user is there");
        drop(first);
        assert!(is_locked());
        second.release();
        assert!(!is_locked());
        // The next user opens it again.
        assert!(bases.find(&open().identity(), MIB, Mode::Writethrough).is_none());
        let third = user("three");
        assert!(is_locked());
        drop((second, third));
        assert!(!is_locked());

        let test = Arc::new(TestStore::new(MIB, 1));
        let user = |name: &str| {
            let base = bases.add("test", Store::Test(test.clone()), Mode::None).unwrap();
            clone_of(&rig, name, base, MIB)
        };
        let aborts = || test.aborts.load(Ordering::Relaxed);
        let (first, second) = (user("one"), user("two"));
        first.abort();
        assert_eq!(aborts(), 0, "the second user needs it");
        // Requests of the first one may still wait for the store.
        second.release();
        assert_eq!(aborts(), 1);
        drop((first, second));
        let only = user("one");
        only.abort();
        only.abort();
        assert_eq!(aborts(), 2);
    });
}

#[test]
fn a_long_read_of_many_layers_yields_to_other_tasks() {
    on_a_worker(Rig::new(64 * MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let below = Store::Memory(MemoryStore::new(16 * MIB));
        let below = bases.add("base", below, Mode::Writethrough).unwrap();
        let store = Store::Memory(MemoryStore::new(32 * MIB));
        let top = CachedStore::new(&rig.cache, "disk", store, Mode::Writethrough).unwrap();
        // The second half of the base does not exist.
        let map = PageMap { layers: (0..8192).map(|page| page % 2).collect(), most: 1 };
        let layers = Layers::stack("disk", top, vec![below], Box::new(map)).unwrap();
        for _ in 0..2 {
            let buf = io.pool().get_for_test(32 << 20);
            let mut future = std::pin::pin!(layers.read(&io, buf, 0));
            let mut polls = 0;
            let (result, _) = std::future::poll_fn(|cx| {
                polls += 1;
                future.as_mut().poll(cx)
            })
            .await;
            result.unwrap();
            assert!(polls >= 128, "{polls} polls for a read of 32 MiB");
        }
    });
}

#[test]
fn failures_of_a_base_are_those_of_the_request() {
    on_a_worker(Rig::new(MIB), |io, rig| async move {
        let bases = BaseLayers::new(&rig.cache);
        let test = Arc::new(TestStore::new(MIB, 1));
        let join = || bases.add("golden", Store::Test(test.clone()), Mode::Writethrough).unwrap();
        let layers = clone_of(&rig, "one", join(), MIB);
        test.read_faults.store(1000, Ordering::Relaxed);
        let (result, buf) = layers.read(&io, io.pool().get_for_test(4096), 8192).await;
        let error = result.unwrap_err();
        assert_eq!((error.operation, error.offset, buf.len()), (Operation::Read, 8192, 4096));
        test.read_faults.store(0, Ordering::Relaxed);
        drop(read(&io, &layers, 8192, 4096).await);
    });
}
