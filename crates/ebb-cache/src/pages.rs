//! Pages and frames: the arithmetic of ranges, without state.
//!
//! A **page** is 4 KiB of a volume, a **frame** is 16 of them (64 KiB) at a multiple of 64 KiB. Sets of
//! a frame's pages are 16-bit masks, the first page in bit 0.

use std::ops::Range;

use ebb_block::SECTOR;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// Pages of a frame.
pub(crate) const FRAME_PAGES: u64 = 16;
/// Bytes of a frame.
pub(crate) const FRAME: u64 = PAGE * FRAME_PAGES;
/// The same as a `usize`.
pub(crate) const PAGE_BYTES: usize = 4096;
/// A page of zeroes.
pub(crate) static ZEROES: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Converts a value that is known to fit (it is below the length of a frame or a buffer).
#[inline]
pub(crate) fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A page's number within its frame, and other numbers up to 16.
#[inline]
pub(crate) fn small(value: usize) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// The mask of `count` pages from `start` (together at most 16).
#[inline]
pub(crate) fn mask(start: usize, count: usize) -> u16 {
    let all = (1u32 << count.min(16)) - 1;
    u16::try_from((all << start.min(16)) & 0xffff).unwrap_or(u16::MAX)
}

/// The pages of a mask, ascending.
#[inline]
pub(crate) fn each(mut mask: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let page = usize::try_from(mask.trailing_zeros()).ok().filter(|_| mask != 0)?;
        mask &= mask - 1;
        Some(page)
    })
}

/// The runs of a mask, ascending: first page and number of pages.
#[inline]
pub(crate) fn runs(mut rest: u16) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        let start = usize::try_from(rest.trailing_zeros()).ok().filter(|_| rest != 0)?;
        let count = usize::try_from((rest >> start).trailing_ones()).ok()?;
        rest &= !mask(start, count);
        Some((start, count))
    })
}

/// A mask as blocks of 1, 2, 4, 8 or 16 pages, each at a multiple of its size: first page and number
/// of pages.
pub(crate) fn blocks(rest: u16) -> impl Iterator<Item = (usize, usize)> {
    let mut rest = rest;
    std::iter::from_fn(move || {
        let (start, run) = runs(rest).next()?;
        let natural = if start == 0 { 16 } else { 1 << start.trailing_zeros() };
        let count = natural.min(1 << run.ilog2());
        rest &= !mask(start, count);
        Some((start, count))
    })
}

/// One frame's part of a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FramePart {
    /// Number of the frame.
    pub(crate) frame: u64,
    /// First byte and end, within the frame.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Its position in the range.
    pub(crate) at: usize,
}

impl FramePart {
    /// Pages touched.
    #[inline]
    pub(crate) fn touched(&self) -> u16 {
        let first = self.from / PAGE_BYTES;
        mask(first, self.to.div_ceil(PAGE_BYTES) - first)
    }

    /// Pages wholly covered; the last page of a volume that ends at `size` counts as whole when all bytes of
    /// it that exist are covered.
    pub(crate) fn covered(&self, size: u64) -> u16 {
        let first = self.from.div_ceil(PAGE_BYTES);
        let last = self.frame * FRAME + self.to as u64 == size;
        let end = if last { self.to.div_ceil(PAGE_BYTES) } else { self.to / PAGE_BYTES };
        mask(first, end.saturating_sub(first))
    }

    /// Bytes of the range in this part.
    pub(crate) fn range(&self) -> Range<usize> {
        self.at..self.at + (self.to - self.from)
    }

    /// The bytes of `pages` (first and number) within this part, relative to the frame.
    #[inline]
    pub(crate) fn clip(&self, start: usize, count: usize) -> Range<usize> {
        (start * PAGE_BYTES).max(self.from)..((start + count) * PAGE_BYTES).min(self.to)
    }
}

/// The frames of a byte range.
pub(crate) fn parts(offset: u64, length: usize) -> impl Iterator<Item = FramePart> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= length {
            return None;
        }
        let position = offset + at as u64;
        let from = index(position % FRAME);
        let to = index(FRAME).min(from + (length - at));
        let part = FramePart { frame: position / FRAME, from, to, at };
        at += to - from;
        Some(part)
    })
}

/// The pages a byte range touches.
pub(crate) fn touched(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE..offset.saturating_add(length).div_ceil(PAGE)
}

/// The sectors of a byte range, which begins and ends with whole ones.
pub(crate) fn sectors(offset: u64, length: u64) -> Range<u64> {
    offset / SECTOR..offset.saturating_add(length).div_ceil(SECTOR)
}

/// The pages a range of sectors touches.
pub(crate) fn pages_of(sectors: &Range<u64>) -> Range<u64> {
    sectors.start / (PAGE / SECTOR)..sectors.end.div_ceil(PAGE / SECTOR)
}

/// The pages of `frame` that are in a range of pages.
pub(crate) fn within(frame: u64, pages: &Range<u64>) -> u16 {
    let first = frame.saturating_mul(FRAME_PAGES);
    let start = pages.start.clamp(first, first + FRAME_PAGES);
    let end = pages.end.clamp(start, first + FRAME_PAGES);
    mask(index(start - first), index(end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_their_runs_agree() {
        assert_eq!((mask(0, 16), mask(3, 2), mask(16, 0)), (0xffff, 0b11000, 0));
        for rest in [0, 1, 0b1011_0111_0000_1110, 0xffff, 0x8001] {
            let joined = runs(rest).fold(0, |all, (start, count)| all | mask(start, count));
            assert_eq!(joined, rest);
            assert_eq!(each(rest).fold(0, |all, page| all | mask(page, 1)), rest);
            let mut all = 0;
            for (start, count) in blocks(rest) {
                assert!(count.is_power_of_two() && start % count == 0, "{start}+{count}");
                assert_eq!(all & mask(start, count), 0);
                all |= mask(start, count);
            }
            assert_eq!(all, rest);
        }
    }

    #[test]
    fn a_range_is_cut_into_frames() {
        let list: Vec<FramePart> = parts(FRAME - 512, 512 + 65536 + 4608).collect();
        assert_eq!(list.len(), 3);
        assert_eq!((list[0].touched(), list[0].covered(u64::MAX)), (0x8000, 0));
        assert_eq!((list[1].touched(), list[1].covered(u64::MAX)), (0xffff, 0xffff));
        assert_eq!((list[2].touched(), list[2].covered(u64::MAX)), (0b11, 0b1));
        let size = 2 * FRAME + 4608;
        assert_eq!(list[2].covered(size), 0b11, "a short last page is whole");
        assert_eq!(list[2].range(), 512 + 65536..512 + 65536 + 4608);
        assert_eq!(within(2, &(33..u64::MAX)), 0xfffe);
        assert_eq!(within(2, &(0..32)), 0);
    }
}
