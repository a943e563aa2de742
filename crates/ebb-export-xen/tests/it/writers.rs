//! Which guests may open a volume; and one writer at a time: of several guests, and of guests and the clients of the NBD
//! server.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use common::{Rig, SIZE, memory, until};
use ebb_access::{AccessEntry, AccessList};
use ebb_export_xen::abi::op;
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{DiskSpec, detach};
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions, Writer};

fn attach(rig: &Rig, number: u16, disk: &str, read_only: bool) -> Frontend {
    let guest = rig.world.find_guest(number).unwrap_or_else(|| rig.guest(number, 256));
    rig.attach_as(&guest, disk, "disk", FrontendConfig::default(), read_only)
}

fn write(disk: &mut Frontend) -> i16 {
    disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap()
}

/// The disk is refused, and both ends close. Returns the error.
fn refused(rig: &Rig, disk: &Frontend, guest: u16) -> String {
    disk.await_backend("6").unwrap();
    reported(rig, guest, 51728)
}

/// The disk is detached, and attached again.
fn attach_again(rig: &Rig, disk: &Frontend) {
    let (mut store, guest) = (rig.world.xenstore().unwrap(), disk.guest().number());
    detach(&mut *store, guest, "xvdb", false).unwrap();
    let order = DiskSpec { volume: "disk", name: "xvdb", read_only: false };
    ebb_export_xen::attach(&mut *store, guest, &order).unwrap();
}

fn reported(rig: &Rig, guest: u16, device: u32) -> String {
    let path = format!("/local/domain/0/error/backend/ebbd/{guest}/{device}/error");
    rig.world.tree.get(&path).unwrap_or_default()
}

#[test]
fn a_second_guest_may_read_and_not_write() {
    let rig = Rig::new();
    let mut first = attach(&rig, 1, "xvdb", false);
    first.connect().unwrap();
    let second = attach(&rig, 2, "xvdb", false);
    let why = refused(&rig, &second, 2);
    assert!(why.contains("written to by Xen guest 1 (disk 51728)"), "{why}");
    assert!(why.contains("shared = true"), "{why}");
    // The first guest may not attach it twice either.
    attach(&rig, 1, "xvdc", false).await_backend("6").unwrap();
    let mut reader = attach(&rig, 3, "xvdb", true);
    reader.connect().unwrap();
    assert_eq!(reader.transfer(0, op::READ, 0, &mut vec![0; 4096]).unwrap(), 0);
    assert_eq!(write(&mut first), 0);
    // When the first guest has released it, the second one may attach it.
    first.close().unwrap();
    let mut second = second;
    attach_again(&rig, &second);
    second.connect().unwrap();
    assert_eq!(write(&mut second), 0);
}

#[test]
fn a_disk_waits_for_a_writer_that_is_about_to_end() {
    let rig = Rig::new();
    let mut first = attach(&rig, 1, "xvdb", false);
    first.connect().unwrap();
    let mut second = attach(&rig, 2, "xvdb", false);
    rig.world.destroy(1);
    second.connect().unwrap();
    assert_eq!(write(&mut second), 0);
}

#[test]
fn guests_and_nbd_clients_exclude_each_other_as_writers() {
    let rig = Rig::new();
    let volume = rig.volumes.get("disk").unwrap().volume;
    let client = volume.claim_writer(Writer::nbd(), false).unwrap();
    let mut guest = attach(&rig, 1, "xvdb", false);
    assert!(refused(&rig, &guest, 1).contains("written to by an NBD client"));
    drop(client);
    attach_again(&rig, &guest);
    guest.connect().unwrap();
    let refused = volume.claim_writer(Writer::nbd(), false).unwrap_err();
    assert_eq!(&*refused.by, "Xen guest 1 (disk 51728)");
    guest.close().unwrap();
    until("it may write", || volume.claim_writer(Writer::nbd(), false).is_ok());
}

#[test]
fn shared_volumes_and_forced_disks_have_several_writers() {
    let rig = Rig::new();
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    rig.add(Volume::new("disk", Store::Memory(MemoryStore::new(SIZE)), options));
    for number in 1..4 {
        let mut disk = attach(&rig, number, "xvdb", false);
        disk.connect().unwrap();
        assert_eq!(write(&mut disk), 0);
    }
    rig.add(memory("disk", SIZE, false));
    let mut first = attach(&rig, 4, "xvdb", false);
    first.connect().unwrap();
    // As in Xen's own `block` script, which does not check other disks in this mode.
    let mut forced = attach(&rig, 5, "xvdb", false);
    rig.world.tree.set("/local/domain/0/backend/ebbd/5/51728/mode", "w!");
    forced.connect().unwrap();
    assert_eq!((write(&mut first), write(&mut forced)), (0, 0));
}

/// One guest as two domains, as it is while it is migrated within the host.
#[test]
fn a_guest_that_is_migrated_within_the_host_keeps_its_disk() {
    let rig = Rig::new();
    for number in [1, 2] {
        rig.world.tree.set(&format!("/local/domain/{number}/vm"), "/vm/7d44840-9dc0");
    }
    let mut old = attach(&rig, 1, "xvdb", false);
    old.connect().unwrap();
    let mut new = attach(&rig, 2, "xvdb", false);
    new.connect().unwrap();
    rig.world.tree.set("/local/domain/3/vm", "/vm/another");
    assert!(refused(&rig, &attach(&rig, 3, "xvdb", false), 3).contains("guest 1"));
}

/// After a restart the successor admits the same writer, whose disk remains in use.
#[test]
fn a_successor_has_the_same_writer() {
    let mut rig = Rig::new();
    let mut disk = attach(&rig, 1, "xvdb", false);
    disk.connect().unwrap();
    rig.stop();
    rig.start(1, |_| {});
    assert_eq!(write(&mut disk), 0);
    assert!(refused(&rig, &attach(&rig, 2, "xvdb", false), 2).contains("guest 1"));
    assert_eq!(write(&mut disk), 0);
}

/// Volumes against guests: by name, UUID and number, and whether the guest gets its disk.
#[test]
fn a_guest_gets_a_volume_that_it_may_open() {
    let uuid = "0ab3c4d5-0000-1111-2222-333344445555";
    let mut number = 0;
    for (entry, allowed) in [
        (Some("xen:guest1"), true),
        (Some("xen:guest"), false),
        (Some("xen:0AB3C4D5-0000-1111-2222-333344445555"), true),
        (Some("xen:0ab3c4d5-0000-1111-2222-333344445556"), false),
        (Some("xen:4"), false),
        (Some("xen:6"), true),
        (Some("uid:0"), false),
        (None, true),
    ] {
        let rig = Rig::new();
        number += 1;
        rig.world.tree.set(&format!("/local/domain/{number}/name"), "guest1");
        rig.world.tree.set(&format!("/local/domain/{number}/vm"), &format!("/vm/{uuid}"));
        rig.volumes.set_allowed("disk", entry.map(list));
        let mut disk = attach(&rig, number, "xvdb", false);
        if allowed {
            disk.connect().unwrap();
            assert_eq!(write(&mut disk), 0, "{entry:?}");
        } else {
            let why = refused(&rig, &disk, number);
            assert!(why.contains("may not open volume `disk`"), "{entry:?}: {why}");
        }
    }
}

#[test]
fn a_guest_that_may_no_longer_open_its_volume_is_disconnected() {
    let rig = Rig::new();
    let mut disk = attach(&rig, 1, "xvdb", false);
    let mut other = attach(&rig, 2, "xvdb", true);
    disk.connect().unwrap();
    other.connect().unwrap();
    assert_eq!(write(&mut disk), 0);
    rig.volumes.set_allowed("disk", Some(list("xen:2")));
    rig.backend.as_ref().unwrap().end_disallowed();
    disk.await_backend("5").unwrap();
    assert!(reported(&rig, 1, 51728).contains("may not open volume `disk`"));
    assert_eq!(other.transfer(0, op::READ, 0, &mut vec![0; 4096]).unwrap(), 0, "still allowed");
}

fn list(entry: &str) -> AccessList {
    AccessList::new(vec![AccessEntry::parse(entry).unwrap()]).unwrap()
}
