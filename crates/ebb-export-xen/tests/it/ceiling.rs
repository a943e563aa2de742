//! Memory that the requests of a guest's rings hold does not reduce another volume's share.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::{HANG, Rig, pattern};
use ebb_export_xen::BackendOptions;
use ebb_export_xen::abi::{Body, Request, Segment, op};
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_io::{Charge, QueueShare, Shares, Worker};
use ebb_mem::Memory;
use ebb_store::{Store, TestStore};
use ebb_volume::{Volume, VolumeOptions, Volumes};

/// A host whose requests share a ceiling of 64 MiB.
fn rig(volumes: &[&Arc<Volume>]) -> (Rig, Shares) {
    let memory = Memory::new(ebb_mem::MemoryOptions::new(64 << 20, Instant::now())).unwrap();
    let shares = memory.shares().clone();
    let mut rig = Rig {
        world: ebb_export_xen::shm::World::default(),
        backend: None,
        workers: vec![Worker::start("xen", &memory).unwrap()],
        volumes: Volumes::default(),
        parameters: Arc::default(),
        polling: Arc::default(),
        journals: tempfile::tempdir_in("/dev/shm").unwrap(),
        memory: None,
    };
    for volume in volumes {
        volume.join(memory.shares(), volume.name());
        rig.add((*volume).clone());
    }
    let handles = rig.workers.iter().map(Worker::handle).collect();
    let mut options =
        BackendOptions::new(Arc::new(rig.world.clone()), handles, rig.volumes.clone());
    options.journals = Some(rig.journals.path().into());
    rig.backend = Some(ebb_export_xen::Backend::start(options).unwrap());
    (rig, shares)
}

/// A request that needs more memory than its volume's reserve, when there is no spare memory, is carried out in pieces.
#[test]
fn requests_larger_than_a_volumes_reserve_are_carried_out_in_pieces() {
    let store = Arc::new(TestStore::new(16 << 20, 1));
    let volume = Volume::new("disk", Store::Test(store.clone()), VolumeOptions::default());
    let (rig, shares) = rig(&[&volume]);
    // With so many volumes each has a reserve of less than 64 KiB.
    let other_shares: Vec<_> = (0..500).map(|number| shares.join(&number.to_string())).collect();
    let queue_shares: Vec<_> =
        other_shares.iter().map(|share| QueueShare::new(share.clone())).collect();
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    let data = pattern(3, 1 << 20);
    let moved = |disk: &mut Frontend| {
        let before = store.writes.load(Ordering::Relaxed) + store.reads.load(Ordering::Relaxed);
        assert_eq!(disk.transfer(0, op::WRITE, 8, &mut data.clone()).unwrap(), 0);
        let mut back = vec![0; 1 << 20];
        assert_eq!(disk.transfer(0, op::READ, 8, &mut back).unwrap(), 0);
        assert!(back == data);
        store.writes.load(Ordering::Relaxed) + store.reads.load(Ordering::Relaxed) - before
    };
    assert_eq!(moved(&mut disk), 2, "there is spare memory");
    let reserve = shares.reserve();
    assert!(reserve < 64 << 10, "{reserve}");
    // Allocates all unreserved memory that a volume can get, except for one page.
    let mut held: Vec<Charge> = Vec::new();
    for queue_share in &queue_shares {
        for bytes in [1 << 20, 64 << 10, 4096] {
            held.extend(std::iter::from_fn(|| queue_share.try_take(bytes)));
        }
    }
    let pieces = moved(&mut disk);
    assert!(pieces >= 2 * (1 << 20) / reserve as u64, "{pieces} pieces");
    drop(held);
    assert_eq!(moved(&mut disk), 2);
}

/// The page that descriptors are copied to is charged to the volume's share as well.
#[test]
fn descriptors_are_fetched_with_memory_of_the_volume() {
    let store = Store::Test(Arc::new(TestStore::new(16 << 20, 1)));
    let volume = Volume::new("disk", store, VolumeOptions::default());
    let (rig, shares) = rig(&[&volume]);
    let guest = rig.guest(1, 4096);
    let mut disk = rig.attach(&guest, "xvdb", "disk", FrontendConfig::default());
    disk.connect().unwrap();
    let queue_share = QueueShare::new(volume.share(&shares).clone());
    let sizes = [1 << 20, 4096, 512, 1];
    let held: Vec<Charge> = sizes
        .iter()
        .flat_map(|bytes| std::iter::from_fn(|| queue_share.try_take(*bytes)))
        .collect();
    // Descriptors in a page that was never granted: an error, once they are read.
    let body = Body::Indirect { sector: 0, count: 32, grefs: [4000; 8] };
    let indirect = disk.queues[0].put(Request { id: 0, operation: op::READ, body });
    disk.queues[0].push();
    for _ in 0..200 {
        let body = Body::Direct { sector: 0, count: 0, segments: Default::default() };
        let unknown = disk.queues[0].put(Request { id: 0, operation: 77, body });
        disk.queues[0].push();
        assert_eq!(
            disk.queues[0].wait().unwrap().id,
            unknown,
            "the other request waits for memory"
        );
    }
    drop(held);
    let answer = disk.queues[0].wait().unwrap();
    assert_eq!((answer.id, answer.status), (indirect, -1));
}

#[test]
fn rings_on_a_store_that_hangs_delay_no_other_volume() {
    let store = Arc::new(TestStore::new(16 << 20, 1));
    store.latency_us.store(3_600_000_000, Ordering::Relaxed);
    let hanging = Volume::new("hanging", Store::Test(store), VolumeOptions::default());
    let store = Store::Test(Arc::new(TestStore::new(16 << 20, 2)));
    let healthy =
        Volume::new("healthy", store, VolumeOptions { shared: true, ..VolumeOptions::default() });
    // The rings on the store that hangs never end, so nothing can wait for the backend.
    let rig = ManuallyDrop::new(rig(&[&hanging, &healthy]).0);
    let (one, two) = (rig.guest(1, 4096), rig.guest(2, 4096));
    let wishes = FrontendConfig { order: 4, queues: 4, ..FrontendConfig::default() };
    let mut greedy = rig.attach(&one, "xvdb", "hanging", wishes);
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
        .map(|name| rig.attach(&two, name, "healthy", FrontendConfig::default()))
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
    over.recv_timeout(HANG).expect("the healthy volume is delayed");
}
