//! The calls on the path of a write allocate nothing, and handles on several threads keep one limit.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use counting_allocator::calls;
use ebb_writeback::{BdiOptions, MILLISECOND, Verdict, WriteOutcome, Writeback, WritebackOptions};

#[test]
fn hot_calls_do_not_touch_the_heap() {
    let mut writeback = Writeback::new(&WritebackOptions::new(64 << 20)).unwrap();
    let mut bdi = writeback.add_bdi(BdiOptions::default(), 0).unwrap();
    let volume = bdi.add_volume(1).unwrap();
    let before = calls();
    let (mut now, mut paused) = (0, 0);
    for _ in 0..20_000 {
        now += MILLISECOND / 4;
        if bdi.reserve(volume, 65_536, now, now) != Verdict::Go {
            paused += 1;
        }
        let plan = bdi.plan(now);
        let bytes = bdi.stats(now).dirty.min(plan.chunk).min(20_000);
        if plan.start && bytes > 0 {
            bdi.on_writeback(volume, bytes, now);
            let _ =
                bdi.on_written(volume, bytes, now, WriteOutcome::Written, now + MILLISECOND / 8);
        }
        writeback.update(now);
    }
    assert_eq!(calls(), before);
    assert!(paused > 1000, "some writes were paced");
}

#[test]
fn handles_on_several_threads_never_exceed_the_limit_together() {
    const LIMIT: u64 = 8 << 20;
    let mut writeback = Writeback::new(&WritebackOptions::new(LIMIT)).unwrap();
    let mut handles = Vec::new();
    for rate in [1 << 30, 1 << 28, 1 << 26, 1 << 24] {
        let options = BdiOptions { rate: Some(rate), ..BdiOptions::default() };
        handles.push(writeback.add_bdi(options, 0).unwrap());
    }
    let (running, went) = (AtomicU64::new(4), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for mut bdi in handles {
            let (running, went) = (&running, &went);
            scope.spawn(move || {
                let volume = bdi.add_volume(1).unwrap();
                let mut now = 0;
                for turn in 0..30_000_u64 {
                    now += 20_000;
                    if bdi.reserve(volume, 32_768, now, now) == Verdict::Go {
                        went.fetch_add(1, Relaxed);
                    }
                    if turn % 3 == 0 {
                        bdi.on_writeback(volume, 65_536, now);
                        let _ = bdi.on_written(
                            volume,
                            65_536,
                            now,
                            WriteOutcome::Written,
                            now + 10_000,
                        );
                    }
                }
                drop(bdi);
                running.fetch_sub(1, Relaxed);
            });
        }
        let mut now = 0;
        while running.load(Relaxed) > 0 {
            now += MILLISECOND;
            writeback.update(now);
            let stats = writeback.stats();
            assert!(stats.held <= LIMIT && stats.limit == LIMIT, "{stats:?}");
        }
    });
    assert!(went.load(Relaxed) > 10_000);
    assert_eq!(writeback.stats().held, 0);
}
