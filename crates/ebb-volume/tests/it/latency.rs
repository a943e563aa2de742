//! Histograms of request times: which requests are counted, and in which histogram.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_io::Worker;
use ebb_store::{MemoryStore, Store, TestStore};
use ebb_volume::{LatencySnapshot, Operation, Volume, VolumeOptions};

fn shortest(latency: &LatencySnapshot) -> Duration {
    latency.quantile(0.0).unwrap()
}

#[test]
fn every_request_has_a_service_time_of_at_least_the_time_of_its_store() {
    let store = Arc::new(TestStore::new(1 << 20, 1));
    store.latency_us.store(20_000, Ordering::Relaxed);
    let volume = Volume::new("disk", Store::Test(store), VolumeOptions::default());
    let worker = Worker::start_alone("latency").unwrap();
    let shown = volume.clone();
    let done = worker.handle().block_on(move |io| async move {
        for _ in 0..3 {
            let buf = io.pool().take(4096).await;
            volume.read(&io, buf, 0).await.0.unwrap();
        }
        let buf = io.pool().take(4096).await;
        volume.write(&io, buf, 0, false).await.0.unwrap();
        // Refused before it reaches the store: not counted.
        let buf = io.pool().take(4096).await;
        volume.read(&io, buf, 1 << 20).await.0.unwrap_err();
    });
    done.unwrap();
    let stats = shown.stats();
    assert_eq!((stats.of(Operation::Read).requests, stats.of(Operation::Write).requests), (3, 1));
    for (operation, count) in [(Operation::Read, 3), (Operation::Write, 1)] {
        let times = stats.service_times(operation);
        assert_eq!(times.count(), count);
        // A bucket is a quarter of its value wide.
        assert!(shortest(&times) >= Duration::from_millis(15), "{operation:?}: {times:?}");
        assert_eq!(stats.queued_times(operation).count(), 0, "none waited before the volume");
    }
    assert_eq!(stats.service_times(Operation::Flush).quantile(0.5), None);
}

#[test]
fn requests_without_a_wait_are_counted_too() {
    let store = Store::Memory(MemoryStore::new(1 << 20));
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let worker = Worker::start_alone("latency").unwrap();
    let shown = volume.clone();
    let done = worker.handle().block_on(move |io| async move {
        let data = volume.direct_access(&io).unwrap();
        data.read(0, 4096, |_| {}).unwrap();
        data.write(0, 4096, |piece| piece.fill(1)).unwrap();
        data.read(1 << 20, 4096, |_| {}).unwrap_err();
    });
    done.unwrap();
    for operation in [Operation::Read, Operation::Write] {
        assert_eq!(shown.stats().of(operation).requests, 1);
        assert_eq!(shown.stats().service_times(operation).count(), 1);
    }
}

#[test]
fn only_requests_that_waited_have_a_queued_time() {
    let store = Store::Memory(MemoryStore::new(1 << 20));
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let worker = Worker::start_alone("latency").unwrap();
    let shown = volume.clone();
    let done = worker.handle().block_on(move |io| async move {
        let arrived = io.iteration_start();
        volume.stats().note_queued(&io, Operation::Read, arrived);
        io.sleep(Duration::from_millis(20)).await;
        volume.stats().note_queued(&io, Operation::Read, arrived);
    });
    done.unwrap();
    let queued = shown.stats().queued_times(Operation::Read);
    assert_eq!(queued.count(), 1);
    assert!(shortest(&queued) >= Duration::from_millis(15), "{queued:?}");
}
