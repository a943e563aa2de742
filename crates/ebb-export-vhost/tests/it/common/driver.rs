//! A guest's driver of one virtqueue, split or packed. The head of a chain in a packed ring is its id.

use std::collections::BTreeMap;

use ebb_guest_ring::{full_barrier, is_event_due, read_barrier, write_barrier};

use super::guest::{DATA, Guest};
use super::packed::PackedPlaces;

/// Status bytes of requests.
pub mod status {
    pub const OK: u8 = 0;
    pub const IO_ERROR: u8 = 1;
    pub const UNSUPPORTED: u8 = 2;
    /// What the driver writes before a request.
    pub const NONE: u8 = 0xee;
}

/// Requests.
pub mod kind {
    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
/// A header and a status byte for each head.
const SLOTS: u64 = 0x10000;
const SLOT: u64 = 32;
/// A table for each head.
const TABLES: u64 = 0x20000;
const TABLE_ENTRIES: u64 = 64;
/// Room for data of each head, in the region with data.
pub const ROOM: u64 = 32 << 10;

/// A descriptor: guest address, bytes, whether the device writes it.
pub type Buffer = (u64, u32, bool);

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub head: u16,
    /// As the used ring has it.
    pub len: u32,
    pub status: u8,
}

/// See the module.
pub struct Driver {
    pub queue: usize,
    pub size: u16,
    pub event_idx: bool,
    pub indirect: bool,
    /// The ring is packed.
    pub packed: Option<PackedPlaces>,
    free: Vec<u16>,
    /// Heads in flight, with their descriptors.
    pub busy: BTreeMap<u16, Vec<u16>>,
    /// The next available index, and as the device was notified of.
    pub available: u16,
    notified: u16,
    /// The used elements that were taken.
    pub taken: u16,
}

impl Driver {
    pub fn new(queue: usize, size: u16) -> Driver {
        Driver {
            queue,
            size,
            event_idx: false,
            indirect: false,
            packed: None,
            free: (0..size).rev().collect(),
            busy: BTreeMap::new(),
            available: 0,
            notified: 0,
            taken: 0,
        }
    }

    fn base(&self) -> u64 {
        Guest::rings(self.queue)
    }

    /// Guest addresses: descriptors, available ring, used ring.
    pub fn rings(&self) -> [u64; 3] {
        [self.base(), self.base() + AVAILABLE, self.base() + USED]
    }

    /// Guest addresses of the header and the status of a head.
    pub fn slot(&self, head: u16) -> (u64, u64) {
        let at = self.base() + SLOTS + SLOT * u64::from(head);
        (at, at + 16)
    }

    /// Room for the data of a head.
    pub fn data(&self, head: u16) -> u64 {
        DATA + (u64::from(head) + 64 * self.queue as u64) % 256 * ROOM
    }

    pub fn room(&self) -> usize {
        let filled: usize = self.busy.values().map(Vec::len).sum();
        self.free.len().min(usize::from(self.size) - filled)
    }

    /// The head that the next request gets.
    pub fn next_head(&self) -> u16 {
        *self.free.last().expect("a free descriptor")
    }

    /// Zeroes the rings, as a guest does that resets the device.
    pub fn reset(&mut self, guest: &Guest) {
        guest.write(self.base(), &vec![0; SLOTS as usize]);
        let (event_idx, indirect) = (self.event_idx, self.indirect);
        *self = Driver { event_idx, indirect, ..Driver::new(self.queue, self.size) };
    }

    pub fn descriptor(guest: &Guest, at: u64, (address, len, _): Buffer, flags: u16, next: u16) {
        let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        guest.write(at, &address.to_le_bytes());
        guest.write(at + 8, &word.to_le_bytes());
    }

    fn table(guest: &Guest, at: u64, buffers: &[Buffer], places: &[u16]) {
        for (number, buffer) in buffers.iter().enumerate() {
            let next = places.get(number + 1).copied();
            let flags = u16::from(next.is_some()) | u16::from(buffer.2) << 1;
            let at = at + 16 * u64::from(places[number]);
            Driver::descriptor(guest, at, *buffer, flags, next.unwrap_or_default());
        }
    }

    /// Puts a chain of these buffers into the ring, without making it visible.
    pub fn add(&mut self, guest: &Guest, buffers: &[Buffer]) -> u16 {
        let base = self.base();
        if let Some(packed) = &mut self.packed {
            let id = self.free.pop().expect("room");
            let table = base + TABLES + u64::from(id) * TABLE_ENTRIES * 16;
            let whole = [(table, 16 * buffers.len() as u32, false)];
            let shown = if self.indirect { &whole } else { buffers };
            if self.indirect {
                PackedPlaces::table(guest, table, buffers);
            }
            packed.add(guest, base, id, shown, self.indirect);
            self.busy.insert(id, vec![id; shown.len()]);
            let filled: usize = self.busy.values().map(Vec::len).sum();
            assert!(filled <= usize::from(self.size), "room");
            return id;
        }
        let count = if self.indirect { 1 } else { buffers.len() };
        let places: Vec<u16> = (0..count).map(|_| self.free.pop().expect("room")).collect();
        let head = places[0];
        if self.indirect {
            let table = self.base() + TABLES + u64::from(head) * TABLE_ENTRIES * 16;
            let all: Vec<u16> = (0..buffers.len() as u16).collect();
            Driver::table(guest, table, buffers, &all);
            let whole = (table, 16 * buffers.len() as u32, false);
            let at = self.base() + 16 * u64::from(head);
            Driver::descriptor(guest, at, whole, 4, 0);
        } else {
            Driver::table(guest, self.base(), buffers, &places);
        }
        self.busy.insert(head, places);
        self.offer(guest, head);
        head
    }

    /// Puts a head into the available ring, without making it visible.
    pub fn offer(&mut self, guest: &Guest, head: u16) {
        let element = self.rings()[1] + 4 + 2 * u64::from(self.available % self.size);
        guest.store_u16(element, head);
        self.available = self.available.wrapping_add(1);
    }

    /// Puts a request into the ring: its data is in `data`.
    pub fn request(&mut self, guest: &Guest, kind: u32, sector: u64, data: &[Buffer]) -> u16 {
        let (header, status) = self.slot(self.next_head());
        self.header(guest, self.next_head(), kind, sector);
        let mut buffers = vec![(header, 16, false)];
        buffers.extend_from_slice(data);
        buffers.push((status, 1, true));
        self.add(guest, &buffers)
    }

    /// Writes the header of the request of a head.
    pub fn header(&self, guest: &Guest, head: u16, kind: u32, sector: u64) {
        let (header, at) = self.slot(head);
        guest.write(header, &u64::from(kind).to_le_bytes());
        guest.write(header + 8, &sector.to_le_bytes());
        guest.write(at, &[status::NONE]);
    }

    /// Makes requests visible; true if the device has to be notified.
    pub fn publish(&mut self, guest: &Guest) -> bool {
        let [ring, available, used] = self.rings();
        if let Some(packed) = &mut self.packed {
            return packed.publish(guest, ring, used, self.event_idx);
        }
        write_barrier();
        guest.store_u16(available + 2, self.available);
        full_barrier();
        let (old, new) = (self.notified, self.available);
        self.notified = new;
        if self.event_idx {
            let event = guest.load_u16(used + 4 + 8 * u64::from(self.size));
            is_event_due(event.wrapping_add(1), old, new)
        } else {
            guest.load_u16(used) & 1 == 0
        }
    }

    /// The used index.
    pub fn used(&self, guest: &Guest) -> u16 {
        guest.load_u16(self.rings()[2] + 2)
    }

    /// Whether a completion can be taken.
    pub fn has_used(&self, guest: &Guest) -> bool {
        match &self.packed {
            Some(packed) => packed.has_used(guest, self.base()),
            None => self.used(guest) != self.taken,
        }
    }

    /// What `SET_VRING_BASE` says, if the device has completed all it has taken.
    pub fn ring_base(&self, guest: &Guest) -> u32 {
        self.packed.as_ref().map_or_else(|| self.used(guest).into(), PackedPlaces::base)
    }

    /// Asks for a notification of the next completion.
    pub fn arm(&self, guest: &Guest) {
        if let Some(packed) = &self.packed {
            packed.arm(guest, self.rings()[1], self.event_idx);
            return full_barrier();
        }
        if self.event_idx {
            guest.store_u16(self.rings()[1] + 4 + 2 * u64::from(self.size), self.taken);
        }
        full_barrier();
    }

    /// Takes a completion. Panics if the request is not in flight: it was completed twice.
    pub fn take(&mut self, guest: &Guest) -> Option<Done> {
        if !self.has_used(guest) {
            return None;
        }
        if let Some(packed) = &mut self.packed {
            let (id, len) = packed.take(guest, Guest::rings(self.queue));
            let places = self.busy.remove(&id);
            let places = places.unwrap_or_else(|| panic!("{id} was completed and not in flight"));
            packed.pass(places.len());
            self.free.push(id);
            let status = guest.read(self.slot(id).1, 1)[0];
            return Some(Done { head: id, len, status });
        }
        read_barrier();
        let element = self.rings()[2] + 4 + 8 * u64::from(self.taken % self.size);
        let bytes = guest.read(element, 8);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let head = word(0) as u16;
        let places = self.busy.remove(&head);
        let places =
            places.unwrap_or_else(|| panic!("head {head} was completed and not in flight"));
        self.free.extend(places.into_iter().rev());
        self.taken = self.taken.wrapping_add(1);
        let status = guest.read(self.slot(head).1, 1)[0];
        Some(Done { head, len: word(4), status })
    }
}
