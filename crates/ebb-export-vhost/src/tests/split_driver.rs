//! A correct driver of a split queue.

use super::driver::{Layout, Request, Requests};
use super::world::{Random, World};
use crate::chain::flag;

pub(super) struct SplitDriver {
    pub(super) requests: Requests,
    /// In random order, so that chains are not contiguous.
    free: Vec<u16>,
    /// By head, the descriptors of its chain.
    chains: Vec<Vec<u16>>,
    available: u16,
    published: u16,
    used: u16,
    random: Random,
}

impl SplitDriver {
    pub(super) fn new(world: &World, start: u16) -> SplitDriver {
        let [_, available, used] = world.rings();
        world.store_u16(available + 2, start);
        world.store_u16(used + 2, start);
        SplitDriver {
            requests: Requests::default(),
            free: (0..world.size).collect(),
            chains: vec![Vec::new(); world.size.into()],
            available: start,
            published: start,
            used: start,
            random: Random::new(77),
        }
    }

    pub(super) fn base(&self) -> u32 {
        self.available.into()
    }

    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn add(&mut self, world: &World, layout: Layout) {
        let [descriptors, available, _] = world.rings();
        let count = layout.descriptors();
        let pick = |_| {
            let at = self.random.below(self.free.len() as u64) as usize;
            self.free.swap_remove(at)
        };
        let chain: Vec<u16> = (0..count).map(pick).collect();
        let head = chain[0];
        let flags = |write: bool| if write { flag::WRITE } else { 0 };
        for (number, index) in chain.iter().enumerate() {
            let at = descriptors + 16 * u64::from(*index);
            // What is not used may be anything.
            let (next, link) = chain.get(number + 1).map_or((0, 999), |next| (flag::NEXT, *next));
            if number < layout.direct {
                let buffer = layout.buffers[number];
                let flags = flags(buffer.write) | next;
                world.descriptor(at, buffer.address, buffer.len, [flags, link]);
            } else {
                let rest = &layout.buffers[layout.direct..];
                let table = self.table(world, head, rest);
                world.descriptor(at, table, 16 * rest.len() as u32, [flag::INDIRECT, link]);
            }
        }
        let element = available + 4 + 2 * u64::from(self.available % world.size);
        world.store_u16(element, head);
        self.available = self.available.wrapping_add(1);
        self.chains[usize::from(head)] = chain;
        self.requests.add(head, layout);
    }

    /// Writes a table, whose entries are linked backwards from its second entry on.
    fn table(&self, world: &World, head: u16, buffers: &[super::driver::Buffer]) -> u64 {
        let table = world.table(head);
        let last = buffers.len() - 1;
        let place = |number: usize| if number == 0 { 0 } else { last + 1 - number };
        for (number, buffer) in buffers.iter().enumerate() {
            let at = table + 16 * place(number) as u64;
            let next = if number < last { flag::NEXT } else { 0 };
            let flags = next | if buffer.write { flag::WRITE } else { 0 };
            let link = if number < last { place(number + 1) as u16 } else { 0xffff };
            world.descriptor(at, buffer.address, buffer.len, [flags, link]);
        }
        table
    }

    pub(super) fn publish(&mut self, world: &World) -> bool {
        let [_, available, used] = world.rings();
        let (old, new) = (self.published, self.available);
        world.store_u16(available + 2, new);
        self.published = new;
        let count = new.wrapping_sub(old);
        if world.features.event_idx {
            let event = world.load_u16(used + 4 + 8 * u64::from(world.size));
            (0..count).any(|step| old.wrapping_add(step) == event)
        } else {
            count > 0 && world.load_u16(used) & 1 == 0
        }
    }

    pub(super) fn poll(&mut self, world: &World) -> Option<Request> {
        let [_, _, used] = world.rings();
        if world.load_u16(used + 2) == self.used {
            return None;
        }
        let element = used + 4 + 8 * u64::from(self.used % world.size);
        let (id, written) = (world.load_u32(element), world.load_u32(element + 4));
        self.used = self.used.wrapping_add(1);
        let id = u16::try_from(id).unwrap();
        self.free.append(&mut self.chains[usize::from(id)]);
        Some(self.requests.finish(id, written))
    }

    pub(super) fn arm(&mut self, world: &World) -> bool {
        let [_, available, used] = world.rings();
        if world.features.event_idx {
            world.store_u16(available + 4 + 2 * u64::from(world.size), self.used);
        } else {
            world.store_u16(available, 0);
        }
        world.load_u16(used + 2) != self.used
    }

    pub(super) fn disarm(&mut self, world: &World) {
        let [_, available, _] = world.rings();
        if !world.features.event_idx {
            world.store_u16(available, 1);
        }
    }
}
