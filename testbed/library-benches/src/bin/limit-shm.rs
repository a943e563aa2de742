//! Limits of a volume that a guest uses over shared memory: asked and measured, at depth 1 and 64, with a store whose requests are carried out inline and one whose requests need tasks.
//!
//! One line a figure: `name ours peer ratio bar ok|short`, where the peer is what was asked. `limit-shm [SECONDS]`.

#![allow(clippy::unwrap_used, reason = "a tool of the bench")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, device_number};
use ebb_io::Worker;
use ebb_store::{MemoryStore, NullStore, Store};
use ebb_volume::{RateLimits, Volume, VolumeOptions, Volumes};
use library_benches::result;

const SIZE: u64 = 256 << 20;
const IOPS: u64 = 5000;
const BANDWIDTH: u64 = 200_000_000;
/// How far a rate may be from the limit.
const BAR: f64 = 0.03;

/// Requests and bytes per second of reads of `pages` pages, `depth` at a time.
fn rate(store: Store, limits: RateLimits, pages: usize, depth: usize, time: Duration) -> [f64; 2] {
    let world = World::default();
    let worker = Worker::start_alone("limit-worker").unwrap();
    let volume = Volume::new("disk", store, VolumeOptions::default());
    volume.set_rate_limits(limits);
    let volumes = Volumes::default();
    volumes.add(volume, Arc::default());
    let options = BackendOptions::new(Arc::new(world.clone()), vec![worker.handle()], volumes);
    options.parameters.max_persistent_grants.set(1 << 16);
    let _backend = Backend::start(options).unwrap();
    let guest = world.guest(1, 16_384).unwrap();
    let disk = DiskSpec { volume: "disk", name: "xvdb", read_only: false };
    attach(&mut *world.xenstore().unwrap(), 1, &disk).unwrap();
    // A ring of four pages has 128 slots.
    let wishes = FrontendConfig { order: 2, ..FrontendConfig::default() };
    let mut front = Frontend::new(&world, &guest, device_number("xvdb").unwrap(), wishes);
    front.connect().unwrap();
    let requests: Vec<_> = (0..depth)
        .map(|at| {
            let pages = front.pages(pages);
            let segments: Vec<_> =
                pages.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
            front.request(op::READ, (at * 2048) as u64, &segments).1
        })
        .collect();
    let queue = &mut front.queues[0];
    for request in &requests {
        queue.put(*request);
    }
    queue.push();
    let (begun, mut done) = (Instant::now(), 0usize);
    while begun.elapsed() < time {
        assert_eq!(queue.wait().unwrap().status, 0);
        done += 1;
        queue.put(requests[done % depth]);
        queue.push();
    }
    let rate = done as f64 / begun.elapsed().as_secs_f64();
    [rate, rate * (pages * 4096) as f64]
}

fn main() {
    let seconds = std::env::args().nth(1).map_or(10, |text| text.parse().unwrap());
    let time = Duration::from_secs(seconds);
    let limit =
        |iops, bandwidth| RateLimits { iops, bandwidth, burst_ms: 100, ..RateLimits::default() };
    for depth in [1, 64] {
        for inline in [true, false] {
            let store = || match inline {
                true => Store::Memory(MemoryStore::new(SIZE)),
                false => Store::Null(NullStore::new(SIZE)),
            };
            let kind = if inline { "inline" } else { "tasks" };
            let [iops, _] = rate(store(), limit(IOPS, 0), 1, depth, time);
            print(&format!("limit_shm_{kind}_4k_qd{depth}_iops"), iops, IOPS as f64);
            let [_, bytes] = rate(store(), limit(0, BANDWIDTH), 11, depth, time);
            let name = format!("limit_shm_{kind}_44k_qd{depth}_mb_per_s");
            print(&name, bytes / 1e6, BANDWIDTH as f64 / 1e6);
        }
    }
}

fn print(name: &str, ours: f64, asked: f64) {
    let ratio = ours / asked;
    let verdict = if (ratio - 1.0).abs() <= BAR { "ok" } else { "short" };
    result(format_args!("{name} {ours:.1} {asked:.1} {ratio:.3} +-{BAR} {verdict}"));
}
