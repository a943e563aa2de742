//! A volume's limits: a throttled ring's requests stay in it, and nothing else waits for them.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;
use std::time::Instant;

use common::driver::kind;
use common::{Frontend, HANG, Rig, SIZE, Wishes, memory_volume, pattern, status, until};
use ebb_volume::{Operation, RateLimits, RequestCost, RequestKind, Volume};

/// Nothing passes for half an hour.
fn exhaust(volume: &Volume) {
    volume.set_rate_limits(RateLimits { bandwidth: 512, ..RateLimits::default() });
    volume.limits().unwrap().take(RequestCost { kind: RequestKind::Read, bytes: 1 << 20 });
}

fn throttled(volume: &Volume) {
    until("the ring is throttled", || volume.limit_figures().unwrap().throttled >= 1);
}

fn flood(disk: &mut Frontend, count: u64) {
    (0..count).for_each(|sector| _ = disk.request(0, kind::READ, 8 * sector, 4096));
    disk.publish(0);
}

/// On a store in memory, whose requests are carried out inline, and on another one.
fn disks() -> [(Rig, Arc<Volume>, Frontend); 2] {
    [false, true].map(|tasks| {
        let rig = if tasks { Rig::on_test_store().0 } else { Rig::new() };
        let volume = rig.volumes.get("disk").unwrap().volume;
        let disk = rig.disk(Wishes { inflight: false, ..Wishes::default() });
        (rig, volume, disk)
    })
}

fn reads(volume: &Volume) -> u64 {
    volume.stats().of(Operation::Read).requests
}

#[test]
fn throttled_requests_stay_in_the_ring_and_a_changed_limit_wakes_them() {
    for (rig, volume, mut disk) in disks() {
        rig.add(memory_volume("other", SIZE, false));
        let mut other = rig.frontend("other", Wishes::default());
        other.start();
        exhaust(&volume);
        flood(&mut disk, 20);
        throttled(&volume);
        // The neighbour on the same worker is served meanwhile.
        for _ in 0..100 {
            assert_eq!(other.write(0, 0, &[1; 4096]), status::OK);
        }
        assert_eq!((reads(&volume), volume.in_flight()), (0, 0));
        volume.set_rate_limits(RateLimits { iops: 1 << 20, ..RateLimits::default() });
        for _ in 0..20 {
            assert_eq!(disk.wait(0).status, status::OK);
        }
        assert_eq!(reads(&volume), 20);
    }
}

/// A queue that waits is stopped at once: only the request that was consumed completes, and the others are taken after the
/// next start.
#[test]
fn a_queue_that_waits_for_limits_can_be_stopped() {
    for (_rig, volume, mut disk) in disks() {
        exhaust(&volume);
        flood(&mut disk, 5);
        throttled(&volume);
        assert_eq!(disk.stop_queue(0), 1);
        assert_eq!(disk.wait(0).status, status::OK);
        assert_eq!(disk.drivers[0].take(&disk.guest), None);
        volume.set_rate_limits(RateLimits::default());
        disk.start_queue(0, 1);
        (0..4).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
    }
}

#[test]
fn withdrawing_and_stopping_end_a_throttled_wait() {
    for withdrawn in [true, false] {
        for (mut rig, volume, mut disk) in disks() {
            exhaust(&volume);
            flood(&mut disk, 5);
            throttled(&volume);
            let backend = rig.backend.take().unwrap();
            if withdrawn {
                let draining = backend.withdraw(&volume);
                futures_lite::future::block_on(draining.drained());
            }
            assert!(backend.stop(Instant::now() + HANG).is_empty());
            assert_eq!(disk.drivers[0].used(&disk.guest), 1);
        }
    }
}

#[test]
fn requests_of_all_kinds_pass_their_limits_in_order() {
    for (_rig, volume, mut disk) in disks() {
        volume.set_rate_limits(RateLimits { iops: 200_000, ..RateLimits::default() });
        for len in [512, 4096, 32768] {
            let data = pattern(len as u64, len);
            assert_eq!(disk.write(0, 8, &data), status::OK);
            assert!(disk.read(0, 8, len) == data);
        }
        // A flush is not counted: with nothing left it passes at once.
        exhaust(&volume);
        assert_eq!(disk.flush(0), status::OK);
    }
}
