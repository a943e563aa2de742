//! A successor resumes where a killed daemon stopped: whole backends that are replaced.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::{HANG, Rig, SIZE, pattern, until};
use ebb_cache::{Cache, CacheOptions, CachedStore, Mode};
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig, offset};
use ebb_mem::Memory;
use ebb_store::{FileStore, OpenOptions, Store, TestStore};
use ebb_volume::{Volume, VolumeOptions};

/// An upgrade: one backend stops, another starts, and guests notice neither.
#[test]
fn guests_stay_connected_while_the_backend_is_replaced() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig { queues: 2, order: 1, ..FrontendConfig::default() });
    for round in 0..5u64 {
        let mut data = pattern(round, 65536);
        assert_eq!(disk.transfer(0, op::WRITE, round * 128, &mut data).unwrap(), 0);
        rig.stop();
        // The guest does not notice and sends requests.
        let page = disk.pages(1)[0];
        let segment = Segment { gref: page, first: 0, last: 7 };
        for queue in 0..2 {
            let (_, request) = disk.request(op::WRITE, 8000 + round, &[segment]);
            disk.queues[queue].put(request);
            disk.queues[queue].push();
        }
        assert_eq!(disk.backend("state").as_deref(), Some("4"), "the disk stays connected");
        rig.start(1, |_| {});
        for queue in 0..2 {
            assert_eq!(disk.queues[queue].wait().unwrap().status, 0);
        }
        let mut back = vec![0; 65536];
        assert_eq!(disk.transfer(1, op::READ, round * 128, &mut back).unwrap(), 0);
        assert!(back == data);
    }
    disk.close().unwrap();
    assert_eq!(std::fs::read_dir(rig.journals.path()).unwrap().count(), 0);
}

/// Without its journal only an idle ring is taken over.
#[test]
fn a_ring_without_its_journal_is_taken_over_only_when_idle() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let forget = |rig: &Rig| {
        for file in std::fs::read_dir(rig.journals.path()).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
    };
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    forget(&rig);
    rig.start(1, |_| {});
    until("the ring is taken over", || !rig.backend.as_ref().unwrap().stats().is_empty());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    forget(&rig);
    let (_, request) = disk.request(op::FLUSH_DISKCACHE, 0, &[]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    rig.start(1, |_| {});
    disk.await_backend("5").unwrap();
}

/// A disk after a kill of the daemon: on the test's store, with a write in flight that the store does not complete.
fn killed(rig: &mut Rig, store: &Arc<TestStore>) -> Frontend {
    rig.add(volume_on("disk", store));
    let mut disk = rig.disk(FrontendConfig::default());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    store.latency_us.store(u64::MAX >> 8, Ordering::SeqCst);
    let page = disk.pages(1)[0];
    assert!(disk.guest().memory().write(offset(page), &pattern(2, 4096)));
    let (_, request) = disk.request(op::WRITE, 8, &[Segment { gref: page, first: 0, last: 7 }]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    until("the write is in flight", || store.writes.load(Ordering::SeqCst) > 1);
    assert_eq!(rig.backend.take().unwrap().stop(Instant::now()).len(), 1);
    rig.workers.clear();
    store.latency_us.store(0, Ordering::SeqCst);
    disk
}

fn volume_on(name: &str, store: &Arc<TestStore>) -> Arc<Volume> {
    Volume::new(name, Store::Test(store.clone()), VolumeOptions::default())
}

/// A volume that acknowledges writes from the memory of this process.
fn written_back(memory: &Arc<Memory>, store: &Arc<TestStore>) -> Arc<Volume> {
    let options = CacheOptions { max_bytes: Some(8 << 20), ..CacheOptions::new(Instant::now()) };
    let cache = Cache::without_reclaimer(memory, options);
    let store = Store::Test(store.clone());
    let store = CachedStore::new(&cache, "disk", store, Mode::Writeback).unwrap();
    Volume::new("disk", store, VolumeOptions::default())
}

/// Replaces a daemon that acknowledged writes from its memory, flushed or not, by a kill or by a clean stop.
fn replaced_with_unflushed_writes(flushed: bool, in_order: bool) -> (Rig, Frontend) {
    let mut rig = Rig::new();
    rig.stop();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    rig.memory = Some(memory.clone());
    let store = Arc::new(TestStore::new(SIZE, 1));
    rig.add(written_back(&memory, &store));
    rig.start(1, |_| {});
    let mut disk = rig.disk(FrontendConfig { queues: 2, ..FrontendConfig::default() });
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    if flushed {
        assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0);
    }
    let backend = rig.backend.take().unwrap();
    let ending = backend.begin_stop();
    assert!(ending.wait_until(Instant::now() + HANG));
    if in_order {
        ending.of("disk").note_stable();
    }
    backend.stop(Instant::now() + HANG);
    rig.workers.clear();
    rig.add(written_back(&memory, &store));
    rig.start(1, |_| {});
    (rig, disk)
}

/// The guest runs on: its next flush must not succeed after a kill has lost acknowledged writes.
#[test]
fn a_successor_does_not_flush_over_writes_that_a_kill_has_lost() {
    let (rig, mut disk) = replaced_with_unflushed_writes(false, false);
    until("the guest is seen to fail", || failing(&rig) == 1);
    assert_ne!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0, "a flush succeeded after a lost write");
    // Writes fail on every ring, so that the guest notices.
    assert_ne!(disk.transfer(1, op::WRITE, 8, &mut pattern(2, 4096)).unwrap(), 0);
    assert_eq!(disk.transfer(1, op::READ, 8, &mut vec![0; 4096]).unwrap(), 0);
}

#[test]
fn writes_that_were_flushed_or_closed_without_loss_do_not_break_a_successor() {
    for (flushed, in_order) in [(true, false), (false, true)] {
        let (_rig, mut disk) = replaced_with_unflushed_writes(flushed, in_order);
        assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0, "{flushed} {in_order}");
        assert_eq!(disk.transfer(1, op::WRITE, 8, &mut pattern(2, 4096)).unwrap(), 0);
    }
}

/// A store that reports lost writes tells the daemon that sent them, which is gone.
#[test]
fn kill_hides_no_loss_that_only_one_daemon_learns_of() {
    for (reports, flushed) in [(true, false), (true, true), (false, false)] {
        let mut rig = Rig::new();
        let store = Arc::new(TestStore::new(SIZE, 1));
        if reports {
            store.report_once();
        }
        rig.add(volume_on("disk", &store));
        let mut disk = rig.disk(FrontendConfig::default());
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
        assert!(!flushed || disk.flush(op::FLUSH_DISKCACHE).unwrap() == 0);
        rig.stop();
        rig.add(volume_on("disk", &Arc::new(store.open_anew())));
        rig.start(1, |_| {});
        let fails = disk.flush(op::FLUSH_DISKCACHE).unwrap() != 0;
        assert_eq!(fails, reports && !flushed, "reports {reports}, flushed {flushed}");
    }
}

/// The number of guests of the volume that the figures show as failing.
fn failing(rig: &Rig) -> u64 {
    let failing = rig.backend.as_ref().unwrap().figures().failing();
    failing.get("disk").copied().unwrap_or_default()
}

fn reported(rig: &Rig) -> String {
    rig.world.tree.get("/local/domain/0/error/backend/ebbd/1/51728/error").unwrap_or_default()
}

/// Requests that a guest sent for one store are not repeated on another that has the volume's name now; when the
/// first store is back, they are repeated there.
#[test]
fn requests_are_not_repeated_on_another_store() {
    let mut rig = Rig::new();
    let (store, other) = (Arc::new(TestStore::new(SIZE, 1)), Arc::new(TestStore::new(SIZE, 2)));
    let mut disk = killed(&mut rig, &store);
    rig.add(volume_on("disk", &other));
    rig.start(1, |_| {});
    disk.await_backend("5").unwrap();
    assert_eq!(failing(&rig), 1);
    assert!(
        reported(&rig).contains("was attached to volume `disk` on test "),
        "{}",
        reported(&rig)
    );
    assert_eq!(other.writes.load(Ordering::SeqCst), 0);
    assert_eq!(disk.queues[0].take().unwrap(), None);
    rig.stop();
    // Nor are they repeated on a volume of another name.
    rig.add(volume_on("disk", &store));
    rig.add(volume_on("second", &store));
    rig.world.tree.set("/local/domain/0/backend/ebbd/1/51728/params", "second");
    rig.start(1, |_| {});
    until("the disk is refused", || reported(&rig).contains("now the disk is volume `second`"));
    disk.await_backend("5").unwrap();
    rig.stop();
    rig.world.tree.set("/local/domain/0/backend/ebbd/1/51728/params", "disk");
    rig.start(1, |_| {});
    assert_eq!(disk.queues[0].wait().unwrap().status, 0);
    assert_eq!(failing(&rig), 0);
    let mut back = vec![0; 4096];
    store.look(8 * 512, &mut back);
    assert!(back == pattern(2, 4096));
}

/// Even an idle guest caches data of its store: it is not resumed on another store, nor on one that has shrunk.
#[test]
fn an_idle_guest_is_not_resumed_on_another_store_or_a_smaller_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let open = || {
        let create = (!path.exists()).then_some(SIZE);
        let options = OpenOptions { create, ..OpenOptions::default() };
        let (store, _) = FileStore::open(&path, &options).unwrap();
        Volume::new("disk", Store::File(store), VolumeOptions::default())
    };
    let mut rig = Rig::new();
    rig.add(open());
    let mut disk = rig.disk(FrontendConfig::default());
    let data = pattern(3, 65536);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data.clone()).unwrap(), 0);
    let end = |rig: &mut Rig| {
        rig.stop();
        // The file is closed.
        rig.volumes.list().iter().for_each(|volume| drop(rig.volumes.remove(volume.name())));
    };
    end(&mut rig);
    let kept = folder.path().join("kept");
    std::fs::rename(&path, &kept).unwrap();
    rig.add(open());
    rig.start(1, |_| {});
    disk.await_backend("5").unwrap();
    assert!(reported(&rig).contains("was attached to volume `disk` on "), "{}", reported(&rig));
    end(&mut rig);
    std::fs::rename(&kept, &path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(SIZE / 2).unwrap();
    rig.add(open());
    rig.start(1, |_| {});
    until("the disk is refused", || reported(&rig).contains("but it was attached with"));
    disk.await_backend("5").unwrap();
    end(&mut rig);
    // A larger store is accepted, and the same file is the same store.
    file.set_len(SIZE * 2).unwrap();
    rig.add(open());
    rig.start(1, |_| {});
    disk.await_backend("4").unwrap();
    let mut back = vec![0; 65536];
    assert_eq!(disk.transfer(0, op::READ, 0, &mut back).unwrap(), 0);
    assert!(back == data);
    assert_eq!(disk.transfer(0, op::WRITE, SIZE / 512, &mut back).unwrap(), 0);
    // The guest was given the new size: a file as small as before is refused from now on.
    end(&mut rig);
    file.set_len(SIZE).unwrap();
    rig.add(open());
    rig.start(1, |_| {});
    until("it is refused", || reported(&rig).contains(&format!("attached with {}", SIZE * 2)));
}

/// When a volume grows while it is used, the journal has the new size, so that a kill at any time is detected.
#[test]
fn the_size_that_a_guest_was_given_is_in_the_journal() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig { queues: 2, ..FrontendConfig::default() });
    let volume = rig.volumes.get("disk").unwrap().volume;
    let grown = volume.clone();
    let order = ebb_volume::Resize { to: Some(2 * SIZE), shrink: false };
    let worker = rig.workers[0].handle();
    worker.block_on(move |io| async move { grown.resize(&io, order).await.unwrap() }).unwrap();
    until("the guest is notified of the new size", || disk.size() == 2 * SIZE);
    rig.stop();
    let order = ebb_volume::Resize { to: Some(SIZE), shrink: true };
    let worker = ebb_io::Worker::start_alone("shrink").unwrap();
    let handle = worker.handle();
    handle.block_on(move |io| async move { volume.resize(&io, order).await.unwrap() }).unwrap();
    rig.start(1, |_| {});
    until("it is refused", || reported(&rig).contains(&format!("attached with {}", SIZE * 2)));
    assert_eq!(disk.queues[0].take().unwrap(), None);
}

/// It attached when the daemon was about to shrink the volume, and a kill followed.
#[test]
fn guest_is_resumed_that_attached_while_its_disk_was_shrunk() {
    let mut rig = Rig::new();
    let volume = rig.volumes.get("disk").unwrap().volume;
    volume.plan_size(Some(SIZE / 2));
    let mut disk = rig.disk(FrontendConfig::default());
    rig.stop();
    let order = ebb_volume::Resize { to: Some(SIZE / 2), shrink: true };
    let worker = ebb_io::Worker::start_alone("shrink").unwrap();
    let handle = worker.handle();
    handle.block_on(move |io| async move { volume.resize(&io, order).await.unwrap() }).unwrap();
    rig.start(1, |_| {});
    disk.await_backend("4").unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut [1; 4096]).unwrap(), 0);
}

/// Writes that fail because a flush failed continue to fail under a successor: the guest may not have noticed yet.
#[test]
fn a_failed_flush_is_remembered_by_a_successor() {
    let mut rig = Rig::new();
    let store = Arc::new(TestStore::new(SIZE, 1));
    rig.add(volume_on("disk", &store));
    let mut disk = rig.disk(FrontendConfig { queues: 2, ..FrontendConfig::default() });
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
    store.flush_faults.store(1000, Ordering::SeqCst);
    assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), -1);
    store.flush_faults.store(0, Ordering::SeqCst);
    for restarts in 0..3 {
        for queue in 0..2 {
            let status = disk.transfer(queue, op::WRITE, 0, &mut pattern(1, 4096)).unwrap();
            assert_eq!(status, -1, "queue {queue} after {restarts} restarts");
        }
        assert_eq!(disk.transfer(1, op::READ, 0, &mut vec![0; 4096]).unwrap(), 0);
        rig.stop();
        rig.start(1, |_| {});
    }
    // A guest that reconnects has discarded its cached data, and its writes work again.
    disk.close().unwrap();
    disk.connect().unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 4096)).unwrap(), 0);
}

/// A journal of an earlier format does not identify its store: only an idle ring is taken over with it.
#[test]
fn a_journal_of_an_earlier_format_is_taken_over_only_when_idle() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let age = |rig: &Rig| {
        for file in std::fs::read_dir(rig.journals.path()).unwrap() {
            let mut old = vec![0; 128 + 32 * 128];
            old[..4].copy_from_slice(b"ebbj");
            std::fs::write(file.unwrap().path(), old).unwrap();
        }
    };
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    age(&rig);
    rig.start(1, |_| {});
    until("the ring is taken over", || !rig.backend.as_ref().unwrap().stats().is_empty());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
    rig.stop();
    age(&rig);
    let (_, request) = disk.request(op::FLUSH_DISKCACHE, 0, &[]);
    disk.queues[0].put(request);
    disk.queues[0].push();
    rig.start(1, |_| {});
    disk.await_backend("5").unwrap();
    assert!(reported(&rig).contains("made by another version of ebbd"), "{}", reported(&rig));
}

#[test]
fn a_guest_waits_for_a_volume_that_its_successor_cannot_open_yet() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(3, 4096)).unwrap(), 0);
    rig.stop();
    let volume = rig.volumes.remove("disk").unwrap();
    let requested = Arc::new(std::sync::atomic::AtomicBool::new(false));
    rig.start(1, |options| {
        let requested = requested.clone();
        options.awaited = Arc::new(move |name| {
            assert_eq!(name, "disk");
            requested.store(true, Ordering::SeqCst);
            true
        });
    });
    until("the successor looks for the volume", || requested.load(Ordering::SeqCst));
    rig.add(volume);
    let backend = rig.backend.as_ref().unwrap();
    backend.recheck_devices();
    until("it is served again", || backend.stats().len() == 1);
    let mut read = vec![0; 4096];
    assert_eq!(disk.transfer(0, op::READ, 0, &mut read).unwrap(), 0);
    assert_eq!(read, pattern(3, 4096));
}
