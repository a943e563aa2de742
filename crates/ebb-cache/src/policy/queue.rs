//! First-in-first-out queues over slot numbers, linked within one table, so that any slot leaves in O(1).
//!
//! Invariants: a slot is in at most one queue, named in its entry; the links of a queue join all its
//! slots and no others; a queue's weight is the sum of theirs. An entry is 16 bytes.

use super::ghosts::Print;

/// No slot.
const NONE: u32 = u32::MAX;

const USES_MASK: u32 = 0b11;
const PLACE_SHIFT: u32 = 2;
const PLACE_MASK: u32 = 0b1100;
const ONCE: u32 = 0b1_0000;
const WEIGHT_SHIFT: u32 = 5;
const WEIGHT_MASK: u32 = 0b1110_0000;
const STAMP_SHIFT: u32 = 8;
/// Stamps count modulo this.
pub(super) const STAMPS: u32 = 1 << (32 - STAMP_SHIFT);

/// Uses that count, at most.
pub(super) const USES_MAX: u32 = USES_MASK;

/// Pages that one slot is taken to be worth, at most.
pub(super) const WEIGHT_MAX: u32 = 128;

/// Which queue a slot is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In none.
    Absent,
    /// Data that is expected to be used once, or was new for long and was not used again.
    Cold,
    /// New data on probation.
    Small,
    /// Data that was used again.
    Main,
}

/// What is known of a slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Neighbours in the queue.
    older: u32,
    newer: u32,
    /// Of the slot's key.
    pub(super) print: Print,
    /// Uses (2 bits), place (2), whether expected to be used once (1), weight as a power of two (3),
    /// stamp (24).
    state: u32,
}

impl Entry {
    const ABSENT: Entry = Entry { older: NONE, newer: NONE, print: Print::ZERO, state: 0 };

    /// Uses that counted, up to [`USES_MAX`].
    pub(super) fn uses(&self) -> u32 {
        self.state & USES_MASK
    }

    pub(super) fn set_uses(&mut self, uses: u32) {
        self.state = self.state & !USES_MASK | uses.min(USES_MAX);
    }

    pub(super) fn place(&self) -> Place {
        match (self.state & PLACE_MASK) >> PLACE_SHIFT {
            0 => Place::Absent,
            1 => Place::Cold,
            2 => Place::Small,
            _ => Place::Main,
        }
    }

    fn set_place(&mut self, place: Place) {
        let bits = match place {
            Place::Absent => 0,
            Place::Cold => 1,
            Place::Small => 2,
            Place::Main => 3,
        };
        self.state = self.state & !PLACE_MASK | bits << PLACE_SHIFT;
    }

    /// Pages it is worth: a power of two up to 128.
    pub(super) fn weight(&self) -> u32 {
        1 << ((self.state & WEIGHT_MASK) >> WEIGHT_SHIFT)
    }

    /// Whether it was expected to be used once when it was inserted.
    pub(super) fn once(&self) -> bool {
        self.state & ONCE != 0
    }

    /// Whether it was used so that it is worth keeping: data that was expected to be used once, twice.
    pub(super) fn kept(&self) -> bool {
        self.uses() > u32::from(self.once())
    }

    /// The first use of data that was expected to be used once: its window begins now.
    pub(super) fn consume(&mut self, stamp: u32) {
        self.state = self.state & ((1 << STAMP_SHIFT) - 1) & !USES_MASK | stamp << STAMP_SHIFT | 1;
    }

    /// From now on it is like any other, without uses.
    pub(super) fn forgive(&mut self) {
        self.state &= !(ONCE | USES_MASK);
    }

    /// When it was inserted or consumed: pages inserted until then, modulo [`STAMPS`].
    pub(super) fn stamp(&self) -> u32 {
        self.state >> STAMP_SHIFT
    }
}

/// The ends of one queue.
#[derive(Debug, Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: u32,
    /// Pages.
    weight: u64,
}

/// All entries, and the queues they are in.
#[derive(Debug)]
pub(super) struct Queues {
    entries: Vec<Entry>,
    /// By [`Place`]; that of the absent stays empty.
    ends: [Ends; 4],
}

/// A slot's index in a table.
fn index(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

fn number(place: Place) -> usize {
    match place {
        Place::Absent => 0,
        Place::Cold => 1,
        Place::Small => 2,
        Place::Main => 3,
    }
}

impl Queues {
    pub(super) fn with_capacity(slots: u32) -> Queues {
        let ends = Ends { oldest: NONE, newest: NONE, len: 0, weight: 0 };
        Queues { entries: vec![Entry::ABSENT; index(slots)], ends: [ends; 4] }
    }

    /// Length of the table, in slots.
    pub(super) fn capacity(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(NONE)
    }

    /// Makes the table long enough for `slot`.
    pub(super) fn reach(&mut self, slot: u32) {
        let least = index(slot).saturating_add(1);
        if least > self.entries.len() {
            self.entries.resize(least.next_power_of_two().max(64), Entry::ABSENT);
        }
    }

    /// Slots in a queue.
    pub(super) fn len(&self, place: Place) -> u32 {
        self.ends[number(place)].len
    }

    /// Pages in a queue.
    pub(super) fn weight(&self, place: Place) -> u64 {
        self.ends[number(place)].weight
    }

    /// The slot that has been in the queue for longest.
    pub(super) fn oldest(&self, place: Place) -> Option<u32> {
        Some(self.ends[number(place)].oldest).filter(|slot| *slot != NONE)
    }

    /// The slot that came into its queue right after `slot`.
    pub(super) fn newer(&self, slot: u32) -> Option<u32> {
        self.get(slot).map(|entry| entry.newer).filter(|slot| *slot != NONE)
    }

    pub(super) fn get(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(index(slot))
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(index(slot))
    }

    /// Where `slot` is.
    pub(super) fn place(&self, slot: u32) -> Place {
        self.get(slot).map_or(Place::Absent, Entry::place)
    }

    /// Puts an absent slot of `pages` at the newest end of a queue, without uses; what goes to the cold one is
    /// expected to be used once. The table reaches to it.
    pub(super) fn insert(&mut self, slot: u32, place: Place, print: Print, pages: u32, stamp: u32) {
        if let Some(entry) = self.entries.get_mut(index(slot)) {
            entry.print = print;
            let once = if place == Place::Cold { ONCE } else { 0 };
            let weight = pages.clamp(1, WEIGHT_MAX).next_power_of_two().ilog2();
            entry.state = stamp << STAMP_SHIFT | weight << WEIGHT_SHIFT | once;
            self.link(slot, place);
        }
    }

    /// Moves a slot to the newest end of a queue, uses and stamp kept.
    pub(super) fn shift(&mut self, slot: u32, place: Place) {
        self.remove(slot);
        self.link(slot, place);
    }

    fn link(&mut self, slot: u32, place: Place) {
        let weight = self.entries[index(slot)].weight();
        let ends = &mut self.ends[number(place)];
        let older = ends.newest;
        ends.newest = slot;
        ends.len += 1;
        ends.weight += u64::from(weight);
        if older == NONE {
            ends.oldest = slot;
        } else {
            self.entries[index(older)].newer = slot;
        }
        let entry = &mut self.entries[index(slot)];
        (entry.older, entry.newer) = (older, NONE);
        entry.set_place(place);
    }

    /// Takes a slot out of its queue, if it is in one.
    pub(super) fn remove(&mut self, slot: u32) {
        let Some(entry) = self.entries.get_mut(index(slot)) else { return };
        let (place, older, newer) = (entry.place(), entry.older, entry.newer);
        if place == Place::Absent {
            return;
        }
        entry.set_place(Place::Absent);
        let weight = entry.weight();
        let ends = &mut self.ends[number(place)];
        ends.len -= 1;
        ends.weight -= u64::from(weight);
        match older {
            NONE => ends.oldest = newer,
            older => self.entries[index(older)].newer = newer,
        }
        match newer {
            NONE => self.ends[number(place)].newest = older,
            newer => self.entries[index(newer)].older = older,
        }
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }
}
