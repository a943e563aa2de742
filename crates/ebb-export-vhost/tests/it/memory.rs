//! The guest's memory changes, or is taken away, while requests are in flight.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test")]

use crate::common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use common::driver::kind;
use common::frontend::{is_readable, receive};
use common::guest::{FAR, GuestRegion, memfd};
use common::{DATA, Frontend, Rig, SIZE, Wishes, memory_volume, pattern, pause, status, until};
use ebb_store::TestStore;
use ebb_vhost_proto::{FrontendMessage as M, MemoryRegion, ProtocolFeatures};
use rustix::fs::ftruncate;

const SHORT: Duration = Duration::from_millis(50);

/// A disk with a read in flight, whose data is at this guest address.
fn reading(at: u64) -> (Rig, Arc<TestStore>, Frontend) {
    let (rig, store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    store.change(0, &pattern(1, 4096));
    store.hang();
    disk.drivers[0].request(&disk.guest, kind::READ, 0, &[(at, 4096, true)]);
    disk.publish(0);
    until("the read is in flight", || store.hanging() == 1);
    (rig, store, disk)
}

/// Trap 13: a region is released when no request uses it, and that is when the change is acknowledged.
#[test]
fn trap_13_a_change_of_memory_is_acknowledged_when_no_request_uses_what_was_removed() {
    let (_rig, store, mut disk) = reading(FAR);
    assert!(disk.try_send(&M::RemMemReg(disk.guest.regions[2].place), true, &[]));
    assert!(!is_readable(&disk.socket, SHORT), "acknowledged while a request writes to it");
    // The other queue goes on meanwhile, with the new table.
    disk.request(1, kind::GET_ID, 0, 20);
    disk.publish(1);
    assert_eq!(disk.wait(1).status, status::OK);
    store.release();
    assert_eq!(receive(&disk.socket).unwrap().1, [0; 8]);
    assert_eq!(disk.wait(0).status, status::OK);
    assert!(disk.guest.read(FAR, 4096) == pattern(1, 4096));
    // Memory that is gone cannot be named: the request fails, and the ring goes on.
    disk.drivers[0].request(&disk.guest, kind::READ, 0, &[(FAR, 4096, true)]);
    disk.publish(0);
    assert_eq!(disk.wait(0).status, status::IO_ERROR);
    assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// Memory that was plugged in without being shared: a request with such a buffer fails, whatever
/// the ring's format and wherever its descriptors are, and those beside it are carried out.
#[test]
fn a_buffer_that_is_not_shared_fails_its_request_only() {
    let plugged = 0x2_0000_0000;
    for (packed, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
        let (rig, store) = Rig::on_test_store();
        let mut disk = rig.disk(Wishes { packed, indirect, ..Wishes::default() });
        store.change(0, &pattern(1, 8192));
        let end = disk.guest.regions[2].place.guest_address + disk.guest.regions[2].place.bytes;
        for (kind, writes) in [(kind::READ, true), (kind::WRITE, false)] {
            for data in [
                vec![(plugged, 4096, writes)],
                vec![(DATA, 4096, writes), (plugged, 4096, writes)],
                vec![(plugged, 4096, writes), (DATA, 4096, writes)],
                // It begins in memory that is shared.
                vec![(end - 512, 4096, writes)],
            ] {
                disk.drivers[0].request(&disk.guest, kind, 0, &data);
                disk.publish(0);
                assert_eq!(disk.wait(0).status, status::IO_ERROR, "{packed} {indirect} {data:?}");
                assert!(disk.read(0, 0, 8192) == pattern(1, 8192));
            }
        }
        assert_eq!(store.writes.load(std::sync::atomic::Ordering::SeqCst), 0);
        assert_eq!(rig.figures().stats.errors, 8);
    }
}

/// A status that cannot be written would be taken for an earlier request's: the ring ends.
#[test]
fn a_status_that_is_not_shared_ends_its_ring() {
    let (rig, _store) = Rig::on_test_store();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    let header = disk.drivers[0].data(0);
    disk.drivers[0].add(&disk.guest, &[(header, 16, false), (0x2_0000_0000, 513, true)]);
    disk.publish(0);
    assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
    assert_eq!(disk.drivers[0].take(&disk.guest), None);
}

#[test]
fn trap_13_memory_is_added_and_replaced_while_rings_run() {
    let (_rig, store, mut disk) = reading(FAR);
    let more = GuestRegion::new(0x2_0000_0000, 1 << 20);
    assert!(disk.try_send(&M::AddMemReg(more.place), true, &[&more.file]));
    store.release();
    assert_eq!(receive(&disk.socket).unwrap().1, [0; 8]);
    assert_eq!(disk.wait(0).status, status::OK);
    disk.guest.regions.push(more);
    for queue in 0..2 {
        let data = (0x2_0000_0000, 4096, true);
        disk.drivers[queue].request(&disk.guest, kind::READ, 0, &[data]);
        disk.publish(queue);
        assert_eq!(disk.wait(queue).status, status::OK);
        assert!(disk.guest.read(0x2_0000_0000, 4096) == pattern(1, 4096));
    }
    // The whole table: the last regions are left out.
    store.hang();
    disk.drivers[0].request(&disk.guest, kind::READ, 0, &[(0x2_0000_0000, 4096, true)]);
    disk.publish(0);
    until("the read is in flight", || store.hanging() == 1);
    let regions = disk.guest.regions[..3].to_vec();
    std::thread::scope(|scope| {
        let change = scope.spawn(|| disk.set_table(&regions));
        pause(SHORT);
        assert!(!change.is_finished(), "acknowledged while a request writes to it");
        store.release();
        assert_eq!(change.join().unwrap(), Some(true));
    });
    assert_eq!(disk.wait(0).status, status::OK);
    assert!(disk.read(1, 0, 4096) == pattern(1, 4096));
}

/// Memory changes all the time under load, and the rings with it.
#[test]
fn trap_13_memory_changes_under_load() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
    let more = GuestRegion::new(0x2_0000_0000, 1 << 20);
    for round in 0..200u64 {
        for queue in 0..2 {
            (0..8).for_each(|sector| _ = disk.request(queue, kind::WRITE, 8 * sector, 4096));
            disk.publish(queue);
        }
        match round % 2 {
            0 => disk.add_region(&more),
            _ => disk.must(&M::RemMemReg(more.place), &[]),
        }
        for queue in 0..2 {
            (0..8).for_each(|_| assert_eq!(disk.wait(queue).status, status::OK));
        }
    }
}

#[test]
fn trap_13_slots_are_offered_for_memory_that_is_plugged_in() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let slots = disk.number(&M::GetMaxMemSlots);
    assert!(slots >= 509, "{slots}");
    let file = memfd(1 << 30);
    let place = |number: u64| {
        let guest_address = (2 << 32) + number * 0x10_0000;
        let user_address = guest_address + common::guest::USER;
        MemoryRegion { guest_address, bytes: 4096, user_address, mmap_offset: number * 0x1000 }
    };
    for number in 3..slots {
        disk.must(&M::AddMemReg(place(number)), &[&file]);
    }
    assert_eq!(disk.set(&M::AddMemReg(place(slots)), &[&file]), Some(false));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    disk.must(&M::RemMemReg(place(7)), &[]);
    assert_eq!(disk.set(&M::RemMemReg(place(7)), &[]), Some(false));
    disk.must(&M::AddMemReg(place(slots)), &[&file]);
}

#[test]
fn tables_that_cannot_be_are_refused_and_change_nothing() {
    let rig = Rig::new();
    let mut disk = rig.disk(Wishes::default());
    let file = memfd(1 << 20);
    let place = MemoryRegion {
        guest_address: 2 << 32,
        bytes: 1 << 20,
        user_address: 2 << 40,
        mmap_offset: 0,
    };
    let bad = [
        MemoryRegion { guest_address: DATA + 4096, ..place },
        MemoryRegion { user_address: DATA + common::guest::USER, ..place },
        MemoryRegion { bytes: 0, ..place },
        MemoryRegion { bytes: (1 << 20) + 1, ..place },
        MemoryRegion { guest_address: u64::MAX - 4096, ..place },
        MemoryRegion { mmap_offset: u64::MAX, ..place },
        MemoryRegion { bytes: u64::MAX, ..place },
    ];
    for place in bad {
        assert_eq!(disk.set(&M::AddMemReg(place), &[&file]), Some(false), "{place:?}");
        assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    }
    // Trap 24: only files in memory.
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.set_len(1 << 20).unwrap();
    assert_eq!(disk.set(&M::AddMemReg(place), &[&on_disk.into()]), Some(false));
    let (reader, _writer) = std::io::pipe().unwrap();
    assert_eq!(disk.set(&M::AddMemReg(place), &[&reader.into()]), Some(false));
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}

/// Trap 24: a frontend that truncates its memory loses its connection, and nothing else happens.
#[test]
fn trap_24_memory_that_is_truncated_ends_its_connection_only() {
    for region in 0..2 {
        let rig = Rig::new();
        rig.add(memory_volume("other", SIZE, false));
        let mut other = rig.frontend("other", Wishes::default());
        other.start();
        let mut disk = rig.disk(Wishes { queues: 2, ..Wishes::default() });
        for queue in 0..2 {
            assert_eq!(disk.write(queue, 0, &pattern(1, 4096)), status::OK);
            (0..20).for_each(|sector| _ = disk.request(queue, kind::WRITE, 8 * sector, 32768));
            disk.drivers[queue].publish(&disk.guest);
        }
        ftruncate(disk.guest.regions[region].file.as_fd(), 0).unwrap();
        (0..2).for_each(|queue| disk.kick(queue));
        assert!(disk.is_closed(), "region {region}");
        until("it is not served", || rig.served() == 1);
        assert_eq!(other.write(0, 0, &[1; 512]), status::OK);
        // The next one is served.
        assert_eq!(rig.disk(Wishes::default()).write(0, 0, &[1; 512]), status::OK);
    }
}

/// The same under a store whose requests are in flight.
#[test]
fn trap_24_memory_that_is_truncated_while_requests_are_in_flight() {
    let (rig, store, disk) = reading(DATA);
    ftruncate(disk.guest.regions[1].file.as_fd(), 0).unwrap();
    store.release();
    assert!(disk.is_closed());
    until("it is not served", || rig.served() == 0);
}

/// The inflight region may be taken away too.
#[test]
fn trap_6_an_inflight_region_that_is_truncated_ends_its_connection_only() {
    let rig = Rig::new();
    let mut disk = rig.frontend("disk", Wishes::default());
    disk.must(&M::SetFeatures(disk.features), &[]);
    disk.create_inflight();
    let (sealed, area) = disk.inflight.clone().unwrap();
    assert!(ftruncate(sealed.as_fd(), 0).is_err(), "our own region is sealed");
    let file = Arc::new(memfd(area.mmap_size));
    disk.inflight = Some((file.clone(), area));
    disk.start();
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
    ftruncate(&*file, 0).unwrap();
    disk.request(0, kind::WRITE, 0, 512);
    disk.publish(0);
    assert!(disk.is_closed());
    until("it is not served", || rig.served() == 0);
}

/// Without regions one at a time, the table is sent as a whole.
#[test]
fn a_frontend_without_memory_slots_is_served() {
    let rig = Rig::new();
    let without_protocol = ProtocolFeatures::CONFIGURE_MEM_SLOTS.with(ProtocolFeatures::REPLY_ACK);
    let mut disk = rig.disk(Wishes { without_protocol, ..Wishes::default() });
    assert_eq!(disk.write(0, 0, &[1; 512]), status::OK);
}
