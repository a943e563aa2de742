//! A cache without data: pages to slots, a policy, and counts.

use ebb_cache::policy::EvictionPolicy;

use crate::trace::{Access, Random};

const NONE: u32 = u32::MAX;

/// The cache.
pub(crate) struct Sim<P> {
    policy: P,
    slot_of: Vec<u32>,
    page_of: Vec<u32>,
    free: Vec<u32>,
    used: u32,
    pub(crate) limit: u32,
    /// Whether the policy is notified of one-pass data.
    hints: bool,
}

/// Accesses that counted, and those of them that hit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Count {
    pub(crate) all: u32,
    pub(crate) hits: u32,
}

impl Count {
    /// Percent.
    pub(crate) fn ratio(self) -> f64 {
        100.0 * f64::from(self.hits) / f64::from(self.all.max(1))
    }
}

impl<P: EvictionPolicy> Sim<P> {
    pub(crate) fn new(cache: u32, hints: bool) -> Self {
        Sim {
            policy: P::with_capacity(cache),
            slot_of: vec![NONE; 1 << 20],
            page_of: vec![NONE; cache as usize],
            free: (0..cache).rev().collect(),
            used: 0,
            limit: cache,
            hints,
        }
    }

    fn evict(&mut self) {
        let slot = self.policy.evict(|_| true).unwrap();
        self.release(slot);
    }

    fn release(&mut self, slot: u32) {
        let page = std::mem::replace(&mut self.page_of[slot as usize], NONE);
        self.slot_of[page as usize] = NONE;
        self.free.push(slot);
        self.used -= 1;
    }

    pub(crate) fn access(&mut self, access: Access) -> bool {
        let page = access.page as usize;
        if page >= self.slot_of.len() {
            self.slot_of.resize(page.next_power_of_two() * 2, NONE);
        }
        if self.slot_of[page] != NONE {
            self.policy.hit(self.slot_of[page]);
            return true;
        }
        while self.used >= self.limit {
            self.evict();
        }
        let slot = self.free.pop().unwrap();
        self.used += 1;
        self.page_of[slot as usize] = access.page;
        self.slot_of[page] = slot;
        self.policy.insert(slot, u64::from(access.page), 1, self.hints && access.once);
        false
    }

    pub(crate) fn run(&mut self, trace: &[Access]) -> Count {
        let mut count = Count::default();
        for access in trace {
            let hit = self.access(*access);
            if access.counts {
                count.all += 1;
                count.hits += u32::from(hit);
            }
        }
        count
    }

    /// Pressure: the limit changes, and the excess is evicted now.
    pub(crate) fn resize(&mut self, limit: u32) {
        self.limit = limit;
        while self.used > limit {
            self.evict();
        }
    }

    /// Time passes for `n` slots.
    pub(crate) fn age(&mut self, n: u32) {
        self.policy.age(n);
    }

    /// The kernel discards the coldest half, in the order in which the policy would lend it.
    pub(crate) fn lose_coldest(&mut self) {
        let mut slots = Vec::new();
        self.policy.coldest(self.used as usize / 2, &mut slots);
        for slot in slots {
            self.policy.lose(slot);
            self.release(slot);
        }
    }

    /// The kernel discards half of the pages, at random.
    pub(crate) fn lose_random(&mut self, seed: u64) {
        let mut random = Random(seed);
        for slot in 0..u32::try_from(self.page_of.len()).unwrap() {
            if self.page_of[slot as usize] != NONE && random.below(2) == 0 {
                self.policy.lose(slot);
                self.release(slot);
            }
        }
    }

    /// The pages that the policy considers the coldest half.
    pub(crate) fn coldest_half(&mut self) -> Vec<u32> {
        let mut slots = Vec::new();
        self.policy.coldest(self.used as usize / 2, &mut slots);
        assert_eq!(slots.len(), self.used as usize / 2);
        slots.iter().map(|slot| self.page_of[*slot as usize]).collect()
    }
}
