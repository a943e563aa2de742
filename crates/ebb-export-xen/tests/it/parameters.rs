//! Each parameter that is changed while disks are served has the effect that its documentation states.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::{Rig, memory, pattern, until};
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_io::Worker;
use ebb_mem::{Memory, PoolParameters};
use ebb_store::{Store, TestStore};
use ebb_volume::{Volume, VolumeOptions};

/// Writes and reads back `rounds` times, each time in other pages.
fn verified(disk: &mut Frontend, rounds: u64) {
    for round in 0..rounds {
        let data = pattern(round, 64 << 10);
        let sector = round % 100 * 128;
        assert_eq!(disk.transfer(0, op::WRITE, sector, &mut data.clone()).unwrap(), 0);
        let mut back = vec![0; data.len()];
        assert_eq!(disk.transfer(0, op::READ, sector, &mut back).unwrap(), 0);
        assert!(back == data, "round {round}");
    }
}

#[test]
fn without_persistent_grants_nothing_stays_mapped_and_no_request_fails() {
    let rig = Rig::new();
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    verified(&mut disk, 20);
    assert!(rig.stats().mapped > 100, "{:?}", rig.stats());

    let load = std::thread::spawn(move || {
        verified(&mut disk, 400);
        disk
    });
    rig.parameters.max_persistent_grants.set(0);
    // The ring's page stays mapped.
    until("all grants are unmapped", || rig.stats().mapped == 0 && guest.mapped() == 1);
    let copies = rig.stats().copies;
    until("data is copied instead", || rig.stats().copies > copies);
    let mut disk = load.join().unwrap();
    let stats = rig.stats();
    assert_eq!((stats.mapped, stats.errors), (0, 0));
    assert!(stats.evictions > 100 && stats.expiries == 0, "{stats:?}");

    // With a small cap, no more than that are mapped.
    rig.parameters.max_persistent_grants.set(8);
    let maps = stats.maps;
    verified(&mut disk, 20);
    let stats = rig.stats();
    assert!(stats.maps > maps && stats.mapped <= 8 && stats.errors == 0, "{stats:?}");
    assert!(guest.mapped() <= 1 + 8);
}

#[test]
fn idle_grants_expire_after_a_time_that_was_set_while_they_were_idle() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    verified(&mut disk, 10);
    assert!(rig.stats().mapped > 100);
    rig.parameters.persistent_grant_unused_seconds.set(1);
    until("idle grants are unmapped", || rig.stats().mapped == 0);
    assert!(rig.stats().expiries > 100 && rig.stats().evictions == 0, "{:?}", rig.stats());
    rig.parameters.persistent_grant_unused_seconds.set(0);
    verified(&mut disk, 10);
    let mapped = rig.stats().mapped;
    assert!(mapped > 100);
    rig.parameters.shrink();
    until("under pressure also grants without a time limit are unmapped", || {
        rig.stats().mapped == 0
    });
}

#[test]
fn requests_that_come_soon_are_found_by_polling_unless_it_is_disabled() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    rig.polling.poll_us.set(1000);
    // On a busy machine a pause may be long, but not every time.
    let found = (0..10_000).any(|_| {
        verified(&mut disk, 1);
        rig.stats().polls > 0
    });
    assert!(found, "{:?}", rig.stats());
    rig.polling.poll_us.set(0);
    verified(&mut disk, 1);
    let polls = rig.stats().polls;
    verified(&mut disk, 200);
    let stats = rig.stats();
    assert_eq!((stats.polls, stats.errors), (polls, 0));
}

#[test]
fn feature_persistent_applies_to_later_connections() {
    let rig = Rig::new();
    rig.add(memory("later", common::SIZE, false));
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    rig.parameters.feature_persistent.set(false);
    // Another guest: each frontend takes pages from the beginning of its guest's memory.
    let neighbour = rig.guest(2, 4096);
    let mut later = rig.attach(&neighbour, "xvdb", "later", FrontendConfig::default());
    later.connect().unwrap();
    assert_eq!(disk.backend("feature-persistent").as_deref(), Some("1"));
    assert_eq!(later.backend("feature-persistent").as_deref(), Some("0"));
    verified(&mut disk, 5);
    verified(&mut later, 5);
    let stats = rig.backend.as_ref().unwrap().stats();
    let found = stats.iter().map(|disk| (&*disk.volume, disk.persistent, disk.queues));
    assert!(found.eq([("disk", true, 1), ("later", false, 1)]), "{stats:?}");
    assert!(stats[0].stats.mapped > 0 && stats[0].stats.copies == 0);
    assert!(stats[1].stats.mapped == 0 && stats[1].stats.copies > 0);
}

#[test]
fn page_pools_of_rings_follow_their_parameters_and_are_squeezed() {
    let io = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let worker = Worker::start("xen", &io).unwrap();
    let pool = Arc::<PoolParameters>::default();
    let volume = memory("disk", common::SIZE, false);
    let mut rig = Rig::with(1, |options| {
        options.volumes.add(volume.clone(), pool.clone());
        options.workers = vec![worker.handle()];
    });
    let kept = || io.stats().pools.iter().map(|pool| pool.free + pool.lent).sum::<usize>();
    let mut disk = rig.disk(FrontendConfig::default());
    verified(&mut disk, 5);
    until("free pages stay", || kept() > 0);

    pool.max_buffer_pages.set(0);
    until("an idle ring keeps none", || kept() == 0);
    pool.max_buffer_pages.set(1024);
    verified(&mut disk, 5);
    until("free pages stay again", || kept() > 0);

    pool.buffer_squeeze_duration_ms.set(60_000);
    io.squeeze(Instant::now());
    until("a sign of pressure empties an idle ring's pool", || kept() == 0);
    verified(&mut disk, 5);
    until("nothing stays while it lasts", || kept() == 0);
    pool.buffer_squeeze_duration_ms.set(0);
    io.squeeze(Instant::now());
    until("the second squeeze is done", || io.stats().pools.iter().any(|p| p.squeezes >= 2));
    verified(&mut disk, 5);
    until("a squeeze of no duration ends at once", || kept() > 0);
    rig.stop();
    drop(worker);
}

#[test]
fn under_continuing_pressure_a_rings_requests_share_few_buffers() {
    let io = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let worker = Worker::start("xen", &io).unwrap();
    let store = Arc::new(TestStore::new(common::SIZE, 1));
    // Long enough for all requests to allocate their buffers before one completes.
    store.latency_us.store(20_000, Ordering::Relaxed);
    let volume = Volume::new("disk", Store::Test(store), VolumeOptions::default());
    let mut rig = Rig::with(1, |options| {
        options.volumes.add(volume.clone(), Arc::default());
        options.workers = vec![worker.handle()];
    });
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    // 32 concurrent reads of 1 MiB; the most memory that their buffers took.
    let pages = disk.pages(256);
    let page = |gref: &u32| Segment { gref: *gref, first: 0, last: 7 };
    let segments: Vec<Segment> = pages.iter().map(page).collect();
    let mut most = || {
        for _ in 0..32 {
            let (_, request) = disk.request(op::READ, 0, &segments);
            disk.queues[0].put(request);
        }
        disk.queues[0].push();
        let (mut most, mut completed) = (0, 0);
        while completed < 32 {
            while let Some(response) = disk.queues[0].take().unwrap() {
                assert_eq!(response.status, 0);
                completed += 1;
            }
            most = most.max(io.stats().owners.iter().map(|owner| owner.wired).sum());
        }
        most
    };
    let calm = most();
    io.reclaim(ebb_mem::Reclaim::Drain, Instant::now());
    let pressed = most();
    assert!(calm > 16 << 20 && pressed < 8 << 20, "{calm} and {pressed} bytes");
    rig.stop();
    drop(worker);
}
