//! Guards of attachments: one writer, access lists, and changes of the size.

use std::sync::atomic::Ordering;

use ebb_access::{AccessEntry, AccessList};
use ebb_volume::Writer;

use crate::volumes::{BLOCK, Host, SIZE, disk, in_memory, pattern, volume_on};
use crate::{
    Attached, End, ExportUnderTest, Peer, Reply, Violation, done, ends, ensure, served, until,
};

pub(crate) fn one_writer<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    let mut export = E::start(&host.memory);
    let store = disk();
    let volume = volume_on("disk", &store);
    export.serve(volume.clone());
    let claim = || {
        let writer = Writer { name: "another export".into(), group: None };
        volume.claim_writer(writer, false).ok()
    };
    let lease = claim().ok_or("the volume has a writer before any peer is attached")?;
    let mut peer = match export.attach(1, "disk") {
        Attached::Served(_) => return Err("a peer is a second writer".to_owned()),
        Attached::Waiting(mut peer) => {
            peer.submit_write(0, &pattern(1));
            ensure!(store.writes.load(Ordering::SeqCst) == 0, "a waiting peer has written");
            drop(lease);
            done(peer.wait(), "the write of the peer that waited")?;
            peer
        }
        Attached::Rejected(_) => {
            drop(lease);
            let mut peer = served(&mut export, 1, "disk")?;
            done(peer.write(0, &pattern(1)), "a write after the other writer has ended")?;
            peer
        }
    };
    ensure!(claim().is_none(), "another export may write next to the attached peer");
    for end in ends::<E>() {
        export.end(end);
        export.start_again();
        ensure!(export.resume(&mut peer), "{end:?}: the writer cannot go on");
        done(peer.write(0, &pattern(2)), "a write of the writer that goes on")?;
        ensure!(claim().is_none(), "{end:?}: another export may write next to the peer");
    }
    peer.detach();
    until("the writer's lease ends with its attachment", || claim().is_some());
    Ok(())
}

fn list(entry: &str) -> Option<AccessList> {
    Some(AccessList::new(vec![AccessEntry::parse(entry).unwrap()]).unwrap())
}

pub(crate) fn access_list<E: ExportUnderTest>() -> Result<(), Violation> {
    const OTHER: &str = "psk:another";
    let host = Host::new();
    let mut export = E::start(&host.memory);
    let store = disk();
    export.serve(volume_on("disk", &store));
    let own = export.admitting(1);
    let rejected = |export: &mut E, state: &str| match export.attach(1, "disk") {
        Attached::Rejected(_) => Ok(()),
        _ => Err(format!("a peer is attached that the list does not admit: {state}")),
    };
    export.volumes().set_allowed("disk", list(OTHER));
    rejected(&mut export, "before")?;
    export.volumes().set_allowed("disk", list(&own));
    let mut peer = served(&mut export, 1, "disk")?;
    export.end_disallowed();
    done(peer.write(0, &pattern(1)), "a write of an admitted peer")?;
    export.volumes().set_allowed("disk", list(OTHER));
    export.end_disallowed();
    peer.await_end();
    rejected(&mut export, "after its end")?;
    for end in ends::<E>() {
        for admitted in [true, false] {
            export.volumes().set_allowed("disk", list(&own));
            let mut peer = served(&mut export, 1, "disk")?;
            done(peer.write(0, &pattern(2)), "a write of an admitted peer")?;
            export.end(end);
            export.volumes().set_allowed("disk", list(if admitted { &own } else { OTHER }));
            export.start_again();
            let serves = export.resume(&mut peer);
            ensure!(serves == admitted, "{end:?}: admitted {admitted}, served {serves}");
            if serves {
                peer.detach();
            }
        }
    }
    Ok(())
}

pub(crate) fn size_change<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    for end in ends::<E>() {
        // The volume changes while a peer is attached.
        let mut export = E::start(&host.memory);
        let volume = in_memory("disk");
        export.serve(volume.clone());
        let mut peer = served(&mut export, 1, "disk")?;
        host.resize(&volume, 2 * SIZE);
        export.announce_sizes();
        let told = peer.await_size(2 * SIZE);
        if told {
            done(peer.write(SIZE, &pattern(1)), "a write to the new part of the volume")?;
        }
        done(peer.write(0, &pattern(2)), "a write after the volume grew")?;
        export.end(end);
        host.resize(&volume, SIZE);
        export.start_again();
        let serves = export.resume(&mut peer);
        ensure!(serves != told, "{end:?}: served {serves} on less than the size it was told");
        if serves {
            done(peer.write(0, &pattern(3)), "a write within the size of the attachment")?;
        }
        export.end(end);
        // The volume changes while no daemon runs.
        for (size, expected) in [(2 * SIZE, true), (SIZE / 2, false)] {
            let mut export = E::start(&host.memory);
            let volume = in_memory("disk");
            export.serve(volume.clone());
            let mut peer = served(&mut export, 1, "disk")?;
            export.end(end);
            host.resize(&volume, size);
            export.start_again();
            let serves = export.resume(&mut peer);
            ensure!(serves == expected, "{end:?}: served {serves} after {SIZE} became {size}");
        }
    }
    if E::SURVIVES_KILL {
        killed_while_shrinking::<E>(&host, SIZE)?;
        killed_while_shrinking::<E>(&host, SIZE / 2)?;
    }
    shrunk_in_use::<E>(&host)
}

/// The kill leaves the volume with this size.
fn killed_while_shrinking<E: ExportUnderTest>(host: &Host, left: u64) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let volume = in_memory("disk");
    export.serve(volume.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    volume.plan_size(Some(SIZE / 2));
    export.note_backing(&volume);
    export.end(End::Kill);
    host.resize(&volume, left);
    volume.plan_size(None);
    export.start_again();
    ensure!(export.resume(&mut peer), "not served after a kill while {SIZE} became {left}");
    done(peer.write(0, &pattern(1)), "a write within what is left")
}

fn shrunk_in_use<E: ExportUnderTest>(host: &Host) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let volume = in_memory("disk");
    export.serve(volume.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    host.resize(&volume, SIZE / 2);
    export.announce_sizes();
    let reply = peer.write(SIZE / 2, &pattern(1));
    ensure!(reply == Reply::Failed, "a write beyond the end: {reply:?}");
    ensure!(peer.read(SIZE / 2, BLOCK).is_none(), "a read beyond the end succeeded");
    done(peer.write(0, &pattern(2)), "a write within a volume that shrank")
}
