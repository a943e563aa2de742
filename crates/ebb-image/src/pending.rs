//! Blocks that a delta holds and whose bits are not stable in its map yet.
//!
//! A write adds its blocks when it has completed. A flush takes what was added ([`PendingBlocks::begin_save`]), makes the
//! data stable, writes the bits and makes them stable, and only then forgets the blocks ([`PendingBlocks::end_save`]).
//! Meanwhile both sets count: a block is never without a bit in memory or in the map.
//!
//! # Invariants
//! - Blocks are forgotten only when they are saved, or beyond the end of a volume that became smaller.
//! - Memory is proportional to the blocks: 2 bytes for each, at most 4 KiB for those of one map page, and 64
//!   bytes for a page.

use std::collections::BTreeMap;

use crate::layout::BLOCKS_PER_PAGE;
use crate::map_page::{self, clear_from};

/// Bytes of the bits of one page.
const BITS: usize = map_page::BYTES - map_page::HEADER;
/// Blocks of a page from which on they are kept as bits: then these take less memory than a list.
const MANY: usize = BITS / 2;
/// Bytes that an entry of the table takes, roughly.
const ENTRY: usize = 64;

/// How many blocks from one on are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// Whether they are in the set.
    pub held: bool,
    /// At least 1.
    pub blocks: u64,
}

/// The blocks of one map page.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PageBlocks {
    /// Few, in order.
    List(Vec<u16>),
    Bits(Box<[u8; BITS]>),
    All,
}

impl PageBlocks {
    fn bytes(&self) -> usize {
        ENTRY
            + match self {
                PageBlocks::List(list) => list.capacity() * 2,
                PageBlocks::Bits(_) => BITS,
                PageBlocks::All => 0,
            }
    }

    fn count(&self) -> u64 {
        match self {
            PageBlocks::List(list) => list.len() as u64,
            PageBlocks::Bits(bits) => bits.iter().map(|byte| u64::from(byte.count_ones())).sum(),
            PageBlocks::All => BLOCKS_PER_PAGE,
        }
    }

    fn add(&mut self, first: u64, count: u64) {
        if count >= BLOCKS_PER_PAGE {
            *self = PageBlocks::All;
            return;
        }
        if let PageBlocks::List(list) = self {
            if list.len() as u64 + count <= MANY as u64 {
                for block in first..first + count {
                    // A page has fewer than 2^16 blocks.
                    let Ok(block) = u16::try_from(block) else { continue };
                    if let Err(at) = list.binary_search(&block) {
                        list.insert(at, block);
                    }
                }
                return;
            }
            let mut bits = Box::new([0; BITS]);
            for block in std::mem::take(list) {
                bits[usize::from(block / 8)] |= 1 << (block % 8);
            }
            *self = PageBlocks::Bits(bits);
        }
        if let PageBlocks::Bits(bits) = self {
            for block in first..(first + count).min(BLOCKS_PER_PAGE) {
                let (byte, mask) = map_page::place(block);
                bits[byte - map_page::HEADER] |= mask;
            }
            if bits.iter().all(|byte| *byte == 0xff) {
                *self = PageBlocks::All;
            }
        }
    }

    fn run(&self, first: u64, most: u64) -> BlockRun {
        let (held, blocks) = match self {
            PageBlocks::All => (true, most),
            PageBlocks::Bits(bits) => map_page::run(&bits[..], first, most),
            PageBlocks::List(list) => {
                let at = list.partition_point(|block| u64::from(*block) < first);
                let rest = &list[at..];
                let alike =
                    (first..).zip(rest).take_while(|(at, block)| *at == u64::from(**block)).count();
                match (alike, rest.first()) {
                    (0, None) => (false, most),
                    (0, Some(next)) => (false, u64::from(*next) - first),
                    (alike, _) => (true, alike as u64),
                }
            }
        };
        BlockRun { held, blocks: blocks.min(most).max(1) }
    }

    /// Sets the bits of these blocks in a page.
    fn set_in(&self, page: &mut [u8]) {
        match self {
            PageBlocks::All => page[map_page::HEADER..].fill(0xff),
            PageBlocks::Bits(bits) => {
                for (to, from) in page[map_page::HEADER..].iter_mut().zip(bits.iter()) {
                    *to |= from;
                }
            }
            PageBlocks::List(list) => {
                for block in list {
                    let (byte, mask) = map_page::place(u64::from(*block));
                    page[byte] |= mask;
                }
            }
        }
    }

    /// These blocks without those from `end` on.
    fn cut(self, end: u64) -> PageBlocks {
        let mut bits = match self {
            PageBlocks::List(mut list) => {
                list.retain(|block| u64::from(*block) < end);
                return PageBlocks::List(list);
            }
            PageBlocks::Bits(bits) => bits,
            PageBlocks::All => Box::new([0xff; BITS]),
        };
        clear_from(&mut bits[..], end);
        PageBlocks::Bits(bits)
    }

    fn merge(&mut self, other: &PageBlocks) {
        match (&mut *self, other) {
            (PageBlocks::All, _) => {}
            (_, PageBlocks::All) => *self = PageBlocks::All,
            (_, PageBlocks::List(list)) => {
                list.iter().for_each(|block| self.add(u64::from(*block), 1));
            }
            (PageBlocks::List(list), PageBlocks::Bits(_)) => {
                let list = std::mem::take(list);
                *self = other.clone();
                self.merge(&PageBlocks::List(list));
            }
            (PageBlocks::Bits(own), PageBlocks::Bits(bits)) => {
                for (to, from) in own.iter_mut().zip(bits.iter()) {
                    *to |= from;
                }
            }
        }
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PendingBlocks {
    added: BTreeMap<u32, PageBlocks>,
    saving: BTreeMap<u32, PageBlocks>,
    /// Bytes of both tables.
    bytes: usize,
}

/// The page of a block, and the block's number in it.
fn in_page(block: u64) -> (u32, u64) {
    (u32::try_from(block / BLOCKS_PER_PAGE).unwrap_or(u32::MAX), block % BLOCKS_PER_PAGE)
}

impl PendingBlocks {
    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.saving.is_empty()
    }

    /// Bytes of memory, roughly.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of blocks. One that was written again while it was being saved counts twice.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.added.values().chain(self.saving.values()).map(PageBlocks::count).sum()
    }

    /// Adds `count` blocks from `first` on, which the delta holds now.
    pub fn add(&mut self, first: u64, count: u64) {
        let (mut at, end) = (first, first.saturating_add(count));
        while at < end {
            let (page, block) = in_page(at);
            let some = (BLOCKS_PER_PAGE - block).min(end - at);
            let own = self.added.entry(page).or_insert_with(|| {
                self.bytes += ENTRY;
                PageBlocks::List(Vec::new())
            });
            self.bytes -= own.bytes();
            own.add(block, some);
            self.bytes += own.bytes();
            at += some;
        }
    }

    /// Whether `block` is in one of the sets, and how many blocks from there are alike, at most `most`.
    #[must_use]
    pub fn run(&self, block: u64, most: u64) -> BlockRun {
        let (page, first) = in_page(block);
        let most = most.min(BLOCKS_PER_PAGE - first).max(1);
        let of = |table: &BTreeMap<u32, PageBlocks>| {
            table
                .get(&page)
                .map_or(BlockRun { held: false, blocks: most }, |own| own.run(first, most))
        };
        let (one, other) = (of(&self.added), of(&self.saving));
        match (one.held, other.held) {
            (true, true) => BlockRun { held: true, blocks: one.blocks.max(other.blocks) },
            (true, false) => one,
            (false, true) => other,
            (false, false) => BlockRun { held: false, blocks: one.blocks.min(other.blocks) },
        }
    }

    /// Forgets the blocks from `end` on: the volume ends there now.
    pub fn cut(&mut self, end: u64) {
        let (edge, first) = in_page(end);
        for table in [&mut self.added, &mut self.saving] {
            let beyond = table.split_off(&edge);
            let kept = beyond.into_iter().next().filter(|(page, _)| *page == edge && first > 0);
            table.extend(kept.map(|(page, blocks)| (page, blocks.cut(first))));
        }
        self.count();
    }

    /// Takes what was added, to be saved, and what an earlier save has not; returns the pages, in order.
    pub fn begin_save(&mut self) -> Vec<u32> {
        for (page, blocks) in std::mem::take(&mut self.added) {
            match self.saving.get_mut(&page) {
                Some(own) => own.merge(&blocks),
                None => {
                    self.saving.insert(page, blocks);
                }
            }
        }
        self.count();
        self.saving.keys().copied().collect()
    }

    /// Sets the bits that are to be saved in a page, which holds those of before.
    pub fn set_in(&self, number: u32, page: &mut [u8]) {
        if let Some(blocks) = self.saving.get(&number) {
            blocks.set_in(page);
        }
    }

    /// What was to be saved is stable in the map. After a save that failed, do not call it: the next save begins with
    /// the same blocks.
    pub fn end_save(&mut self) {
        self.saving.clear();
        self.count();
    }

    fn count(&mut self) {
        self.bytes = self.added.values().chain(self.saving.values()).map(PageBlocks::bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Add(u64, u64),
        Cut(u64),
        Save(bool),
        Look(u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let block = prop_oneof![
            0..300u64,
            BLOCKS_PER_PAGE - 50..BLOCKS_PER_PAGE + 50,
            0..3 * BLOCKS_PER_PAGE
        ];
        let count = prop_oneof![1..4u64, 1..5000u64, Just(BLOCKS_PER_PAGE)];
        let step = prop_oneof![
            4 => (block.clone(), count.clone()).prop_map(|(block, count)| Step::Add(block, count)),
            1 => any::<bool>().prop_map(Step::Save),
            1 => block.clone().prop_map(Step::Cut),
            4 => (block, count).prop_map(|(block, count)| Step::Look(block, count)),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        /// Compared with sets of numbers; and pages hold what was saved.
        #[test]
        fn blocks_are_held_until_they_are_saved(steps in steps()) {
            let mut pending = PendingBlocks::default();
            let (mut added, mut saved) = (BTreeSet::new(), BTreeSet::new());
            let mut pages: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Add(first, count) => {
                        pending.add(first, count);
                        added.extend(first..first + count);
                    }
                    Step::Cut(end) => {
                        pending.cut(end);
                        added.split_off(&end);
                    }
                    Step::Save(ends) => {
                        for number in pending.begin_save() {
                            let page = pages.entry(number).or_insert_with(|| vec![0; map_page::BYTES]);
                            pending.set_in(number, page);
                        }
                        if ends {
                            pending.end_save();
                            saved.append(&mut added);
                            prop_assert!(pending.is_empty() && pending.bytes() == 0);
                        }
                    }
                    Step::Look(first, most) => {
                        let found = pending.run(first, most);
                        let held = added.contains(&first);
                        prop_assert_eq!(found.held, held);
                        prop_assert!((1..=most).contains(&found.blocks));
                        let alike = (first..first + found.blocks).all(|block| added.contains(&block) == held);
                        prop_assert!(alike, "{found:?}");
                    }
                }
                for block in saved.iter().step_by(997) {
                    let (page, bit) = in_page(*block);
                    let (byte, mask) = map_page::place(bit);
                    prop_assert!(pages[&page][byte] & mask != 0, "{block}");
                }
            }
        }
    }

    #[test]
    fn memory_is_bounded_by_the_blocks() {
        let mut pending = PendingBlocks::default();
        // A volume of 1 TiB, all of it zeroed.
        pending.add(0, 1 << 28);
        assert!(pending.bytes() < 1 << 20, "{}", pending.bytes());
        let mut random = PendingBlocks::default();
        for number in 0..65_536u64 {
            random.add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 36, 1);
        }
        assert!(random.bytes() < 1 << 20, "{}", random.bytes());
        random.begin_save();
        assert!(random.bytes() < 1 << 20, "{}", random.bytes());
    }
}
