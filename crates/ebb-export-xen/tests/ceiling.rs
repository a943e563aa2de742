//! What a guest's rings hold of the memory for requests takes nothing from another volume.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::{HANG, Rig, pattern};
use ebb_export_xen::Options;
use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::shm::frontend::Wishes;
use ebb_io::Worker;
use ebb_mem::{Memory, PoolParameters};
use ebb_store::{Store, TestStore};
use ebb_volume::{Volume, VolumeOptions};

/// A machine whose requests share a ceiling of 64 MiB.
fn rig(volumes: &[&Arc<Volume>]) -> Rig {
    let memory = Memory::new(ebb_mem::Options::new(64 << 20, Instant::now())).unwrap();
    let mut rig = Rig {
        world: ebb_export_xen::shm::World::default(),
        backend: None,
        workers: vec![Worker::start("xen", &memory).unwrap()],
        volumes: common::Volumes::default(),
        parameters: Arc::default(),
        journals: tempfile::tempdir_in("/dev/shm").unwrap(),
        memory: None,
    };
    for volume in volumes {
        volume.join(memory.shares(), volume.name());
        rig.add((*volume).clone());
    }
    let volumes = rig.volumes.clone();
    let lookup = move |name: &str| {
        let volume = volumes.lock().unwrap().get(name).cloned()?;
        Some((volume, Arc::<PoolParameters>::default()))
    };
    let handles = rig.workers.iter().map(Worker::handle).collect();
    let mut options = Options::new(Arc::new(rig.world.clone()), handles, Arc::new(lookup));
    options.journals = Some(rig.journals.path().into());
    rig.backend = Some(ebb_export_xen::Backend::start(options).unwrap());
    rig
}

#[test]
fn rings_on_a_silent_store_hold_up_no_other_volume() {
    let store = Arc::new(TestStore::new(16 << 20, 1));
    store.latency_us.store(3_600_000_000, Ordering::Relaxed);
    let dead = Volume::new("dead", Store::Test(store), VolumeOptions::default());
    let store = Store::Test(Arc::new(TestStore::new(16 << 20, 2)));
    let healthy =
        Volume::new("healthy", store, VolumeOptions { shared: true, ..VolumeOptions::default() });
    // The rings of the dead store never come to their end, so that nothing can wait for it.
    let rig = ManuallyDrop::new(rig(&[&dead, &healthy]));
    let (one, two) = (rig.guest(1, 4096), rig.guest(2, 4096));
    let wishes = Wishes { order: 4, queues: 4, ..Wishes::default() };
    let mut greedy = rig.attach(&one, "xvdb", "dead", wishes);
    greedy.connect().unwrap();
    let pages = greedy.pages(11);
    for queue in 0..4 {
        // 512 requests of 44 KiB take 32 MiB.
        for number in 0..512u64 {
            let segments: Vec<_> =
                pages.iter().map(|page| Segment { gref: *page, first: 0, last: 7 }).collect();
            let (_, request) = greedy.request(op::WRITE, number * 8, &segments);
            greedy.queues[queue].put(request);
        }
        greedy.queues[queue].push();
    }
    let mut disks: Vec<_> = ["xvdc", "xvdd", "xvde"]
        .map(|name| rig.attach(&two, name, "healthy", Wishes::default()))
        .into_iter()
        .collect();
    let (done, over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for disk in &mut disks {
            disk.connect().unwrap();
            for (sector, len) in [(0, 4096), (8, 44 << 10), (100, 1 << 20)] {
                let data = pattern(sector, len);
                assert_eq!(disk.transfer(0, op::WRITE, sector, &mut data.clone()).unwrap(), 0);
                let mut back = vec![0; len];
                assert_eq!(disk.transfer(0, op::READ, sector, &mut back).unwrap(), 0);
                assert!(back == data);
            }
        }
        done.send(()).unwrap();
    });
    over.recv_timeout(HANG).expect("the healthy volume is held up");
}
