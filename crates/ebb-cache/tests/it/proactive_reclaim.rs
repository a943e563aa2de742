//! Proactive reclaim returns memory before the kernel has to search for it: the reclaimer with a simulated
//! host; the cache and its memory are real.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Disk, MIB, Rig};
use ebb_cache::{Reclaimer, pages_discarded_by_kernel};
use ebb_io::{Io, Worker};
use ebb_mem::IdlePolicy;
use ebb_mem::pressure::Room;

const PIECE: u64 = 64 << 10;
const HELD: u64 = 24 * MIB;

/// A host whose free memory other processes use up.
#[derive(Clone)]
struct Host(Arc<Mutex<Room>>);

impl Host {
    fn new(free: u64) -> Host {
        let floor = 2 * MIB;
        let available = free + HELD;
        let room = Room { total: 128 * MIB, free: free + floor, available, floor, behind: 0 };
        Host(Arc::new(Mutex::new(room)))
    }

    fn take(&self, bytes: u64) {
        let mut room = self.0.lock().unwrap();
        room.free = room.free.saturating_sub(bytes);
        room.available = room.available.saturating_sub(bytes);
    }

    fn free(&self, bytes: u64) {
        self.0.lock().unwrap().free += bytes;
    }
}

async fn fill(io: &Io, disk: &Disk) {
    for offset in (0..HELD).step_by(65536) {
        let buf = io.pool().get_for_test(65536);
        disk.cached.read(io, buf, offset).await.0.unwrap();
    }
}

/// The bytes cached after other processes have allocated `taken` bytes, 2 MiB every 5 ms, and the bytes that the
/// reclaimer returned. The cache is full at the start, and lent where possible.
fn beside(policy: IdlePolicy, min: u64, free: u64, taken: u64) -> (u64, u64) {
    beside_with(None, policy, min, free, taken)
}

/// The same within a control group, on a host that has `plenty`.
fn beside_with(
    plenty: Option<Room>,
    policy: IdlePolicy,
    min: u64,
    free: u64,
    taken: u64,
) -> (u64, u64) {
    let rig = Arc::new(Rig::of(64 * MIB, policy));
    rig.cache.set_min(min);
    let worker = Worker::start("recede", &rig.memory).unwrap();
    let result = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let out = result.clone();
    let done = worker.handle().block_on(move |io| async move {
        let disk = rig.volume("disk", 64 * MIB, 1);
        fill(&io, &disk).await;
        let host = Host::new(free);
        let look = host.clone();
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel))
            .with_memory_probe(Box::new(move |list| {
                list.clear();
                list.extend(plenty);
                list.push(*look.0.lock().unwrap());
                true
            }));
        let mut now = rig.start;
        let mut step = |reclaimer: &mut Reclaimer, lend: bool| {
            now += if lend { Duration::from_millis(300) } else { Duration::from_millis(5) };
            if lend {
                reclaimer.run_once(&rig.cache, now);
            }
            // The first sample after lending is not compared.
            rig.memory.settle();
            reclaimer.proactive_reclaim(&rig.cache, now);
            let before = rig.cache.stats().total.bufspace;
            reclaimer.proactive_reclaim(&rig.cache, now);
            rig.memory.settle();
            let after = rig.cache.stats().total.bufspace;
            host.free(before - after);
        };
        (0..20).for_each(|_| step(&mut reclaimer, true));
        assert_eq!(
            rig.cache.stats().total.bufspace,
            HELD,
            "memory was returned before other processes allocated any"
        );
        let mut left = taken;
        while left > 0 {
            host.take(left.min(2 * MIB));
            left -= left.min(2 * MIB);
            step(&mut reclaimer, false);
        }
        // The demand has ended, and nothing more is returned.
        (0..100).for_each(|_| step(&mut reclaimer, false));
        let stats = rig.cache.stats();
        out.0.store(stats.total.bufspace, Ordering::Relaxed);
        out.1.store(stats.proactively_reclaimed, Ordering::Relaxed);
        // The remaining data equals the store's.
        for offset in (0..HELD).step_by(65536) {
            let mut buf = io.pool().get_for_test(65536);
            if disk.cached.try_read_cached(&mut buf, offset) {
                let mut stored = vec![0; buf.len()];
                disk.test.look(offset, &mut stored);
                assert!(buf[..] == stored[..], "offset {offset}");
            }
        }
    });
    assert!(done.is_some(), "the run panicked; see above");
    (result.0.load(Ordering::Relaxed), result.1.load(Ordering::Relaxed))
}

#[test]
fn other_processes_find_free_memory_and_the_remaining_cache_stays() {
    // 10 MiB are free and 20 are allocated: 10 are returned, and what would be allocated a moment later.
    let (held, reclaimed) = beside(IdlePolicy::Elastic, 0, 10 * MIB, 20 * MIB);
    println!("{held} of {HELD} bytes remain, {reclaimed} were returned");
    assert!((10 * MIB - PIECE..=18 * MIB).contains(&reclaimed), "{reclaimed} bytes returned");
    assert_eq!(held + reclaimed, HELD);
}

#[test]
fn processes_of_a_control_group_find_free_memory_on_a_host_with_plenty() {
    let all = 8192 * MIB;
    let plenty = Room { total: all, free: all / 2, available: all / 2, floor: MIB, behind: MIB };
    let (held, reclaimed) = beside_with(Some(plenty), IdlePolicy::Elastic, 0, 10 * MIB, 20 * MIB);
    assert!((10 * MIB - PIECE..=18 * MIB).contains(&reclaimed), "{reclaimed} bytes returned");
    assert_eq!(held + reclaimed, HELD);
}

#[test]
fn nothing_is_returned_while_free_memory_lasts() {
    assert_eq!(beside(IdlePolicy::Elastic, 0, 60 * MIB, 20 * MIB), (HELD, 0));
}

#[test]
fn the_minimum_holds_and_a_static_cache_returns_nothing() {
    let (held, _) = beside(IdlePolicy::Elastic, 20 * MIB, MIB, 30 * MIB);
    assert!(held >= 20 * MIB, "{held}");
    assert_eq!(beside(IdlePolicy::Static, 0, MIB, 30 * MIB), (HELD, 0));
}
