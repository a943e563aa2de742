//! A volume's limits: a throttled ring's requests stay in it, and nothing else waits for them.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use crate::common;

use std::sync::Arc;

use common::{HANG, Rig, SIZE, memory, until};
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_store::{Store, TestStore};
use ebb_volume::{Operation, RateLimits, RequestCost, RequestKind, Volume, VolumeOptions};

/// Nothing passes for half an hour.
fn exhaust(volume: &Volume) {
    volume.set_rate_limits(RateLimits { bandwidth: 512, ..RateLimits::default() });
    volume.limits().unwrap().take(RequestCost { kind: RequestKind::Read, bytes: 1 << 20 });
}

fn throttled(volume: &Volume, count: u64) {
    until("the ring is throttled", || volume.limit_figures().unwrap().throttled >= count);
}

fn flood(disk: &mut Frontend, count: usize) {
    for page in disk.pages(count) {
        let segment = Segment { gref: page, first: 0, last: 7 };
        let (_, request) = disk.request(op::READ, 8, &[segment]);
        disk.queues[0].put(request);
    }
    disk.queues[0].push();
}

fn reads(volume: &Volume) -> u64 {
    volume.stats().of(Operation::Read).requests
}

/// On a store in memory, whose requests are carried out inline, and on another one.
fn disks() -> [(Rig, Arc<Volume>, Frontend); 2] {
    [false, true].map(|tasks| {
        let rig = Rig::new();
        if tasks {
            let store = Store::Test(Arc::new(TestStore::new(SIZE, 1)));
            rig.volumes.remove("disk");
            rig.add(Volume::new("disk", store, VolumeOptions::default()));
        }
        let volume = rig.volumes.get("disk").unwrap().volume;
        let disk = rig.disk(FrontendConfig::default());
        (rig, volume, disk)
    })
}

#[test]
fn throttled_requests_stay_in_the_ring_and_a_changed_limit_wakes_them() {
    for (rig, volume, mut disk) in disks() {
        rig.add(memory("other", SIZE, false));
        let guest = rig.guest(2, 4096);
        let mut other = rig.attach(&guest, "xvdc", "other", FrontendConfig::default());
        other.connect().unwrap();
        exhaust(&volume);
        flood(&mut disk, 20);
        throttled(&volume, 1);
        // The neighbour on the same worker is served meanwhile.
        for _ in 0..100 {
            assert_eq!(other.transfer(0, op::WRITE, 0, &mut vec![1; 4096]).unwrap(), 0);
        }
        assert_eq!((reads(&volume), volume.in_flight()), (0, 0));
        assert_eq!(volume.limit_figures().unwrap().throttled, 1);
        volume.set_rate_limits(RateLimits { iops: 1 << 20, ..RateLimits::default() });
        for _ in 0..20 {
            assert_eq!(disk.queues[0].wait().unwrap().status, 0);
        }
        assert_eq!(reads(&volume), 20);
    }
}

#[test]
fn withdrawing_and_stopping_end_a_throttled_wait() {
    for (mut rig, volume, mut disk) in disks() {
        exhaust(&volume);
        flood(&mut disk, 5);
        throttled(&volume, 1);
        let backend = rig.backend.take().unwrap();
        let ending = backend.withdraw(&volume);
        assert!(ending.wait_until(std::time::Instant::now() + HANG), "it does not drain");
        assert_eq!(reads(&volume), 0);
        drop(backend);
    }
    for (mut rig, volume, mut disk) in disks() {
        exhaust(&volume);
        flood(&mut disk, 5);
        throttled(&volume, 1);
        let backend = rig.backend.take().unwrap();
        assert!(backend.begin_stop().wait_until(std::time::Instant::now() + HANG));
        assert_eq!(reads(&volume), 0);
        drop(backend);
    }
}

#[test]
fn requests_of_all_kinds_pass_their_limits_in_order() {
    for (_rig, volume, mut disk) in disks() {
        volume.set_rate_limits(RateLimits { iops: 200_000, ..RateLimits::default() });
        for len in [512, 4096, 44 << 10, 256 << 10, 1 << 20] {
            let data = common::pattern(len as u64, len);
            assert_eq!(disk.transfer(0, op::WRITE, 8, &mut data.clone()).unwrap(), 0);
            let mut back = vec![0; len];
            assert_eq!(disk.transfer(0, op::READ, 8, &mut back).unwrap(), 0);
            assert!(back == data, "{len} bytes");
        }
        assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0);
        assert_eq!(disk.flush(op::WRITE_BARRIER).unwrap(), 0);
        // A flush is not counted: with nothing left it passes at once.
        exhaust(&volume);
        assert_eq!(disk.flush(op::FLUSH_DISKCACHE).unwrap(), 0);
    }
}
