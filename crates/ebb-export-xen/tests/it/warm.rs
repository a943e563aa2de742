//! The cost of a warm ring in counts: heap allocations, system calls, hypercalls.

use std::sync::Mutex;

use counting_allocator::{mark_thread, marked_calls};
use ebb_export_xen::abi::{Request, Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};

use crate::common::Rig;

/// Serialises the tests, which share the counter.
static ALONE: Mutex<()> = Mutex::new(());

fn enters(rig: &Rig) -> u64 {
    rig.workers[0].handle().block_on(|io| async move { io.stats().enters }).unwrap()
}

/// Sends the requests as one batch and waits for all of them, `count` times.
fn rounds(disk: &mut Frontend, requests: &[Request], count: u32) {
    let queue = &mut disk.queues[0];
    for _ in 0..count {
        for request in requests {
            queue.put(*request);
        }
        queue.push();
        for _ in requests {
            assert_eq!(queue.wait().unwrap().status, 0);
        }
    }
}

/// `count` requests of a page each, reads and writes.
fn requests(disk: &mut Frontend, count: usize) -> Vec<Request> {
    let pages = disk.pages(count);
    let one = |(number, gref): (usize, &u32)| {
        let segment = Segment { gref: *gref, first: 0, last: 7 };
        let operation = if number % 2 == 0 { op::WRITE } else { op::READ };
        disk.request(operation, u64::from(*gref) * 8, &[segment]).1
    };
    pages.iter().enumerate().map(one).collect()
}

struct Costs {
    allocations: u64,
    enters: u64,
    stats: ebb_export_xen::XenStats,
}

/// The cost of `count` rounds of `depth` requests, after a warm-up.
fn costs(persistent: bool, cap: u32, depth: usize, count: u32) -> Costs {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let rig = Rig::new();
    rig.parameters.max_persistent_grants.set(cap);
    let mut disk = rig.disk(FrontendConfig { persistent, ..FrontendConfig::default() });
    let requests = requests(&mut disk, depth);
    rounds(&mut disk, &requests, 200);
    let mark = |on| rig.workers[0].handle().block_on(move |_| async move { mark_thread(on) });
    let (entered, before) = (enters(&rig), rig.stats());
    mark(true).unwrap();
    let allocated = marked_calls();
    rounds(&mut disk, &requests, count);
    let allocations = marked_calls() - allocated;
    mark(false).unwrap();
    let (after, entered) = (rig.stats(), enters(&rig) - entered);
    let mut stats = after;
    stats.maps -= before.maps;
    stats.copies -= before.copies;
    stats.copy_calls -= before.copy_calls;
    stats.events -= before.events;
    stats.notifications -= before.notifications;
    stats.responses -= before.responses;
    Costs { allocations, enters: entered, stats }
}

#[test]
fn a_warm_ring_allocates_nothing_mapped_or_copied() {
    for (persistent, cap) in [(true, 1056), (true, 0), (false, 1056)] {
        let Costs { allocations, stats, .. } = costs(persistent, cap, 32, 300);
        assert_eq!(stats.responses, 9600);
        assert_eq!(stats.errors, 0);
        // Waking the worker to mark and unmark it is not part of a request.
        assert!(allocations <= 4, "{allocations} allocations, persistent {persistent}, cap {cap}");
    }
}

#[test]
fn a_lone_request_takes_one_wait_and_one_event() {
    let Costs { enters, stats, .. } = costs(true, 1056, 1, 2000);
    assert_eq!((stats.responses, stats.maps, stats.copies), (2000, 0, 0));
    assert!(stats.notifications <= 2000 && stats.events <= 2010, "{stats:?}");
    // One call unmasks, awaits and reads an event.
    assert!(enters <= 2100, "{enters} calls of the ring for 2000 requests");
}

#[test]
fn a_full_ring_costs_no_hypercall_for_grants_and_one_for_sixteen_copies() {
    let mapped = costs(true, 1056, 32, 300).stats;
    assert_eq!((mapped.maps, mapped.copies, mapped.copy_calls), (0, 0, 0));
    assert!(mapped.notifications <= mapped.responses / 8, "{mapped:?}");
    // The kernel passes sixteen copies per hypercall.
    let copied = costs(false, 1056, 32, 300).stats;
    assert_eq!((copied.maps, copied.copies), (0, 9600));
    assert!(copied.copy_calls * 16 <= copied.copies, "{copied:?}");
}
