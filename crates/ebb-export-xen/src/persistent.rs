//! Persistent grants: grants that stay mapped between requests, as in Linux's xen-blkback.
//!
//! A guest with `feature-persistent` uses the same pages again and again: each is mapped once and found by
//! its grant reference. A purge unmaps the least recently used mappings when there are too many, and those
//! that have been idle for long or when memory is needed. Copies to and from a mapping begin and end
//! between two awaits, so no mapping is in use during a purge.
//!
//! Invariants: no more grants than the cap are mapped; the least recently used is unmapped first (Linux
//! walks its tree from the lowest reference up); finding and using a mapping allocate nothing. A use only
//! records its sequence number: a purge, at most ten times a second, finds the least recently used ones,
//! and uses are thousands of times as frequent.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ebb_guest_ring::Mapping;

/// References below this are found by index: a guest has 32,768 unless it is configured with more.
/// The index takes 256 KiB at most.
const NEAR: u32 = 1 << 16;
/// How many recent grants are remembered while there is little room.
const RECENT: usize = 256;
/// The part of the cap that is unmapped at each purge while it is too small, percent.
const PURGE_PERCENT: u32 = 5;

#[derive(Debug)]
struct GrantEntry {
    gref: u32,
    mapping: Option<Mapping>,
    /// Its last use: the time, and the sequence number among all uses.
    used: Instant,
    order: u64,
}

/// The limits that a purge enforces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantLimits {
    /// Most grants mapped.
    pub cap: u32,
    /// How long a mapping may be idle; `None` is without limit.
    pub unused: Option<Duration>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    /// The indices, plus 1, of the entries of small references: guests use few and small ones.
    near: Vec<u32>,
    /// The indices of the entries of other references.
    far: HashMap<u32, u32>,
    len: usize,
    entries: Vec<GrantEntry>,
    free: Vec<u32>,
    /// Uses so far.
    uses: u64,
    /// A time before which no mapping was last used.
    oldest: Option<Instant>,
    /// A grant found no room since the last purge.
    overflowed: bool,
    /// Recent grants while there was little room, by the low bits of their reference; empty until then.
    recent: Vec<u32>,
    /// What the purge unmaps, the next one last: the sequence number when it was chosen, and the index.
    victims: Vec<(u64, u32)>,
    /// The victims were chosen because they were idle, not because there are too many mappings.
    victims_idle: bool,
    evictions: u64,
    expiries: u64,
}

fn place(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl GrantTable {
    /// Grants mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// True if none is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if a grant found no room since the last purge.
    pub(crate) fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// How many were unmapped because there were too many, and how many because they were idle.
    pub(crate) fn unmapped(&self) -> (u64, u64) {
        (self.evictions, self.expiries)
    }

    /// The mapping of a grant, which becomes the most recently used one.
    pub(crate) fn get(&mut self, gref: u32, now: Instant) -> Option<&Mapping> {
        let index = self.touch(gref, now)?;
        self.page(index)
    }

    /// The index of the mapping of a grant (see [`GrantTable::page`]), valid until the table is changed; the
    /// grant becomes the most recently used one.
    #[inline]
    pub(crate) fn touch(&mut self, gref: u32, now: Instant) -> Option<u32> {
        let index = self.find(gref)?;
        let entry = self.entries.get_mut(place(index))?;
        self.uses += 1;
        entry.order = self.uses;
        entry.used = now;
        Some(index)
    }

    /// The mapping at an index that [`GrantTable::touch`] or [`GrantTable::insert`] returned.
    #[inline]
    pub(crate) fn page(&self, index: u32) -> Option<&Mapping> {
        self.entries.get(place(index))?.mapping.as_ref()
    }

    /// True if there is room for one more under `cap`; if not, a purge will make room.
    pub(crate) fn has_room(&mut self, cap: u32) -> bool {
        let room = self.len() < place(cap);
        self.overflowed |= !room;
        room
    }

    /// True if a grant that is not in the table was used recently; remembers it. While there is little room,
    /// only such grants are mapped: otherwise a guest that goes through more pages than are kept would have
    /// each mapped and unmapped for one use.
    pub(crate) fn seen_recently(&mut self, gref: u32) -> bool {
        if self.recent.is_empty() {
            self.recent = vec![u32::MAX; RECENT];
        }
        let last = &mut self.recent[place(gref) % RECENT];
        std::mem::replace(last, gref) == gref
    }

    /// Inserts the mapping of a grant that is not in the table; returns its index.
    pub(crate) fn insert(&mut self, gref: u32, mapping: Mapping, now: Instant) -> u32 {
        self.uses += 1;
        let entry = GrantEntry { gref, mapping: Some(mapping), used: now, order: self.uses };
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

    /// Purges: unmaps what exceeds the cap, and 5 % of the cap while that is too small, the least recently
    /// used first; then what has been idle for `unused`. Unmaps at most `most`. True if more are due; `first`
    /// is true in the first of several calls, since the 5 % are unmapped once.
    pub(crate) fn purge(
        &mut self,
        limits: &GrantLimits,
        now: Instant,
        most: usize,
        first: bool,
    ) -> bool {
        let mut share = first;
        for _ in 0..most {
            if self.victims.is_empty()
                && !self.choose_victims(limits, now, std::mem::take(&mut share))
            {
                return false;
            }
            let Some((order, index)) = self.victims.pop() else { break };
            // A mapping that was used since it was chosen stays, unless the cap is exceeded.
            let chosen = self.entries.get(place(index)).is_some_and(|entry| entry.order == order);
            let above = !self.victims_idle && self.len() > place(limits.cap);
            if (!chosen && !above) || self.page(index).is_none() {
                continue;
            }
            self.unmap(index);
            match self.victims_idle {
                true => self.expiries += 1,
                false => self.evictions += 1,
            }
        }
        !self.victims.is_empty() || self.choose_victims(limits, now, false)
    }

    /// Chooses what is unmapped next; false if nothing is. With `share`, makes room if there was none.
    fn choose_victims(&mut self, limits: &GrantLimits, now: Instant, share: bool) -> bool {
        let GrantLimits { cap, unused } = *limits;
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
            (self.victims, self.victims_idle) = (all, false);
            return true;
        }
        if self.next_expiry(unused).is_none_or(|at| at > now) {
            return false;
        }
        let is_idle = |entry: &GrantEntry| unused.is_some_and(|unused| entry.used + unused <= now);
        let (idle, busy): (Vec<_>, Vec<_>) = mapped().partition(|(entry, _)| is_idle(entry));
        let oldest = busy.iter().map(|(entry, _)| entry.used).min();
        let mut victims: Vec<_> = idle.iter().map(|(entry, index)| (entry.order, *index)).collect();
        victims.sort_unstable_by(|a, b| b.cmp(a));
        // No mapping that stays was last used before this.
        self.oldest = oldest.or(Some(now));
        (self.victims, self.victims_idle) = (victims, true);
        !self.victims.is_empty()
    }

    fn excess(&self, cap: u32) -> usize {
        let (cap, len) = (place(cap), self.len());
        if len < cap || (len == cap && !self.overflowed) {
            return 0;
        }
        // Rounded up, so that a small cap makes room as well; Linux rounds down to 0.
        let share = (cap * place(PURGE_PERCENT)).div_ceil(100);
        (len - cap + share).min(len)
    }

    /// When a mapping may first have been idle for `unused`.
    pub(crate) fn next_expiry(&self, unused: Option<Duration>) -> Option<Instant> {
        self.oldest?.checked_add(unused?)
    }

    /// Unmaps everything, at most `most`; true if some are left.
    pub(crate) fn clear(&mut self, most: usize) -> bool {
        self.victims.clear();
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
    use ebb_guest_ring::Unmap;

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

    /// The expected table: grants with the time of their last use, the oldest first.
    type Model = VecDeque<(u32, Instant)>;

    fn use_grant(
        table: &mut GrantTable,
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
                /// The least recently used are unmapped first, idle ones after their time, and nothing else is.
        #[test]
                fn the_least_recently_used_are_unmapped_first(
            steps in prop::collection::vec((0u8..5, 0u32..40, 0u64..30), 1..300),
        ) {
            let start = Instant::now();
            let count = Arc::<Count>::default();
            let (mut table, mut model, mut now) = (GrantTable::default(), Model::new(), start);
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
                        let limits = GrantLimits { cap, unused: Some(unused) };
                        prop_assert!(!table.purge(&limits, now, 64, true));
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(count.0.load(Ordering::SeqCst), model.len());
                let oldest = model.front().map(|(_, used)| *used + Duration::from_secs(9));
                                // Checking too early is allowed.
                let next = table.next_expiry(Some(Duration::from_secs(9)));
                prop_assert_eq!(next.is_some(), oldest.is_some());
                prop_assert!(next <= oldest);
            }
            prop_assert!(!table.clear(64));
            prop_assert_eq!(count.0.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn zero_seconds_disable_expiry_and_a_large_purge_is_split() {
        let (count, now) = (Arc::<Count>::default(), Instant::now());
        let mut table = GrantTable::default();
        for gref in 0..1000 {
            table.insert(gref, mapping(&count), now);
        }
        assert_eq!(table.next_expiry(None), None);
        let limits = |cap| GrantLimits { cap, unused: None };
        assert!(!table.purge(&limits(1000), now + Duration::from_secs(1 << 20), 10, true));
        assert_eq!(table.len(), 1000);
        assert!(!table.has_room(1000));
        // 5 % of 1000.
        assert!(!table.purge(&limits(1000), now, 64, true));
        assert_eq!(table.len(), 950);
        assert!(table.purge(&limits(0), now, 64, true));
        assert_eq!(table.len(), 886);
    }

    #[test]
    fn the_purge_share_is_unmapped_once_and_the_excess_even_if_it_is_used() {
        let (count, now) = (Arc::<Count>::default(), Instant::now());
        let mut table = GrantTable::default();
        for gref in 0..1000 {
            table.insert(gref, mapping(&count), now);
        }
        let limits = |cap| GrantLimits { cap, unused: None };
        // 5 % in steps of 8, while the guest takes every place that becomes free.
        assert!(!table.has_room(1000));
        let (mut first, mut next) = (true, 1000);
        while table.purge(&limits(1000), now, 8, std::mem::take(&mut first)) {
            while table.has_room(1000) {
                table.insert(next, mapping(&count), now);
                next += 1;
            }
        }
        assert_eq!(table.unmapped(), (50, 0));
        // The oldest victims are used again before they are unmapped: they stay.
        while table.has_room(1000) {
            table.insert(next, mapping(&count), now);
            next += 1;
        }
        assert!(table.purge(&limits(1000), now, 8, true));
        assert!((58..100).all(|gref| table.touch(gref, now).is_some()));
        while table.purge(&limits(1000), now, 8, false) {}
        assert_eq!(table.unmapped().0, 58);
        // With a cap of 0 everything is unmapped.
        first = true;
        while table.purge(&limits(0), now, 8, std::mem::take(&mut first)) {
            assert!((0..next).any(|gref| table.touch(gref, now).is_some()));
            (0..next).for_each(|gref| {
                table.touch(gref, now);
            });
        }
        assert!(table.is_empty() && count.0.load(Ordering::SeqCst) == 0);
    }
}
