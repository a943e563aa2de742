//! The order of eviction: a scan before the hot set, a noisy volume before a quiet one. Counts only, no time.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Disk, MIB, Random, Rig};
use ebb_cache::{FixedLimit, Mode, Reclaimer, pages_discarded_by_kernel};
use ebb_io::{Io, Worker};

const PAGE: u64 = 4096;
const CACHE: u64 = 16 * MIB;

async fn read(io: &Io, disk: &Disk, offset: u64, length: usize) {
    let mut buf = io.pool().get_for_test(length);
    if !disk.cached.try_read_cached(&mut buf, offset) {
        disk.cached.read(io, buf, offset).await.0.unwrap();
    }
}

/// Hits per page over `count` reads of a set of `pages`, most reads of a few pages.
async fn hot(io: &Io, disk: &Disk, random: &mut Random, pages: u64, count: u32) -> f64 {
    let before = disk.cached.stats();
    for _ in 0..count {
        let page = random.below(pages).min(random.below(pages));
        read(io, disk, page * PAGE, 4096).await;
    }
    let after = disk.cached.stats();
    let hits = u32::try_from(after.hits - before.hits).unwrap();
    f64::from(hits) / f64::from(count)
}

fn on_a_worker<Fut: Future<Output = ()> + 'static>(
    play: impl FnOnce(Io, Arc<Rig>) -> Fut + Send + 'static,
) {
    let rig = Arc::new(Rig::new(CACHE));
    let worker = Worker::start("shares", &rig.memory).unwrap();
    let done = worker.handle().block_on(move |io| play(io, rig));
    assert!(done.is_some(), "the run panicked; see above");
}

#[test]
fn a_scan_of_ten_times_the_cache_costs_the_hot_set_five_points_at_most() {
    on_a_worker(|io, rig| async move {
        let mut random = Random::new(3);
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let disk = rig.volume("disk", 256 * MIB, 1);
        // The hot set is three quarters of the cache.
        let pages = CACHE / PAGE * 3 / 4;
        hot(&io, &disk, &mut random, pages, 60_000).await;
        let before = hot(&io, &disk, &mut random, pages, 10_000).await;
        // One pass beside the hot set, which stays in use.
        let mut now = rig.start;
        for (step, offset) in (64 * MIB..64 * MIB + 10 * CACHE).step_by(65536).enumerate() {
            read(&io, &disk, offset, 65536).await;
            hot(&io, &disk, &mut random, pages, 8).await;
            if step % 64 == 0 {
                now += Duration::from_millis(100);
                reclaimer.run_once(&rig.cache, now);
            }
        }
        let after = hot(&io, &disk, &mut random, pages, 10_000).await;
        println!("hit ratio {before:.3} before the scan, {after:.3} after");
        assert!(before > 0.9, "the hot set fits: {before}");
        assert!(before - after <= 0.05, "{before} before the scan, {after} after");
    });
}

/// Reads each hot page once, in random order; returns the share of hits.
async fn each_hot(io: &Io, disk: &Disk, random: &mut Random, count: u64) -> f64 {
    let mut pages: Vec<u64> = (0..count).collect();
    for last in (1..pages.len()).rev() {
        pages.swap(last, usize::try_from(random.below(last as u64 + 1)).unwrap());
    }
    let before = disk.cached.stats();
    for page in pages {
        read(io, disk, page * PAGE, 4096).await;
    }
    let hits = disk.cached.stats().hits - before.hits;
    f64::from(u32::try_from(hits).unwrap()) / f64::from(u32::try_from(count).unwrap())
}

/// A scan while the hot set is idle: only earlier uses show that it is hot. Returns the lost points.
fn a_scan_at_rest(seed: u64, request: usize, in_order: bool) {
    on_a_worker(move |io, rig| async move {
        let mut random = Random::new(seed);
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let disk = rig.volume("disk", 512 * MIB, 1);
        // The hot set is three quarters of the cache; nothing is evicted while it is read.
        let pages = CACHE / PAGE * 3 / 4;
        let mut now = rig.start;
        for _ in 0..3 {
            each_hot(&io, &disk, &mut random, pages).await;
            for _ in 0..2 {
                now += Duration::from_secs(1);
                reclaimer.run_once(&rig.cache, now);
            }
        }
        let before = each_hot(&io, &disk, &mut random, pages).await;
        let pieces = 10 * CACHE / request as u64;
        for step in 0..pieces {
            // A permutation of the pieces, if not in order.
            let piece = if in_order { step } else { step * 1_000_003 % pieces };
            read(&io, &disk, 64 * MIB + piece * request as u64, request).await;
            if step % 64 == 0 {
                now += Duration::from_millis(100);
                reclaimer.run_once(&rig.cache, now);
            }
        }
        let after = each_hot(&io, &disk, &mut random, pages).await;
        println!("seed {seed} {request} in order {in_order}: {before:.4} before, {after:.4} after");
        assert!(before > 0.99, "the hot set fits: {before}");
        assert!(before - after <= 0.05, "seed {seed}: {before} before the scan, {after} after");
    });
}

#[test]
fn a_scan_costs_an_idle_hot_set_five_points_at_most() {
    for seed in 1..=4 {
        a_scan_at_rest(seed, 128 << 10, true);
    }
}

#[test]
fn reads_of_64_kib_all_over_a_disk_cost_a_hot_set_of_pages_five_points_at_most() {
    for seed in 1..=4 {
        a_scan_at_rest(seed, 64 << 10, false);
    }
}

#[test]
fn a_noisy_volume_costs_the_quiet_one_ten_points_at_most() {
    on_a_worker(|io, rig| async move {
        let mut random = Random::new(4);
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let quiet = rig.volume("quiet", 64 * MIB, 1);
        let noisy = rig.volume("noisy", 256 * MIB, 2);
        // The quiet one needs a little less than its half.
        let pages = CACHE / PAGE * 2 / 5;
        let mut now = rig.start;
        let mut turn = |reclaimer: &mut Reclaimer| {
            now += Duration::from_millis(300);
            reclaimer.run_once(&rig.cache, now);
        };
        hot(&io, &quiet, &mut random, pages, 40_000).await;
        let before = hot(&io, &quiet, &mut random, pages, 10_000).await;
        // For each read of the quiet one ten of the noisy one, at random over its disk and each twice.
        let mut during = 0.0;
        for _ in 0..100 {
            for _ in 0..500 {
                let page = random.below(256 * MIB / PAGE);
                read(&io, &noisy, page * PAGE, 4096).await;
                read(&io, &noisy, page * PAGE, 4096).await;
            }
            during += hot(&io, &quiet, &mut random, pages, 100).await / 100.0;
            turn(&mut reclaimer);
        }
        println!("hit ratio {before:.3} alone, {during:.3} beside the noisy one");
        assert!(before > 0.9);
        assert!(before - during <= 0.10, "{before} alone, {during} beside the noisy one");
        let stats = rig.cache.stats();
        assert!(stats.total.bufspace <= CACHE);
        // When the quiet volume is idle, the other one may take all memory.
        for _ in 0..200 {
            read(&io, &noisy, random.below(256 * MIB / PAGE) * PAGE, 4096).await;
            turn(&mut reclaimer);
        }
        for _ in 0..20_000 {
            read(&io, &noisy, random.below(256 * MIB / PAGE) * PAGE, 4096).await;
        }
        let held = |disk: &Disk| disk.cached.stats().bufspace;
        println!("quiet {} noisy {}", held(&quiet), held(&noisy));
        assert!(held(&noisy) > CACHE * 9 / 10, "an idle volume has no share");
    });
}

#[test]
fn a_volume_whose_pages_are_all_dirty_does_not_keep_other_volumes_from_caching() {
    on_a_worker(|io, rig| async move {
        let mut reclaimer = Reclaimer::new(&rig.cache, Box::new(pages_discarded_by_kernel));
        let dirty = rig.volume_as("dirty", 64 * MIB, 1, Mode::Writeback);
        dirty.cached.set_control(Arc::new(FixedLimit::default()));
        let clean = rig.volume("clean", 64 * MIB, 2);
        let other = rig.volume("other", 64 * MIB, 3);
        for offset in (0..9 * MIB).step_by(65536) {
            let buf = io.pool().get_for_test(65536);
            dirty.cached.write(&io, buf, offset, false).await.0.unwrap();
        }
        for page in 0..CACHE / PAGE {
            read(&io, &clean, page * PAGE, 4096).await;
        }
        read(&io, &other, 0, 4096).await;
        reclaimer.run_once(&rig.cache, rig.start + Duration::from_millis(300));
        let held = |disk: &Disk| disk.cached.stats().bufspace;
        assert!(held(&clean) > 6 * MIB, "more than its third: {}", held(&clean));
        assert_eq!(dirty.cached.dirty(), 9 * MIB);
        // The third volume gets a little memory at the cost of the one with clean pages,
        let pass = async |from: u64, pages: u64| {
            let before = other.cached.stats().hits;
            for page in 0..pages {
                read(&io, &other, from + page * PAGE, 4096).await;
            }
            other.cached.stats().hits - before
        };
        pass(0, 200).await;
        let hits = pass(0, 200).await;
        assert!(hits >= 190, "{hits} of 200 hits");
        // and when those are used up, it evicts its own oldest pages.
        pass(8 * MIB, 2000).await;
        pass(16 * MIB, 100).await;
        let hits = pass(16 * MIB, 100).await;
        assert!(hits >= 95, "{hits} of 100 hits");
        assert_eq!(dirty.cached.dirty(), 9 * MIB);
        assert!(rig.cache.stats().total.bufspace <= CACHE);
        dirty.cached.flush(&io).await.unwrap();
    });
}
