//! Guards of ends: limits that requests wait for, a stop, and the removal of a volume.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_store::TestStore;
use ebb_volume::{Operation, RateLimits, RequestCost, RequestKind, Volume};

use crate::volumes::{BLOCK, Host, content, disk, in_memory, pattern, volume_on};
use crate::{Attached, ExportUnderTest, Peer, Violation, done, ensure, served, until};

/// Requests in flight.
const REQUESTS: u8 = 3;

fn place(request: u8) -> u64 {
    u64::from(request) * BLOCK as u64
}

fn submit<P: Peer>(peer: &mut P) {
    (0..REQUESTS).for_each(|request| peer.submit_write(place(request), &pattern(request)));
}

/// All requests succeed, and the disk has their data.
fn completed<P: Peer>(peer: &mut P, store: &TestStore) -> Result<(), Violation> {
    for _ in 0..REQUESTS {
        done(peer.wait(), "a request in flight")?;
    }
    let written = (0..REQUESTS).all(|request| content(store, place(request)) == pattern(request));
    ensure!(written, "an acknowledged write is missing");
    let writes = store.writes.load(Ordering::SeqCst);
    ensure!(writes == u64::from(REQUESTS), "{writes} writes for {REQUESTS} requests");
    Ok(())
}

/// A peer of `disk` with requests in flight at a store that does not complete them.
struct BusyPeer<P> {
    store: Arc<TestStore>,
    volume: Arc<Volume>,
    peer: P,
}

fn in_flight<E: ExportUnderTest>(export: &mut E) -> Result<BusyPeer<E::Peer>, Violation> {
    let store = disk();
    let volume = volume_on("disk", &store);
    export.serve(volume.clone());
    let mut peer = served(export, 1, "disk")?;
    store.hang();
    submit(&mut peer);
    until("the requests are in flight", || store.hanging() == usize::from(REQUESTS));
    Ok(BusyPeer { store, volume, peer })
}

/// Nothing passes for half an hour.
fn exhaust(volume: &Volume) {
    volume.set_rate_limits(RateLimits { bandwidth: 512, ..RateLimits::default() });
    volume.limits().unwrap().take(RequestCost { kind: RequestKind::Read, bytes: 1 << 20 });
}

pub(crate) fn limits<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    for (stops, inline) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut export = E::start(&host.memory);
        let store = disk();
        let volume = if inline { in_memory("disk") } else { volume_on("disk", &store) };
        export.serve(volume.clone());
        export.serve(in_memory("other"));
        let mut peer = served(&mut export, 1, "disk")?;
        let mut neighbour = served(&mut export, 2, "other")?;
        let writes = || volume.stats().of(Operation::Write).requests;
        let throttled = |times: u64| {
            let figures = || volume.limit_figures().map_or(0, |figures| figures.throttled);
            until("the peer waits for its limit", || figures() >= times);
        };
        exhaust(&volume);
        submit(&mut peer);
        throttled(1);
        done(neighbour.write(0, &pattern(9)), "a write of a neighbour")?;
        ensure!(writes() == 0, "{} requests passed a limit", writes());
        volume.set_rate_limits(RateLimits::default());
        for _ in 0..REQUESTS {
            done(peer.wait(), "a request whose limit was lifted")?;
        }
        let before = volume.limit_figures().map_or(0, |figures| figures.throttled);
        exhaust(&volume);
        submit(&mut peer);
        throttled(before + 1);
        let ending = if stops {
            export.begin_stop()
        } else {
            drop(export.volumes().remove("disk"));
            export.begin_withdraw(&volume)
        };
        ending.finish();
        // A request that the peer cannot take back is completed.
        let passed = writes() - u64::from(REQUESTS);
        ensure!(passed <= 1, "{passed} requests passed a limit at the end");
    }
    Ok(())
}

pub(crate) fn stop<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    let mut export = E::start(&host.memory);
    let BusyPeer { store, volume, mut peer } = in_flight(&mut export)?;
    let ending = export.begin_stop();
    store.release();
    ending.finish();
    ensure!(volume.in_flight() == 0, "{} requests are in flight", volume.in_flight());
    completed(&mut peer, &store)
}

pub(crate) fn removal<E: ExportUnderTest>() -> Result<(), Violation> {
    let host = Host::new();
    let mut export = E::start(&host.memory);
    export.serve(in_memory("other"));
    let BusyPeer { store, volume, mut peer } = in_flight(&mut export)?;
    let mut neighbour = served(&mut export, 2, "other")?;
    drop(export.volumes().remove("disk"));
    let ending = export.begin_withdraw(&volume);
    done(neighbour.write(0, &pattern(1)), "a write of a neighbour during the removal")?;
    store.release();
    ending.finish();
    ensure!(volume.in_flight() == 0, "{} requests are in flight", volume.in_flight());
    completed(&mut peer, &store)?;
    peer.await_end();
    match export.attach(3, "disk") {
        Attached::Rejected(_) => {}
        _ => return Err("a removed volume can be attached".to_owned()),
    }
    done(neighbour.write(0, &pattern(2)), "a write of a neighbour after the removal")?;
    export.serve(in_memory("disk"));
    let mut next = served(&mut export, 3, "disk")?;
    done(next.write(0, &pattern(3)), "a write to a new volume of the name")
}
