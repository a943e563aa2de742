//! The region of a packed queue: copies of the descriptors in flight, since the ring's own are overwritten, and a list of
//! free entries.
//!
//! Invariants
//! - Every entry is in the free list, or in one chain in flight.
//! - What changes the list and the used position together is done in two steps: first the new values beside the old ones,
//!   then, after the store to the ring, the old ones. A successor sees by the ring which of them hold.
//! - Both numbers of a pair are in one word, and change with one store.
//! - Chains are retired one by one: used descriptors behind the first one of a batch would be seen by the driver although
//!   a successor has given up the batch.

use ebb_guest_ring::{SharedMemory, write_barrier};

use crate::area::Area;
use crate::chain::Descriptor;
use crate::inflight::{
    InflightFault, PACKED_LAYOUT, QueueInflight, VERSION, in_order, quarters, word_of,
};
use crate::position::Position;

/// Header: features (u64); version, size, `free_head`, `old_free_head`; `used_idx`,
/// `old_used_idx` (u16), `used_wrap_counter`, `old_used_wrap_counter` (u8); padding. Entry: inflight (u8), padding, `next`,
/// `last`, `num` (u16); counter (u64); id, flags (u16), len (u32); address (u64).
const FREE: usize = 8;
const USED: usize = 16;
const NEXT: usize = 2;
const COUNTER: usize = 8;
const DESCRIPTOR: usize = 16;
const ADDRESS: usize = 24;

/// A chain in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    last: u16,
    count: u16,
}

/// What a predecessor had in flight.
#[derive(Debug)]
pub(crate) struct PackedResume {
    pub(crate) used: Position,
    /// Descriptors in flight.
    pub(crate) held: u16,
    /// Their chains, the next one to be taken last.
    pub(crate) entries: Vec<u16>,
}

/// See the module. Of the region only descriptors are read.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    area: Area<SharedMemory>,
    size: u16,
    counter: u64,
    used: Position,
    /// The first free entry, or the size.
    free: u16,
    /// The next entry of the list, or of the chain.
    next: Box<[u16]>,
    /// By the first entry of each chain.
    held: Box<[Held]>,
}

#[inline]
fn place(entry: u16) -> usize {
    PACKED_LAYOUT.0 + PACKED_LAYOUT.1 * usize::from(entry)
}

/// The word of the free list: its first entry, before and after the change.
#[inline]
fn store_free(area: &Area<SharedMemory>, size: u16, new: u16, old: u16) {
    area.store_u64(FREE, word_of([VERSION, size, new, old]));
}

/// The word of the used position, before and after the change.
#[inline]
fn store_used(area: &Area<SharedMemory>, new: Position, old: Position) {
    let wraps = u16::from(new.wrap) | u16::from(old.wrap) << 8;
    area.store_u64(USED, word_of([new.index, old.index, wraps, 0]));
}

/// Notes that an entry is in the free list or in a chain: it is in one place only.
fn see(seen: &mut [bool], entry: u16) -> Result<(), InflightFault> {
    match seen.get_mut(usize::from(entry)) {
        Some(seen) if !*seen => {
            *seen = true;
            Ok(())
        }
        _ => Err(InflightFault::Corrupt),
    }
}

impl PackedInflight {
    /// Opens the region of a queue. `used` is its used position if the region was not in use, `flags` tells the flags of a
    /// descriptor of the ring. Returns what was in flight if the region was in use; else it is initialised.
    pub(crate) fn open(
        region: QueueInflight,
        size: u16,
        used: Position,
        flags: impl FnOnce(u16) -> u16,
    ) -> Result<(PackedInflight, Option<PackedResume>), InflightFault> {
        let QueueInflight { area, .. } = region;
        let [version, entries, free, old_free] = quarters(area.load_u64(FREE));
        let next = (1..=size).collect();
        let held = vec![Held::default(); size.into()].into();
        let mut this = PackedInflight { area, size, counter: 0, used, free: 0, next, held };
        if version == 0 {
            if used.index >= size {
                return Err(InflightFault::Corrupt);
            }
            this.initialize();
            return Ok((this, None));
        }
        if version != VERSION {
            return Err(InflightFault::Version);
        }
        if entries != size {
            return Err(InflightFault::Size);
        }
        let [index, old_index, wraps, _] = quarters(this.area.load_u64(USED));
        let new = Position { index, wrap: wraps & 1 != 0 };
        let old = Position { index: old_index, wrap: wraps >> 8 & 1 != 0 };
        if new.index >= size || old.index >= size {
            return Err(InflightFault::Corrupt);
        }
        // The driver has got what was being retired if the descriptor is not as the driver had written it.
        let published = new != old && !old.is_available(flags(old.index));
        (this.free, this.used) = if published { (free, new) } else { (old_free, old) };
        let resumed = this.read_entries()?;
        write_barrier();
        store_free(&this.area, size, this.free, this.free);
        write_barrier();
        store_used(&this.area, this.used, this.used);
        Ok((this, Some(resumed)))
    }

    fn initialize(&mut self) {
        for entry in 0..self.size {
            self.area.store_u64(place(entry), word_of([0, entry + 1, 0, 0]));
        }
        self.area.store_u64(0, 0);
        store_used(&self.area, self.used, self.used);
        self.area.store_u64(USED + 8, 0);
        write_barrier();
        store_free(&self.area, self.size, 0, 0);
    }

    /// Reads and checks the free list and the chains in flight.
    fn read_entries(&mut self) -> Result<PackedResume, InflightFault> {
        let size = self.size;
        let mut seen = vec![false; size.into()];
        let (mut at, mut free) = (self.free, 0);
        while at < size {
            see(&mut seen, at)?;
            let [inflight, next, ..] = quarters(self.area.load_u64(place(at)));
            if inflight & 0xff != 0 {
                // A predecessor died while it took the chain, or after it had published it.
                self.area.store_u16(place(at), 0);
            }
            self.next[usize::from(at)] = next;
            (at, free) = (next, free + 1);
        }
        let (mut entries, mut held) = (Vec::new(), 0u16);
        let mut marked = Vec::new();
        for entry in 0..size {
            let [inflight, _, last, count] = quarters(self.area.load_u64(place(entry)));
            if inflight & 0xff != 0 && !seen[usize::from(entry)] {
                marked.push((entry, Held { last, count }));
            }
        }
        for (entry, chain) in marked {
            let (mut at, mut last) = (entry, entry);
            for number in 0..chain.count {
                see(&mut seen, at)?;
                last = at;
                if number + 1 < chain.count {
                    let [_, next, ..] = quarters(self.area.load_u64(place(at)));
                    self.next[usize::from(at)] = next;
                    at = next;
                }
            }
            if chain.count == 0 || last != chain.last {
                return Err(InflightFault::Corrupt);
            }
            self.held[usize::from(entry)] = chain;
            // Each entry is in one chain: no more than the size.
            held += chain.count;
            entries.push((self.area.load_u64(place(entry) + COUNTER), entry));
        }
        if free + held != size {
            return Err(InflightFault::Corrupt);
        }
        let (entries, counter) = in_order(entries);
        self.counter = counter;
        Ok(PackedResume { used: self.used, held, entries })
    }

    /// Descriptors of a chain in flight.
    pub(crate) fn held(&self, entry: u16) -> u16 {
        self.held[usize::from(entry)].count
    }

    /// The descriptors of a chain in flight, as the peer has them now.
    pub(crate) fn descriptors(&self, entry: u16) -> impl Iterator<Item = Descriptor> + '_ {
        let mut at = entry;
        (0..self.held(entry)).map(move |_| {
            let [id, flags, ..] = quarters(self.area.load_u64(place(at) + DESCRIPTOR));
            let len = self.area.load_u32(place(at) + DESCRIPTOR + 4);
            let address = self.area.load_u64(place(at) + ADDRESS);
            at = self.next[usize::from(at)];
            Descriptor { address, len, flags, link: id }
        })
    }

    /// Notes a chain that is being taken; no more descriptors are in flight than the queue has. Returns its first entry.
    #[inline]
    pub(crate) fn begin(&mut self, descriptors: &[Descriptor]) -> u16 {
        let entry = self.free;
        let (mut at, mut last, mut count) = (entry, entry, 0);
        for descriptor in descriptors {
            let Descriptor { address, len, flags, link } = *descriptor;
            let word = u64::from(link) | u64::from(flags) << 16 | u64::from(len) << 32;
            self.area.store_u64(place(at) + DESCRIPTOR, word);
            self.area.store_u64(place(at) + ADDRESS, address);
            last = at;
            at = self.next[usize::from(at)];
            count += 1;
        }
        self.held[usize::from(entry)] = Held { last, count };
        self.area.store_u64(place(entry) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        write_barrier();
        let next = self.next[usize::from(entry)];
        self.area.store_u64(place(entry), word_of([1, next, last, count]));
        write_barrier();
        store_free(&self.area, self.size, at, at);
        self.free = at;
        entry
    }

    /// Notes that a chain is used, after which the used position is `used`. `publish` has the driver see it.
    #[inline]
    pub(crate) fn retire(&mut self, entry: u16, used: Position, publish: impl FnOnce()) {
        let last = self.held[usize::from(entry)].last;
        self.next[usize::from(last)] = self.free;
        self.area.store_u16(place(last) + NEXT, self.free);
        store_free(&self.area, self.size, entry, self.free);
        write_barrier();
        store_used(&self.area, used, self.used);
        write_barrier();
        publish();
        write_barrier();
        self.area.store_u16(place(entry), 0);
        write_barrier();
        store_free(&self.area, self.size, entry, entry);
        write_barrier();
        store_used(&self.area, used, used);
        (self.free, self.used) = (entry, used);
    }
}
