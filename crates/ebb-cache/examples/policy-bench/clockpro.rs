//! CLOCK-Pro (Jiang, Chen, Zhang, USENIX 2005): one clock of hot, cold and evicted pages, three hands, and an
//! adaptive share of cold pages. Slots are nodes `0..slots`, evicted pages the nodes above.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use ebb_cache::policy::EvictionPolicy;

/// No node.
const NONE: u32 = u32::MAX;

/// A multiplication instead of the standard hash, so that the comparison of costs is fair.
#[derive(Default)]
pub(crate) struct Quick(u64);

impl Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Free,
    Hot,
    Cold,
    Ghost,
}

#[derive(Clone, Copy)]
struct Node {
    prev: u32,
    next: u32,
    key: u64,
    kind: Kind,
    used: bool,
    /// On trial: used again now, it becomes hot.
    test: bool,
}

/// The policy.
pub(crate) struct ClockPro {
    nodes: Vec<Node>,
    /// Free nodes for evicted pages.
    spare: Vec<u32>,
    ghosts: HashMap<u64, u32, BuildHasherDefault<Quick>>,
    hot_hand: u32,
    cold_hand: u32,
    test_hand: u32,
    hot: u32,
    cold: u32,
    /// How many of the resident pages should be cold.
    target: u32,
}

impl ClockPro {
    fn resident(&self) -> u32 {
        self.hot + self.cold
    }

    /// The minimum share of cold pages: 1 %; otherwise a page read twice in a moment is evicted in between.
    fn floor(&self) -> u32 {
        (self.resident() / 100).max(1)
    }

    fn node(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn next(&self, at: u32) -> u32 {
        self.nodes[at as usize].next
    }

    /// Inserts `at` at the head of the clock: just behind the hot hand.
    fn link(&mut self, at: u32) {
        if self.hot_hand == NONE {
            (self.node(at).prev, self.node(at).next) = (at, at);
            (self.hot_hand, self.cold_hand, self.test_hand) = (at, at, at);
            return;
        }
        let hand = self.hot_hand;
        let prev = self.nodes[hand as usize].prev;
        (self.node(at).prev, self.node(at).next) = (prev, hand);
        self.node(prev).next = at;
        self.node(hand).prev = at;
    }

    fn unlink(&mut self, at: u32) {
        let Node { prev, next, .. } = self.nodes[at as usize];
        let after = if next == at { NONE } else { next };
        for hand in [&mut self.hot_hand, &mut self.cold_hand, &mut self.test_hand] {
            if *hand == at {
                *hand = after;
            }
        }
        self.node(prev).next = next;
        self.node(next).prev = prev;
    }

    fn forget(&mut self, ghost: u32) {
        let key = self.nodes[ghost as usize].key;
        self.unlink(ghost);
        self.node(ghost).kind = Kind::Free;
        self.ghosts.remove(&key);
        self.spare.push(ghost);
    }

    /// Ends the trial of a cold page that was not used in it.
    fn end_test(&mut self, at: u32) {
        match self.nodes[at as usize].kind {
            Kind::Ghost => {
                self.forget(at);
                self.target = self.target.saturating_sub(1).max(self.floor());
            }
            Kind::Cold if self.nodes[at as usize].test && !self.nodes[at as usize].used => {
                self.node(at).test = false;
                self.target = self.target.saturating_sub(1).max(self.floor());
            }
            _ => {}
        }
    }

    /// Advances the hot hand until one hot page became cold.
    fn cool(&mut self) {
        for _ in 0..self.nodes.len() * 3 {
            if self.hot == 0 {
                return;
            }
            let at = self.hot_hand;
            self.hot_hand = self.next(at);
            if self.nodes[at as usize].kind != Kind::Hot {
                self.end_test(at);
            } else if self.nodes[at as usize].used {
                self.node(at).used = false;
            } else {
                let node = self.node(at);
                (node.kind, node.test) = (Kind::Cold, false);
                self.hot -= 1;
                self.cold += 1;
                return;
            }
        }
    }

    fn trim_ghosts(&mut self) {
        while self.ghosts.len() > self.resident().max(1) as usize || self.spare.is_empty() {
            let at = self.test_hand;
            self.test_hand = self.next(at);
            self.end_test(at);
        }
    }

    fn take(&mut self, at: u32) {
        match self.nodes[at as usize].kind {
            Kind::Hot => self.hot -= 1,
            Kind::Cold => self.cold -= 1,
            Kind::Free | Kind::Ghost => return,
        }
        self.unlink(at);
        self.node(at).kind = Kind::Free;
    }

    /// A cold page is evicted; during its trial, it stays in the clock.
    fn depart(&mut self, at: u32) {
        let Node { key, test, prev, .. } = self.nodes[at as usize];
        if !test {
            return self.take(at);
        }
        self.trim_ghosts();
        let ghost = self.spare.pop().unwrap_or(NONE);
        // At its position.
        let hands = (self.hot_hand, self.cold_hand, self.test_hand);
        let keep = self.nodes[at as usize].next;
        let alone = keep == at;
        self.take(at);
        *self.node(ghost) =
            Node { prev: ghost, next: ghost, key, kind: Kind::Ghost, used: false, test: true };
        if alone {
            self.link(ghost);
        } else {
            let prev = if self.nodes[prev as usize].kind == Kind::Free {
                self.nodes[keep as usize].prev
            } else {
                prev
            };
            (self.node(ghost).prev, self.node(ghost).next) = (prev, keep);
            self.node(prev).next = ghost;
            self.node(keep).prev = ghost;
        }
        if hands.0 == at {
            self.hot_hand = ghost;
        }
        if hands.2 == at {
            self.test_hand = ghost;
        }
        self.ghosts.insert(key, ghost);
    }
}

impl EvictionPolicy for ClockPro {
    fn with_capacity(slots: u32) -> Self {
        let free =
            Node { prev: NONE, next: NONE, key: 0, kind: Kind::Free, used: false, test: false };
        ClockPro {
            nodes: vec![free; slots as usize * 2 + 2],
            spare: (slots..slots * 2 + 2).rev().collect(),
            ghosts: HashMap::with_capacity_and_hasher(
                slots as usize * 2,
                BuildHasherDefault::default(),
            ),
            hot_hand: NONE,
            cold_hand: NONE,
            test_hand: NONE,
            hot: 0,
            cold: 0,
            target: 1,
        }
    }

    fn insert(&mut self, slot: u32, key: u64, _: u32, cold: bool) {
        let ghost = self.ghosts.get(&key).copied();
        if let Some(ghost) = ghost {
            self.forget(ghost);
            self.target = (self.target + 1).min(self.resident().max(1));
        }
        let hot = ghost.is_some() && !cold;
        let kind = if hot { Kind::Hot } else { Kind::Cold };
        *self.node(slot) = Node { prev: NONE, next: NONE, key, kind, used: false, test: !cold };
        if hot {
            self.hot += 1;
        } else {
            self.cold += 1;
        }
        self.link(slot);
        if cold {
            self.cold_hand = slot;
        }
        while self.hot > self.resident().saturating_sub(self.target) && self.hot > 0 {
            self.cool();
        }
    }

    fn hit(&mut self, slot: u32) {
        self.node(slot).used = true;
    }

    fn remove(&mut self, slot: u32) {
        self.take(slot);
    }

    fn evict(&mut self, mut may: impl FnMut(u32) -> bool) -> Option<u32> {
        self.target = self.target.min(self.resident()).max(self.floor());
        for _ in 0..self.nodes.len() * 4 {
            if self.resident() == 0 {
                return None;
            }
            if self.cold == 0 {
                self.cool();
            }
            let at = self.cold_hand;
            self.cold_hand = self.next(at);
            let Node { kind, used, test, .. } = self.nodes[at as usize];
            if kind != Kind::Cold {
                continue;
            }
            if used && test {
                self.target = (self.target + 1).min(self.resident());
                let node = self.node(at);
                (node.kind, node.used, node.test) = (Kind::Hot, false, false);
                self.cold -= 1;
                self.hot += 1;
                self.unlink(at);
                self.link(at);
                while self.hot > self.resident().saturating_sub(self.target) && self.hot > 0 {
                    self.cool();
                }
            } else if used {
                let node = self.node(at);
                (node.used, node.test) = (false, true);
                self.unlink(at);
                self.link(at);
            } else if may(at) {
                self.depart(at);
                return Some(at);
            }
        }
        None
    }

    fn coldest(&mut self, n: usize, out: &mut Vec<u32>) {
        let full = out.len() + n;
        let orders =
            [(Kind::Cold, false), (Kind::Cold, true), (Kind::Hot, false), (Kind::Hot, true)];
        for (kind, used) in orders {
            let start = if kind == Kind::Cold { self.cold_hand } else { self.hot_hand };
            let mut at = start;
            while at != NONE && out.len() < full {
                let node = &self.nodes[at as usize];
                if node.kind == kind && node.used == used {
                    out.push(at);
                }
                at = node.next;
                if at == start {
                    break;
                }
            }
        }
    }
}
