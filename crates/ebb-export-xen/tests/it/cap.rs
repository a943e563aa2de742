//! The cap of persistent grants (in Linux's xen-blkback, against a denial of service by a guest that
//! supplies new grefs): a guest that uses all the references it can have has no more pages mapped than
//! the cap, uses no more memory, and makes no request of another guest fail.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::{Rig, SIZE, memory, pattern};
use ebb_export_xen::abi::{MAX_DIRECT_SEGMENTS, PAGE_BYTES, Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig, offset};
use ebb_io::Worker;
use ebb_mem::Memory;

/// Grant references of a guest, as Xen gives them by default.
const GREFS: usize = 32_768;
/// The default of `max_persistent_grants`.
const CAP: u64 = 1056;

/// Uses all pages once, `depth` requests at a time; calls `look` meanwhile.
fn cycle(disk: &mut Frontend, pages: &[u32], look: &mut impl FnMut()) {
    let depth = usize::try_from(disk.queues[0].slots()).unwrap();
    for window in pages.chunks(depth * MAX_DIRECT_SEGMENTS) {
        for part in window.chunks(MAX_DIRECT_SEGMENTS) {
            let segments: Vec<Segment> =
                part.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
            let sector = u64::from(part[0]) * 8 % (SIZE / 512 - 128);
            let (_, request) = disk.request(op::READ, sector, &segments);
            disk.queues[0].put(request);
        }
        disk.queues[0].push();
        for _ in window.chunks(MAX_DIRECT_SEGMENTS) {
            assert_eq!(disk.queues[0].wait().unwrap().status, 0);
        }
        look();
    }
}

#[test]
fn a_guest_that_uses_all_its_grants_has_at_most_the_cap_mapped() {
    let io = Memory::new(ebb_mem::MemoryOptions::new(256 << 20, Instant::now())).unwrap();
    let worker = Worker::start("xen", &io).unwrap();
    let mut rig = Rig::with(1, |options| options.workers = vec![worker.handle()]);
    rig.add(memory("neighbour", SIZE, false));
    let wishes = FrontendConfig::default();
    let guest = rig.guest(1, u32::try_from(GREFS).unwrap() + 16);
    let mut disk = rig.attach(&guest, "xvdb", "disk", wishes);
    disk.connect().unwrap();
    let data = pattern(1, 1 << 16);
    assert_eq!(disk.transfer(0, op::WRITE, 0, &mut data.clone()).unwrap(), 0);

    // The other guest writes and reads back until the end.
    let other = rig.guest(2, 4096);
    let mut near = rig.attach(&other, "xvdb", "neighbour", wishes);
    near.connect().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let seen = over.clone();
    let neighbour = std::thread::spawn(move || {
        let mut rounds = 0;
        while !seen.load(Ordering::SeqCst) || rounds < 20 {
            let data = pattern(rounds, 1 << 15);
            let sector = rounds % 100 * 64;
            assert_eq!(near.transfer(0, op::WRITE, sector, &mut data.clone()).unwrap(), 0);
            let mut back = vec![0; data.len()];
            assert_eq!(near.transfer(0, op::READ, sector, &mut back).unwrap(), 0);
            assert!(back == data, "round {rounds}");
            rounds += 1;
        }
    });

    let pages = disk.pages(GREFS);
    let (mut mapped, mut wired) = (0, 0);
    for _ in 0..3 {
        cycle(&mut disk, &pages, &mut || {
            // Its ring's page is mapped, too.
            mapped = mapped.max(guest.mapped() - 1);
            wired = wired.max(io.arena_stats().wired);
        });
    }
    over.store(true, Ordering::SeqCst);
    neighbour.join().unwrap();

    let stats = rig.backend.as_ref().unwrap().stats();
    let own = stats.iter().find(|disk| &*disk.volume == "disk").unwrap().stats;
    assert!(mapped <= CAP && own.mapped_most <= CAP, "{mapped} grants mapped, {own:?}");
    assert!(own.mapped > 0, "some stay mapped: {own:?}");
    assert!(own.copies > 2 * GREFS as u64, "the other pages are copied: {own:?}");
    assert!(stats.iter().all(|disk| disk.stats.errors == 0), "{stats:?}");
    // The requests of a ring in flight, and the pools of two rings within their limits.
    let most = 2 * (32 * MAX_DIRECT_SEGMENTS.next_power_of_two() + 1024) * PAGE_BYTES + (4 << 20);
    assert!(wired <= most, "{wired} bytes wired, at most {most} expected");

    // The last pass read what was written first.
    cycle(&mut disk, &pages[..MAX_DIRECT_SEGMENTS], &mut || {});
    let sector = u64::from(pages[0]) * 8 % (SIZE / 512 - 128);
    let from = usize::try_from(sector).unwrap() * 512;
    let mut page = vec![0; PAGE_BYTES];
    assert!(guest.memory().read(offset(pages[0]), &mut page));
    if from + PAGE_BYTES <= data.len() {
        assert!(page == data[from..from + PAGE_BYTES], "wrong bytes");
    }
    rig.stop();
    drop(worker);
    assert_eq!(guest.mapped(), 0, "nothing stays mapped");
}
