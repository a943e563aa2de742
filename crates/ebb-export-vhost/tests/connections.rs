//! Frontends as clients: what is shown of them, the end of a connection on request, and the descriptors that they may hold.

#![allow(clippy::unwrap_used, reason = "this is a test")]

mod common;

use std::sync::Arc;

use common::driver::kind;
use common::frontend::event;
use common::{Frontend, Guest, Rig, SIZE, Wishes, memory_volume, status, until};
use ebb_access::{AccessEntry, AccessList};
use ebb_export_vhost::{FrontendDescriptors, VhostBackend, VhostOptions};
use ebb_io::Worker;
use ebb_vhost_proto::{FrontendMessage as M, VringFile};

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
