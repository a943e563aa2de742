//! Grants that stay mapped (seed `003`).
//!
//! A guest that agreed uses the same pages again and again: each is mapped once, found by its
//! grant reference, and unmapped when it is the least recently used of too many, has lain idle for
//! long, or memory is wanted back. Copies into and out of mappings begin and end between two waits,
//! so a mapping is never in use when the table is tidied.
//!
//! Invariants: never more than the cap is mapped; who goes first was used least recently (the seed's
//! "LRU", which Linux takes from the lowest reference up); finding and using allocate nothing. A use
//! only notes its place among all uses: who was used least recently is asked when the table is tidied,
//! ten times a second at most, and a use is thousands of times as frequent.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::guest_memory::Mapping;

/// References below this are found by their number: a guest has 32,768 unless it was given more.
/// The list of them takes 256 KiB at most.
const NEAR: u32 = 1 << 16;
/// Grants that are remembered as having come while there was little room.
const LATELY: usize = 256;
/// How much of the cap goes at each turn while it is too small, percent.
const PERCENT: u32 = 5;

#[derive(Debug)]
struct Entry {
    gref: u32,
    mapping: Option<Mapping>,
    /// Its last use: the time, and the place among all uses.
    used: Instant,
    order: u64,
}

/// What a table is kept within.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most grants mapped.
    pub cap: u32,
    /// How long one may lie idle; `None` is for ever.
    pub unused: Option<Duration>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Table {
    /// Where the entries of small references are, plus 1: guests use few and small ones.
    near: Vec<u32>,
    /// Where the others are.
    far: HashMap<u32, u32>,
    len: usize,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Uses so far.
    uses: u64,
    /// No mapping was used before this for the last time.
    oldest: Option<Instant>,
    /// A grant found no place since the last tidying.
    overflowed: bool,
    /// Grants that came while there was little room, by the end of their number; empty until then.
    lately: Vec<u32>,
    /// What tidying unmaps, the next one last: the entry, and its last use when it was chosen.
    doomed: Vec<(u64, u32)>,
    /// They are because they were idle, not because there are too many.
    doomed_by_age: bool,
    evictions: u64,
    expiries: u64,
}

fn place(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl Table {
    /// Grants mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if none is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if a grant found no place lately.
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// How many were unmapped so far because there were too many, and because they were idle.
    pub fn unmapped(&self) -> (u64, u64) {
        (self.evictions, self.expiries)
    }

    /// The mapping of a grant, which is the most recently used one now.
    pub fn get(&mut self, gref: u32, now: Instant) -> Option<&Mapping> {
        let index = self.touch(gref, now)?;
        self.page(index)
    }

    /// Where the mapping of a grant is (see [`Table::page`]) until the table is changed; the grant is
    /// the most recently used one now.
    #[inline]
    pub fn touch(&mut self, gref: u32, now: Instant) -> Option<u32> {
        let index = self.find(gref)?;
        let entry = self.entries.get_mut(place(index))?;
        self.uses += 1;
        entry.order = self.uses;
        entry.used = now;
        Some(index)
    }

    /// The mapping at a place that [`Table::touch`] or [`Table::insert`] named.
    #[inline]
    pub fn page(&self, index: u32) -> Option<&Mapping> {
        self.entries.get(place(index))?.mapping.as_ref()
    }

    /// True if one more has a place under `cap`; if not, tidying will make some.
    pub fn has_room(&mut self, cap: u32) -> bool {
        let room = self.len() < place(cap);
        self.overflowed |= !room;
        room
    }

    /// True if a grant that is not in the table came lately, and then it is remembered that it did. While
    /// there is little room only such a one is worth a place: a guest that goes through more pages
    /// than are kept would otherwise have each mapped and unmapped for one use.
    pub fn came_before(&mut self, gref: u32) -> bool {
        if self.lately.is_empty() {
            self.lately = vec![u32::MAX; LATELY];
        }
        let last = &mut self.lately[place(gref) % LATELY];
        std::mem::replace(last, gref) == gref
    }

    /// Keeps a mapping of a grant that is not in the table; its place.
    pub fn insert(&mut self, gref: u32, mapping: Mapping, now: Instant) -> u32 {
        self.uses += 1;
        let entry = Entry { gref, mapping: Some(mapping), used: now, order: self.uses };
        if let Some(index) = self.find(gref) {
            self.entries[place(index)] = entry;
            return index;
        }
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[place(index)] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.remember(gref, index);
        self.oldest.get_or_insert(now);
        index
    }

    #[inline]
    fn find(&self, gref: u32) -> Option<u32> {
        if gref < NEAR {
            return self.near.get(place(gref))?.checked_sub(1);
        }
        self.far.get(&gref).copied()
    }

    fn remember(&mut self, gref: u32, index: u32) {
        self.len += 1;
        if gref >= NEAR {
            self.far.insert(gref, index);
            return;
        }
        if self.near.len() <= place(gref) {
            self.near.resize(place(gref).next_power_of_two().max(1024) + 1, 0);
        }
        self.near[place(gref)] = index + 1;
    }

    fn unmap(&mut self, index: u32) {
        let entry = &mut self.entries[place(index)];
        let gref = entry.gref;
        entry.mapping = None;
        self.free.push(index);
        self.len -= 1;
        if gref >= NEAR {
            self.far.remove(&gref);
        } else if let Some(index) = self.near.get_mut(place(gref)) {
            *index = 0;
        }
        if self.len == 0 {
            self.oldest = None;
        }
    }

    /// One turn of tidying: unmaps what is above the cap and 5 % of it while that is too small, the
    /// least recently used first; then what has lain idle for `unused`. At most `most` are unmapped.
    /// True if more are due; `first` is the first turn of several: the share of the cap goes once.
    pub fn tidy(&mut self, limits: &Limits, now: Instant, most: usize, first: bool) -> bool {
        let mut share = first;
        for _ in 0..most {
            if self.doomed.is_empty() && !self.condemn(limits, now, std::mem::take(&mut share)) {
                return false;
            }
            let Some((order, index)) = self.doomed.pop() else { break };
            // Who was used since it was chosen stays, but for what is above the cap.
            let chosen = self.entries.get(place(index)).is_some_and(|entry| entry.order == order);
            let above = !self.doomed_by_age && self.len() > place(limits.cap);
            if (!chosen && !above) || self.page(index).is_none() {
                continue;
            }
            self.unmap(index);
            match self.doomed_by_age {
                true => self.expiries += 1,
                false => self.evictions += 1,
            }
        }
        !self.doomed.is_empty() || self.condemn(limits, now, false)
    }

    /// Chooses what is to be unmapped next; false if nothing is. With `share` room is made if there was
    /// none.
    fn condemn(&mut self, limits: &Limits, now: Instant, share: bool) -> bool {
        let Limits { cap, unused } = *limits;
        let due = if share || self.len() > place(cap) { self.excess(cap) } else { 0 };
        if share {
            self.overflowed = false;
        }
        let mapped = || {
            let entries = self.entries.iter().zip(0..);
            entries.filter(|(entry, _)| entry.mapping.is_some())
        };
        if due > 0 {
            let all = mapped().map(|(entry, index)| (entry.order, index));
            let mut all: Vec<(u64, u32)> = all.collect();
            all.select_nth_unstable(due - 1);
            all.truncate(due);
            all.sort_unstable_by(|a, b| b.cmp(a));
            (self.doomed, self.doomed_by_age) = (all, false);
            return true;
        }
        if self.next_expiry(unused).is_none_or(|at| at > now) {
            return false;
        }
        let is_idle = |entry: &Entry| unused.is_some_and(|unused| entry.used + unused <= now);
        let (idle, busy): (Vec<_>, Vec<_>) = mapped().partition(|(entry, _)| is_idle(entry));
        let oldest = busy.iter().map(|(entry, _)| entry.used).min();
        let mut doomed: Vec<_> = idle.iter().map(|(entry, index)| (entry.order, *index)).collect();
        doomed.sort_unstable_by(|a, b| b.cmp(a));
        // While these are there none of them is older.
        self.oldest = oldest.or(Some(now));
        (self.doomed, self.doomed_by_age) = (doomed, true);
        !self.doomed.is_empty()
    }

    fn excess(&self, cap: u32) -> usize {
        let (cap, len) = (place(cap), self.len());
        if len < cap || (len == cap && !self.overflowed) {
            return 0;
        }
        // A small cap gives way, too; Linux rounds its share down to nothing.
        let share = (cap * place(PERCENT)).div_ceil(100);
        (len - cap + share).min(len)
    }

    /// When to look for mappings that have lain idle for `unused`: none has before.
    pub fn next_expiry(&self, unused: Option<Duration>) -> Option<Instant> {
        self.oldest?.checked_add(unused?)
    }

    /// Unmaps everything, at most `most`; true if some are left.
    pub fn clear(&mut self, most: usize) -> bool {
        self.doomed.clear();
        let mut left = most;
        for index in (0..self.entries.len()).rev() {
            if left == 0 || self.is_empty() {
                break;
            }
            if self.entries[index].mapping.is_some() {
                self.unmap(u32::try_from(index).unwrap_or(u32::MAX));
                left -= 1;
            }
        }
        if self.is_empty() {
            self.entries.clear();
            self.free.clear();
        }
        !self.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;
    use crate::guest_memory::Unmap;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Unmap for Count {
        fn unmap(&self, _base: NonNull<u8>, _bytes: usize, _cookie: u64) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn mapping(count: &Arc<Count>) -> Mapping {
        count.0.fetch_add(1, Ordering::SeqCst);
        // SAFETY: of no bytes, so that nothing of it is ever reached.
        unsafe { Mapping::new(NonNull::dangling(), 0, 0, count.clone()) }
    }

    /// What the table should be: grants with the time of their last use, the oldest in front.
    type Model = VecDeque<(u32, Instant)>;

    fn use_grant(
        table: &mut Table,
        model: &mut Model,
        count: &Arc<Count>,
        gref: u32,
        now: Instant,
    ) {
        if table.get(gref, now).is_some() {
            let place = model.iter().position(|(known, _)| *known == gref).unwrap();
            model.remove(place);
        } else if table.has_room(20) {
            table.insert(gref, mapping(count), now);
        } else {
            return;
        }
        model.push_back((gref, now));
    }

    proptest! {
        /// The least recently used go first, idle ones after their time; nothing else goes, and
        /// what goes is unmapped.
        #[test]
        fn the_least_recently_used_go_first(
            steps in prop::collection::vec((0u8..5, 0u32..40, 0u64..30), 1..300),
        ) {
            let start = Instant::now();
            let count = Arc::<Count>::default();
            let (mut table, mut model, mut now) = (Table::default(), Model::new(), start);
            for (what, gref, seconds) in steps {
                // Small references and large ones.
                let gref = if gref % 2 == 0 { gref } else { u32::MAX - gref };
                match what {
                    0..3 => use_grant(&mut table, &mut model, &count, gref, now),
                    3 => now += Duration::from_secs(seconds),
                    _ => {
                        let cap = if seconds == 0 { 0 } else { 20 };
                        let excess = if cap == 0 {
                            model.len()
                        } else if model.len() == 20 && table.overflowed() {
                            1
                        } else {
                            0
                        };
                        model.drain(..excess);
                        let unused = Duration::from_secs(60);
                        while model.front().is_some_and(|(_, used)| *used + unused <= now) {
                            model.pop_front();
                        }
                        let limits = Limits { cap, unused: Some(unused) };
                        prop_assert!(!table.tidy(&limits, now, 64, true));
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(count.0.load(Ordering::SeqCst), model.len());
                let oldest = model.front().map(|(_, used)| *used + Duration::from_secs(9));
                // Looking too early does no harm.
                let next = table.next_expiry(Some(Duration::from_secs(9)));
                prop_assert_eq!(next.is_some(), oldest.is_some());
                prop_assert!(next <= oldest);
            }
            prop_assert!(!table.clear(64));
            prop_assert_eq!(count.0.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn zero_seconds_are_for_ever_and_a_large_turn_is_split() {
        let (count, now) = (Arc::<Count>::default(), Instant::now());
        let mut table = Table::default();
        for gref in 0..1000 {
            table.insert(gref, mapping(&count), now);
        }
        assert_eq!(table.next_expiry(None), None);
        let limits = |cap| Limits { cap, unused: None };
        assert!(!table.tidy(&limits(1000), now + Duration::from_secs(1 << 20), 10, true));
        assert_eq!(table.len(), 1000);
        assert!(!table.has_room(1000));
        // 5 % of 1000.
        assert!(!table.tidy(&limits(1000), now, 64, true));
        assert_eq!(table.len(), 950);
        assert!(table.tidy(&limits(0), now, 64, true));
        assert_eq!(table.len(), 886);
    }

    #[test]
    fn the_share_goes_once_in_turns_and_what_is_above_the_cap_goes_though_it_is_used() {
        let (count, now) = (Arc::<Count>::default(), Instant::now());
        let mut table = Table::default();
        for gref in 0..1000 {
            table.insert(gref, mapping(&count), now);
        }
        let limits = |cap| Limits { cap, unused: None };
        // 5 % in turns of 8, while the guest takes every place that comes free.
        assert!(!table.has_room(1000));
        let (mut first, mut next) = (true, 1000);
        while table.tidy(&limits(1000), now, 8, std::mem::take(&mut first)) {
            while table.has_room(1000) {
                table.insert(next, mapping(&count), now);
                next += 1;
            }
        }
        assert_eq!(table.unmapped(), (50, 0));
        // The oldest of those chosen are used again before their turn: they stay.
        while table.has_room(1000) {
            table.insert(next, mapping(&count), now);
            next += 1;
        }
        assert!(table.tidy(&limits(1000), now, 8, true));
        assert!((58..100).all(|gref| table.touch(gref, now).is_some()));
        while table.tidy(&limits(1000), now, 8, false) {}
        assert_eq!(table.unmapped().0, 58);
        // A cap of nothing spares nobody.
        first = true;
        while table.tidy(&limits(0), now, 8, std::mem::take(&mut first)) {
            assert!((0..next).any(|gref| table.touch(gref, now).is_some()));
            (0..next).for_each(|gref| {
                table.touch(gref, now);
            });
        }
        assert!(table.is_empty() && count.0.load(Ordering::SeqCst) == 0);
    }
}
