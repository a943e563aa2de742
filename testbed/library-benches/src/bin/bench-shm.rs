//! The throughput of many concurrent guests over shared memory: with persistent grants, and with copies
//! beyond the cap. Mapping and unmapping change page tables and interrupt the
//! processors that run the workers, as real ones do.
//!
//! One line a figure: `name ours peer ratio bar ok|short`. `bench-shm [SECONDS [ROUNDS]]`.

#![allow(clippy::unwrap_used, reason = "a bench")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_export_xen::abi::{Segment, op};
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_export_xen::{Backend, BackendOptions, DiskSpec, attach, device_number};
use ebb_io::Worker;
use ebb_store::{NullStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};
use library_benches::{median, note, result};

const GUESTS: [u16; 6] = [1, 2, 5, 8, 10, 16];
const DEPTH: usize = 32;
const SIZE: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Persistent,
    /// Persistent grants negotiated, but a cap of 0: as for a guest beyond the cap.
    PastCap,
}

/// 4 KiB reads per second of `guests` guests.
fn run(mode: Mode, guests: u16, span: Duration) -> f64 {
    let world = World::default();
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let workers: Vec<Worker> =
        (0..count).map(|n| Worker::start_alone(&format!("bench-{n}")).unwrap()).collect();
    let volumes = Volumes::default();
    let store = Store::Null(NullStore::new(SIZE));
    let options = VolumeOptions { shared: true, ..VolumeOptions::default() };
    volumes.add(Volume::new("null", store, options), Arc::default());
    let handles = workers.iter().map(Worker::handle).collect();
    let options = BackendOptions::new(Arc::new(world.clone()), handles, volumes);
    if mode == Mode::PastCap {
        options.parameters.max_persistent_grants.set(0);
    }
    let backend = Backend::start(options).unwrap();
    let stop = AtomicBool::new(false);
    let begun = Instant::now();
    let done: u64 = std::thread::scope(|scope| {
        let runs: Vec<_> = (1..=guests)
            .map(|number| {
                let (world, stop) = (&world, &stop);
                scope.spawn(move || {
                    let guest = world.guest(number, 256).unwrap();
                    let mut store = world.xenstore().unwrap();
                    let disk = DiskSpec { volume: "null", name: "xvdb", read_only: false };
                    attach(&mut *store, number, &disk).unwrap();
                    let wishes = FrontendConfig::default();
                    let device = device_number("xvdb").unwrap();
                    let mut front = Frontend::new(world, &guest, device, wishes);
                    front.connect().unwrap();
                    drive(&mut front, stop)
                })
            })
            .collect();
        std::thread::park_timeout(span);
        while begun.elapsed() < span {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        runs.into_iter().map(|run| run.join().unwrap()).sum()
    });
    let rate = done as f64 / begun.elapsed().as_secs_f64();
    drop(backend);
    rate
}

/// Keeps the ring full until stopped; returns the number of requests.
fn drive(front: &mut Frontend, stop: &AtomicBool) -> u64 {
    let pages = front.pages(DEPTH);
    let requests: Vec<_> = pages
        .iter()
        .map(|page| {
            let segment = Segment { gref: *page, first: 0, last: 7 };
            front.request(op::READ, u64::from(*page) * 8, &[segment]).1
        })
        .collect();
    let queue = &mut front.queues[0];
    let (mut done, mut next) = (0u64, 0usize);
    while !stop.load(Ordering::Relaxed) {
        while queue.room() > 0 {
            queue.put(requests[next % DEPTH]);
            next += 1;
        }
        queue.push();
        queue.wait().unwrap();
        done += 1;
        while queue.take().unwrap().is_some() {
            done += 1;
        }
    }
    while queue.room() < DEPTH {
        queue.wait().unwrap();
    }
    done
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().map_or(1.0, |text| text.parse().unwrap());
    let rounds: usize = arguments.next().map_or(3, |text| text.parse().unwrap());
    let span = Duration::from_secs_f64(seconds);
    let modes = [Mode::Persistent, Mode::PastCap];
    let mut rates: BTreeMap<(Mode, u16), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for guests in GUESTS {
            for mode in modes {
                let rate = run(mode, guests, span);
                note(format_args!("round {round}: {guests} guests {mode:?}: {rate:.0}/s"));
                rates.entry((mode, guests)).or_default().push(rate);
            }
        }
    }
    let at = |mode, guests| median(rates[&(mode, guests)].clone());
    let verdict = |ok: bool| if ok { "ok" } else { "short" };
    for (name, mode) in [("persistent", Mode::Persistent), ("past_cap", Mode::PastCap)] {
        let peak = GUESTS.iter().map(|guests| at(mode, *guests)).fold(0.0, f64::max);
        let last = at(mode, 16);
        let ok = verdict(last >= 0.95 * peak);
        result(format_args!(
            "xen_shm_{name}_at_16_of_peak {last:.0} {peak:.0} {:.2} >=0.95x {ok}",
            last / peak
        ));
    }
}
