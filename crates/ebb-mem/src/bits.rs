//! Page sets of one extent, and sets of extents: plain bit arithmetic.

use crate::class::EXTENT_PAGES;

const WORDS: usize = EXTENT_PAGES / 64;

/// A set of the 512 pages of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pages([u64; WORDS]);

impl Pages {
    pub(crate) const EMPTY: Pages = Pages([0; WORDS]);

    /// The pages `start..start + count`, cut off at the end of the extent.
    pub(crate) fn range(start: usize, count: usize) -> Pages {
        let end = (start + count).min(EXTENT_PAGES);
        let mut pages = Pages::EMPTY;
        for (word, bits) in pages.0.iter_mut().enumerate() {
            let (low, high) = (start.max(word * 64), end.min(word * 64 + 64));
            if low < high {
                *bits = (u64::MAX >> (64 - (high - low))) << (low - word * 64);
            }
        }
        pages
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(crate) fn meets(&self, other: &Pages) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    pub(crate) fn and(&self, other: &Pages) -> Pages {
        Pages(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    pub(crate) fn or(&self, other: &Pages) -> Pages {
        Pages(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    pub(crate) fn without(&self, other: &Pages) -> Pages {
        Pages(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }

    /// The first page of the set at or after `from`.
    pub(crate) fn first_from(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = *self.0.get(word)? & (u64::MAX << (from % 64));
        loop {
            if bits != 0 {
                return Some(word * 64 + bits.trailing_zeros() as usize);
            }
            word += 1;
            bits = *self.0.get(word)?;
        }
    }

    /// The first run of consecutive pages at or after `from`: (start, count).
    pub(crate) fn first_run(&self, from: usize) -> Option<(usize, usize)> {
        let start = self.first_from(from)?;
        let gap = Pages(std::array::from_fn(|word| !self.0[word]));
        let end = gap.first_from(start).unwrap_or(EXTENT_PAGES);
        Some((start, end - start))
    }
}

/// A set of extents, of a size fixed at creation: inserting never allocates.
pub(crate) struct Extents {
    words: Box<[u64]>,
    /// All words below this one are zero: keeps repeated searches short.
    low: usize,
    count: usize,
}

impl Extents {
    pub(crate) fn new(extents: usize) -> Extents {
        let words = vec![0; extents.div_ceil(64)].into_boxed_slice();
        Extents { low: words.len(), words, count: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn contains(&self, extent: usize) -> bool {
        self.words[extent / 64] >> (extent % 64) & 1 == 1
    }

    pub(crate) fn insert(&mut self, extent: usize) {
        if !self.contains(extent) {
            self.words[extent / 64] |= 1 << (extent % 64);
            self.low = self.low.min(extent / 64);
            self.count += 1;
        }
    }

    pub(crate) fn remove(&mut self, extent: usize) {
        if self.contains(extent) {
            self.words[extent / 64] &= !(1 << (extent % 64));
            self.count -= 1;
        }
    }

    pub(crate) fn clear(&mut self) {
        if self.count > 0 {
            self.words.fill(0);
            self.count = 0;
        }
    }

    /// The first member at or after `from`.
    pub(crate) fn first_from(&mut self, from: usize) -> Option<usize> {
        if self.count == 0 {
            self.low = self.words.len();
            return None;
        }
        while self.words.get(self.low) == Some(&0) {
            self.low += 1;
        }
        let mut word = (from / 64).max(self.low);
        let mask = if word == from / 64 { u64::MAX << (from % 64) } else { u64::MAX };
        let mut bits = *self.words.get(word)? & mask;
        loop {
            if bits != 0 {
                return Some(word * 64 + bits.trailing_zeros() as usize);
            }
            word += 1;
            bits = *self.words.get(word)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_runs_agree() {
        for (start, count) in [(0, 1), (0, 512), (63, 2), (60, 200), (511, 1), (64, 64)] {
            let pages = Pages::range(start, count);
            assert_eq!(pages.count(), count);
            assert_eq!(pages.first_run(0), Some((start, count)));
            assert!(
                (0..512).all(
                    |p| pages.meets(&Pages::range(p, 1)) == (start..start + count).contains(&p)
                )
            );
        }
        assert_eq!(Pages::EMPTY.first_run(0), None);
        assert_eq!(Pages::range(500, 100).count(), 12);
        let two = Pages::range(3, 2).or(&Pages::range(100, 30));
        assert_eq!(two.first_run(5), Some((100, 30)));
        assert_eq!(two.without(&Pages::range(0, 101)).first_run(0), Some((101, 29)));
    }

    #[test]
    fn extents_are_found_in_order() {
        let mut set = Extents::new(300);
        assert_eq!(set.first_from(0), None);
        for extent in [299, 64, 65, 3] {
            set.insert(extent);
        }
        assert_eq!(set.first_from(0), Some(3));
        assert_eq!(set.first_from(4), Some(64));
        set.remove(3);
        assert_eq!(set.first_from(0), Some(64));
        assert_eq!(set.first_from(66), Some(299));
        set.insert(1);
        assert_eq!(set.first_from(0), Some(1));
    }
}
