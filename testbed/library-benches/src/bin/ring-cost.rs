//! What a request costs in a virtqueue: taking its chain, completing it, publishing the batch. Chains have three
//! descriptors: a header, 4 KiB, a status. The driver's side is not counted, nor is reading the clock. The figure is the
//! median of all batches: other work of the machine does not count.
//!
//! One line a figure: `format chain inflight batch ns`. `ring-cost [MILLIONS]`.
//!
//! The modules are private to `ebb-export-vhost`, and included by their paths; their unit tests run there.

#![cfg(not(test))]
#![allow(clippy::unwrap_used, dead_code, unexpected_cfgs, unreachable_pub, reason = "a bench")]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a bench")]

#[path = "../../../../crates/ebb-export-vhost/src/area.rs"]
mod area;
#[path = "../../../../crates/ebb-export-vhost/src/chain.rs"]
mod chain;
#[path = "../../../../crates/ebb-export-vhost/src/dirty_log.rs"]
mod dirty_log;
#[path = "../../../../crates/ebb-export-vhost/src/inflight.rs"]
mod inflight;
#[path = "../../../../crates/ebb-export-vhost/src/memory.rs"]
mod memory;
#[path = "../../../../crates/ebb-export-vhost/src/packed_inflight.rs"]
mod packed_inflight;
#[path = "../../../../crates/ebb-export-vhost/src/packed_ring.rs"]
mod packed_ring;
#[path = "../../../../crates/ebb-export-vhost/src/position.rs"]
mod position;
#[path = "../../../../crates/ebb-export-vhost/src/region_backing.rs"]
mod region_backing;
#[path = "../../../../crates/ebb-export-vhost/src/ring_setup.rs"]
mod ring_setup;
#[path = "../../../../crates/ebb-export-vhost/src/split_inflight.rs"]
mod split_inflight;
#[path = "../../../../crates/ebb-export-vhost/src/split_ring.rs"]
mod split_ring;
#[path = "../../../../crates/ebb-export-vhost/src/virtqueue.rs"]
mod virtqueue;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ring::SharedMemory;
use library_benches::result;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::chain::{Chain, Token, flag};
use crate::inflight::{QueueInflight, bytes_for};
use crate::memory::{GuestMemory, Region};
use crate::ring_setup::{RingAddresses, RingFeatures, RingSetup};
use crate::virtqueue::Virtqueue;

const SIZE: u16 = 256;
const USER: u64 = 0x7f00_0000_0000;
const BYTES: usize = 16 << 20;
const DRIVER: usize = 0x2000;
const DEVICE: usize = 0x3000;
const TABLES: usize = 0x1_0000;

fn memfd(bytes: usize) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

struct Bench {
    memory: GuestMemory,
    features: RingFeatures,
    indirect: bool,
    /// The next available index, or descriptor.
    next: u32,
}

impl Bench {
    fn put(&self, at: usize, address: u64, len: u32, tail: [u16; 2]) {
        let word = u64::from(len) | u64::from(tail[0]) << 32 | u64::from(tail[1]) << 48;
        assert!(self.memory.regions()[0].memory.write_words(at, &[address, word]));
    }

    /// Makes one request available, as a driver that reuses its descriptors in order.
    fn send(&mut self) {
        let size = u32::from(SIZE);
        let per_chain = if self.indirect { 1 } else { 3 };
        let number = self.next;
        let head = number * per_chain % size;
        let data = (0x10_0000 + u64::from(number % 512) * 8192, 4096u32);
        let parts = [
            (data.0 + 4096, 16, 0),
            (data.0, data.1, flag::WRITE),
            (data.0 + 4112, 1, flag::WRITE),
        ];
        let (packed, indirect) = (self.features.packed, self.indirect);
        let flags = |number: u32| {
            let lap =
                (u64::from(self.next) * u64::from(per_chain) + u64::from(number)) / u64::from(size);
            if lap.is_multiple_of(2) { 1u16 << 7 } else { 1 << 15 }
        };
        for (index, (address, len, write)) in parts.into_iter().enumerate() {
            let index = index as u32;
            let next = if index < 2 { flag::NEXT } else { 0 };
            let at = (head + index) % size;
            let table = TABLES + head as usize * 64 + 16 * index as usize;
            match (packed, indirect) {
                (false, true) => self.put(table, address, len, [write | next, index as u16 + 1]),
                (true, true) => self.put(table, address, len, [0, write]),
                (false, false) => {
                    let link = ((at + 1) % size) as u16;
                    self.put(16 * at as usize, address, len, [write | next, link]);
                }
                (true, false) => {
                    let flags = write | next | flags(index);
                    self.put(16 * at as usize, address, len, [head as u16, flags]);
                }
            }
        }
        let table = (TABLES + head as usize * 64) as u64;
        match (packed, indirect) {
            (false, true) => self.put(16 * head as usize, table, 48, [flag::INDIRECT, 0]),
            (true, true) => {
                self.put(16 * head as usize, table, 48, [head as u16, flag::INDIRECT | flags(0)]);
            }
            _ => {}
        }
        let memory = &self.memory.regions()[0].memory;
        if !packed {
            memory.store_u16(DRIVER + 4 + 2 * (number % size) as usize, head as u16);
        }
        self.next += 1;
        if !packed {
            memory.store_u16(DRIVER + 2, self.next as u16);
        }
    }
}

/// Nanoseconds of a request.
fn run(packed: bool, indirect: bool, inflight: bool, batch: usize, requests: usize) -> f64 {
    let memory = SharedMemory::map(memfd(BYTES).as_fd(), 0, BYTES, Arc::default()).unwrap();
    let region = Arc::new(Region { guest: 0, user: USER, memory });
    let memory = GuestMemory::new(vec![region]).unwrap();
    let features = RingFeatures { packed, indirect: true, event_idx: true };
    let mut bench = Bench { memory, features, indirect, next: 0 };
    let bytes = bytes_for(packed, 1, SIZE);
    let noted =
        Arc::new(SharedMemory::map(memfd(bytes).as_fd(), 0, bytes, Arc::default()).unwrap());
    let setup = RingSetup {
        memory: &bench.memory,
        addresses: RingAddresses {
            descriptors: USER,
            driver: USER + DRIVER as u64,
            device: USER + DEVICE as u64,
        },
        size: SIZE,
        features,
        base: if packed { 1 << 15 | 1 << 31 } else { 0 },
        inflight: inflight.then(|| QueueInflight::find(&noted, packed, 0, SIZE).unwrap()),
    };
    let mut queue = Virtqueue::new(setup).unwrap();
    let (mut chain, mut tokens) = (Chain::default(), Vec::<Token>::new());
    let (mut spent, mut bytes) = (Vec::with_capacity(requests / batch), 0);
    for _ in 0..requests / batch {
        (0..batch).for_each(|_| bench.send());
        let start = Instant::now();
        assert!(queue.waiting().unwrap() >= batch as u32);
        while let Some(token) = queue.take(&bench.memory, &mut chain).unwrap() {
            bytes += chain.readable_bytes() + chain.writable_bytes();
            tokens.push(token);
        }
        assert_eq!(tokens.len(), batch);
        for token in tokens.drain(..) {
            queue.complete(token, 4097);
        }
        std::hint::black_box(queue.publish());
        spent.push(start.elapsed());
    }
    assert_eq!(bytes, (requests / batch * batch) as u64 * 4113);
    median(spent).saturating_sub(clock_cost()).as_nanos() as f64 / batch as f64
}

fn median(mut times: Vec<Duration>) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

fn clock_cost() -> Duration {
    median((0..100_000).map(|_| Instant::now().elapsed()).collect())
}

fn main() {
    let millions = std::env::args().nth(1).map_or(2, |count| count.parse().unwrap());
    for (packed, inflight) in [(false, false), (false, true), (true, false), (true, true)] {
        for (indirect, batch) in [false, true].into_iter().flat_map(|i| [1, 16, 32].map(|b| (i, b)))
        {
            let ns = run(packed, indirect, inflight, batch, millions * 1_000_000);
            let format = if packed { "packed" } else { "split" };
            let chain = if indirect { "indirect" } else { "direct" };
            let inflight = if inflight { "inflight" } else { "-" };
            result(format_args!("{format} {chain} {inflight} {batch} {ns:.1}"));
        }
    }
}
