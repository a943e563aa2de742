//! The memory of a guest. It outlives connections.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ebb_guest_ring::SharedMemory;
use ebb_vhost_proto::MemoryRegion;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Where the rings of queue 0 are, in guest addresses; those of others follow at [`STRIDE`].
pub const RINGS: u64 = 0x10_0000;
pub const STRIDE: u64 = 0x8_0000;
/// Memory for data: it begins in a region that is adjacent to the one with the rings.
pub const DATA: u64 = 0x1000_0000;
/// Memory behind a gap.
pub const FAR: u64 = 0x1_0000_0000;
/// What the VMM adds to a guest address.
pub const USER: u64 = 0x7f00_0000_0000;
const DATA_BYTES: u64 = 8 << 20;
const FAR_BYTES: u64 = 1 << 20;

/// One region.
#[derive(Clone)]
pub struct GuestRegion {
    pub place: MemoryRegion,
    pub file: Arc<OwnedFd>,
    pub memory: Arc<SharedMemory>,
}

impl GuestRegion {
    pub fn new(guest_address: u64, bytes: u64) -> GuestRegion {
        let file = memfd(bytes);
        let memory = SharedMemory::map(file.as_fd(), 0, bytes as usize, Arc::default()).unwrap();
        let user_address = guest_address + USER;
        let place = MemoryRegion { guest_address, bytes, user_address, mmap_offset: 0 };
        GuestRegion { place, file: Arc::new(file), memory: Arc::new(memory) }
    }
}

/// A file in memory.
pub fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

/// A guest's memory: the rings end where the data begins.
#[derive(Clone)]
pub struct Guest {
    pub regions: Vec<GuestRegion>,
}

impl Guest {
    /// With room for the rings of this many queues.
    pub fn new(queues: usize) -> Guest {
        let rings = STRIDE * queues as u64;
        let places = [(DATA - rings, rings), (DATA, DATA_BYTES), (FAR, FAR_BYTES)];
        Guest { regions: places.map(|(at, bytes)| GuestRegion::new(at, bytes)).to_vec() }
    }

    /// The guest address of a queue's rings.
    pub fn rings(queue: usize) -> u64 {
        DATA - STRIDE * (queue as u64 + 1)
    }

    /// The region of an address, and the offset in it.
    pub fn at(&self, address: u64) -> (&SharedMemory, usize) {
        let contains = |region: &&GuestRegion| {
            let MemoryRegion { guest_address, bytes, .. } = region.place;
            (guest_address..guest_address + bytes).contains(&address)
        };
        let region = self.regions.iter().find(contains).expect("an address of the guest");
        (&region.memory, (address - region.place.guest_address) as usize)
    }

    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let (memory, at) = self.at(address + done as u64);
            let now = (len - done).min(memory.bytes() - at);
            assert!(memory.read(at, &mut bytes[done..done + now]));
            done += now;
        }
        bytes
    }

    pub fn write(&self, address: u64, mut bytes: &[u8]) {
        let mut address = address;
        while !bytes.is_empty() {
            let (memory, at) = self.at(address);
            let (now, rest) = bytes.split_at(bytes.len().min(memory.bytes() - at));
            assert!(memory.write(at, now));
            address += now.len() as u64;
            bytes = rest;
        }
    }

    pub fn load_u16(&self, address: u64) -> u16 {
        let (memory, at) = self.at(address);
        memory.load_u16(at)
    }

    pub fn store_u16(&self, address: u64, value: u16) {
        let (memory, at) = self.at(address);
        memory.store_u16(at, value);
    }
}
