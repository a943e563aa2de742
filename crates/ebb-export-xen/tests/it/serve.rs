//! A frontend that behaves as Linux's is served in all its configurations.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use common::{Rig, SIZE, memory, pattern, until};
use ebb_export_xen::abi::{Abi, Body, Request, Segment, op};
use ebb_export_xen::detach;
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::frontend::{FrontendConfig, offset};
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions};

fn round_trip(rig: &Rig, wishes: FrontendConfig) {
    let mut disk = rig.disk(wishes);
    assert_eq!(disk.size(), SIZE);
    for queue in 0..disk.queues.len() {
        for (sector, len) in [(0, 512), (8, 4096), (100, 44 << 10), (1000, 256 << 10), (3, 1 << 20)]
        {
            let data = pattern(sector + queue as u64, len);
            assert_eq!(disk.transfer(queue, op::WRITE, sector, &mut data.clone()).unwrap(), 0);
            let mut back = vec![0; len];
            assert_eq!(disk.transfer(queue, op::READ, sector, &mut back).unwrap(), 0);
            assert!(back == data, "{wishes:?} sector {sector}, {len} bytes");
        }
    }
    assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0);
    assert_eq!(disk.flush(op::WRITE_BARRIER).unwrap(), 0);
    let mut data = pattern(7, 8192);
    assert_eq!(disk.transfer(0, op::WRITE_BARRIER, 16, &mut data).unwrap(), 0);
    assert_eq!(disk.transfer(0, op::FLUSH_DISKCACHE, 32, &mut data).unwrap(), 0);
    assert_eq!(disk.discard(16, 16, false).unwrap(), 0);
    let mut back = vec![1; 8192];
    assert_eq!(disk.transfer(0, op::READ, 16, &mut back).unwrap(), 0);
    assert!(back.iter().all(|byte| *byte == 0), "a store in memory discards to zeroes");
    assert_eq!(disk.discard(16, 16, true).unwrap(), -2, "secure discard is not offered");
    assert_eq!(disk.discard(0, 0, false).unwrap(), 0);
    disk.close().unwrap();
}

#[test]
fn every_layout_ring_size_and_kind_of_grant_is_served() {
    for abi in [Abi::X86_64, Abi::X86_32, Abi::Native] {
        for (order, queues, persistent) in [(0, 1, true), (0, 1, false), (4, 1, true), (2, 3, true)]
        {
            let rig = Rig::with(2, |_| {});
            round_trip(&rig, FrontendConfig { abi, order, queues, persistent });
        }
    }
}

#[test]
fn responses_to_a_full_ring_are_published_in_batches() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let pages = disk.pages(32);
    for round in 0..50u64 {
        for page in &pages {
            let segment = Segment { gref: *page, first: 0, last: 7 };
            let operation = if round % 2 == 0 { op::WRITE } else { op::READ };
            let (_, request) = disk.request(operation, u64::from(*page) * 8, &[segment]);
            disk.queues[0].put(request);
        }
        disk.queues[0].push();
        for _ in &pages {
            assert_eq!(disk.queues[0].wait().unwrap().status, 0);
        }
    }
    let stats = rig.stats();
    assert_eq!(stats.responses, 1600);
    assert!(stats.publications < 800, "{stats:?}");
    assert_eq!((stats.maps, stats.mapped, stats.copies), (32, 32, 0), "each page mapped once");
}

#[test]
fn requests_out_of_bounds_are_refused_and_other_requests_served() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let end = SIZE / 512;
    let mut data = vec![0; 4096];
    for sector in [end, end - 7, u64::MAX, u64::MAX / 512, 1 << 55] {
        for operation in [op::READ, op::WRITE] {
            assert_eq!(disk.transfer(0, operation, sector, &mut data).unwrap(), -1, "{sector}");
        }
        assert_eq!(disk.discard(sector, 8, false).unwrap(), -1);
    }
    assert_eq!(disk.discard(1, u64::MAX, false).unwrap(), -1);
    assert_eq!(disk.transfer(0, op::READ, end - 8, &mut data).unwrap(), 0);
    for (first, last) in [(0, 8), (3, 2), (255, 255), (0, 255)] {
        let segment = Segment { gref: 9, first, last };
        let (_, request) = disk.request(op::READ, 0, &[segment]);
        assert_eq!(disk.queues[0].call(request).unwrap(), -1, "{segment:?}");
    }
    for operation in [op::READ, op::WRITE] {
        let (_, request) = disk.request(operation, 0, &[]);
        assert_eq!(disk.queues[0].call(request).unwrap(), -1, "no segments");
        let body = Body::Direct { sector: 0, count: 12, segments: [Segment::default(); 11] };
        assert_eq!(disk.queues[0].call(Request { id: 0, operation, body }).unwrap(), -1);
        for count in [0, 257, u16::MAX] {
            let body = Body::Indirect { sector: 0, count, grefs: [9; 8] };
            assert_eq!(disk.queues[0].call(Request { id: 0, operation, body }).unwrap(), -1);
        }
    }
    let body = Body::Indirect { sector: 0, count: 1, grefs: [9; 8] };
    assert_eq!(disk.queues[0].call(Request { id: 0, operation: 3, body }).unwrap(), -1);
    for operation in [4, 7, 200] {
        let request = Request { id: 0, operation, body: Body::Unknown };
        assert_eq!(disk.queues[0].call(request).unwrap(), -2, "{operation}");
    }
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data).unwrap(), 0);
}

#[test]
fn one_bad_grant_fails_one_request() {
    for persistent in [true, false] {
        let rig = Rig::new();
        let mut disk = rig.disk(FrontendConfig { persistent, ..FrontendConfig::default() });
        let pages = disk.pages(4);
        let segments: Vec<_> = pages
            .iter()
            .chain(&[4_000_000_000])
            .map(|gref| Segment { gref: *gref, first: 0, last: 7 })
            .collect();
        let (_, bad) = disk.request(op::WRITE, 0, &segments);
        let (_, good) = disk.request(op::WRITE, 0, &segments[..4]);
        let bad = disk.queues[0].put(bad);
        disk.queues[0].put(good);
        disk.queues[0].push();
        for _ in 0..2 {
            let response = disk.queues[0].wait().unwrap();
            assert_eq!(response.status == 0, response.id != bad, "{response:?}");
        }
    }
}

#[test]
fn a_read_only_disk_refuses_changes_and_says_so() {
    for whole_volume in [true, false] {
        let rig = Rig::new();
        rig.add(memory("ro", SIZE, whole_volume));
        let guest = rig.guest(1, 1024);
        let mut disk =
            rig.attach_as(&guest, "xvdb", "ro", FrontendConfig::default(), !whole_volume);
        disk.connect().unwrap();
        assert_eq!(disk.backend("info").as_deref(), Some("4"));
        assert_eq!(disk.backend("feature-flush-cache").as_deref(), Some("0"));
        assert_eq!(disk.backend("feature-discard"), None);
        let mut data = vec![1; 4096];
        assert_eq!(disk.transfer(0, op::READ, 0, &mut data).unwrap(), 0);
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data).unwrap(), -1);
        assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), -1);
        assert_eq!(disk.discard(0, 8, false).unwrap(), -1);
    }
}

#[test]
fn a_detached_disk_is_released_and_can_be_attached_again() {
    let rig = Rig::new();
    let guest = rig.guest(1, 1024);
    for _ in 0..3 {
        let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
        disk.connect().unwrap();
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 65536]).unwrap(), 0);
        assert!(guest.mapped() > 1);
        let world = rig.world.clone();
        let waiter = std::thread::spawn(move || {
            detach(&mut *world.xenstore().unwrap(), 1, "xvdb", false).map_err(|e| e.to_string())
        });
        disk.await_backend("5").unwrap();
        disk.close().unwrap();
        waiter.join().unwrap().unwrap();
        until("all pages are unmapped", || guest.mapped() == 0);
        assert_eq!(
            rig.world.tree.below("/local/domain/0/backend/ebbd/1"),
            ["/local/domain/0/backend/ebbd/1"]
        );
    }
    assert_eq!(std::fs::read_dir(rig.journals.path()).unwrap().count(), 0, "no journal remains");
}

#[test]
fn a_destroyed_guest_leaves_nothing_behind() {
    let rig = Rig::new();
    let guest = rig.guest(1, 1024);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 65536]).unwrap(), 0);
    rig.world.destroy(1);
    until("all pages are unmapped", || guest.mapped() == 0);
    until("the nodes are removed", || {
        rig.world.tree.get("/local/domain/0/backend/ebbd/1/51728/state").is_none()
    });
}

#[test]
fn a_guest_that_restarts_is_served_again() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    for round in 0..5 {
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(round, 4096)).unwrap(), 0);
        // As after a suspend: a new ring without a disconnect.
        disk.set("state", "1");
        disk.await_backend("2").unwrap();
        disk.share().unwrap();
        disk.set("state", "3");
        disk.await_backend("4").unwrap();
        disk.set("state", "4");
        let mut back = vec![0; 4096];
        assert_eq!(disk.transfer(0, op::READ, 0, &mut back).unwrap(), 0);
        assert_eq!(back, pattern(round, 4096));
    }
}

#[test]
fn a_guest_is_notified_when_its_disk_grows() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let mut data = pattern(3, 4096);
    assert_eq!(disk.transfer(0, op::WRITE, SIZE / 512, &mut data).unwrap(), -1);
    let volume = rig.volumes.get("disk").unwrap().volume;
    let order = ebb_volume::Resize { to: Some(2 * SIZE), shrink: false };
    let grown = rig.workers[0]
        .handle()
        .block_on(move |io| async move { volume.resize(&io, order).await.unwrap() });
    assert_eq!(grown, Some(2 * SIZE));
    until("the guest is notified of the new size", || disk.size() == 2 * SIZE);
    assert_eq!(disk.backend("state").as_deref(), Some("4"));
    assert_eq!(disk.transfer(0, op::WRITE, SIZE / 512, &mut data).unwrap(), 0);
    let mut back = vec![0; 4096];
    assert_eq!(disk.transfer(0, op::READ, SIZE / 512, &mut back).unwrap(), 0);
    assert_eq!(back, pattern(3, 4096));
}

/// Two rings of one worker. One has 500 requests in flight, each of which writes its number to the same place, with
/// ten more pages, so that it takes long; the other sends one request, which reads that place. What it reads is how
/// many requests preceded it. Both guests run on the worker itself, so that the number of completed requests at the
/// time when the single one was sent is known.
#[test]
fn a_lone_request_does_not_wait_for_a_full_ring() {
    const MANY: u32 = 500;
    let mut rig = Rig::new();
    rig.polling.poll_us.set(0);
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    rig.add(Volume::new("disk", Store::Memory(MemoryStore::new(SIZE)), options));
    let guest = rig.guest(1, 4096);
    let mut deep = rig.attach(
        &guest,
        "xvdb",
        "disk",
        FrontendConfig { order: 4, ..FrontendConfig::default() },
    );
    deep.connect().unwrap();
    let other = rig.guest(2, 64);
    let mut lone = rig.attach(&other, "xvdb", "disk", FrontendConfig::default());
    lone.connect().unwrap();
    let pages = deep.pages(MANY as usize);
    for (number, page) in pages.iter().enumerate() {
        assert!(guest.memory().write(offset(*page), &(number as u64 + 1).to_le_bytes()));
    }
    let result = lone.pages(1)[0];
    let whole = |gref: u32| [Segment { gref, first: 0, last: 7 }];
    let writes: Vec<Request> =
        pages.iter().map(|page| deep.request(op::WRITE, 0, &[whole(*page)[0]; 11]).1).collect();
    let read = lone.request(op::READ, 0, &whole(result)).1;
    let worker = rig.workers[0].handle();
    let mut round = |at_once: bool| {
        let (mut full, mut single) = (deep.queues.remove(0), lone.queues.remove(0));
        for request in &writes {
            full.put(*request);
        }
        single.put(read);
        let driven = worker.block_on(move |io| async move {
            let (since, last) = (full.load(8), single.load(8));
            full.push();
            while !at_once && full.load(8) == since {
                io.yield_iteration().await;
            }
            let before = full.load(8).wrapping_sub(since);
            single.push();
            while single.load(8) == last {
                io.yield_iteration().await;
            }
            (full, single, u64::from(before))
        });
        let (mut full, mut single, before) = driven.unwrap();
        assert_eq!(single.wait().unwrap().status, 0);
        (0..MANY).for_each(|_| assert_eq!(full.wait().unwrap().status, 0));
        deep.queues.push(full);
        lone.queues.push(single);
        let mut found = [0; 8];
        assert!(other.memory().read(offset(result), &mut found));
        (before, u64::from_le_bytes(found))
    };
    // Once all pages are mapped.
    round(true);
    for at_once in [true, false] {
        let rounds: Vec<(u64, u64)> = (0..10).map(|_| round(at_once)).collect();
        println!("{rounds:?}");
        let waited = |(before, found): &(u64, u64)| found.saturating_sub(*before);
        assert!(
            rounds.iter().all(|round| waited(round) <= 64),
            "more than a batch preceded it: {rounds:?}"
        );
        let others_turn = |(before, _): &(u64, u64)| *before < u64::from(MANY);
        assert!(rounds.iter().all(others_turn), "all 500 preceded it: {rounds:?}");
    }
    rig.stop();
}
