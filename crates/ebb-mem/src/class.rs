//! Size classes of blocks: powers of two from 4 KiB to 1 MiB, and runs of 2 MiB extents above.
//!
//! Why these: the smallest is the page, the kernel's unit of memory. Every power of two divides the
//! extent, so blocks are aligned to their size, no block crosses an extent, and a request of a common
//! length (4, 8, 16, 64, 128 KiB) fits exactly. Finer classes would waste less on odd lengths but spread
//! the same traffic over more caches, and block clients almost always use powers of two. Above 1 MiB a
//! class would have one block per extent or fewer, so a larger request gets whole extents and is charged
//! for the pages it uses.

/// Bytes in a page, the unit in which this crate counts.
pub const PAGE_BYTES: usize = 4096;
/// Bytes in an extent, the unit that serves one size class (and the size of a huge page).
pub const EXTENT_BYTES: usize = 2 << 20;
/// Number of size classes.
pub const CLASSES: usize = 9;
/// The largest block, in bytes.
pub const MAX_BLOCK_BYTES: usize = 64 << 20;

pub(crate) const EXTENT_PAGES: usize = EXTENT_BYTES / PAGE_BYTES;
const MIN_SHIFT: u32 = PAGE_BYTES.trailing_zeros();

/// Bytes in a block of `class` (0 to [`CLASSES`] - 1).
pub(crate) const fn class_bytes(class: usize) -> usize {
    PAGE_BYTES << class
}

/// Pages in a block of `class`.
pub(crate) const fn class_pages(class: usize) -> usize {
    1 << class
}

/// The class that serves `len` bytes; [`CLASSES`] or more means a run.
#[inline]
pub(crate) const fn class_of(len: usize) -> usize {
    // Of a length of one page or less this is 0; beyond, the bits above the page count.
    let last = len.saturating_sub(1) >> MIN_SHIFT;
    (usize::BITS - last.leading_zeros()) as usize
}

/// Pages needed for `len` bytes, at least one.
pub(crate) const fn pages_of(len: usize) -> usize {
    if len == 0 { 1 } else { len.div_ceil(PAGE_BYTES) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_the_smallest_power_of_two_that_fits() {
        for (len, class) in [(0, 0), (1, 0), (4096, 0), (4097, 1), (8192, 1), (65536, 4)] {
            assert_eq!(class_of(len), class, "{len}");
        }
        assert_eq!(class_of(1 << 20), CLASSES - 1);
        assert_eq!(class_of((1 << 20) + 1), CLASSES);
        for class in 0..CLASSES {
            assert_eq!(class_of(class_bytes(class)), class);
            assert_eq!(class_pages(class) * PAGE_BYTES, class_bytes(class));
        }
    }
}
