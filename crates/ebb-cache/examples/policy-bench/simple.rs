//! LRU, CLOCK and SIEVE: one list each, for comparison. Cold data goes in at the end that is evicted.

use ebb_cache::policy::EvictionPolicy;

/// No slot.
const NONE: u32 = u32::MAX;

/// A list over slot numbers, newest at the front.
#[derive(Default)]
pub(crate) struct List {
    newer: Vec<u32>,
    older: Vec<u32>,
    pub(crate) used: Vec<u8>,
    inside: Vec<bool>,
    pub(crate) newest: u32,
    pub(crate) oldest: u32,
    pub(crate) len: u32,
}

impl List {
    fn new(slots: u32) -> List {
        let n = slots as usize;
        List {
            newer: vec![NONE; n],
            older: vec![NONE; n],
            used: vec![0; n],
            inside: vec![false; n],
            newest: NONE,
            oldest: NONE,
            len: 0,
        }
    }

    /// Links `slot` in as the newest, or as the oldest.
    fn insert(&mut self, slot: u32, as_oldest: bool) {
        let at = slot as usize;
        self.inside[at] = true;
        self.len += 1;
        let (ends, ways) = if as_oldest {
            ((&mut self.oldest, &mut self.newest), (&mut self.newer, &mut self.older))
        } else {
            ((&mut self.newest, &mut self.oldest), (&mut self.older, &mut self.newer))
        };
        let neighbour = *ends.0;
        *ends.0 = slot;
        ways.0[at] = neighbour;
        ways.1[at] = NONE;
        if neighbour == NONE {
            *ends.1 = slot;
        } else {
            ways.1[neighbour as usize] = slot;
        }
    }

    /// Moves `slot` to right below `hand` in age; to the oldest end without one.
    fn put_before(&mut self, slot: u32, hand: u32) {
        let older = if hand == NONE { NONE } else { self.older[hand as usize] };
        self.remove(slot);
        if hand == NONE || older == NONE {
            return self.insert(slot, true);
        }
        self.inside[slot as usize] = true;
        self.len += 1;
        (self.newer[slot as usize], self.older[slot as usize]) = (hand, older);
        self.older[hand as usize] = slot;
        self.newer[older as usize] = slot;
    }

    fn remove(&mut self, slot: u32) -> bool {
        let at = slot as usize;
        if !std::mem::take(&mut self.inside[at]) {
            return false;
        }
        self.len -= 1;
        let (newer, older) = (self.newer[at], self.older[at]);
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        true
    }

    /// From the oldest on, those for which `which` holds, until `out` has `full`.
    fn list(&self, full: usize, out: &mut Vec<u32>, which: impl Fn(u8) -> bool) {
        let mut slot = self.oldest;
        while slot != NONE && out.len() < full {
            if which(self.used[slot as usize]) {
                out.push(slot);
            }
            slot = self.newer[slot as usize];
        }
    }
}

/// Least recently used.
pub(crate) struct Lru(List);

impl EvictionPolicy for Lru {
    fn with_capacity(slots: u32) -> Self {
        Lru(List::new(slots))
    }
    fn insert(&mut self, slot: u32, _: u64, _: u32, cold: bool) {
        self.0.insert(slot, cold);
    }
    fn hit(&mut self, slot: u32) {
        if self.0.newest != slot {
            self.0.remove(slot);
            self.0.insert(slot, false);
        }
    }
    fn remove(&mut self, slot: u32) {
        self.0.remove(slot);
    }
    fn evict(&mut self, mut may: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut slot = self.0.oldest;
        while slot != NONE && !may(slot) {
            slot = self.0.newer[slot as usize];
        }
        self.0.remove((slot != NONE).then_some(slot)?);
        Some(slot)
    }
    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        self.0.list(out.len() + n, out, |_| true);
    }
}

/// A clock with counters up to `MOST`.
pub(crate) struct Clock<const MOST: u8>(List);

impl<const MOST: u8> EvictionPolicy for Clock<MOST> {
    fn with_capacity(slots: u32) -> Self {
        Clock(List::new(slots))
    }
    fn insert(&mut self, slot: u32, _: u64, _: u32, cold: bool) {
        self.0.used[slot as usize] = 0;
        self.0.insert(slot, cold);
    }
    fn hit(&mut self, slot: u32) {
        let used = &mut self.0.used[slot as usize];
        *used = (*used + 1).min(MOST);
    }
    fn remove(&mut self, slot: u32) {
        self.0.remove(slot);
    }
    fn evict(&mut self, mut may: impl FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..=self.0.len * (u32::from(MOST) + 1) {
            let slot = (self.0.oldest != NONE).then_some(self.0.oldest)?;
            self.0.remove(slot);
            let used = &mut self.0.used[slot as usize];
            if *used == 0 && may(slot) {
                return Some(slot);
            }
            *used = used.saturating_sub(1);
            self.0.insert(slot, false);
        }
        None
    }
    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        let full = out.len() + n;
        for used in 0..=MOST {
            self.0.list(full, out, |u| u == used);
        }
    }
}

/// SIEVE (Zhang et al., NSDI 2024): a hand that leaves used slots where they are.
pub(crate) struct Sieve {
    list: List,
    hand: u32,
}

impl EvictionPolicy for Sieve {
    fn with_capacity(slots: u32) -> Self {
        Sieve { list: List::new(slots), hand: NONE }
    }
    fn insert(&mut self, slot: u32, _: u64, _: u32, cold: bool) {
        self.list.used[slot as usize] = 0;
        self.list.insert(slot, false);
        if cold {
            self.list.put_before(slot, self.hand);
            self.hand = slot;
        }
    }
    fn hit(&mut self, slot: u32) {
        self.list.used[slot as usize] = 1;
    }
    fn remove(&mut self, slot: u32) {
        if self.hand == slot {
            self.hand = self.list.newer[slot as usize];
        }
        self.list.remove(slot);
    }
    fn evict(&mut self, mut may: impl FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..=self.list.len * 2 {
            if self.hand == NONE {
                self.hand = (self.list.oldest != NONE).then_some(self.list.oldest)?;
            }
            let slot = self.hand;
            if std::mem::take(&mut self.list.used[slot as usize]) == 0 && may(slot) {
                self.remove(slot);
                return Some(slot);
            }
            self.hand = self.list.newer[slot as usize];
        }
        None
    }
    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        let full = out.len() + n;
        // In the order of the hand: from it to the newest, then from the oldest to it; unused ones first.
        for used in 0..=1 {
            for (from, to) in [(self.hand, NONE), (self.list.oldest, self.hand)] {
                let mut slot = from;
                while slot != to && slot != NONE && out.len() < full {
                    if self.list.used[slot as usize] == used {
                        out.push(slot);
                    }
                    slot = self.list.newer[slot as usize];
                }
            }
        }
    }
}
