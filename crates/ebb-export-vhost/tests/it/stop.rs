//! The end of queues: `GET_VRING_BASE`, disabling, withdrawing, stopping.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::time::{Duration, Instant};

use common::driver::kind;
use common::frontend::{event, is_readable, receive, take_event};
use common::{
    Frontend, HANG, Random, Rig, SIZE, Wishes, memory_volume, pattern, pause, status, until,
    volume_on,
};
use ebb_store::TestStore;
use ebb_vhost_proto::{FrontendMessage as M, VirtioFeatures, VringFile, VringState};

/// Long enough for a backend that does not wait to reply.
const SHORT: Duration = Duration::from_millis(50);

/// A disk with a read in flight at a store that hangs.
fn hanging() -> (Rig, std::sync::Arc<TestStore>, Frontend) {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    store.change(0, &pattern(1, 4096));
    store.hang();
    disk.request(0, kind::READ, 0, 4096);
    disk.publish(0);
    until("the read is in flight", || store.hanging() == 1);
    (rig, store, disk)
}

/// Trap 12: the reply means that nothing is in flight; afterwards the backend writes to no guest memory and sends no notification.
/// Trap 11: the queue may be disabled before, and its request lives on.
#[test]
fn trap_11_12_a_base_is_replied_when_nothing_is_in_flight() {
    for disabled_first in [false, true] {
        let (rig, store, mut disk) = hanging();
        rig.add(memory_volume("other", SIZE, false));
        let mut other = rig.frontend("other", Wishes::default());
        other.start();
        if disabled_first {
            disk.enable(0, false);
            // Disabled, it consumes nothing.
            disk.request(0, kind::READ, 0, 4096);
            disk.publish(0);
            disk.kick(0);
        }
        take_event(&disk.calls[0]);
        assert!(disk.try_send(&M::GetVringBase(0), false, &[]));
        assert!(!is_readable(&disk.socket, SHORT), "a reply, and a request is in flight");
        // Others are served meanwhile, and so is the frontend's other queue; its next message is not read.
        for _ in 0..50 {
            assert_eq!(other.write(0, 0, &[1; 4096]), status::OK);
        }
        assert_eq!(other.stop_queue(0), 50);
        disk.request(1, kind::GET_ID, 0, 20);
        disk.publish(1);
        assert_eq!(disk.wait(1).status, status::OK);
        store.release();
        let (_, body, _) = receive(&disk.socket).unwrap();
        assert_eq!(body, [0, 0, 0, 0, 1, 0, 0, 0], "the base is behind the completed request");
        let done = disk.drivers[0].take(&disk.guest).expect("completed before the reply");
        assert_eq!(done.status, status::OK);
        assert!(disk.guest.read(disk.drivers[0].data(done.head), 4096) == pattern(1, 4096));
        let before = disk.guest.read(common::Guest::rings(0), 0x8_0000);
        take_event(&disk.calls[0]);
        disk.request(0, kind::READ, 0, 4096);
        disk.publish(0);
        disk.kick(0);
        // The backend has handled all of this when it replies.
        disk.number(&M::GetFeatures);
        assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
        let after = disk.guest.read(common::Guest::rings(0), 0x8_0000);
        let used = |ring: &[u8]| ring[0x8000..0x9000].to_vec();
        assert!(used(&before) == used(&after), "a stopped queue was written to");
        assert!(!take_event(&disk.calls[0]), "a stopped queue has notified");
        // It goes on at the base.
        disk.start_queue(0, 1);
        let left = disk.drivers[0].busy.len();
        (0..left).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
    }
}

/// The successor carries out the requests that are left. A frontend that moves to another host
/// would skip them after that base.
#[test]
fn no_base_is_replied_for_a_queue_that_leaves_requests() {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes::default());
    store.hang();
    disk.request(0, kind::WRITE, 0, 4096);
    disk.publish(0);
    until("the write is in flight", || store.hanging() == 1);
    assert!(disk.try_send(&M::GetVringBase(0), false, &[]));
    assert!(!is_readable(&disk.socket, SHORT), "a reply, and a request is in flight");
    let volume = rig.volumes.get("disk").unwrap().volume;
    let ending = rig.backend.as_ref().unwrap().begin_stop();
    volume.abort();
    assert!(volume.abandon(), "nothing was acknowledged");
    store.release();
    futures_lite::future::block_on(ending.drained());
    assert!(disk.drivers[0].take(&disk.guest).is_none(), "the write was completed");
    assert!(disk.is_closed(), "a base behind the write in flight was replied");
}

/// A frontend that configures a queue anew while its last requests complete, as Cloud Hypervisor does when it resets a device,
/// waits for them instead of being refused.
#[test]
fn a_queue_that_is_ending_can_be_configured_anew() {
    for reset_owner in [false, true] {
        let (_rig, store, mut disk) = hanging();
        disk.enable(0, false);
        if reset_owner {
            assert!(disk.try_send(&M::ResetOwner, false, &[]));
        }
        let number = M::SetVringNum(VringState { index: 0, number: 64 });
        assert!(disk.try_send(&number, true, &[]));
        assert!(!is_readable(&disk.socket, SHORT), "the ring is in use");
        store.release();
        assert_eq!(receive(&disk.socket).unwrap().1, [0; 8], "it is refused");
        assert_eq!(disk.wait(0).status, status::OK);
        disk.start_queue(0, 1);
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
}

#[test]
fn a_queue_in_use_is_not_changed() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let state = |number| VringState { index: 0, number };
    assert_eq!(disk.set(&M::SetVringNum(state(128)), &[]), Some(false));
    assert_eq!(disk.set(&M::SetVringBase(state(1)), &[]), Some(false));
    let mut moved = disk.addresses(0);
    moved.used += 4096;
    assert_eq!(disk.set(&M::SetVringAddr(moved), &[]), Some(false));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// Trap 16: descriptors may be replaced at any time, or left out.
#[test]
fn trap_16_kick_and_call_are_replaced_while_requests_are_in_flight() {
    for round in 0..20 {
        let (_rig, store, mut disk) = hanging();
        let calls = VringFile { index: 0, has_descriptor: true };
        disk.calls[0] = event();
        disk.must(&M::SetVringCall(calls), &[&disk.calls[0]]);
        if round % 2 == 0 {
            disk.kicks[0] = event();
            disk.set_kick(0);
        }
        store.release();
        assert_eq!(disk.wait(0).status, status::OK);
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
        // Without a call descriptor requests are served, and without a kick descriptor the ring is polled.
        disk.must(&M::SetVringCall(VringFile { has_descriptor: false, ..calls }), &[]);
        disk.request(0, kind::READ, 0, 512);
        disk.publish(0);
        until("it is served", || disk.drivers[0].take(&disk.guest).is_some());
        disk.must(&M::SetVringCall(calls), &[&disk.calls[0]]);
        disk.wishes.polled = true;
        disk.set_kick(0);
        disk.request(0, kind::READ, 0, 512);
        disk.drivers[0].publish(&disk.guest);
        assert_eq!(disk.wait(0).status, status::OK);
    }
}

/// Trap 10: a frontend that does not negotiate the protocol's features has its rings enabled from the start, and
/// `SET_FEATURES` neither disables rings nor resets an index.
#[test]
fn trap_10_rings_of_an_old_frontend_start_enabled() {
    let rig = Rig::new();
    let without = VirtioFeatures::PROTOCOL_FEATURES;
    let mut old = rig.disk(Wishes { without, ..Wishes::default() });
    assert_eq!(old.write(0, 0, &[1; 512]), status::OK);
    for on in [true, false] {
        let log = VirtioFeatures::LOG_ALL;
        let features = if on { old.features.with(log) } else { old.features };
        old.must(&M::SetFeatures(features), &[]);
        old.must(&M::SetVringAddr(old.addresses(0)), &[]);
        assert_eq!(old.write(0, 0, &[1; 512]), status::OK);
    }
    assert_eq!(old.stop_queue(0), 3);
    drop(old);
    // A new one has to enable them.
    until("the first one ended", || rig.served() == 0);
    let mut disk = rig.disk(Wishes::default());
    assert!(is_readable(&disk.calls[0], HANG) && take_event(&disk.calls[0]), "at the start");
    disk.enable(0, false);
    disk.must(&M::SetFeatures(disk.features), &[]);
    disk.request(0, kind::GET_ID, 0, 20);
    disk.publish(0);
    disk.kick(0);
    assert!(!is_readable(&disk.calls[0], SHORT), "a disabled ring is served");
    disk.enable(0, true);
    assert_eq!(disk.wait(0).status, status::OK);
}

#[test]
fn resetting_the_device_waits_for_its_requests_and_forgets_its_queues() {
    let (_rig, store, mut disk) = hanging();
    assert!(disk.try_send(&M::ResetDevice, true, &[]));
    assert!(!is_readable(&disk.socket, SHORT));
    store.release();
    assert_eq!(receive(&disk.socket).unwrap().1, [0; 8]);
    assert_eq!(disk.wait(0).status, status::OK);
    // The rings begin anew. Trap 7: an old inflight region is not theirs.
    disk.drivers.iter_mut().for_each(|driver| driver.reset(&disk.guest));
    disk.wishes.inflight = false;
    disk.start();
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
}

/// A volume is withdrawn, and the backend stops, at any moment of a frontend's requests: what was consumed completes, and
/// nothing waits for ever.
#[test]
fn withdrawing_and_stopping_complete_what_was_consumed() {
    let mut random = Random::new(3);
    for round in 0..40 {
        let (mut rig, store) = Rig::on_test_store();
        store.latency_us.store(random.below(300), std::sync::atomic::Ordering::SeqCst);
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        for queue in 0..2 {
            (0..10).for_each(|sector| _ = disk.request(queue, kind::WRITE, sector, 512));
            disk.publish(queue);
        }
        pause(Duration::from_micros(random.below(1500)));
        let backend = rig.backend.take().unwrap();
        if round % 2 == 0 {
            let volume = rig.volumes.remove("disk").unwrap();
            let draining = backend.withdraw(&volume);
            futures_lite::future::block_on(draining.drained());
            let taken: usize =
                (0..2).map(|queue| usize::from(disk.drivers[queue].used(&disk.guest))).sum();
            assert_eq!(store.writes.load(std::sync::atomic::Ordering::SeqCst), taken as u64);
            assert!(disk.is_closed(), "the connection of a withdrawn volume ends");
        }
        assert!(backend.stop(Instant::now() + HANG).is_empty());
        let taken: usize =
            (0..2).map(|queue| usize::from(disk.drivers[queue].used(&disk.guest))).sum();
        assert_eq!(store.writes.load(std::sync::atomic::Ordering::SeqCst), taken as u64);
        assert!(disk.is_closed());
    }
}

#[test]
fn a_stop_does_not_wait_for_a_store_that_hangs_beyond_its_deadline() {
    let (mut rig, store, _disk) = hanging();
    let other = std::sync::Arc::new(TestStore::new(SIZE, 1));
    rig.add(volume_on("other", &other));
    let _other = rig.frontend("other", Wishes::default());
    let left = rig.backend.take().unwrap().stop(Instant::now() + SHORT);
    assert_eq!(left.iter().map(|disk| &*disk.volume).collect::<Vec<_>>(), ["disk"]);
    store.release();
}

/// A volume that comes back under its name is served again at the same socket.
#[test]
fn a_withdrawn_volume_can_be_replaced() {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    let volume = rig.volumes.remove("disk").unwrap();
    let draining = rig.backend.as_ref().unwrap().withdraw(&volume);
    futures_lite::future::block_on(draining.drained());
    assert!(disk.is_closed());
    // Without a volume, connections are refused.
    let refused = std::os::unix::net::UnixStream::connect(rig.path("disk")).unwrap();
    assert!(receive(&refused).is_none());
    let again = std::sync::Arc::new(store.open_anew());
    rig.volumes.add(volume_on("disk", &again), std::sync::Arc::default());
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// A killed daemon may have left writes to the kernel, which reports their loss to the last flush
/// of its successor. An orderly stop leaves only stable writes.
#[test]
fn an_inherited_loss_is_noticed_by_guests_of_killed_daemons() {
    for killed in [true, false] {
        let (mut rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
        for life in 0..2 {
            let ending = rig.backend.as_ref().unwrap().begin_stop();
            futures_lite::future::block_on(ending.drained());
            match (life, killed) {
                (0, true) => {}
                (0, false) => ending.of("disk").note_stable(),
                _ => ending.of("disk").note_inherited_lost(),
            }
            rig.kill();
            rig.add(volume_on("disk", &std::sync::Arc::new(store.open_anew())));
            rig.start(1);
            disk.reconnect(&rig.path("disk"));
        }
        let expected = if killed { status::IO_ERROR } else { status::OK };
        assert_eq!(disk.flush(0), expected, "killed: {killed}");
    }
}

/// The store reports the loss to this flush alone.
#[test]
fn flush_that_fails_for_a_loss_is_not_left_to_a_successor() {
    let (rig, store) = Rig::on_test_store();
    store.report_once();
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &pattern(1, 4096)), status::OK);
    store.lose();
    store.hang();
    disk.request(0, kind::FLUSH, 0, 0);
    disk.publish(0);
    until("the flush is in flight", || store.hanging() == 1);
    let volume = rig.volumes.get("disk").unwrap().volume;
    let ending = rig.backend.as_ref().unwrap().begin_stop();
    let (closing, worker) = (volume.clone(), rig.workers[0].handle());
    let close = std::thread::spawn(move || {
        worker.block_on(move |io| async move { closing.close(&io).await }).unwrap()
    });
    until("the volume is being closed", || volume.is_closing());
    store.release();
    close.join().unwrap().unwrap();
    futures_lite::future::block_on(ending.drained());
    let done = disk.drivers[0].take(&disk.guest).expect("it was left to the successor");
    assert_eq!(done.status, status::IO_ERROR);
}

/// A store that reports lost writes tells the daemon that sent them, which is gone.
#[test]
fn kill_hides_no_loss_that_only_one_daemon_learns_of() {
    for (reports, flushed) in [(true, false), (true, true), (false, false)] {
        let (mut rig, store) = Rig::on_test_store();
        if reports {
            store.report_once();
        }
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        assert_eq!(disk.write(1, 0, &pattern(1, 4096)), status::OK);
        assert!(!flushed || disk.flush(0) == status::OK);
        rig.kill();
        rig.add(volume_on("disk", &std::sync::Arc::new(store.open_anew())));
        rig.start(1);
        disk.reconnect(&rig.path("disk"));
        let is_hidden = reports && !flushed;
        let expected = if is_hidden { status::IO_ERROR } else { status::OK };
        assert_eq!(disk.flush(0), expected, "reports {reports}, flushed {flushed}");
    }
}
