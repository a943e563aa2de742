//! Reads that go around the cache while zeroes that the store has lost are repeated.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{MIB, Rig};
use ebb_block::{Operation, ZeroFlags};
use ebb_cache::{FixedLimit, Mode};
use ebb_io::Worker;

const SIZE: u64 = 2 * MIB;
const ZEROED: std::ops::Range<u64> = 1_572_864..1_638_400;

/// One read of the whole volume that may go around the cache, during the flush that repeats the
/// zeroes. Returns the bytes that are not zero, if it succeeded.
fn not_zero(seed: u64) -> Option<u64> {
    let rig = Rig::new(16 * MIB);
    let worker = Worker::start("zeroes", &rig.memory).unwrap();
    let disk = rig.volume_as("disk", SIZE, seed, Mode::Writeback);
    let wrong = Arc::new(AtomicU64::new(u64::MAX));
    let outcome = wrong.clone();
    let done = worker.handle().block_on(move |io| async move {
        disk.cached.set_control(Arc::new(FixedLimit::default()));
        let mut buf = io.pool().get_for_test(SIZE.try_into().unwrap());
        buf.fill(7);
        disk.cached.write(&io, buf, 0, false).await.0.unwrap();
        disk.cached.flush(&io).await.unwrap();
        let length = ZEROED.end - ZEROED.start;
        let flags = ZeroFlags::default();
        disk.cached.write_zeroes(&io, ZEROED.start, length, flags).await.unwrap();
        disk.test.lose();
        disk.test.evict();
        disk.cached.pages().invalidate(32_768, 4096);
        disk.test.hang_only(&[Operation::WriteZeroes]);
        disk.test.read_faults.store(500, Ordering::Relaxed);
        let mut buf = io.pool().get_for_test(SIZE.try_into().unwrap());
        buf.fill(0xee);
        let (reader, on) = (disk.clone(), io.clone());
        let read = io.spawn(async move { reader.cached.read(&on, buf, 0).await });
        for _ in 0..seed % 32 {
            io.yield_now().await;
        }
        let (flusher, on) = (disk.clone(), io.clone());
        let flush = io.spawn(async move { flusher.cached.flush(&on).await });
        for _ in 0..500 {
            io.yield_now().await;
        }
        disk.test.release();
        let (result, buf) = read.await;
        let _ = flush.await;
        if result.is_ok() {
            let range = ZEROED.start.try_into().unwrap()..ZEROED.end.try_into().unwrap();
            let count = buf[range].iter().filter(|byte| **byte != 0).count();
            outcome.store(count as u64, Ordering::Relaxed);
        }
    });
    assert!(done.is_some(), "the run with seed {seed} panicked; see above");
    Some(wrong.load(Ordering::Relaxed)).filter(|count| *count != u64::MAX)
}

#[test]
fn reads_around_the_cache_return_zeroes_while_these_are_repeated() {
    let read: Vec<_> = (0..256).filter_map(|seed| Some((seed, not_zero(seed)?))).collect();
    assert!(read.len() > 25, "only {} reads succeeded", read.len());
    let wrong: Vec<_> = read.into_iter().filter(|(_, count)| *count > 0).collect();
    assert!(wrong.is_empty(), "seeds and bytes that are not zero: {wrong:?}");
}
