//! The eviction policy against an oracle, and its required properties: bounded, resistant to scans, cold data
//! first.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::{BTreeMap, HashSet};

use ebb_cache::policy::{Eviction, EvictionPolicy, NextVictim};
use proptest::prelude::*;

/// An operation of a shard.
#[derive(Debug, Clone)]
enum Step {
    Insert {
        slot: u32,
        key: u64,
        pages: u32,
        cold: bool,
    },
    Hit(u32),
    Remove(u32),
    Lose(u32),
    /// Slots `slot % modulus == rest` are refused.
    Evict {
        modulus: u32,
        rest: u32,
    },
    Coldest(usize),
    Age(u32),
}

fn steps(slots: u32) -> impl Strategy<Value = Vec<Step>> {
    let slot = 0..slots;
    let pages = prop_oneof![Just(1_u32), Just(4), Just(16), any::<u32>()];
    let insert = (slot.clone(), 0..u64::from(slots) * 4, pages, prop::bool::weighted(0.2));
    let step = prop_oneof![
        8 => insert.prop_map(|(slot, key, pages, cold)| Step::Insert { slot, key, pages, cold }),
        8 => slot.clone().prop_map(Step::Hit),
        1 => slot.clone().prop_map(Step::Remove),
        1 => slot.prop_map(Step::Lose),
        5 => (1..5_u32, 0..6_u32).prop_map(|(modulus, rest)| Step::Evict { modulus, rest }),
        1 => (0..300_usize).prop_map(Step::Coldest),
        1 => (0..300_u32).prop_map(Step::Age),
    ];
    prop::collection::vec(step, 0..600)
}

/// Does one step; `inside` is what the policy should contain.
fn check(policy: &mut Eviction, inside: &mut BTreeMap<u32, u64>, step: &Step) {
    match *step {
        Step::Insert { slot, key, pages, cold } => {
            policy.insert(slot, key, pages, cold);
            inside.insert(slot, u64::from(pages.clamp(1, 128).next_power_of_two()));
        }
        Step::Hit(slot) => policy.hit(slot),
        Step::Remove(slot) => {
            policy.remove(slot);
            inside.remove(&slot);
        }
        Step::Lose(slot) => {
            policy.lose(slot);
            inside.remove(&slot);
        }
        Step::Evict { modulus, rest } => {
            let may = |slot: u32| slot % modulus != rest;
            let least = inside.keys().any(|slot| may(*slot));
            let evicted = policy.evict(|slot| {
                assert!(inside.contains_key(&slot), "slot {slot} is offered but not inside");
                may(slot)
            });
            assert_eq!(evicted.is_some(), least, "a slot that may be evicted is found");
            if let Some(slot) = evicted {
                assert!(may(slot), "slot {slot} was refused");
                assert!(inside.remove(&slot).is_some(), "slot {slot} was evicted twice");
            }
        }
        Step::Coldest(n) => {
            let mut out = vec![u32::MAX];
            policy.coldest(n, &mut out);
            let listed: HashSet<u32> = out[1..].iter().copied().collect();
            assert_eq!(out.len() - 1, n.min(inside.len()));
            assert_eq!(listed.len(), out.len() - 1, "each once");
            assert!(listed.iter().all(|slot| inside.contains_key(slot)));
        }
        Step::Age(n) => policy.age(n),
    }
    assert_eq!(policy.len(), u32::try_from(inside.len()).unwrap());
    assert_eq!(policy.pages(), inside.values().sum::<u64>());
    assert_eq!(policy.next() == NextVictim::Nothing, inside.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_slot_stays_until_it_is_evicted_exactly_once(
        steps in steps(120),
        capacity in prop_oneof![Just(0_u32), Just(120)],
    ) {
        let mut policy = Eviction::with_capacity(capacity);
        let mut inside = BTreeMap::new();
        for step in &steps {
            check(&mut policy, &mut inside, step);
        }
        // The remaining slots are evicted, each once, and then nothing.
        while let Some(slot) = policy.evict(|_| true) {
            prop_assert!(inside.remove(&slot).is_some());
        }
        prop_assert!(inside.is_empty() && policy.is_empty());
    }

    #[test]
    fn a_full_table_never_grows(steps in steps(100)) {
        let mut policy = Eviction::with_capacity(100);
        let (mut inside, bytes) = (BTreeMap::new(), policy.bytes());
        for step in &steps {
            check(&mut policy, &mut inside, step);
        }
        prop_assert_eq!(policy.bytes(), bytes);
    }
}

/// A cache without data: maps pages to slots.
struct Cache {
    policy: Eviction,
    slots: BTreeMap<u64, u32>,
    pages: Vec<Option<u64>>,
    free: Vec<u32>,
}

impl Cache {
    fn new(size: u32) -> Cache {
        let pages = vec![None; size as usize];
        let free = (0..size).rev().collect();
        Cache { policy: Eviction::with_capacity(size), slots: BTreeMap::new(), pages, free }
    }

    fn evict(&mut self) -> u64 {
        let slot = self.policy.evict(|_| true).unwrap();
        let page = self.pages[slot as usize].take().unwrap();
        self.slots.remove(&page);
        self.free.push(slot);
        page
    }

    /// Whether it hit.
    fn access(&mut self, page: u64, cold: bool) -> bool {
        if let Some(slot) = self.slots.get(&page) {
            self.policy.hit(*slot);
            return true;
        }
        if self.free.is_empty() {
            self.evict();
        }
        let slot = self.free.pop().unwrap();
        self.pages[slot as usize] = Some(page);
        self.slots.insert(page, slot);
        self.policy.insert(slot, page << 4, 1, cold);
        false
    }

    fn touch(&mut self, page: u64, cold: bool) {
        self.access(page, cold);
    }

    fn has(&self, page: u64) -> bool {
        self.slots.contains_key(&page)
    }
}

#[test]
fn a_scan_of_ten_times_the_cache_leaves_the_hot_set() {
    for cold in [false, true] {
        let mut cache = Cache::new(1000);
        for round in 0..20_u64 {
            (0..500).for_each(|page| cache.touch(page, false));
            // Some other traffic, so that the hot pages stand out.
            (0..200).for_each(|page| cache.touch(1_000_000 + round * 200 + page, false));
        }
        (0..10_000).for_each(|page| cache.touch(10_000 + page, cold));
        let kept = (0..500).filter(|page| cache.has(*page)).count();
        assert!(kept >= 475, "{kept} of 500 hot pages remain, cold: {cold}");
    }
}

#[test]
fn large_slots_do_not_crowd_out_many_small_ones() {
    // 600 hot slots of a page and room for 25 of sixteen, which are read at random and never again.
    let mut policy = Eviction::with_capacity(1000);
    (0..600).for_each(|slot| policy.insert(slot, u64::from(slot), 1, false));
    for _ in 0..3 {
        (0..600).for_each(|slot| policy.hit(slot));
    }
    let mut hot: HashSet<u32> = (0..600).collect();
    let mut free: Vec<u32> = (600..1000).collect();
    for key in 0..1000 {
        while policy.pages() + 16 > 1000 {
            let slot = policy.evict(|_| true).unwrap();
            hot.remove(&slot);
            free.push(slot);
        }
        policy.insert(free.pop().unwrap(), 1_000_000 + key, 16, false);
    }
    // The newest 30 were still in the window of new slots, where hot slots are not recognized.
    assert!(hot.len() >= 560, "{} of 600 hot slots remain", hot.len());
}

#[test]
fn one_pass_data_is_evicted_first_and_in_order() {
    let mut cache = Cache::new(100);
    (0..60).for_each(|page| cache.touch(page, false));
    (100..140).for_each(|page| cache.touch(page, true));
    // Read like read-ahead data of a stream: at once, several times.
    (100..140).for_each(|page| cache.touch(page, true));
    let mut coldest = Vec::new();
    cache.policy.coldest(35, &mut coldest);
    let pages: Vec<u64> = coldest.iter().map(|slot| cache.pages[*slot as usize].unwrap()).collect();
    let evicted: Vec<u64> = (0..35).map(|_| cache.evict()).collect();
    assert!(evicted.iter().all(|page| *page >= 100), "{evicted:?}");
    assert_eq!(evicted, pages, "lent in the order of eviction");
}

#[test]
fn uses_within_a_moment_count_as_one() {
    let mut cache = Cache::new(1000);
    for round in 0..4 {
        (0..800).for_each(|page| cache.touch(page, false));
        (0..100).for_each(|page| cache.touch(100_000 + round * 100 + page, false));
    }
    // Each new page is read four times at once and then never again: no reason to keep it.
    for page in 2000..8000 {
        (0..4).for_each(|_| cache.touch(page, false));
    }
    let kept = (0..800).filter(|page| cache.has(*page)).count();
    assert!(kept >= 760, "{kept} of 800 pages in use remain");
}

#[test]
fn a_page_read_again_soon_after_its_eviction_stays() {
    let mut cache = Cache::new(1000);
    let mut scan = 10_000..;
    let mut scanned = |cache: &mut Cache, n: usize| {
        scan.by_ref().take(n).for_each(|page| cache.touch(page, false));
    };
    // Used often, so that the main queue is not empty.
    for _ in 0..3 {
        (1000..1800).for_each(|page| cache.touch(page, false));
        scanned(&mut cache, 100);
    }
    cache.access(7, false);
    scanned(&mut cache, 600);
    assert!(!cache.has(7), "a new page was not evicted");
    assert!(!cache.access(7, false));
    scanned(&mut cache, 600);
    assert!(cache.has(7), "it was read again, and is not kept");
}

#[test]
fn keys_of_lost_pages_are_remembered_and_of_removed_pages_are_not() {
    for (lost, kept) in [(true, true), (false, false)] {
        let mut cache = Cache::new(1000);
        for _ in 0..3 {
            (0..600).for_each(|page| cache.touch(page, false));
            (0..300).for_each(|page| cache.touch(5000 + page, false));
        }
        let slot = cache.slots.remove(&7).unwrap();
        cache.pages[slot as usize] = None;
        cache.free.push(slot);
        if lost {
            cache.policy.lose(slot);
        } else {
            cache.policy.remove(slot);
        }
        cache.access(7, false);
        (0..600).for_each(|page| cache.touch(10_000 + page, false));
        assert_eq!(cache.has(7), kept, "lost: {lost}");
    }
}

#[test]
fn aging_cools_pages_that_were_hot_long_ago() {
    let mut cache = Cache::new(1000);
    // There is room for everything: nothing is evicted.
    for _ in 0..5 {
        (0..900).for_each(|page| cache.touch(page, false));
    }
    cache.policy.age(1000);
    for _ in 0..5 {
        (0..900).for_each(|page| cache.touch(page, false));
    }
    for _ in 0..6 {
        cache.policy.age(1000);
        (600..900).for_each(|page| cache.touch(page, false));
    }
    let evicted: HashSet<u64> = (0..550).map(|_| cache.evict()).collect();
    let mistakes = evicted.iter().filter(|page| **page >= 600).count();
    assert_eq!(mistakes, 0, "pages in use were evicted before pages used long ago");
}

#[test]
fn a_call_examines_a_bounded_number_of_slots() {
    let mut policy = Eviction::with_capacity(100_000);
    for slot in 0..100_000 {
        policy.insert(slot, u64::from(slot), 1, slot % 3 == 0);
    }
    let mut examined = 0;
    assert_eq!(
        policy.evict(|_| {
            examined += 1;
            false
        }),
        None
    );
    assert!(examined <= 2048, "{examined} slots were examined");
    // All have the maximum use count: the first call finds one nevertheless.
    for slot in 0..100_000 {
        (0..4).for_each(|_| policy.hit(slot));
    }
    assert!(policy.evict(|_| true).is_some());
    // Only the last may be evicted: each call continues where the previous one ended, and reaches it.
    let calls = (0..1000).position(|_| policy.evict(|slot| slot == 99_999).is_some());
    assert!(calls.is_some());
}

#[test]
fn wrong_slots_are_ignored() {
    let mut policy = Eviction::with_capacity(4);
    for slot in [0, 3, 4, 1_000_000, u32::MAX] {
        policy.hit(slot);
        policy.remove(slot);
        policy.lose(slot);
    }
    assert_eq!(policy.evict(|_| true), None);
    policy.insert(1, 1, 1, false);
    policy.insert(1, 2, 1, true);
    assert_eq!(policy.len(), 1);
    assert_eq!(policy.evict(|_| true), Some(1));
    assert!(policy.is_empty());
}

#[test]
fn metadata_is_small() {
    let slots = 1 << 20;
    let mut policy = Eviction::with_capacity(slots);
    assert!(policy.bytes() <= 20 * slots as usize, "{} bytes", policy.bytes());
    // A table that grows by itself is at most twice that size.
    policy = Eviction::with_capacity(0);
    for slot in 0..(1 << 16) + 1 {
        policy.insert(slot, u64::from(slot), 1, false);
    }
    assert!(policy.bytes() <= (2 * 20) << 16, "{} bytes", policy.bytes());
}
