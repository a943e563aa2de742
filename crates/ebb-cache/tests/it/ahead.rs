//! Read-ahead on a slow store: a sequential reader waits for few reads only, and a random one causes no
//! read-ahead.
#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{MIB, Random, Rig};
use ebb_io::Worker;

#[test]
fn a_sequential_reader_finds_its_data_in_memory() {
    let rig = Arc::new(Rig::new(64 * MIB));
    let worker = Worker::start("ahead", &rig.memory).unwrap();
    let disk = rig.volume("disk", 32 * MIB, 1);
    for (at, byte) in [(0, 1), (MIB, 2), (31 * MIB, 3)] {
        disk.test.change(at, &[byte; 4096]);
    }
    disk.test.latency_us.store(300, Ordering::Relaxed);
    let for_run = disk.clone();
    let done = worker.handle().block_on(move |io| async move {
        let disk = for_run;
        let mut waited = 0;
        for offset in (0..32 * MIB).step_by(16384) {
            let mut buf = io.pool().get_for_test(16384);
            if !disk.cached.read_cached(&io, &mut buf, offset) {
                waited += 1;
                let (result, back) = disk.cached.read(&io, buf, offset).await;
                result.unwrap();
                buf = back;
            }
            let mut expected = vec![0; 16384];
            disk.test.look(offset, &mut expected);
            assert!(*buf == *expected);
            io.yield_now().await;
        }
        assert!(waited < 2048 / 4, "of 2048 reads {waited} had to wait");
        let stats = disk.cached.stats();
        assert!(stats.read_ahead > 30 * MIB / 4096, "{stats:?}");
        let reads = disk.test.reads.load(Ordering::Relaxed);
        assert!(reads < 100, "{reads} reads of the store for 32 MiB");
        assert_eq!(
            disk.test.read_bytes.load(Ordering::Relaxed),
            32 * MIB,
            "each byte is read once"
        );
    });
    assert!(done.is_some(), "the run panicked; see above");
    let stats = disk.cached.stats();
    assert!(stats.hits > stats.misses, "{stats:?}");
}

#[test]
fn random_reads_cause_no_read_ahead_and_prefetch_loads_its_range() {
    let rig = Arc::new(Rig::new(64 * MIB));
    let worker = Worker::start("ahead", &rig.memory).unwrap();
    let disk = rig.volume("disk", 256 * MIB, 1);
    let done = worker.handle().block_on(move |io| async move {
        let mut random = Random::new(9);
        for _ in 0..200 {
            let offset = random.below(65536) * 4096;
            let buf = io.pool().get_for_test(4096);
            disk.cached.read(&io, buf, offset).await.0.unwrap();
        }
        assert_eq!(disk.cached.stats().read_ahead, 0);
        disk.cached.invalidate(0, 256 * MIB);
        disk.cached.prefetch(&io, MIB + 512, MIB).await.unwrap();
        let stats = disk.cached.stats();
        assert_eq!((stats.read_ahead, stats.bufspace), (257, 257 * 4096));
        let mut buf = io.pool().get_for_test(1 << 20);
        assert!(disk.cached.try_read_cached(&mut buf, MIB + 512));
    });
    assert!(done.is_some(), "the run panicked; see above");
}
