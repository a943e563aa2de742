//! A guest's memory: two regions that are adjacent in the guest, and a third behind a gap.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ebb_guest_ring::SharedMemory;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
pub(super) use seeded::Random;

use crate::chain::Chain;
use crate::inflight::{QueueInflight, bytes_for};
use crate::memory::{GuestMemory, GuestSpan, Region};
use crate::ring_setup::{RingAddresses, RingFeatures, RingSetup, SetupFault};
use crate::virtqueue::Virtqueue;

/// Guest addresses, addresses of the VMM and sizes of the regions.
pub(super) const REGIONS: [(u64, u64, usize); 3] = [
    (0x10_0000, 0x7f00_0000_0000, 0x20_0000),
    (0x30_0000, 0x7e00_0000_0000, 0x10_0000),
    (0x1_0000_0000, 0x7f00_1000_0000, 0x10_0000),
];

/// Where things are, as bytes from the start of the first region on.
const DESCRIPTORS: u64 = 0x1000;
const DRIVER: u64 = 0x9000;
const DEVICE: u64 = 0xa000;
/// Tables of indirect descriptors, one for each head or id.
const TABLES: u64 = 0x2_0000;
/// Entries of each.
pub(super) const TABLE_ENTRIES: u64 = 160;

pub(super) fn memfd(bytes: usize) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes as u64).unwrap();
    fd
}

/// See the module.
pub(super) struct World {
    pub(super) memory: GuestMemory,
    pub(super) files: Vec<OwnedFd>,
    pub(super) inflight: Arc<SharedMemory>,
    pub(super) size: u16,
    pub(super) features: RingFeatures,
}

pub(super) fn guest_memory(files: &[OwnedFd]) -> GuestMemory {
    let lost = Arc::<std::sync::atomic::AtomicBool>::default();
    let region = |(fd, &(guest, user, bytes)): (&OwnedFd, &(u64, u64, usize))| {
        let memory = SharedMemory::map(fd.as_fd(), 0, bytes, lost.clone()).unwrap();
        Arc::new(Region { guest, user, memory })
    };
    GuestMemory::new(files.iter().zip(&REGIONS).map(region).collect()).unwrap()
}

impl World {
    pub(super) fn new(size: u16, features: RingFeatures) -> World {
        let files: Vec<OwnedFd> = REGIONS.iter().map(|(_, _, bytes)| memfd(*bytes)).collect();
        let bytes = bytes_for(features.packed, 2, size);
        let inflight = SharedMemory::map(memfd(bytes).as_fd(), 0, bytes, Arc::default()).unwrap();
        let memory = guest_memory(&files);
        World { memory, files, inflight: Arc::new(inflight), size, features }
    }

    pub(super) fn addresses(&self) -> RingAddresses {
        let user = REGIONS[0].1;
        RingAddresses {
            descriptors: user + DESCRIPTORS,
            driver: user + DRIVER,
            device: user + DEVICE,
        }
    }

    /// Guest addresses of the rings.
    pub(super) fn rings(&self) -> [u64; 3] {
        [DESCRIPTORS, DRIVER, DEVICE].map(|at| REGIONS[0].0 + at)
    }

    /// The guest address of a table.
    pub(super) fn table(&self, number: u16) -> u64 {
        REGIONS[0].0 + TABLES + u64::from(number) * TABLE_ENTRIES * 16
    }

    /// The queue's region: that of the second queue.
    pub(super) fn queue_inflight(&self) -> QueueInflight {
        QueueInflight::find(&self.inflight, self.features.packed, 1, self.size).unwrap()
    }

    pub(super) fn try_queue(&self, base: u32, inflight: bool) -> Result<Virtqueue, SetupFault> {
        Virtqueue::new(RingSetup {
            memory: &self.memory,
            addresses: self.addresses(),
            size: self.size,
            features: self.features,
            base,
            inflight: inflight.then(|| self.queue_inflight()),
        })
    }

    /// Zeroes the rings and the inflight regions.
    pub(super) fn reset(&self) {
        let end = TABLES as usize;
        assert!(self.memory.regions()[0].memory.write(0, &vec![0; end]));
        assert!(self.inflight.write(0, &vec![0; self.inflight.bytes()]));
    }

    fn at(&self, address: u64, len: usize) -> (&Region, usize) {
        let span = self.memory.find(&Cell::new(0), address, len as u32).unwrap();
        (self.memory.region(span.region).unwrap(), span.offset)
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        let (region, at) = self.at(address, bytes.len());
        assert!(region.memory.write(at, bytes));
    }

    pub(super) fn store_u16(&self, address: u64, value: u16) {
        let (region, at) = self.at(address, 2);
        region.memory.store_u16(at, value);
    }

    pub(super) fn load_u16(&self, address: u64) -> u16 {
        let (region, at) = self.at(address, 2);
        region.memory.load_u16(at)
    }

    pub(super) fn load_u32(&self, address: u64) -> u32 {
        let (region, at) = self.at(address, 4);
        region.memory.load(at)
    }

    pub(super) fn store_u32(&self, address: u64, value: u32) {
        let (region, at) = self.at(address, 4);
        region.memory.store(at, value);
    }

    /// Writes a descriptor; `tail` is its last two numbers.
    pub(super) fn descriptor(&self, at: u64, address: u64, len: u32, tail: [u16; 2]) {
        let word = u64::from(len) | u64::from(tail[0]) << 32 | u64::from(tail[1]) << 48;
        self.write(at, &address.to_le_bytes());
        self.write(at + 8, &word.to_le_bytes());
    }

    /// Checks that spans are within their regions.
    pub(super) fn check_spans(&self, chain: &Chain) {
        for span in chain.readable.iter().chain(&chain.writable) {
            let region = self.memory.region(span.region).unwrap();
            assert!(span.len > 0 && span.offset + span.len as usize <= region.memory.bytes());
        }
        let sum = |spans: &[GuestSpan]| spans.iter().map(|span| u64::from(span.len)).sum::<u64>();
        let bytes = (chain.readable_bytes(), chain.writable_bytes());
        assert_eq!((sum(&chain.readable), sum(&chain.writable)), bytes);
    }

    /// Spans as guest addresses and lengths, those that are adjacent in the guest joined.
    pub(super) fn ranges(&self, spans: &[GuestSpan]) -> Vec<(u64, u64)> {
        let range = |span: &GuestSpan| {
            let region = self.memory.region(span.region).unwrap();
            (region.guest + span.offset as u64, u64::from(span.len))
        };
        join(spans.iter().map(range))
    }
}

/// Joins ranges that are adjacent, and leaves empty ones out.
pub(super) fn join(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (address, len) in ranges.filter(|(_, len)| *len > 0) {
        match joined.last_mut() {
            Some(last) if last.0 + last.1 == address => last.1 += len,
            _ => joined.push((address, len)),
        }
    }
    joined
}
