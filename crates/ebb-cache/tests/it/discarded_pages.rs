//! Reads that go around the cache while the kernel discards its lent pages.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{MIB, Rig};
use ebb_cache::{FixedLimit, Mode, Reclaimer, pages_discarded_by_kernel};
use ebb_io::Worker;

const SIZE: u64 = 2 * MIB;

/// One read of the whole volume, whose first request to the store may fail. Then the rest is read
/// from the store as well, while its discarded pages are still listed as valid.
/// True if the read succeeded.
fn is_read_after_a_discard(seed: u64) -> bool {
    let rig = Rig::new(16 * MIB);
    let worker = Worker::start("discarded", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", SIZE, seed, Mode::Writeback);
    let is_read = Arc::new(AtomicBool::new(false));
    let outcome = is_read.clone();
    let done = worker.handle().block_on(move |io| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        let mut buf = io.pool().get_for_test(SIZE.try_into().unwrap());
        buf.fill(7);
        disk.cached.write(&io, buf, 0, false).await.0.unwrap();
        disk.cached.flush(&io).await.unwrap();
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let mapping = ebb_mem::testing::range(io.pool().memory());
        ebb_mem::testing::enter_pages();
        for step in 1..=30 {
            reclaimer.run_once(&rig.cache, rig.start + step * Duration::from_millis(100));
        }
        rig.memory.settle();
        common::reclaim(mapping);
        disk.cached.pages().invalidate(32_768, 4096);
        disk.test.read_faults.store(500, Ordering::Relaxed);
        let mut buf = io.pool().get_for_test(SIZE.try_into().unwrap());
        buf.fill(0xee);
        let (result, buf) = disk.cached.read(&io, buf, 0).await;
        outcome.store(result.is_ok(), Ordering::Relaxed);
        if result.is_ok() {
            let wrong = buf.iter().position(|byte| *byte != 7);
            assert_eq!(wrong, None, "seed {seed}");
        }
    });
    assert!(done.is_some(), "the run with seed {seed} panicked; see above");
    is_read.load(Ordering::Relaxed)
}

#[test]
fn reads_around_the_cache_return_what_the_kernel_discarded() {
    let read = (0..32).filter(|&seed| is_read_after_a_discard(seed)).count();
    assert!(read > 4, "only {read} reads succeeded");
}
