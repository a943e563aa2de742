#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::atomic::{AtomicBool, Ordering};

use ebb_io::Worker;
use ebb_store::{NullStore, Store};

use super::*;
use crate::{Volume, VolumeOptions};

fn volume() -> Arc<Volume> {
    Volume::new("disk", Store::Null(NullStore::new(1 << 30)), VolumeOptions::default())
}

fn read(bytes: u64) -> RequestCost {
    RequestCost { kind: RequestKind::Read, bytes }
}

/// A limit that a request of a MiB exceeds for half an hour.
const SLOW: RateLimits = RateLimits {
    iops: 0,
    read_iops: 0,
    write_iops: 0,
    bandwidth: 512,
    read_bandwidth: 0,
    write_bandwidth: 0,
    burst_ms: 0,
};

/// Lets a request wait on a worker of its own, calls `act`, and returns what became of the request.
fn waits(volume: &Arc<Volume>, wanted: Arc<AtomicBool>, act: impl FnOnce()) -> bool {
    let worker = Worker::start_alone("limit").unwrap();
    let (begun, begins) = std::sync::mpsc::channel();
    let (sender, receiver) = std::sync::mpsc::channel();
    let volume = volume.clone();
    worker.handle().spawn(move |io| async move {
        let limits = volume.limits().unwrap();
        let stage = limits.try_take(read(512)).expect_err("it has to wait");
        begun.send(()).unwrap();
        let passed = limits.wait(&io, read(512), stage, || wanted.load(Ordering::Relaxed)).await;
        sender.send(passed).unwrap();
    });
    begins.recv().unwrap();
    act();
    receiver.recv().unwrap()
}

fn always() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(true))
}

#[test]
fn a_volume_without_limits_has_none_and_allocates_none() {
    let volume = volume();
    volume.set_rate_limits(RateLimits { burst_ms: 5, ..RateLimits::default() });
    volume.set_limit_group(None);
    assert!(volume.limits().is_none() && volume.limit_figures().is_none());
    volume.set_rate_limits(SLOW);
    assert!(volume.limits().is_some());
    volume.set_rate_limits(RateLimits::default());
    assert!(volume.limits().is_none());
}

#[test]
fn a_changed_limit_wakes_those_that_wait() {
    let volume = volume();
    volume.set_rate_limits(SLOW);
    volume.limits().unwrap().take(read(1 << 20));
    let faster = RateLimits { bandwidth: 1 << 30, ..SLOW };
    assert!(waits(&volume, always(), || volume.set_rate_limits(faster)));
    volume.set_rate_limits(SLOW);
    volume.limits().unwrap().take(read(1 << 20));
    assert!(waits(&volume, always(), || volume.set_rate_limits(RateLimits::default())));
    let figures = volume.limit_figures().unwrap();
    assert_eq!((figures.throttled, figures.limits), (2, RateLimits::default()));
    assert!(figures.throttled_time > Duration::ZERO);
}

#[test]
fn a_volume_waits_for_its_group_until_it_leaves_it_or_the_group_has_no_limit() {
    let (volume, group) = (volume(), LimitGroup::new("gold"));
    group.set(SLOW);
    volume.set_limit_group(Some(&group));
    volume.limits().unwrap().take(read(1 << 20));
    assert!(waits(&volume, always(), || volume.set_limit_group(None)));
    assert!(volume.limits().is_none());
    volume.set_limit_group(Some(&group));
    assert!(waits(&volume, always(), || group.set(RateLimits::default())));
    assert_eq!(volume.limit_figures().unwrap().group.as_deref(), Some("gold"));
    assert_eq!((group.figures().throttled, group.name().as_ref()), (2, "gold"));
}

#[test]
fn a_request_that_is_not_wanted_any_more_ends_its_wait_and_others_take_its_place() {
    let (volume, wanted) = (volume(), always());
    volume.set_rate_limits(SLOW);
    volume.limits().unwrap().take(read(1 << 20));
    assert!(!waits(&volume, wanted.clone(), || wanted.store(false, Ordering::Relaxed)));
    assert_eq!(volume.limits().unwrap().own.lock().queue.waiting(), 0);
    assert!(waits(&volume, always(), || volume.set_rate_limits(RateLimits::default())));
}
