//! The places of a driver in a packed ring.
//!
//! Source: "Virtual I/O Device (VIRTIO) Version 1.2", 2.8.

use ebb_guest_ring::{full_barrier, read_barrier, write_barrier};

use super::driver::{Buffer, Driver};
use super::guest::Guest;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A descriptor of the ring, and the parity of its lap.
#[derive(Clone, Copy, Debug)]
struct Place {
    index: u16,
    wrap: bool,
}

impl Place {
    fn step(self, size: u16) -> Place {
        match self.index + 1 {
            index if index == size => Place { index: 0, wrap: !self.wrap },
            index => Place { index, wrap: self.wrap },
        }
    }

    fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }
}

/// See the module.
#[derive(Debug)]
pub struct PackedPlaces {
    size: u16,
    next: Place,
    used: Place,
    /// Flags of heads that are not visible yet, and all places that were filled.
    heads: Vec<(u16, u16)>,
    filled: Vec<Place>,
}

impl PackedPlaces {
    pub fn new(size: u16) -> PackedPlaces {
        let start = Place { index: 0, wrap: true };
        PackedPlaces { size, next: start, used: start, heads: Vec::new(), filled: Vec::new() }
    }

    /// What `SET_VRING_BASE` says.
    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    /// Puts a chain into the ring at `ring`: its buffers, or one table of them.
    pub fn add(&mut self, guest: &Guest, ring: u64, id: u16, buffers: &[Buffer], table: bool) {
        for (number, buffer) in buffers.iter().enumerate() {
            let place = self.next;
            let kind = if table { INDIRECT } else { u16::from(buffer.2) * WRITE };
            let next = if number + 1 < buffers.len() { NEXT } else { 0 };
            let flags = kind | next | if place.wrap { AVAILABLE } else { USED };
            let at = ring + 16 * u64::from(place.index);
            // The flags of the head are stored last.
            let shown = if number == 0 { guest.load_u16(at + 14) } else { flags };
            guest.write(at, &buffer.0.to_le_bytes());
            guest.write(at + 8, &buffer.1.to_le_bytes());
            guest.store_u16(at + 12, id);
            guest.store_u16(at + 14, shown);
            if number == 0 {
                self.heads.push((place.index, flags));
            }
            self.filled.push(place);
            self.next = place.step(self.size);
        }
    }

    /// An indirect table, whose entries need no flags but that of direction.
    pub fn table(guest: &Guest, at: u64, buffers: &[Buffer]) {
        for (number, buffer) in buffers.iter().enumerate() {
            let at = at + 16 * number as u64;
            // The flags are where a split table has the link.
            Driver::descriptor(guest, at, *buffer, 0, u16::from(buffer.2) * WRITE);
        }
    }

    /// Makes chains visible; true if the device, whose event suppression is at `event`, has to be notified.
    pub fn publish(&mut self, guest: &Guest, ring: u64, event: u64, event_idx: bool) -> bool {
        write_barrier();
        for (index, flags) in self.heads.drain(..) {
            guest.store_u16(ring + 16 * u64::from(index) + 14, flags);
        }
        full_barrier();
        let filled = std::mem::take(&mut self.filled);
        match guest.load_u16(event + 2) {
            1 => false,
            2 if event_idx => {
                let event = guest.load_u16(event);
                filled.iter().any(|place| place.bits() == event)
            }
            _ => !filled.is_empty(),
        }
    }

    pub fn has_used(&self, guest: &Guest, ring: u64) -> bool {
        let flags = guest.load_u16(ring + 16 * u64::from(self.used.index) + 14);
        let (available, used) = (flags & AVAILABLE != 0, flags & USED != 0);
        available == used && used == self.used.wrap
    }

    /// The id and the length of the next completion, which is there.
    pub fn take(&self, guest: &Guest, ring: u64) -> (u16, u32) {
        read_barrier();
        let bytes = guest.read(ring + 16 * u64::from(self.used.index) + 8, 6);
        let len = u32::from_le_bytes(bytes[..4].try_into().unwrap());
        (u16::from_le_bytes(bytes[4..].try_into().unwrap()), len)
    }

    /// Passes over a completion of this many descriptors.
    pub fn pass(&mut self, count: usize) {
        (0..count).for_each(|_| self.used = self.used.step(self.size));
    }

    /// Asks for a notification of the next completion.
    pub fn arm(&self, guest: &Guest, event: u64, event_idx: bool) {
        if event_idx {
            guest.store_u16(event, self.used.bits());
        }
        guest.store_u16(event + 2, if event_idx { 2 } else { 0 });
    }
}
