//! Hostile guests. The security advisories (XSA) about blkback and xenbus backends have tests here or beside
//! the code; their numbers are in the comments of the tests.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Rig, SIZE, memory, pattern, until};
use ebb_export_xen::abi::{Abi, Body, Request, Segment, op};
use ebb_export_xen::shm::frontend::{FrontendConfig, offset};
use ebb_export_xen::shm::hostile::{Hostile, SeededRandom};

/// Random requests in all.
fn requests() -> u64 {
    seeded::scaled(1_000_000)
}

/// A million requests of hostile guests in every layout, with and without persistent grants: no panic, no
/// grant that stays mapped, and no changed byte in the range of another guest.
#[test]
fn a_million_hostile_requests_affect_no_other_guest() {
    let kinds = [
        (Abi::X86_64, 0, true),
        (Abi::X86_64, 1, false),
        (Abi::X86_32, 0, true),
        (Abi::X86_32, 0, false),
    ];
    let rig = Rig::new();
    rig.parameters.max_persistent_grants.set(100);
    std::thread::scope(|scope| {
        for (number, (abi, order, persistent)) in (1u16..).zip(kinds) {
            let rig = &rig;
            scope.spawn(move || {
                let name = format!("disk-{number}");
                rig.add(memory(&name, SIZE, false));
                let guest = rig.guest(number, 600);
                let wishes = FrontendConfig { abi, order, queues: 1, persistent };
                let mut disk = rig.attach(&guest, "xvdb", &name, wishes);
                disk.connect().unwrap();
                // The guest does not write the first half of the disk, and uses the second.
                let data = pattern(number.into(), 8 << 20);
                for (at, part) in data.chunks(1 << 20).enumerate() {
                    let sector = (at as u64) << 11;
                    assert_eq!(disk.transfer(0, op::WRITE, sector, &mut part.to_vec()).unwrap(), 0);
                }
                let pages = disk.pages(160);
                let sectors = SIZE / 512;
                let seed = 77 + u64::from(number);
                let mut hostile = Hostile::new(&guest, seed, pages, sectors, sectors / 2..sectors);
                let mut queue = disk.queues.remove(0);
                // The ring is mapped and need not stay granted: a guest that has its own ring overwritten
                // only ends the test.
                queue.ring.iter().for_each(|page| guest.revoke(*page));
                let mut completed = 0;
                while hostile.sent < requests() / 4 {
                    hostile.send(&mut queue, 64);
                    completed += u64::from(hostile.receive(&mut queue, 16).unwrap());
                }
                let rest = u32::try_from(hostile.sent - completed).unwrap();
                hostile.receive(&mut queue, rest).unwrap();
                drop(queue);
                disk.set("state", "6");
                until("all pages are unmapped", || guest.mapped() == 0);
                // A new ring: the guest's state of the old one is not usable.
                let mut again = rig.attach(&guest, "xvdc", &name, wishes);
                again.connect().unwrap();
                for (at, part) in data.chunks(1 << 20).enumerate() {
                    let mut back = vec![0; 1 << 20];
                    let sector = (at as u64) << 11;
                    assert_eq!(again.transfer(0, op::READ, sector, &mut back).unwrap(), 0);
                    let wrong = back.iter().zip(part).position(|(have, want)| have != want);
                    assert_eq!(wrong, None, "guest {number}: a wrong byte in MiB {at}");
                }
            });
        }
    });
}

/// XSA-155: descriptors and data that change while they are used are read once.
#[test]
fn memory_that_changes_during_a_request_is_read_once() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig { persistent: false, ..FrontendConfig::default() });
    let pages = disk.pages(17);
    let (list, data) = pages.split_first().unwrap();
    let guest = rig.guest(9, 16);
    drop(guest);
    let mut grefs = [0; 8];
    grefs[0] = *list;
    let stop = AtomicBool::new(false);
    let good = Segment { gref: data[0], first: 0, last: 7 }.encode();
    let bad = Segment { gref: data[1], first: 7, last: 255 }.encode();
    let view = disk_memory(&rig);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Alternates one half of the descriptors between valid and invalid, as fast as possible.
            while !stop.load(Ordering::Relaxed) {
                for place in 0..32 {
                    let at = offset(*list) + place * 8;
                    let _ = view.memory().write(at, &bad);
                    let _ = view.memory().write(at, &good);
                }
            }
        });
        for round in 0..5000 {
            let body = Body::Indirect { sector: round, count: 32, grefs };
            let status = disk.queues[0].call(Request { id: 0, operation: op::READ, body }).unwrap();
            assert!(status == 0 || status == -1);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut data = pattern(1, 4096);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data).unwrap(), 0);
}

fn disk_memory(rig: &Rig) -> std::sync::Arc<ebb_export_xen::shm::Guest> {
    rig.world.find_guest(1).unwrap()
}

/// A ring whose guest claims more requests than it has slots is stopped; other rings continue.
#[test]
fn a_ring_with_invalid_indices_is_stopped_and_other_rings_continue() {
    for excess in [33, 1000, u32::MAX, 1 << 31] {
        let rig = Rig::new();
        let mut disk = rig.disk(FrontendConfig { queues: 2, ..FrontendConfig::default() });
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
        let produced = disk.queues[0].load(0);
        disk.queues[0].store(0, produced.wrapping_add(excess));
        rig.world.find_guest(1).unwrap().notify(disk.queues[0].port);
        for _ in 0..20 {
            assert_eq!(disk.transfer(1, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
        }
        let responses = rig.stats().responses;
        assert_eq!(responses, 21, "no claimed request has a response");
        disk.close().unwrap();
        until("all pages are unmapped", || rig.world.find_guest(1).unwrap().mapped() == 0);
    }
}

/// A guest that sends unknown operations is delayed like one that sends invalid requests; a ring with valid requests is not.
#[test]
fn a_guest_that_sends_unknown_operations_is_slowed_down() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    for round in 0..100 {
        assert_eq!(disk.transfer(0, op::WRITE, round * 8, &mut vec![1; 4096]).unwrap(), 0);
    }
    assert_eq!(rig.stats().throttled, 0);
    for _ in 0..20 {
        let count = disk.queues[0].slots();
        for _ in 0..count {
            let body = Body::Direct { sector: 0, count: 0, segments: Default::default() };
            disk.queues[0].put(Request { id: 0, operation: 77, body });
        }
        disk.queues[0].push();
        for _ in 0..count {
            assert_eq!(disk.queues[0].wait().unwrap().status, -2, "BLKIF_RSP_EOPNOTSUPP");
        }
    }
    let throttled = rig.stats().throttled;
    assert!(throttled >= 5, "{throttled} times for 640 requests");
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
}

/// XSA-349, XSA-350: connecting and disconnecting, repeatedly and in any order.
#[test]
fn floods_of_state_changes_leave_the_device_usable() {
    let rig = Rig::new();
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    let mut neighbour = {
        let guest = rig.guest(2, 256);
        rig.add(memory("other", SIZE, false));
        let mut disk = rig.attach(&guest, "xvdb", "other", FrontendConfig::default());
        disk.connect().unwrap();
        disk
    };
    disk.share().unwrap();
    let mut dice = SeededRandom(5);
    let begun = Instant::now();
    let mut changes = 0;
    while begun.elapsed() < Duration::from_secs(2) {
        let state = ["0", "1", "3", "4", "5", "6", "2", "7", "x", ""];
        disk.set("state", state[usize::try_from(dice.below(10)).unwrap()]);
        changes += 1;
        if changes % 64 == 0 {
            neighbour.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap();
        }
    }
    disk.set("state", "6");
    until("the disk is released", || {
        guest.mapped() == 0 && disk.backend("state").as_deref() == Some("6")
    });
    for queue in std::mem::take(&mut disk.queues) {
        disk.free_pages(&queue.ring);
    }
    disk.connect().unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
}

/// Events without requests: one wakeup per iteration, and soon only one per millisecond (XSA-332).
#[test]
fn a_flood_of_events_is_throttled() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let guest = rig.world.find_guest(1).unwrap();
    let before = rig.stats().events;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        guest.notify(disk.queues[0].port);
    }
    let events = u128::from(rig.stats().events - before);
    let milliseconds = begun.elapsed().as_millis();
    assert!(events < 3 * milliseconds, "{events} events in {milliseconds} ms");
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
}

/// Text instead of numbers, numbers out of range, and missing nodes.
#[test]
fn invalid_nodes_are_refused_and_can_be_corrected() {
    let rig = Rig::new();
    let guest = rig.guest(1, 4096);
    let long = "9".repeat(3000);
    for (node, value) in [
        ("ring-ref", "x"),
        ("ring-ref", ""),
        ("ring-ref", "-1"),
        ("ring-ref", "99999999999999"),
        ("ring-ref", "4294967295"),
        ("ring-ref", &long),
        ("event-channel", "one"),
        ("event-channel", "77777"),
        ("protocol", "x86_16-abi"),
        ("protocol", &long),
        ("protocol", "x\nERROR forged\r\u{1b}[2J\u{2028}"),
        ("ring-page-order", "5"),
        ("ring-page-order", "4294967295"),
        ("multi-queue-num-queues", "0"),
        ("multi-queue-num-queues", "9"),
        ("multi-queue-num-queues", "two"),
        ("feature-persistent", "yes"),
    ] {
        let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
        disk.await_backend("2").unwrap();
        disk.share().unwrap();
        disk.set(node, value);
        disk.set("state", "3");
        disk.await_backend("5").unwrap();
        let base = "/local/domain/0/error/backend/ebbd/1/51728/error";
        let error = rig.world.tree.get(base).unwrap();
        // The error is one line, whatever the guest wrote.
        assert!(!error.contains(|c: char| c.is_control() || c == '\u{2028}'), "{error:?}");
        assert!(error.len() < 1024, "{} bytes", error.len());
        assert_eq!(guest.mapped(), 0, "{node}={value:.20}: nothing stays mapped");
        rig.world.tree.remove_all("/local/domain/1/device");
        until("forgotten", || {
            rig.world.tree.get("/local/domain/0/backend/ebbd/1/51728/state").is_none()
        });
        for queue in std::mem::take(&mut disk.queues) {
            disk.free_pages(&queue.ring);
        }
    }
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
}

/// A guest that uses all its pages has no more of them mapped than the cap.
#[test]
fn a_guest_never_has_more_mapped_than_the_cap() {
    let rig = Rig::new();
    rig.parameters.max_persistent_grants.set(200);
    let guest = rig.guest(1, 33_000);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    let pages = disk.pages(32_768);
    for chunk in pages.chunks(32) {
        for page in chunk {
            let segment = Segment { gref: *page, first: 0, last: 7 };
            let (_, request) = disk.request(op::WRITE, 0, &[segment]);
            disk.queues[0].put(request);
        }
        disk.queues[0].push();
        for _ in chunk {
            assert_eq!(disk.queues[0].wait().unwrap().status, 0);
        }
        assert!(guest.mapped() <= 201);
    }
    let stats = rig.stats();
    // Near the cap only pages that are used repeatedly are mapped.
    assert!((187..=200).contains(&stats.mapped_most), "{}", stats.mapped_most);
    assert!(stats.copies > 32_000 && stats.evictions == 0, "pages used once are copied: {stats:?}");
    let again = pages[pages.len() - 8..].to_vec();
    let segments: Vec<_> =
        again.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
    let request = disk.request(op::READ, 0, &segments).1;
    let mut call = || {
        assert_eq!(disk.queues[0].call(request).unwrap(), 0);
        rig.stats().copies
    };
    // One page is mapped per batch, until all eight are.
    for _ in 0..9 {
        call();
    }
    let copies = call();
    assert_eq!(call(), copies, "pages that are used repeatedly are mapped");
    rig.parameters.max_persistent_grants.set(0);
    until("all pages but the ring's are unmapped", || guest.mapped() == 1);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 65536]).unwrap(), 0);
}

/// Idle mappings are unmapped under memory pressure, and after their time.
#[test]
fn idle_grants_are_unmapped() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let guest = rig.world.find_guest(1).unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 44 << 10]).unwrap(), 0);
    assert_eq!(guest.mapped(), 12);
    rig.parameters.shrink();
    until("all pages but the ring's are unmapped", || guest.mapped() == 1);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut vec![1; 44 << 10]).unwrap(), 0);
    rig.parameters.persistent_grant_unused_seconds.set(1);
    until("all pages but the ring's are unmapped", || guest.mapped() == 1);
}

/// Rings share the budget of mappings: each has its share, no request fails, and the sum stays within the budget.
#[test]
fn all_rings_together_stay_within_the_budget_of_mappings() {
    let rig = Rig::new();
    rig.parameters.set_map_budget(100);
    let guests: Vec<_> = (1..=4).map(|number| rig.guest(number, 400)).collect();
    let mut disks = Vec::new();
    let mapped = || guests.iter().map(|guest| guest.mapped()).sum::<u64>();
    for (number, guest) in guests.iter().enumerate() {
        let name = format!("disk-{number}");
        rig.add(memory(&name, SIZE, false));
        let mut disk = rig.attach(guest, "xvdb", &name, FrontendConfig::default());
        disk.connect().unwrap();
        disks.push(disk);
        let rings = disks.len() as u64;
        // Each uses 200 pages, twice, and reads back what it wrote.
        for disk in &mut disks {
            for round in 0..2 {
                let data = pattern(round, 200 * 4096);
                assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data.clone()).unwrap(), 0);
                assert!(mapped() <= 100 + rings, "{} mapped", mapped());
                let mut back = vec![0; data.len()];
                assert_eq!(disk.transfer(0, op::READ, 0, &mut back).unwrap(), 0);
                assert!(back == data && mapped() <= 100 + rings, "{} mapped", mapped());
            }
        }
    }
    // The first ring has unmapped what exceeds its share.
    until("each has its share", || guests.iter().all(|guest| guest.mapped() <= 26));
    let all = rig.backend.as_ref().unwrap().stats();
    assert!(all.iter().all(|disk| disk.stats.errors == 0 && disk.stats.copies > 0), "{all:?}");
    drop(disks);
}

/// If the process can map nothing more, pages are copied, and no request fails.
#[test]
fn a_page_that_cannot_be_mapped_is_copied() {
    let rig = Rig::new();
    let mut disk = rig.disk(FrontendConfig::default());
    let guest = rig.world.find_guest(1).unwrap();
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 65536)).unwrap(), 0);
    guest.fail_maps(true);
    let before = rig.stats();
    for round in 0..50 {
        // Pages that were not mapped yet, direct and by descriptors.
        let data = pattern(round, if round % 2 == 0 { 32 << 10 } else { 256 << 10 });
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data.clone()).unwrap(), 0);
        let mut back = vec![0; data.len()];
        assert_eq!(disk.transfer(0, op::READ, 0, &mut back).unwrap(), 0);
        assert!(back == data);
    }
    let stats = rig.stats();
    assert!(stats.errors == 0 && stats.copies > before.copies, "{stats:?}");
    guest.fail_maps(false);
    until("pages are mapped again", || {
        assert_eq!(disk.transfer(0, op::WRITE, 0, &mut pattern(1, 65536)).unwrap(), 0);
        rig.stats().maps > stats.maps
    });
}
