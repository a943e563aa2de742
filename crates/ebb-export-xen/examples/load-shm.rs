//! One guest's load over shared memory, with a known number of requests, to count the cost of one: run it
//! under `valgrind --tool=callgrind --separate-threads=yes` and divide the worker's instructions by the
//! number of requests; see `docs/adr/0004-grants.md`.
//!
//! `load-shm persistent|copy read|write KIB DEPTH COUNT`; prints the backend's counters.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a tool of the bench")]

use std::sync::Arc;

use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, device_number};
use ebb_io::Worker;
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};

const SIZE: u64 = 32 << 20;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    let (kib, depth, count) = (number(2), number(3), number(4));
    let operation = if words[1] == "write" { op::WRITE } else { op::READ };
    let world = World::default();
    let worker = Worker::start_alone("load-worker").unwrap();
    let volume =
        Volume::new("memory", Store::Memory(MemoryStore::new(SIZE)), VolumeOptions::default());
    let volumes = Volumes::default();
    volumes.add(volume, Arc::default());
    let options = BackendOptions::new(Arc::new(world.clone()), vec![worker.handle()], volumes);
    // More grants than the guest has, so that the cap has no effect.
    options.parameters.max_persistent_grants.set(1 << 16);
    let backend = Backend::start(options).unwrap();
    let guest = world.guest(1, 16384).unwrap();
    let disk = DiskSpec { volume: "memory", name: "xvdb", read_only: false };
    attach(&mut *world.xenstore().unwrap(), 1, &disk).unwrap();
    let wishes =
        FrontendConfig { persistent: words[0] == "persistent", ..FrontendConfig::default() };
    let mut front = Frontend::new(&world, &guest, device_number("xvdb").unwrap(), wishes);
    front.connect().unwrap();
    // Every block is written once, so that none is a hole.
    for chunk in 0..SIZE / (1 << 17) {
        let mut data = vec![u8::try_from(chunk % 251).unwrap(); 1 << 17];
        assert_eq!(front.transfer(0, op::WRITE, chunk << 8, &mut data).unwrap(), 0);
    }
    let requests: Vec<_> = (0..depth)
        .map(|n| {
            let pages = front.pages(kib.div_ceil(4));
            let segments: Vec<_> =
                pages.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
            let sector = (n * kib * 2) as u64 % (SIZE / 512 - 2048);
            front.request(operation, sector, &segments).1
        })
        .collect();
    let before = backend.stats()[0].stats;
    println!("before {before:?}");
    let queue = &mut front.queues[0];
    for _ in 0..count.div_ceil(depth) {
        // As with a full ring on one processor: all requests are sent, then all complete.
        for request in &requests {
            queue.put(*request);
        }
        queue.push();
        for _ in &requests {
            assert_eq!(queue.wait().unwrap().status, 0);
        }
    }
    println!("after  {:?}", backend.stats()[0].stats);
}
