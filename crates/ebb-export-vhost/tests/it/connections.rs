//! Frontends as clients: what is shown of them, the end of a connection on request, and the descriptors that they may hold.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::driver::{Driver, kind};
use common::frontend::{event, is_readable, receive};
use common::{
    Frontend, Guest, HANG, Rig, SIZE, Wishes, memory_volume, status, until, written_back,
};
use ebb_access::{AccessEntry, AccessList};
use ebb_export_vhost::{FrontendDescriptors, VhostBackend, VhostOptions};
use ebb_io::Worker;
use ebb_mem::{Memory, MemoryOptions};
use ebb_store::{MemoryStore, Store, TestStore};
use ebb_vhost_proto::{FrontendMessage as M, VringAddress, VringFile};
use ebb_volume::{Operation, Volume, VolumeOptions};

#[test]
fn a_frontend_is_shown_from_its_connection_to_its_end() {
    let rig = Rig::new();
    let mut disk = rig.frontend("disk", Wishes { queues: 2, ..Wishes::default() });
    let shown = || rig.disks().next().unwrap();
    let path = rig.path("disk").display().to_string();
    assert_eq!((&*shown().volume, &*shown().socket, shown().queues), ("disk", &*path, 0));
    assert_eq!(shown().pid, Some(std::process::id()));
    disk.start();
    assert_eq!(disk.write(1, 0, &[1; 4096]), status::OK);
    let stats = shown().stats;
    assert_eq!((shown().queues, shown().read_only, shown().waiting), (2, false, false));
    assert_eq!((stats.writes, stats.written_bytes, stats.completed), (1, 4096, 1));
    // A second guest waits for the first one's right to write.
    let second = rig.disk(Wishes::default());
    let waits = || rig.disks().last().unwrap().waiting;
    assert!(waits());
    let writer = rig.disks().last().unwrap().waits_for.unwrap();
    assert!(writer.starts_with("KVM guest vhost-"), "{writer}");
    drop(disk);
    until("the second one may write", || !waits());
    drop(second);
    until("both have ended", || rig.disks().next().is_none());
}

#[test]
fn a_disconnected_frontend_has_its_requests_completed_and_may_connect_again() {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes::default());
    let number = rig.figures().number;
    let backend = rig.backend.as_ref().unwrap();
    assert!(!backend.disconnect(number + 1));
    store.hang();
    disk.request(0, kind::WRITE, 0, 4096);
    disk.publish(0);
    until("it is in flight", || rig.figures().stats.consumed == 1);
    assert!(backend.disconnect(number));
    until("it is closing", || rig.figures().closing);
    store.release();
    assert_eq!(disk.wait(0).status, status::OK);
    assert!(disk.is_closed());
    until("it has ended", || rig.disks().next().is_none());
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    assert_ne!(rig.figures().number, number);
}

/// A VMM that connects again at once finds its former connection, whose requests are in flight:
/// both connections would complete them.
#[test]
fn ring_waits_for_former_connection_of_its_guest() {
    let rig = Rig::empty(1);
    let store = Arc::new(TestStore::new(SIZE, 1));
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    rig.add(Volume::new("disk", Store::Test(store.clone()), options));
    let mut disk = rig.disk(Wishes::default());
    store.hang();
    disk.request(0, kind::WRITE, 0, 512);
    disk.publish(0);
    until("it is in flight", || store.hanging() == 1);
    disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
    disk.reconnect(&rig.path("disk"));
    until("the daemon has noticed", || rig.disks().any(|disk| disk.closing));
    assert_eq!(rig.served(), 1, "both connections serve the ring");
    // The guest's memory may change until the former connection has ended.
    assert!(disk.try_send(&M::GetVringBase(0), false, &[]));
    assert!(!is_readable(&disk.socket, Duration::from_millis(300)), "the queue has ended");
    // Another guest need not wait.
    let mut other = rig.disk(Wishes::default());
    until("it is served", || rig.served() == 2);
    store.release();
    assert!(receive(&disk.socket).is_some());
    disk.start_queue(0, 1);
    assert_eq!(disk.wait(0).status, status::OK);
    assert_eq!(disk.write(0, 8, &[1; 512]), status::OK);
    assert_eq!(other.write(0, 16, &[1; 512]), status::OK);
    assert_eq!(store.writes.load(Ordering::SeqCst), 3, "the request was repeated");
}

/// Without an inflight region only the former connection knows where the ring goes on.
#[test]
fn ring_continues_where_its_former_connection_ended() {
    for (packed, asks) in [(false, false), (false, true), (true, false), (true, true)] {
        let rig = Rig::empty(1);
        let store = Arc::new(TestStore::new(SIZE, 1));
        let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
        rig.add(Volume::new("disk", Store::Test(store.clone()), options));
        let mut disk = rig.disk(Wishes { inflight: false, packed, ..Wishes::default() });
        store.hang();
        disk.request(0, kind::WRITE, 0, 512);
        disk.publish(0);
        until("it is in flight", || store.hanging() == 1);
        disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
        disk.reconnect(&rig.path("disk"));
        until("the daemon has noticed", || rig.disks().any(|disk| disk.closing));
        if asks {
            assert!(disk.try_send(&M::GetVringBase(0), false, &[]));
            assert!(!is_readable(&disk.socket, Duration::from_millis(50)), "it has not ended");
        }
        store.release();
        if asks {
            let (_, body, _) = receive(&disk.socket).unwrap();
            let base = u32::from_le_bytes(body[4..].try_into().unwrap());
            disk.start_queue(0, base);
        }
        assert_eq!(disk.wait(0).status, status::OK);
        assert_eq!(disk.write(0, 8, &[1; 512]), status::OK);
        let writes = store.writes.load(Ordering::SeqCst);
        assert_eq!(writes, 2, "the request was repeated: packed {packed}, asks {asks}");
    }
}

/// The flush of a former connection does not cover the writes of a later one.
#[test]
fn kill_loses_no_write_beside_a_flush_of_the_former_connection() {
    let mut rig = Rig::empty(1);
    rig.stop();
    let memory = Memory::new(MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    rig.memory = Some(memory.clone());
    let store = Arc::new(TestStore::new(SIZE, 1));
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    let volume = || written_back(&memory, &store, options);
    rig.add(volume());
    rig.start(1);
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    store.hang_only(&[Operation::Flush]);
    disk.request(0, kind::FLUSH, 0, 0);
    disk.publish(0);
    until("the flush is in flight", || store.hanging() == 1);
    disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
    until("the daemon has noticed", || rig.disks().any(|disk| disk.closing));
    disk.reconnect(&rig.path("disk"));
    disk.request(1, kind::WRITE, 8, 512);
    disk.publish(1);
    let is_served = rig.served() == 2;
    if is_served {
        assert_eq!(disk.wait(1).status, status::OK);
    }
    store.release();
    until("the former connection has ended", || rig.disks().count() == 1);
    assert_eq!(disk.wait(0).status, status::OK);
    if !is_served {
        assert_eq!(disk.wait(1).status, status::OK);
    }
    rig.kill();
    rig.add(volume());
    rig.start(1);
    disk.reconnect(&rig.path("disk"));
    assert_eq!(disk.flush(0), status::IO_ERROR, "the guest does not notice the loss");
}

/// A further connection of a guest, whose driver has put its rings where its other rings are.
fn with_rings_of(rig: &Rig, volume: &str, guest: &Guest) -> Frontend {
    let mut disk = Frontend::connect(&rig.path(volume), guest.clone(), Wishes::default());
    disk.negotiate();
    disk.start();
    disk
}

/// Returns true if a VMM that ends or resets its disk gets the reply that it waits for without
/// limit.
fn ends(disk: &Frontend, resets: bool) -> bool {
    let message = if resets { M::ResetDevice } else { M::GetVringBase(0) };
    disk.try_send(&message, resets, &[]) && is_readable(&disk.socket, HANG)
}

/// A guest that gives two disks the same ring does not harm its VMM.
#[test]
fn end_of_a_ring_waits_for_no_other_disk_that_uses_it() {
    for (second, resets) in [("other", false), ("other", true), ("disk", false), ("disk", true)] {
        let rig = Rig::empty(1);
        for name in ["disk", "other"] {
            let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
            rig.add(Volume::new(name, Store::Memory(MemoryStore::new(SIZE)), options));
        }
        let mut disk = rig.disk(Wishes::default());
        let other = with_rings_of(&rig, second, &disk.guest);
        assert!(ends(&other, resets), "{second} waits for the first disk, resets {resets}");
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
}

#[test]
fn ring_waits_for_no_former_connection_of_another_volume() {
    let (rig, store) = Rig::on_test_store();
    rig.add(memory_volume("other", SIZE, false));
    let mut disk = rig.disk(Wishes::default());
    store.hang();
    disk.request(0, kind::READ, 0, 512);
    disk.publish(0);
    until("it is in flight", || store.hanging() == 1);
    disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
    until("the daemon has noticed", || rig.disks().any(|disk| disk.closing));
    let other = with_rings_of(&rig, "other", &disk.guest);
    assert_eq!(rig.served(), 2, "it is not served");
    assert!(ends(&other, false), "it waits for the former connection to the first volume");
    store.release();
}

/// A disk with a read in flight at a store that hangs, whose connection ends soon if a ring does
/// not.
fn hanging() -> (Rig, Arc<TestStore>, Frontend) {
    let (mut rig, store) = Rig::on_test_store();
    let workers = rig.workers.iter().map(Worker::handle).collect();
    let former_wait = Duration::from_millis(50);
    let options = VhostOptions { former_wait, ..VhostOptions::new(workers, rig.volumes.clone()) };
    rig.backend = Some(VhostBackend::start(options).unwrap());
    rig.listen("disk");
    let mut disk = rig.disk(Wishes::default());
    store.hang();
    disk.request(0, kind::READ, 0, 512);
    disk.publish(0);
    until("it is in flight", || store.hanging() == 1);
    (rig, store, disk)
}

/// A VMM waits without limit for the reply, and would hang with the store.
#[test]
fn connection_ends_if_its_former_one_does_not() {
    for resets in [false, true] {
        let (rig, store, mut disk) = hanging();
        disk.socket.shutdown(std::net::Shutdown::Both).unwrap();
        disk.reconnect(&rig.path("disk"));
        until("the daemon has noticed", || rig.disks().any(|disk| disk.closing));
        assert!(ends(&disk, resets), "it waits without limit, resets {resets}");
        assert!(disk.is_closed(), "the end of a ring in use was replied, resets {resets}");
        // It may connect again, and is served when the former one has ended.
        disk.reconnect(&rig.path("disk"));
        store.release();
        assert_eq!(disk.wait(0).status, status::OK);
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
}

/// So does one whose own ring does not end.
#[test]
fn connection_ends_if_its_own_ring_does_not() {
    let (rig, store, mut disk) = hanging();
    assert!(ends(&disk, false), "it waits without limit");
    assert!(disk.is_closed(), "the end of a ring in use was replied");
    disk.reconnect(&rig.path("disk"));
    store.release();
    assert_eq!(disk.wait(0).status, status::OK);
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// The store reports a loss once, to the flush of one of them.
#[test]
fn a_loss_fails_a_flush_of_each_guest() {
    let rig = Rig::empty(1);
    let store = Arc::new(TestStore::new(SIZE, 1));
    store.report_once();
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    rig.add(Volume::new("disk", Store::Test(store.clone()), options));
    let mut disks = [0, 1].map(|_| rig.disk(Wishes::default()));
    assert_eq!(disks[0].write(0, 0, &[1; 4096]), status::OK);
    store.lose();
    for expected in [status::IO_ERROR, status::OK] {
        for disk in disks.iter_mut().rev() {
            assert_eq!(disk.flush(0), expected);
        }
    }
}

/// Nor does one that gives two queues of a disk the same ring, whether or not both are whole.
#[test]
fn end_of_a_queue_waits_for_no_other_queue_of_its_disk() {
    for breaks in [false, true] {
        let rig = Rig::new();
        let mut disk = rig.frontend("disk", Wishes { queues: 2, ..Wishes::default() });
        disk.drivers[1] = Driver::new(0, disk.wishes.size);
        disk.start();
        let ended = usize::from(!breaks);
        if breaks {
            disk.stop_queue(0);
            let outside = VringAddress { available: 0, ..disk.addresses(0) };
            disk.must(&M::SetVringAddr(outside), &[]);
            disk.set_kick(0);
            until("the second one is served", || rig.served() == 1);
        }
        assert!(disk.try_send(&M::GetVringBase(ended as u32), false, &[]));
        assert!(is_readable(&disk.socket, HANG), "it waits for the other one, breaks {breaks}");
        receive(&disk.socket).unwrap();
        disk.stop_queue(1 - ended);
    }
}

#[test]
fn a_frontend_opens_a_volume_that_its_user_or_group_may_open() {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let list = |entry: String| AccessList::new(vec![AccessEntry::parse(&entry).unwrap()]).unwrap();
    let rig = Rig::new();
    let connect = || Frontend::connect(&rig.path("disk"), Guest::new(1), Wishes::default());
    for (entry, allowed) in [
        (format!("uid:{uid}"), true),
        (format!("gid:{gid}"), true),
        (format!("uid:{}", uid + 1), false),
        ("gid:4294967294".to_owned(), false),
        ("xen:1".to_owned(), false),
        ("net:0.0.0.0/0".to_owned(), false),
    ] {
        rig.volumes.set_allowed("disk", Some(list(entry.clone())));
        if allowed {
            assert_eq!(connect().number(&M::GetQueueNum), 256, "{entry}");
        } else {
            assert!(connect().is_closed(), "{entry}");
        }
    }
    // Access that is taken away.
    rig.volumes.set_allowed("disk", None);
    let mut disk = rig.disk(Wishes::default());
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    let backend = rig.backend.as_ref().unwrap();
    rig.volumes.set_allowed("disk", Some(list(format!("uid:{uid}"))));
    backend.end_disallowed();
    assert_eq!(disk.write(0, 0, &[2; 512]), status::OK, "still allowed");
    rig.volumes.set_allowed("disk", Some(list(format!("uid:{}", uid + 1))));
    backend.end_disallowed();
    assert!(disk.is_closed());
    until("it has ended", || rig.disks().next().is_none());
}

#[test]
fn frontends_leave_descriptors_to_other_parts_and_to_each_other() {
    let mut rig = Rig::empty(1);
    for name in ["greedy", "other", "third"] {
        rig.volumes.add(memory_volume(name, SIZE, false), Arc::default());
    }
    let descriptors = Arc::<FrontendDescriptors>::default();
    descriptors.limit(120);
    let workers = rig.workers.iter().map(Worker::handle).collect();
    let options = VhostOptions {
        descriptors: descriptors.clone(),
        ..VhostOptions::new(workers, rig.volumes.clone())
    };
    rig.backend = Some(VhostBackend::start(options).unwrap());
    rig.volumes.list().iter().for_each(|volume| rig.listen(volume.name()));

    // One that would take all is refused beyond half.
    let greedy = rig.frontend("greedy", Wishes::default());
    let mut accepted = 0;
    let (has_descriptor, wanted) = (true, 200);
    for index in 0..wanted {
        let file = VringFile { index, has_descriptor };
        accepted += u32::from(greedy.set(&M::SetVringCall(file), &[&event()]) == Some(true));
    }
    assert!(accepted > 30 && accepted < 60, "{accepted}");
    assert!(descriptors.reserved() <= 60, "{descriptors:?}");
    assert!(descriptors.open() < descriptors.reserved());
    // A replaced one does not count.
    greedy.must(&M::SetVringCall(VringFile { index: 0, has_descriptor: false }), &[]);
    for _ in 0..10 {
        let file = VringFile { index: 0, has_descriptor };
        greedy.must(&M::SetVringCall(file), &[&event()]);
        greedy.must(&M::SetVringCall(VringFile { index: 0, has_descriptor: false }), &[]);
    }
    // Another one is served with several queues.
    let mut other = rig.frontend("other", Wishes { queues: 4, ..Wishes::default() });
    other.start();
    assert_eq!(other.write(3, 0, &[1; 512]), status::OK);
    // When there are none left, one is refused at once, and served when there are some again.
    descriptors.limit(descriptors.reserved());
    let refused = Frontend::connect(&rig.path("third"), Guest::new(1), Wishes::default());
    assert!(refused.is_closed());
    drop(greedy);
    until("its descriptors are free", || rig.disks().count() == 1);
    assert_eq!(rig.frontend("third", Wishes::default()).number(&M::GetQueueNum), 256);
    drop(other);
    until("all have ended", || descriptors.reserved() == 0 && descriptors.open() == 0);
}
