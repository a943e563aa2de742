//! The cost of a warm queue, and of devices that do nothing.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use counting_allocator::{mark_thread, marked_calls};
use ebb_store::{NullStore, Store};
use ebb_volume::{Volume, VolumeOptions};

use crate::common::driver::kind;
use crate::common::{Frontend, Guest, Rig, SIZE, Wishes, pause, status, until};

/// Serialises the tests, which share the counters.
static ALONE: Mutex<()> = Mutex::new(());

fn rounds(disk: &mut Frontend, count: u32) {
    for _ in 0..count {
        for sector in 0..16 {
            let kind = if sector % 2 == 0 { kind::WRITE } else { kind::READ };
            disk.request(0, kind, 8 * sector, 4096);
        }
        disk.publish(0);
        (0..16).for_each(|_| assert_eq!(disk.wait(0).status, status::OK));
    }
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (inline, indirect, inflight, packed) in [
        (true, false, true, false),
        (true, true, false, false),
        (false, true, true, false),
        (true, true, true, true),
        (false, false, false, true),
    ] {
        let rig = if inline { Rig::new() } else { Rig::empty(1) };
        if !inline {
            // Requests in tasks, of a store that allocates nothing itself.
            let path = rig.folder.path().join("file");
            let options = ebb_store::OpenOptions { create: Some(SIZE), ..Default::default() };
            let (store, _) = ebb_store::FileStore::open(&path, &options).unwrap();
            rig.add(Volume::new("disk", Store::File(store), VolumeOptions::default()));
        }
        let mut disk = rig.disk(Wishes { indirect, inflight, packed, ..Wishes::default() });
        rounds(&mut disk, 100);
        let worker = rig.workers[0].handle();
        let mark = |on| worker.block_on(move |_| async move { mark_thread(on) }).unwrap();
        mark(true);
        let before = marked_calls();
        rounds(&mut disk, 200);
        let calls = marked_calls() - before;
        mark(false);
        eprintln!("{calls} allocations in {} requests", 200 * 16);
        // Waking the worker to mark and unmark it is not part of a request.
        assert!(calls <= 4, "{calls} allocations, inline {inline}, indirect {indirect}");
    }
}

/// A queue that has been idle for a second has no request tasks: a later request makes one.
#[test]
fn request_tasks_of_an_idle_queue_end() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rig = Rig::on_file(1);
    let mut disk = rig.disk(Wishes::default());
    let worker = rig.workers[0].handle();
    let mark = |on| worker.block_on(move |_| async move { mark_thread(on) }).unwrap();
    until("its tasks have ended", || {
        rounds(&mut disk, 2);
        pause(Duration::from_millis(1500));
        mark(true);
        let before = marked_calls();
        rounds(&mut disk, 1);
        let calls = marked_calls() - before;
        mark(false);
        calls > 8
    });
}

/// Bytes of anonymous memory of this process.
fn anonymous() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// 1,000 devices with 2 queues each: the frontends' own memory is in the figure too.
#[test]
fn a_thousand_idle_devices_are_served_and_take_little_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let count = 1000;
    let rig = Rig::empty(2);
    let name = |number: usize| format!("disk{number}");
    for number in 0..=count {
        let store = Store::Null(NullStore::new(SIZE));
        rig.add(Volume::new(&name(number), store, VolumeOptions::default()));
    }
    let wishes = Wishes { queues: 2, size: 128, ..Wishes::default() };
    let connect = |number: usize| {
        let mut disk = Frontend::connect(&rig.path(&name(number)), Guest::new(2), wishes);
        disk.negotiate();
        disk.start();
        (0..2).for_each(|queue| assert_eq!(disk.write(queue, 0, &[1; 4096]), status::OK));
        // Only the backend's copies are to count.
        disk.inflight = None;
        disk
    };
    let _first = connect(count);
    let before = anonymous();
    let mut disks: Vec<Frontend> = (0..count).map(connect).collect();
    let each = anonymous().saturating_sub(before) / count as u64;
    eprintln!("{each} bytes per idle device with 2 queues");
    assert!(each <= 100 << 10, "{each} bytes per device");
    for disk in &mut disks {
        assert_eq!(disk.write(1, 0, &[1; 512]), status::OK);
    }
    assert_eq!(rig.served(), count + 1);
}
