//! FIFO queues of slot numbers, linked within one table, so that any slot can be removed in O(1).
//!
//! Invariants: a slot is in at most one queue, named in its entry; the links of a queue join all its slots
//! and no others; a queue's weight is the sum of theirs. An entry is 16 bytes.

use super::ghosts::Fingerprint;

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

/// Uses that are counted, at most.
pub(super) const USES_MAX: u32 = USES_MASK;

/// Pages that one slot counts as, at most.
pub(super) const WEIGHT_MAX: u32 = 128;

/// Which queue a slot is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueKind {
    /// In none.
    Absent,
    /// Data that is expected to be used once, or was new for long without being used again.
    Cold,
    /// New data on probation.
    Small,
    /// Data that was used again.
    Main,
}

/// The record of a slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueEntry {
    /// Neighbours in the queue.
    older: u32,
    newer: u32,
    /// Fingerprint of the slot's key.
    pub(super) fingerprint: Fingerprint,
    /// Uses (2 bits), queue (2), whether expected to be used once (1), weight as a power of two (3), stamp
    /// (24).
    state: u32,
}

impl QueueEntry {
    const ABSENT: QueueEntry =
        QueueEntry { older: NONE, newer: NONE, fingerprint: Fingerprint::ZERO, state: 0 };

    /// Counted uses, up to [`USES_MAX`].
    pub(super) fn uses(&self) -> u32 {
        self.state & USES_MASK
    }

    pub(super) fn set_uses(&mut self, uses: u32) {
        self.state = self.state & !USES_MASK | uses.min(USES_MAX);
    }

    pub(super) fn place(&self) -> QueueKind {
        match (self.state & PLACE_MASK) >> PLACE_SHIFT {
            0 => QueueKind::Absent,
            1 => QueueKind::Cold,
            2 => QueueKind::Small,
            _ => QueueKind::Main,
        }
    }

    fn set_place(&mut self, place: QueueKind) {
        let bits = match place {
            QueueKind::Absent => 0,
            QueueKind::Cold => 1,
            QueueKind::Small => 2,
            QueueKind::Main => 3,
        };
        self.state = self.state & !PLACE_MASK | bits << PLACE_SHIFT;
    }

    /// Pages it counts as: a power of two up to 128.
    pub(super) fn weight(&self) -> u32 {
        1 << ((self.state & WEIGHT_MASK) >> WEIGHT_SHIFT)
    }

    /// Whether it was expected to be used once when it was inserted.
    pub(super) fn once(&self) -> bool {
        self.state & ONCE != 0
    }

    /// Whether its uses make it worth keeping: data that was expected to be used once needs two.
    pub(super) fn is_worth_keeping(&self) -> bool {
        self.uses() > u32::from(self.once())
    }

    /// The first use of data that was expected to be used once: its window begins now.
    pub(super) fn consume(&mut self, stamp: u32) {
        self.state = self.state & ((1 << STAMP_SHIFT) - 1) & !USES_MASK | stamp << STAMP_SHIFT | 1;
    }

    /// From now on it is treated like any other slot, without uses.
    pub(super) fn reset_uses(&mut self) {
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

/// All entries and their queues.
#[derive(Debug)]
pub(super) struct Queues {
    entries: Vec<QueueEntry>,
    /// By [`QueueKind`]; that of absent slots stays empty.
    ends: [Ends; 4],
}

/// A slot's index in a table.
fn index(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

fn number(place: QueueKind) -> usize {
    match place {
        QueueKind::Absent => 0,
        QueueKind::Cold => 1,
        QueueKind::Small => 2,
        QueueKind::Main => 3,
    }
}

impl Queues {
    pub(super) fn with_capacity(slots: u32) -> Queues {
        let ends = Ends { oldest: NONE, newest: NONE, len: 0, weight: 0 };
        Queues { entries: vec![QueueEntry::ABSENT; index(slots)], ends: [ends; 4] }
    }

    /// Length of the table, in slots.
    pub(super) fn capacity(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(NONE)
    }

    /// Makes the table long enough for `slot`.
    pub(super) fn grow_to(&mut self, slot: u32) {
        let least = index(slot).saturating_add(1);
        if least > self.entries.len() {
            self.entries.resize(least.next_power_of_two().max(64), QueueEntry::ABSENT);
        }
    }

    /// Slots in a queue.
    pub(super) fn len(&self, place: QueueKind) -> u32 {
        self.ends[number(place)].len
    }

    /// Pages in a queue.
    pub(super) fn weight(&self, place: QueueKind) -> u64 {
        self.ends[number(place)].weight
    }

    /// The slot that has been in the queue for longest.
    pub(super) fn oldest(&self, place: QueueKind) -> Option<u32> {
        Some(self.ends[number(place)].oldest).filter(|slot| *slot != NONE)
    }

    /// The slot that came into its queue right after `slot`.
    pub(super) fn newer(&self, slot: u32) -> Option<u32> {
        self.get(slot).map(|entry| entry.newer).filter(|slot| *slot != NONE)
    }

    pub(super) fn get(&self, slot: u32) -> Option<&QueueEntry> {
        self.entries.get(index(slot))
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut QueueEntry> {
        self.entries.get_mut(index(slot))
    }

    /// The queue of `slot`.
    pub(super) fn place(&self, slot: u32) -> QueueKind {
        self.get(slot).map_or(QueueKind::Absent, QueueEntry::place)
    }

    /// Puts an absent slot of `pages` at the newest end of a queue, with a use count of 0; in the cold queue
    /// it is marked as expected to be used once. The table must reach to it.
    pub(super) fn insert(
        &mut self,
        slot: u32,
        place: QueueKind,
        fingerprint: Fingerprint,
        pages: u32,
        stamp: u32,
    ) {
        if let Some(entry) = self.entries.get_mut(index(slot)) {
            entry.fingerprint = fingerprint;
            let once = if place == QueueKind::Cold { ONCE } else { 0 };
            let weight = pages.clamp(1, WEIGHT_MAX).next_power_of_two().ilog2();
            entry.state = stamp << STAMP_SHIFT | weight << WEIGHT_SHIFT | once;
            self.link(slot, place);
        }
    }

    /// Moves a slot to the newest end of a queue; uses and stamp are kept.
    pub(super) fn shift(&mut self, slot: u32, place: QueueKind) {
        self.remove(slot);
        self.link(slot, place);
    }

    fn link(&mut self, slot: u32, place: QueueKind) {
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

    /// Removes a slot from its queue, if it is in one.
    pub(super) fn remove(&mut self, slot: u32) {
        let Some(entry) = self.entries.get_mut(index(slot)) else { return };
        let (place, older, newer) = (entry.place(), entry.older, entry.newer);
        if place == QueueKind::Absent {
            return;
        }
        entry.set_place(QueueKind::Absent);
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

    /// Size of the table in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<QueueEntry>()
    }
}
