//! What a guest that exceeds the cap of persistent grants costs its neighbour, over shared memory: the
//! neighbour's latency beside a guest that uses 32,768 grant references, compared with one that sends the same
//! requests with as many pages as the cap allows. Both guests share one worker, which is the worst case.
//!
//! One line a figure: `name ours peer ratio bar ok|short`, microseconds. `bench-cap [SECONDS [ROUNDS]]`.

#![allow(clippy::unwrap_used, reason = "a bench")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_export_xen::abi::{MAX_DIRECT_SEGMENTS, Request, Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, device_number};
use ebb_io::Worker;
use ebb_store::{MemoryStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};
use library_benches::{median, note, result};

const SIZE: u64 = 64 << 20;
/// Pages that a guest uses: all that it can grant, and fewer than the cap.
const HOSTILE: usize = 32_768;
const POLITE: usize = 1024;
const DEPTH: usize = 32;

fn connect(world: &World, number: u16, pages: u32) -> Frontend {
    let guest = world.guest(number, pages).unwrap();
    let disk = DiskSpec { volume: "memory", name: "xvdb", read_only: false };
    attach(&mut *world.xenstore().unwrap(), number, &disk).unwrap();
    let device = device_number("xvdb").unwrap();
    let mut front = Frontend::new(world, &guest, device, FrontendConfig::default());
    front.connect().unwrap();
    front
}

/// Reads of eleven pages each, through all pages in order.
fn requests(front: &mut Frontend, pages: usize) -> Vec<Request> {
    let pages = front.pages(pages);
    let request = |part: &[u32]| {
        let segments: Vec<Segment> =
            part.iter().map(|gref| Segment { gref: *gref, first: 0, last: 7 }).collect();
        front.request(op::READ, u64::from(part[0]) * 8 % (SIZE / 512 - 128), &segments).1
    };
    pages.chunks(MAX_DIRECT_SEGMENTS).map(request).collect()
}

/// Keeps `DEPTH` requests in flight until stopped; returns the number of requests.
fn drive(front: &mut Frontend, requests: &[Request], stop: &AtomicBool) -> u64 {
    let queue = &mut front.queues[0];
    let idle = queue.room();
    let (mut done, mut next) = (0u64, 0usize);
    while !stop.load(Ordering::Relaxed) {
        while idle - queue.room() < DEPTH && queue.room() > 0 {
            queue.put(requests[next % requests.len()]);
            next += 1;
        }
        queue.push();
        queue.wait().unwrap();
        done += 1;
        while queue.take().unwrap().is_some() {
            done += 1;
        }
    }
    while queue.room() < idle {
        queue.wait().unwrap();
    }
    done
}

/// The neighbour's median and 99th percentile in microseconds, and the other guest's requests per second.
fn run(pages: usize, span: Duration) -> [f64; 3] {
    let world = World::default();
    // It does not poll: guests and worker share processors where instructions are counted, and polling takes time from
    // the guest that would fill the ring.
    let worker = Worker::start_alone("bench").unwrap();
    let store = Store::Memory(MemoryStore::new(SIZE));
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    let volume = Volume::new("memory", store, options);
    let volumes = Volumes::default();
    volumes.add(volume, Arc::default());
    let options = BackendOptions::new(Arc::new(world.clone()), vec![worker.handle()], volumes);
    let backend = Backend::start(options).unwrap();
    let mut greedy = connect(&world, 1, u32::try_from(HOSTILE).unwrap() + 16);
    let mut near = connect(&world, 2, 64);
    let greedy_requests = requests(&mut greedy, pages);
    let page = near.pages(1);
    let segment = Segment { gref: page[0], first: 0, last: 7 };
    let request = near.request(op::READ, 0, &[segment]).1;
    let stop = AtomicBool::new(false);
    let mut times = Vec::new();
    let done = std::thread::scope(|scope| {
        let other = scope.spawn(|| drive(&mut greedy, &greedy_requests, &stop));
        // The first pass maps its pages.
        let warm = Instant::now() + span / 4;
        let end = warm + span;
        loop {
            let begun = Instant::now();
            assert_eq!(near.queues[0].call(request).unwrap(), 0);
            let now = Instant::now();
            if begun >= warm {
                times.push((now - begun).as_secs_f64() * 1e6);
            }
            if now >= end {
                break;
            }
            std::thread::park_timeout(Duration::from_micros(200));
        }
        stop.store(true, Ordering::Relaxed);
        other.join().unwrap()
    });
    drop(backend);
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    [at(50), at(99), done as f64 / span.as_secs_f64() / 1.25]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().map_or(2.0, |text| text.parse().unwrap());
    let rounds: usize = arguments.next().map_or(5, |text| text.parse().unwrap());
    let span = Duration::from_secs_f64(seconds);
    let mut found = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for (place, pages) in [HOSTILE, POLITE].into_iter().enumerate() {
            let [p50, p99, rate] = run(pages, span);
            note(format_args!(
                "round {round}: {pages} grants: {p50:.1} {p99:.1} us, other {rate:.0}/s"
            ));
            found[place].push([p50, p99]);
        }
    }
    for (place, name, bar) in [(0, "p50", None), (1, "p99", Some(1.2))] {
        let [ours, peer] =
            [0, 1].map(|n| median(found[n].iter().map(|v: &[f64; 2]| v[place]).collect()));
        let ratio = ours / peer;
        let (text, ok) = match bar {
            Some(most) => (format!("<={most:.2}x"), ratio <= most),
            None => ("-".to_owned(), true),
        };
        let verdict = if ok { "ok" } else { "short" };
        result(format_args!(
            "xen_shm_cap_neighbour_{name}_us {ours:.1} {peer:.1} {ratio:.3} {text} {verdict}"
        ));
    }
}
