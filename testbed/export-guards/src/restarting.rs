//! Guards of peers that stay attached while the daemon is replaced: the store's identity, unstable
//! writes, and unanswered requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_store::{Faults, TestStore};
use ebb_volume::Volume;

use crate::volumes::{BLOCK, Host, OverlayDisks, content, disk, in_memory, pattern, volume_on};
use crate::{End, ExportUnderTest, Peer, Reply, Violation, done, ends, ensure, served, until};

pub(crate) fn store_identity<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    for end in ends::<E>() {
        same_store::<E>(&host, end)?;
        for numbered in [true, false] {
            another_store::<E>(&host, end, numbered)?;
        }
    }
    if ends::<E>().contains(&End::Kill) {
        for exchanged in [false, true] {
            killed_while_layers_are_exchanged::<E>(&host, exchanged)?;
        }
    }
    replaced_in_use::<E>(&host)
}

/// A peer goes on over its own store, also after its layers were exchanged.
fn same_store<E: ExportUnderTest>(host: &Host, end: End) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let store = disk();
    let volume = volume_on("disk", &store);
    export.serve(volume.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    for exchanged in [false, true] {
        if exchanged {
            store.renumber();
            let served = export.volumes().get("disk").ok_or("the volume is gone")?;
            export.note_backing(&served.volume);
        }
        export.end(end);
        export.serve(volume_on("disk", &store));
        export.start_again();
        ensure!(export.resume(&mut peer), "{end:?}: not served on its own store");
        ensure!(peer.read(0, BLOCK) == Some(pattern(1)), "{end:?}: other data on its own store");
    }
    Ok(())
}

/// A kill during a snapshot leaves either the former layers or the next ones: a peer goes on over
/// both, and not over another snapshot's.
fn killed_while_layers_are_exchanged<E: ExportUnderTest>(
    host: &Host,
    exchanged: bool,
) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let disks = OverlayDisks::new();
    let volume = host.overlay(&disks, true);
    export.serve(volume.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    done(peer.flush(), "a flush")?;
    host.begin_snapshot(&volume, &disks);
    export.note_backing(&volume);
    export.end(End::Kill);
    if exchanged {
        export.serve(host.overlay(&OverlayDisks::new(), true));
        export.start_again();
        ensure!(!export.resume(&mut peer), "served on another overlay");
        export.end(End::Kill);
        export.serve(host.overlay_with_snapshot(&disks));
    } else {
        export.serve(host.overlay(&disks, false));
    }
    export.start_again();
    ensure!(export.resume(&mut peer), "exchanged {exchanged}: not served on its own layers");
    ensure!(peer.read(0, BLOCK) == Some(pattern(1)), "exchanged {exchanged}: other data");
    done(peer.write(0, &pattern(2)), "a write after the kill")?;
    Ok(())
}

/// A peer does not go on over another store, and nothing it asked for is carried out there.
fn another_store<E: ExportUnderTest>(
    host: &Host,
    end: End,
    numbered: bool,
) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let (store, other) = (disk(), disk());
    export.serve(volume_on("disk", &store));
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    if end == End::Kill {
        store.hang();
        peer.submit_write(BLOCK as u64, &pattern(2));
        until("a write is in flight", || store.hanging() == 1);
    }
    export.end(end);
    let next = if numbered { volume_on("disk", &other) } else { in_memory("disk") };
    export.serve(next.clone());
    export.start_again();
    ensure!(!export.resume(&mut peer), "{end:?}: served on another store");
    let writes = next.stats().of(ebb_volume::Operation::Write).requests;
    ensure!(writes == 0, "{end:?}: {writes} writes for the former store on another one");
    if end == End::Kill {
        export.end(end);
        store.release();
        export.serve(volume_on("disk", &store));
        export.start_again();
        ensure!(export.resume(&mut peer), "not served when its store is back");
        done(peer.wait(), "the write that was in flight")?;
        ensure!(content(&store, BLOCK as u64) == pattern(2), "the write is missing");
    }
    Ok(())
}

/// The same daemon gives the volume's name to another store.
fn replaced_in_use<E: ExportUnderTest>(host: &Host) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let volume = in_memory("disk");
    export.serve(volume.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    drop(export.volumes().remove("disk"));
    export.begin_withdraw(&volume).finish();
    export.serve(in_memory("disk"));
    ensure!(!export.resume(&mut peer), "served on the store that replaced its own");
    Ok(())
}

/// A volume that acknowledges writes before a kill could not lose them.
enum Unstable {
    Writeback(Arc<TestStore>),
    Overlay(OverlayDisks),
}

impl Unstable {
    fn open(&self, host: &Host, new: bool) -> Arc<Volume> {
        match self {
            Unstable::Writeback(store) => host.written_back(store),
            Unstable::Overlay(disks) => host.overlay(disks, new),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Unstable::Writeback(_) => "writeback",
            Unstable::Overlay(_) => "overlay",
        }
    }
}

/// How acknowledged writes are made stable before the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flushed {
    ByPeer,
    ByDaemon,
    No,
}

pub(crate) fn unstable_writes<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    for (flushed, end) in [
        (Flushed::ByPeer, End::Kill),
        (Flushed::No, End::Kill),
        (Flushed::ByDaemon, End::HandOver { lost: false }),
        (Flushed::No, End::HandOver { lost: true }),
    ] {
        for volume in [Unstable::Writeback(disk()), Unstable::Overlay(OverlayDisks::new())] {
            ended_with_unstable_writes::<E>(&host, &volume, flushed, end)
                .map_err(|why| format!("{}, flushed {flushed:?}, {end:?}: {why}", volume.name()))?;
        }
    }
    for end in ends::<E>() {
        flush_failed::<E>(&host, end)?;
    }
    Ok(())
}

fn ended_with_unstable_writes<E: ExportUnderTest>(
    host: &Host,
    volume: &Unstable,
    flushed: Flushed,
    end: End,
) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let opened = volume.open(host, true);
    export.serve(opened.clone());
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    match flushed {
        Flushed::ByPeer => done(peer.flush(), "a flush")?,
        Flushed::ByDaemon => host.flush(&opened),
        Flushed::No => {}
    }
    export.end(end);
    export.serve(volume.open(host, false));
    export.start_again();
    let lost = flushed == Flushed::No;
    if !export.resume(&mut peer) {
        ensure!(lost || !ends::<E>().contains(&end), "the peer cannot go on, and nothing is lost");
        return Ok(());
    }
    let kept = peer.read(0, BLOCK) == Some(pattern(1));
    ensure!(kept || lost, "flushed data is lost");
    let (flush, write) = (peer.flush(), peer.write(0, &pattern(2)));
    let expected = if lost { Reply::Failed } else { Reply::Done };
    ensure!(flush == expected, "a flush: {flush:?}");
    ensure!(write == expected, "a write: {write:?}");
    Ok(())
}

/// After a failed flush the successor's flushes fail, although its store has forgotten the failure.
fn flush_failed<E: ExportUnderTest>(host: &Host, end: End) -> Result<(), Violation> {
    let mut export = E::start(&host.memory);
    let store = disk();
    export.serve(volume_on("disk", &store));
    let mut peer = served(&mut export, 1, "disk")?;
    done(peer.write(0, &pattern(1)), "a write")?;
    store.faults(&Faults { flushes: 1000, ..Faults::default() });
    ensure!(peer.flush() == Reply::Failed, "a flush succeeded that failed at the store");
    store.faults(&Faults::default());
    // A daemon cannot close such a volume.
    export.end(if end == End::Kill { end } else { End::HandOver { lost: true } });
    export.serve(volume_on("disk", &store));
    export.start_again();
    if export.resume(&mut peer) {
        let flush = peer.flush();
        ensure!(flush == Reply::Failed, "{end:?}: a flush after a failed one: {flush:?}");
    }
    Ok(())
}

pub(crate) fn restart<E: ExportUnderTest>() -> Result<(), Violation> {
    const REQUESTS: u8 = 3;
    let host = Host::new();
    let place = |request: u8| u64::from(request) * BLOCK as u64;
    for end in [End::Kill, End::HandOver { lost: false }] {
        let mut export = E::start(&host.memory);
        let store = disk();
        export.serve(volume_on("disk", &store));
        let mut peer = served(&mut export, 1, "disk")?;
        if end == End::Kill {
            store.hang();
        }
        (0..REQUESTS).for_each(|request| peer.submit_write(place(request), &pattern(request)));
        if end == End::Kill {
            until("the writes are in flight", || store.hanging() == usize::from(REQUESTS));
        }
        export.end(end);
        store.release();
        let before = store.writes.load(Ordering::SeqCst);
        export.serve(volume_on("disk", &store));
        export.start_again();
        let written =
            || (0..REQUESTS).all(|request| content(&store, place(request)) == pattern(request));
        if ends::<E>().contains(&end) {
            ensure!(export.resume(&mut peer), "{end:?}: the peer cannot go on");
            for _ in 0..REQUESTS {
                done(peer.wait(), "a request across the restart")?;
            }
            ensure!(written(), "{end:?}: an acknowledged write is missing");
            done(peer.write(0, &pattern(9)), "a write after the restart")?;
        } else {
            ensure!(!export.resume(&mut peer), "{end:?}: a peer goes on that was cut off");
            ensure!(peer.wait() == Reply::Gone, "{end:?}: a reply after the connection ended");
            let writes = store.writes.load(Ordering::SeqCst);
            ensure!(writes == before, "{end:?}: the successor carried out unanswered requests");
        }
    }
    Ok(())
}
