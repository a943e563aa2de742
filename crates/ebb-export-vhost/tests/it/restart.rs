//! Recovery: a successor continues where a killed backend stopped.
//!
//! `EBB_KILLS=<number>` sets how often the backend is killed, `EBBD_FUZZ_SEED=<number>` the seed.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "this is a test"
)]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::driver::kind;
use common::frontend::{is_readable, take_event};
use common::load::Load;
use common::{
    Base, DATA, Frontend, HANG, Random, Rig, SIZE, Wishes, memory_volume, number, pattern, status,
    until, volume_on,
};
use ebb_cache::{BaseLayers, Cache, CacheOptions, CachedStore, Delta, Layers, Mode, plain_parent};
use ebb_mem::Memory;
use ebb_store::{Direct, Faults, FileStore, OpenOptions, Store, TestStore};
use ebb_vhost_proto::{FrontendMessage as M, VirtioFeatures};
use ebb_volume::{Volume, VolumeOptions};

/// A kill at any moment loses no request, completes none twice, and leaves none hanging; completions are out of order. Traps 1
/// to 5, and both conventions of the base.
#[test]
fn trap_1_to_5_kills_lose_no_request_and_repeat_none() {
    kills_lose_no_request_and_repeat_none(false);
}

#[test]
fn trap_1_to_5_kills_lose_no_request_of_a_packed_ring() {
    kills_lose_no_request_and_repeat_none(true);
}

fn kills_lose_no_request_and_repeat_none(packed: bool) {
    let (kills, seed) = (number("EBB_KILLS", 150), number("EBBD_FUZZ_SEED", 1));
    let mut random = Random::new(seed);
    let (mut rig, store) = Rig::on_test_store();
    store.waits.store(6, Ordering::SeqCst);
    store.faults(&Faults { late: 400, late_us: 1500, ..Faults::default() });
    let indirect = Wishes { queues: 2, indirect: true, packed, ..Wishes::default() };
    let mut disk = rig.disk(indirect);
    let mut load = Load::default();
    let (mut cut, mut resumed) = (0, 0);
    for round in 0..kills {
        for queue in 0..2 {
            load.submit(&mut disk, queue, &mut random);
        }
        match random.below(4) {
            0 => {}
            1 => std::thread::yield_now(),
            _ => {
                let begun = Instant::now();
                let time = Duration::from_micros(random.below(1200));
                while begun.elapsed() < time {
                    (0..2).for_each(|queue| load.take(&mut disk, queue));
                }
            }
        }
        rig.kill();
        (0..2).for_each(|queue| load.take(&mut disk, queue));
        cut += disk.drivers.iter().map(|driver| driver.busy.len()).sum::<usize>();
        if random.below(3) == 0 {
            // The guest goes on while there is no backend.
            load.submit(&mut disk, random.below(2) as usize, &mut random);
        }
        // As opened by another process: a flush that was cut short is not remembered.
        rig.add(volume_on("disk", &Arc::new(store.open_anew())));
        rig.start(1);
        disk.wishes.base = if random.below(2) == 0 { Base::Used } else { Base::Available };
        disk.reconnect(&rig.path("disk"));
        until("it is served", || rig.served() == 1);
        resumed += rig.figures().stats.resumed;
        if round % 8 == 7 {
            load.finish(&mut disk);
        }
    }
    load.finish(&mut disk);
    load.verify(&mut disk);
    println!("{kills} kills, {cut} requests cut, {resumed} resumed, {} written", load.written);
    assert!(resumed > kills / 8, "{resumed} resumed in {kills} kills: the test shows nothing");
}

/// A long request of a frontend that has gone is cut short, and carried out for the same guest when it comes back.
#[test]
fn a_long_request_of_a_frontend_that_has_gone_is_cut_short_and_repeated() {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { indirect: true, ..Wishes::default() });
    store.change(0, &pattern(1, 1 << 20));
    store.hang();
    // Eight pieces into the same memory.
    let buffers = [(DATA + 0x10_0000, 1 << 20, true); 8];
    disk.drivers[0].request(&disk.guest, kind::READ, 0, &buffers);
    disk.publish(0);
    until("its first piece is in flight", || store.hanging() == 1);
    let reads = store.reads.load(Ordering::SeqCst);
    disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
    until("the daemon has noticed", || rig.figures().closing);
    store.release();
    until("it is not served", || rig.served() == 0);
    assert_eq!(store.reads.load(Ordering::SeqCst), reads, "its other pieces were read");
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.wait(0).status, status::OK);
    assert!(store.reads.load(Ordering::SeqCst) >= reads + 8);
}

/// Trap 5: the successor looks at the ring without a kick, and signals once for what completed before.
#[test]
fn trap_5_a_successor_needs_no_kick_and_signals_once() {
    let (mut rig, store) = Rig::on_test_store();
    let without = VirtioFeatures::RING_EVENT_IDX;
    let mut disk = rig.disk(Wishes { without, ..Wishes::default() });
    store.hang();
    disk.request(0, kind::WRITE, 0, 512);
    disk.publish(0);
    until("it is in flight", || store.hanging() == 1);
    rig.kill();
    // Made visible, and not notified of.
    disk.request(0, kind::WRITE, 8, 512);
    disk.drivers[0].publish(&disk.guest);
    take_event(&disk.kicks[0]);
    take_event(&disk.calls[0]);
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    // Before anything completes: the predecessor may have ended between a completion and its signal.
    assert!(is_readable(&disk.calls[0], HANG), "no signal");
    store.release();
    until("both are served", || disk.drivers[0].used(&disk.guest) == 2);
    assert_eq!(store.writes.load(Ordering::SeqCst), 3, "one was repeated");
}

/// The predecessor may have published the last completion and ended before the signal: then nothing is in flight, and the guest
/// waits.
#[test]
fn trap_5_a_successor_signals_although_nothing_is_in_flight() {
    let (mut rig, _store) = Rig::on_test_store();
    for packed in [false, true] {
        let mut disk = rig.disk(Wishes { packed, ..Wishes::default() });
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
        rig.kill();
        take_event(&disk.calls[0]);
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        assert!(is_readable(&disk.calls[0], HANG), "no signal");
    }
}

/// Trap 2: a region that is initialised for a ring in use begins at its used index.
#[test]
fn trap_2_a_new_region_for_a_ring_that_was_used_loses_nothing() {
    for base in [Base::Used, Base::Available] {
        let (mut rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { inflight: false, base, ..Wishes::default() });
        (0..70).for_each(|sector| assert_eq!(disk.write(0, sector, &[1; 512]), status::OK));
        // As after a migration: another backend, and a region of its own.
        rig.stop();
        rig.start(1);
        disk.wishes.inflight = true;
        disk.reconnect(&rig.path("disk"));
        store.hang();
        for sector in 0..4 {
            disk.request(0, kind::WRITE, sector, 512);
        }
        disk.publish(0);
        until("all are in flight", || store.hanging() == 4);
        rig.kill();
        store.release();
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        (0..4).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
}

/// Trap 7: a guest that is reset has its VMM drop the region and ask for another one.
#[test]
fn trap_7_a_reset_guest_begins_anew_with_a_new_region() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    for _ in 0..3 {
        (0..70).for_each(|_| assert_eq!(disk.write(0, 0, &[1; 512]), status::OK));
        disk.stop_queue(0);
        disk.drivers[0].reset(&disk.guest);
        disk.inflight = None;
        disk.start();
    }
}

/// Trap 8: without a region, a frontend that replays from its used index repeats what was in flight, which is right if requests
/// complete in order.
#[test]
fn trap_8_without_a_region_requests_are_repeated_from_the_base() {
    let (mut rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { inflight: false, ..Wishes::default() });
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    store.hang();
    (0..3).for_each(|sector| _ = disk.request(0, kind::WRITE, sector, 512));
    disk.publish(0);
    until("all are in flight", || store.hanging() == 3);
    rig.kill();
    store.release();
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    (0..3).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
    assert_eq!(store.writes.load(Ordering::SeqCst), 7);
}

/// A volume that acknowledges writes from the memory of this process.
fn written_back(memory: &Arc<Memory>, store: &Arc<TestStore>) -> Arc<Volume> {
    common::written_back(memory, store, VolumeOptions::default())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    KillAfterFlush,
    Clean,
    Lost,
}

/// A daemon that acknowledges writes from its memory.
fn rig_with_writeback() -> (Rig, Arc<Memory>, Arc<TestStore>) {
    let mut rig = Rig::empty(1);
    rig.stop();
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    rig.memory = Some(memory.clone());
    let store = Arc::new(TestStore::new(SIZE, 1));
    rig.add(written_back(&memory, &store));
    rig.start(1);
    (rig, memory, store)
}

/// Replaces a daemon that acknowledged writes from its memory.
fn replaced(end: End) -> (Rig, Frontend) {
    let (mut rig, memory, store) = rig_with_writeback();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    if end == End::KillAfterFlush {
        assert_eq!(disk.flush(1), status::OK);
    }
    if matches!(end, End::Clean | End::Lost) {
        let ending = rig.backend.as_ref().unwrap().begin_stop();
        futures_lite::future::block_on(ending.drained());
        match end {
            End::Clean => ending.of("disk").note_stable(),
            _ => ending.of("disk").note_lost(),
        }
    }
    rig.kill();
    rig.add(written_back(&memory, &store));
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    (rig, disk)
}

/// The same daemon goes on with a guest's disk: nothing is lost, whatever is in its memory. The next flush is for all queues, and
/// what no flush has covered is known to be lost after a kill.
#[test]
fn a_guest_that_comes_back_to_the_same_daemon_has_lost_nothing() {
    for covered in [true, false] {
        let (mut rig, memory, store) = rig_with_writeback();
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
        // Paused and continued, as QEMU does; then connected anew.
        let bases = [0, 1].map(|queue| disk.stop_queue(queue));
        (0..2).for_each(|queue| disk.start_queue(queue, bases[queue].into()));
        assert_eq!(disk.write(0, 8, &pattern(2, 4096)), status::OK);
        disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
        until("it is not served", || rig.served() == 0);
        disk.reconnect(&rig.path("disk"));
        if covered {
            assert_eq!(disk.flush(0), status::OK);
        }
        rig.kill();
        rig.add(written_back(&memory, &store));
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        let expected = if covered { status::OK } else { status::IO_ERROR };
        assert_eq!(disk.flush(0), expected, "covered: {covered}");
    }
}

/// A flush on one queue is about the writes of all, also of those that are not started again.
#[test]
fn a_flush_fails_on_any_queue_after_a_kill_has_lost_the_writes_of_another() {
    let (mut rig, memory, store) = rig_with_writeback();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
    rig.kill();
    rig.add(written_back(&memory, &store));
    rig.start(1);
    disk.wishes.queues = 1;
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.flush(0), status::IO_ERROR);
}

/// After a failed flush the data may be on no disk, and the flush of a successor would succeed.
#[test]
fn a_successor_does_not_forget_that_a_flush_has_failed() {
    let (mut rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
    store.faults(&Faults { flushes: 1000, ..Faults::default() });
    assert_eq!(disk.flush(0), status::IO_ERROR);
    store.faults(&Faults::default());
    rig.kill();
    rig.add(volume_on("disk", &Arc::new(store.open_anew())));
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.flush(0), status::IO_ERROR, "the successor has forgotten it");
}

/// What a stopping daemon cannot complete, since its store does not respond, is left to its successor.
#[test]
fn requests_that_a_stop_gives_up_are_carried_out_by_the_successor() {
    let (mut rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes::default());
    store.hang();
    disk.request(0, kind::WRITE, 0, 4096);
    disk.publish(0);
    until("the write is in flight", || store.hanging() == 1);
    let volume = rig.volumes.get("disk").unwrap().volume;
    let ending = rig.backend.as_ref().unwrap().begin_stop();
    volume.abort();
    assert!(volume.abandon(), "nothing was acknowledged");
    store.release();
    futures_lite::future::block_on(ending.drained());
    assert!(disk.drivers[0].take(&disk.guest).is_none(), "the guest got an error");
    rig.kill();
    rig.add(volume_on("disk", &Arc::new(store.open_anew())));
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.wait(0).status, status::OK);
}

/// The guest runs on: its next flush must not succeed after a kill has lost acknowledged writes, on any queue, nor under a
/// successor's successor, whether the first one was killed or closed its volume without loss, until
/// the guest is reset.
#[test]
fn a_successor_fails_writes_and_flushes_after_a_kill_has_lost_writes() {
    for (end, reset) in [(End::Kill, true), (End::Kill, false), (End::Lost, false)] {
        let (mut rig, mut disk) = replaced(end);
        assert_eq!(failing(&rig), 1);
        for stops in [false, true, false] {
            for queue in 0..2 {
                assert_eq!(disk.flush(queue), status::IO_ERROR, "a flush succeeded");
                assert_eq!(disk.write(queue, 0, &pattern(1, 4096)), status::IO_ERROR);
                assert_eq!(disk.transfer(queue, kind::READ, 0, &mut [0; 4096]).status, status::OK);
            }
            if stops {
                let ending = rig.backend.as_ref().unwrap().begin_stop();
                futures_lite::future::block_on(ending.drained());
                ending.of("disk").note_stable();
            }
            rig.kill();
            rig.start(1);
            disk.reconnect(&rig.path("disk"));
        }
        if reset {
            disk.must(&M::ResetDevice, &[]);
        } else {
            // A VMM that does not tell resets.
            (0..2).for_each(|queue| _ = disk.stop_queue(queue));
        }
        disk.drivers.iter_mut().for_each(|driver| driver.reset(&disk.guest));
        disk.inflight = None;
        disk.start();
        for queue in 0..2 {
            assert_eq!(disk.write(queue, 0, &pattern(1, 4096)), status::OK);
            assert_eq!(disk.flush(queue), status::OK);
        }
        assert_eq!(failing(&rig), 0);
    }
}

/// The number of guests of the volume that the figures show as failing.
fn failing(rig: &Rig) -> u64 {
    let failing = rig.backend.as_ref().unwrap().figures().failing();
    failing.get("disk").copied().unwrap_or_default()
}

#[test]
fn writes_that_were_flushed_or_closed_without_loss_do_not_break_a_successor() {
    for end in [End::KillAfterFlush, End::Clean] {
        let (_rig, mut disk) = replaced(end);
        assert_eq!(disk.flush(0), status::OK, "{end:?}");
        assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
    }
}

/// An upgrade: one backend stops, another one starts, and the guest notices neither.
#[test]
fn guests_go_on_over_an_orderly_restart() {
    let (mut rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    for round in 0..10 {
        (0..2).for_each(|queue| {
            (0..5).for_each(|sector| _ = disk.request(queue, kind::WRITE, sector, 512));
            disk.publish(queue);
        });
        rig.stop();
        disk.wishes.base = if round % 2 == 0 { Base::Used } else { Base::Available };
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        for queue in 0..2 {
            (0..5).for_each(|_| assert_eq!(disk.wait(queue).status, status::OK));
        }
    }
    assert_eq!(store.writes.load(Ordering::SeqCst), 100, "none is repeated after a drain");
}

/// An overlay in the given mode; the delta is made if it is `new`.
fn overlay(
    memory: &Arc<Memory>,
    (delta, base): (&Arc<TestStore>, &Arc<TestStore>),
    mode: Mode,
    new: bool,
) -> Arc<Volume> {
    let worker = ebb_io::Worker::start("layers", memory).unwrap();
    let options = CacheOptions { max_bytes: Some(8 << 20), ..CacheOptions::new(Instant::now()) };
    let cache = Cache::without_reclaimer(memory, options);
    let (delta, base) = (delta.clone(), base.clone());
    let open = move |io: ebb_io::Io| async move {
        let top = CachedStore::new(&cache, "disk", Store::Test(delta), mode).unwrap();
        let plain = CachedStore::from(Store::Test(Arc::new(base.open_anew())));
        let parent = plain_parent(&io, &plain).await.unwrap();
        let delta = match new {
            true => Delta::create(&io, &top, SIZE, parent, [9; 16]).await.unwrap(),
            false => {
                let delta = Delta::open(&io, &top).await.unwrap();
                delta.check_parent(&top, &parent).unwrap();
                delta.begin_writing(&io, &top).await.unwrap();
                delta
            }
        };
        let bases = BaseLayers::new(&cache);
        let below = vec![bases.add("base", Store::Test(base), Mode::Writethrough).unwrap()];
        let layers = Layers::overlay("disk", top, below, vec![Arc::new(delta)], false).unwrap();
        Volume::new("disk", layers, VolumeOptions::default())
    };
    worker.handle().block_on(open).unwrap()
}

/// The map of an overlay is in the daemon's memory whatever the cache mode: no flush may succeed after a kill has lost it.
#[test]
fn flush_fails_after_kill_has_lost_blocks_of_overlay() {
    for (mode, flushed) in [
        (Mode::Writethrough, false),
        (Mode::Writethrough, true),
        (Mode::Writeback, false),
        (Mode::Writeback, true),
    ] {
        let mut rig = Rig::empty(1);
        rig.stop();
        let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
        rig.memory = Some(memory.clone());
        let stores =
            (Arc::new(TestStore::new(2 * SIZE + (1 << 20), 1)), Arc::new(TestStore::new(SIZE, 2)));
        rig.add(overlay(&memory, (&stores.0, &stores.1), mode, true));
        rig.start(1);
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
        if flushed {
            assert_eq!(disk.flush(1), status::OK);
        }
        rig.kill();
        rig.add(overlay(&memory, (&stores.0, &stores.1), mode, false));
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        assert_eq!(disk.read(0, 0, 4096) == pattern(1, 4096), flushed, "{mode:?}");
        let expected = if flushed { status::OK } else { status::IO_ERROR };
        assert_eq!(disk.flush(1), expected, "{mode:?}, flushed: {flushed}");
    }
}
/// The region says which store the guest is attached to: on another one nothing is carried out that
/// it asked for. Reset, it begins with the other store.
#[test]
fn a_guest_does_not_go_on_over_another_store() {
    for packed in [false, true] {
        let (mut rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { packed, ..Wishes::default() });
        assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
        store.hang();
        for sector in [8, 16, 24] {
            disk.request(0, kind::WRITE, sector, 4096);
        }
        disk.publish(0);
        until("they are in flight", || store.hanging() == 3);
        rig.kill();
        let other = Arc::new(TestStore::new(SIZE, 1));
        for volume in [volume_on("disk", &other), memory_volume("disk", SIZE, false)] {
            rig.add(volume);
            rig.start(1);
            assert!(!disk.try_reconnect(&rig.path("disk")), "it is served on another store");
            until("its connection has ended", || rig.disks().count() == 0);
            assert!(!disk.try_reconnect(&rig.path("disk")), "it is served on another store");
            assert_eq!(failing(&rig), 1, "one guest was refused");
            rig.kill();
        }
        assert_eq!(other.writes.load(Ordering::SeqCst), 0, "a request for the former store");
        // The former one is back.
        store.release();
        rig.add(volume_on("disk", &Arc::new(store.open_anew())));
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        (0..3).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
        // A reset guest has no region.
        rig.kill();
        rig.add(volume_on("disk", &other));
        rig.start(1);
        disk.drivers.iter_mut().for_each(|driver| driver.reset(&disk.guest));
        disk.inflight = None;
        disk.reconnect(&rig.path("disk"));
        assert_eq!(disk.write(0, 0, &pattern(2, 4096)), status::OK);
        assert_eq!(other.writes.load(Ordering::SeqCst), 1);
        assert_eq!(failing(&rig), 0);
    }
}

/// The store has lost its end while no daemon had it open.
#[test]
fn a_guest_does_not_go_on_over_a_smaller_disk() {
    let (mut rig, mut disk) = (Rig::on_file(1), None);
    let path = rig.path("image");
    for (bytes, serves) in [(SIZE, true), (SIZE / 2, false), (2 * SIZE, true)] {
        std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        if let Some(disk) = &mut disk {
            rig.kill();
            drop(rig.volumes.remove("disk"));
            let options = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
            let store = Store::File(FileStore::open(&path, &options).unwrap().0);
            rig.add(Volume::new("disk", store, VolumeOptions::default()));
            rig.start(1);
            assert_eq!(Frontend::try_reconnect(disk, &rig.path("disk")), serves, "{bytes}");
        } else {
            disk = Some(rig.disk(Wishes::default()));
        }
    }
}

/// It attached, or came back, when the daemon was about to shrink the volume, and a kill followed.
#[test]
fn guest_goes_on_that_attached_while_its_disk_was_shrunk() {
    for comes_back in [false, true] {
        let mut rig = Rig::on_file(1);
        let path = rig.path("image");
        let before = comes_back.then(|| rig.disk(Wishes::default()));
        rig.volumes.get("disk").unwrap().volume.plan_size(Some(SIZE / 2));
        let mut disk = match before {
            Some(mut disk) => {
                disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
                until("it has ended", || rig.disks().next().is_none());
                disk.reconnect(&rig.path("disk"));
                disk
            }
            None => rig.disk(Wishes::default()),
        };
        assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
        rig.kill();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
        drop(rig.volumes.remove("disk"));
        let options = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
        let store = Store::File(FileStore::open(&path, &options).unwrap().0);
        rig.add(Volume::new("disk", store, VolumeOptions::default()));
        rig.start(1);
        assert!(disk.try_reconnect(&rig.path("disk")), "comes back: {comes_back}");
    }
}

/// A reload gives the name to another store, in the same daemon.
#[test]
fn a_guest_of_a_volume_that_was_replaced_is_refused() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    let former = rig.volumes.remove("disk").unwrap();
    let withdrawn = rig.backend.as_ref().unwrap().withdraw(&former);
    futures_lite::future::block_on(withdrawn.drained());
    rig.add(memory_volume("disk", SIZE, false));
    assert!(!disk.try_reconnect(&rig.path("disk")));
    assert_eq!(failing(&rig), 1);
    // Reset, it goes on with the other store.
    disk.drivers.iter_mut().for_each(|driver| driver.reset(&disk.guest));
    disk.inflight = None;
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    assert_eq!(failing(&rig), 0);
}

/// A snapshot puts another layer on top while the guest runs: the successor serves it with that.
#[test]
fn a_guest_goes_on_over_layers_that_were_exchanged_under_it() {
    let (mut rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    store.renumber();
    let volume = rig.volumes.get("disk").unwrap().volume;
    rig.backend.as_ref().unwrap().note_backing(&volume);
    rig.kill();
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
}

/// A region of another backend, or of an earlier version, says nothing about the store.
#[test]
fn a_region_without_a_store_is_used() {
    let mut rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    let (_, area) = disk.inflight.as_mut().unwrap();
    area.mmap_size -= 1024;
    rig.kill();
    rig.add(memory_volume("disk", SIZE, false));
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
}
