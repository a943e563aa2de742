//! A correct driver of a packed queue.

use super::driver::{Layout, Request, Requests};
use super::world::{Random, World};
use crate::chain::flag;

const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A place in the ring, with the driver's wrap counter.
#[derive(Clone, Copy, PartialEq, Eq)]
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
        self.index | if self.wrap { 1 << 15 } else { 0 }
    }
}

pub(super) struct PackedDriver {
    pub(super) requests: Requests,
    room: usize,
    /// In random order.
    free_ids: Vec<u16>,
    /// Descriptors by id.
    counts: Vec<u16>,
    next: Place,
    used: Place,
    /// Flags of heads that are not yet written, and all places filled since the last publication.
    heads: Vec<(u16, u16)>,
    filled: Vec<Place>,
    random: Random,
}

impl PackedDriver {
    /// `start`: the index, and in bit 15 that the ring is in an odd lap.
    pub(super) fn new(world: &World, start: u16) -> PackedDriver {
        let place = Place { index: (start & 0x7fff) % world.size, wrap: start >> 15 == 0 };
        // As the laps before have left it: everything used.
        let [ring, ..] = world.rings();
        for index in 0..world.size {
            let lap = place.wrap == (index < place.index);
            let flags = if lap { AVAILABLE | USED } else { 0 };
            world.descriptor(ring + 16 * u64::from(index), 0, 0, [0, flags]);
        }
        PackedDriver {
            requests: Requests::default(),
            room: world.size.into(),
            free_ids: (0..world.size).collect(),
            counts: vec![0; world.size.into()],
            next: place,
            used: place,
            heads: Vec::new(),
            filled: Vec::new(),
            random: Random::new(78),
        }
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    pub(super) fn room(&self) -> usize {
        self.room
    }

    pub(super) fn add(&mut self, world: &World, layout: Layout) {
        let [ring, ..] = world.rings();
        let count = layout.descriptors();
        let at = self.random.below(self.free_ids.len() as u64) as usize;
        let id = self.free_ids.swap_remove(at);
        for number in 0..count {
            let place = self.next;
            let mark = if place.wrap { AVAILABLE } else { USED };
            let next = if number + 1 < count { flag::NEXT } else { 0 };
            let (address, len, flags) = if number < layout.direct {
                let buffer = layout.buffers[number];
                let write = if buffer.write { flag::WRITE } else { 0 };
                (buffer.address, buffer.len, write | next | mark)
            } else {
                let table = world.table(id);
                let rest = &layout.buffers[layout.direct..];
                for (entry, buffer) in rest.iter().enumerate() {
                    let flags = if buffer.write { flag::WRITE } else { 0 };
                    let at = table + 16 * entry as u64;
                    world.descriptor(at, buffer.address, buffer.len, [0x5555, flags]);
                }
                (table, 16 * rest.len() as u32, flag::INDIRECT | mark)
            };
            let at = ring + 16 * u64::from(place.index);
            // The flags of the head come last; the id counts in the last descriptor.
            let shown = if number == 0 { world.load_u16(at + 14) } else { flags };
            let id = if number + 1 < count { 0x1234 } else { id };
            world.descriptor(at, address, len, [id, shown]);
            if number == 0 {
                self.heads.push((place.index, flags));
            }
            self.filled.push(place);
            self.next = place.step(world.size);
        }
        self.room -= count;
        self.counts[usize::from(id)] = count as u16;
        self.requests.add(id, layout);
    }

    pub(super) fn publish(&mut self, world: &World) -> bool {
        let [ring, _, device] = world.rings();
        for (index, flags) in self.heads.drain(..) {
            world.store_u16(ring + 16 * u64::from(index) + 14, flags);
        }
        let filled = std::mem::take(&mut self.filled);
        let event = world.load_u16(device);
        match world.load_u16(device + 2) {
            1 => false,
            2 if world.features.event_idx => filled.iter().any(|place| place.bits() == event),
            _ => !filled.is_empty(),
        }
    }

    fn has_used(&self, world: &World) -> bool {
        let [ring, ..] = world.rings();
        let flags = world.load_u16(ring + 16 * u64::from(self.used.index) + 14);
        let (available, used) = (flags & AVAILABLE != 0, flags & USED != 0);
        available == used && used == self.used.wrap
    }

    pub(super) fn poll(&mut self, world: &World) -> Option<Request> {
        if !self.has_used(world) {
            return None;
        }
        let [ring, ..] = world.rings();
        let at = ring + 16 * u64::from(self.used.index);
        let (written, id) = (world.load_u32(at + 8), world.load_u16(at + 12));
        let flags = world.load_u16(at + 14);
        assert_eq!(flags & flag::WRITE != 0, written > 0);
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        (0..count).for_each(|_| self.used = self.used.step(world.size));
        self.room += usize::from(count);
        self.free_ids.push(id);
        Some(self.requests.finish(id, written))
    }

    pub(super) fn arm(&mut self, world: &World) -> bool {
        let [_, driver, _] = world.rings();
        let event = u32::from(self.used.bits()) | 2 << 16;
        world.store_u32(driver, if world.features.event_idx { event } else { 0 });
        self.has_used(world)
    }

    pub(super) fn disarm(&mut self, world: &World) {
        let [_, driver, _] = world.rings();
        world.store_u32(driver, 1 << 16);
    }
}
