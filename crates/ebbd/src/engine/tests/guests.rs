//! Xen guests and reloads, on a Xen in shared memory.

use std::sync::Arc;

use ebb_api::stat::FailingGuests;
use ebb_export_xen::abi::op;
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World as Machine;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, detach, device_number};

use super::*;

/// Where the backend says what is wrong with the disk of guest 1.
pub(super) const ERROR: &str = "/local/domain/0/error/backend/ebbd/1/51728/error";

/// Starts the Xen backend of a daemon; with `journals` its successor goes on with the rings.
pub(super) fn serve_guests(world: &World, machine: &Machine, journals: Option<&Path>) {
    let workers = vec![world.worker.handle()];
    let mut options =
        BackendOptions::new(Arc::new(machine.clone()), workers, world.volumes.clone());
    options.journals = journals.map(Path::to_owned);
    world.engine.serve_guests(Backend::start(options).unwrap());
}

pub(super) fn attach_disk(machine: &Machine) {
    attach_volume(machine, "disk");
}

pub(super) fn attach_volume(machine: &Machine, volume: &str) {
    let order = DiskSpec { volume, name: "xvdb", read_only: false };
    attach(&mut *machine.xenstore().unwrap(), 1, &order).unwrap();
}

pub(super) fn transfer(disk: &mut Frontend, operation: u8, byte: u8) -> Vec<u8> {
    let mut data = vec![byte; 4096];
    assert_eq!(disk.transfer(0, operation, 0, &mut data).unwrap(), 0);
    data
}

#[test]
fn a_guest_keeps_its_disk_through_a_failed_reload_and_is_notified_of_a_new_store() {
    let on = |file: &str| config(&format!("[volume.disk]\nstore='file:/{file}'\n"));
    let world = World::new(&on("one"), SOON);
    let (one, two) = (world.store("one"), world.store("two"));
    world.start(on("one"), None);
    let machine = Machine::default();
    serve_guests(&world, &machine, None);
    let guest = machine.guest(1, 64).unwrap();
    attach_disk(&machine);
    let device = device_number("xvdb").unwrap();
    let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
    disk.connect().unwrap();
    transfer(&mut disk, op::WRITE, 1);

    world.stores.set("absent", Fate::Fails);
    world.reload(on("absent"));
    assert_eq!(transfer(&mut disk, op::READ, 0), [1; 4096]);
    assert_eq!(machine.tree.get(ERROR), None);

    world.reload(on("two"));
    assert_eq!(one.stable_bytes()[..4096], [1; 4096], "flushed before the new one is offered");
    // Closing, and why.
    disk.await_backend("5").unwrap();
    let told = machine.tree.get(ERROR).unwrap();
    assert!(told.contains("`disk` is not served any more"), "{told}");

    // Attached again, it is the new store.
    machine.tree.remove_all("/local/domain/0/error");
    disk.set("state", "6");
    detach(&mut *machine.xenstore().unwrap(), 1, "xvdb", true).unwrap();
    attach_disk(&machine);
    disk.connect().unwrap();
    assert_eq!(transfer(&mut disk, op::READ, 9), [0; 4096]);
    transfer(&mut disk, op::WRITE, 2);
    assert!(world.stop().is_clean());
    world.engine.end_guests();
    assert_eq!((one.stable_bytes()[0], two.stable_bytes()[0]), (1, 2));
}

/// Writes that were acknowledged from memory are on the store when a stop has ended well: a successor goes on with the guest.
#[test]
fn an_orderly_stop_leaves_a_written_back_volume_to_the_next_daemon() {
    let listed = || volumes(&["disk"], "writeback");
    let journals = tempfile::tempdir_in("/dev/shm").unwrap();
    let machine = Machine::default();
    let guest = machine.guest(1, 64).unwrap();
    let device = device_number("xvdb").unwrap();
    let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
    let store = Arc::new(TestStore::new(SIZE, 1));
    for life in 1..3 {
        let world = World::new(&listed(), SOON);
        world.stores.set("disk", Fate::Opens(store.clone()));
        world.start(listed(), None);
        serve_guests(&world, &machine, Some(journals.path()));
        if life == 1 {
            attach_disk(&machine);
            disk.connect().unwrap();
        }
        // Not flushed by the guest.
        transfer(&mut disk, op::WRITE, life);
        assert!(world.stop().is_clean());
        world.engine.end_guests();
        assert_eq!(store.stable_bytes()[..4096], [life; 4096]);
        assert_eq!(disk.backend("state").as_deref(), Some("4"), "it stays connected");
    }
}

/// The last flush of a stop fails: the stop lists the volume, and the guest's writes fail from the next daemon on, so
/// that it notices what was lost.
#[test]
fn the_guest_of_a_volume_that_a_stop_lists_as_lost_notices_it() {
    let listed = || volumes(&["disk"], "none");
    let journals = tempfile::tempdir_in("/dev/shm").unwrap();
    let machine = Machine::default();
    let guest = machine.guest(1, 64).unwrap();
    let device = device_number("xvdb").unwrap();
    let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
    let store = Arc::new(TestStore::new(SIZE, 1));
    for life in 1..3 {
        let world = World::new(&listed(), SOON);
        world.stores.set("disk", Fate::Opens(Arc::new(store.open_anew())));
        world.start(listed(), None);
        serve_guests(&world, &machine, Some(journals.path()));
        if life == 1 {
            attach_disk(&machine);
            disk.connect().unwrap();
            transfer(&mut disk, op::WRITE, life);
            let faults = ebb_store::Faults { flushes: 1000, ..ebb_store::Faults::default() };
            store.faults(&faults);
            assert_eq!(world.stop().unflushed.len(), 1);
            store.faults(&ebb_store::Faults::default());
        } else {
            let status = disk.transfer(0, op::WRITE, 80, &mut vec![2; 4096]).unwrap();
            assert_ne!(status, 0, "the guest does not notice the loss");
            let failing = FailingGuests { xen: 1, vhost: 0 };
            assert_eq!(world.engine.failing_guests().get("disk"), Some(&failing));
            world.stop();
        }
        world.engine.end_guests();
    }
}

/// A killed daemon leaves a write to the kernel, which loses it and reports that to the last flush
/// of the next daemon. The guest runs on with the third one.
#[test]
fn a_guest_notices_that_a_write_of_a_killed_daemon_is_lost() {
    for killed in [true, false] {
        let listed = || volumes(&["disk"], "none");
        let journals = tempfile::tempdir_in("/dev/shm").unwrap();
        let machine = Machine::default();
        let guest = machine.guest(1, 64).unwrap();
        let device = device_number("xvdb").unwrap();
        let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
        let store = Arc::new(TestStore::new(SIZE, 1));
        for life in 1..4 {
            let world = World::new(&listed(), SOON);
            world.stores.set("disk", Fate::Opens(Arc::new(store.open_anew())));
            world.start(listed(), None);
            serve_guests(&world, &machine, Some(journals.path()));
            match life {
                1 => {
                    attach_disk(&machine);
                    disk.connect().unwrap();
                    transfer(&mut disk, op::WRITE, life);
                    assert!(killed || world.stop().is_clean());
                }
                2 => {
                    transfer(&mut disk, op::READ, 0);
                    store.faults(&ebb_store::Faults { flushes: 1000, ..Default::default() });
                    let report = world.stop();
                    assert!(report.is_clean() && !report.failing[0].knows_earlier, "{report:?}");
                    store.faults(&ebb_store::Faults::default());
                }
                _ => {
                    let flushed = disk.flush(op::FLUSH_DISKCACHE).unwrap() == 0;
                    assert_eq!(flushed, !killed, "a flush succeeds: {flushed}, killed: {killed}");
                    assert!(world.stop().is_clean());
                }
            }
            world.engine.end_guests();
        }
    }
}

/// A reload closes a volume whose store does not reply. The store has the guest's writes, unless it
/// reports their loss to this daemon alone.
#[test]
fn guest_of_a_silent_store_is_told_of_no_loss_at_a_reload() {
    for reports in [false, true] {
        let listed = || volumes(&["disk", "other"], "none");
        let journals = tempfile::tempdir_in("/dev/shm").unwrap();
        let journal = || {
            let mut files = std::fs::read_dir(journals.path()).unwrap();
            let path = files.find_map(|file| file.ok().filter(|one| one.path().is_file()));
            std::fs::read(path.expect("the ring has a journal").path()).unwrap()
        };
        let machine = Machine::default();
        let guest = machine.guest(1, 64).unwrap();
        let device = device_number("xvdb").unwrap();
        let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
        let world = World::new(&listed(), SOON);
        let store = world.store("disk");
        world.store("other");
        if reports {
            store.report_once();
        }
        world.start(listed(), None);
        serve_guests(&world, &machine, Some(journals.path()));
        attach_disk(&machine);
        disk.connect().unwrap();
        transfer(&mut disk, op::WRITE, 1);
        let before = journal();
        store.silent.store(true, Ordering::SeqCst);
        world.reload(volumes(&["other"], "none"));
        assert_eq!(journal() != before, reports, "reports {reports}: a loss is noted");
        world.stop();
        world.engine.end_guests();
    }
}
