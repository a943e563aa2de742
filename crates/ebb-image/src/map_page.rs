//! A page of the block map: a header with a checksum, then one bit per block.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `EBMP` |
//! | 4..8 | CRC-32 of the rest of the page |
//! | 8..16 | generation: the number of times that the page was written |
//! | 16..24 | number of the page |
//! | 24..40 | identity of the delta |
//! | 64.. | bits, the lowest of a byte first; a set bit: the delta holds the block |
//!
//! Numbers are little-endian; the bytes between are 0.

use crate::layout::{BLOCKS_PER_PAGE, MAP_HEADER};

/// Bytes before the bits.
pub const HEADER: usize = 64;
const _: () = assert!(HEADER as u64 == MAP_HEADER, "the layout counts with it");
/// Bytes of a page, as a length.
pub const BYTES: usize = 4096;

const MAGIC: [u8; 4] = *b"EBMP";

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The generation of a valid page of this delta; `None` if it is torn, was never written, or belongs elsewhere.
#[must_use]
pub fn generation(page: &[u8], number: u32, delta: [u8; 16]) -> Option<u64> {
    if page.len() != BYTES || page[..4] != MAGIC {
        return None;
    }
    let sum = u32::try_from(word(page, 4) & 0xffff_ffff).ok()?;
    let is_own = word(page, 16) == u64::from(number) && page[24..40] == delta;
    (crc32fast::hash(&page[8..]) == sum && is_own).then(|| word(page, 8))
}

/// Whether bytes look like a map page, of whatever delta, valid or not.
#[must_use]
pub fn is_one(page: &[u8]) -> bool {
    page.starts_with(&MAGIC)
}

/// Returns true if the slots at [`crate::MAP_START`] look like those of a delta: a store without a
/// header is one whose header is damaged.
#[must_use]
pub fn has_map(slots: &[u8]) -> bool {
    slots.chunks(BYTES).any(is_one)
}

/// Completes a page whose bits are set: writes its header.
///
/// # Panics
/// If `page` is not of [`BYTES`].
pub fn seal(page: &mut [u8], number: u32, delta: [u8; 16], generation: u64) {
    assert_eq!(page.len(), BYTES, "a map page");
    page[..HEADER].fill(0);
    page[8..16].copy_from_slice(&generation.to_le_bytes());
    page[16..24].copy_from_slice(&u64::from(number).to_le_bytes());
    page[24..40].copy_from_slice(&delta);
    let sum = crc32fast::hash(&page[8..]);
    page[..4].copy_from_slice(&MAGIC);
    page[4..8].copy_from_slice(&sum.to_le_bytes());
}

/// The CRC-32 of `bytes` behind data with the checksum `before`.
#[must_use]
pub fn checksum(before: u32, bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new_with_initial(before);
    sum.update(bytes);
    sum.finalize()
}

/// The place of a block's bit in its page: byte and mask. `block` counts from the first of the page.
#[must_use]
pub fn place(block: u64) -> (usize, u8) {
    let block = block.min(BLOCKS_PER_PAGE - 1);
    (HEADER + usize::try_from(block / 8).unwrap_or(0), 1 << (block % 8))
}

/// Clears the bits from `first` on.
pub fn clear_from(bits: &mut [u8], first: u64) {
    let byte = usize::try_from(first / 8).unwrap_or(usize::MAX);
    let Some(rest) = bits.get_mut(byte..) else { return };
    let (edge, whole) = rest.split_at_mut(rest.len().min(1));
    edge.iter_mut().for_each(|edge| *edge &= (1u8 << (first % 8)) - 1);
    whole.fill(0);
}

/// How many of the first `end` bits are set.
#[must_use]
pub fn count(bits: &[u8], end: u64) -> u64 {
    let whole = usize::try_from(end / 8).unwrap_or(usize::MAX).min(bits.len());
    let ones = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
    let edge = bits.get(whole).map_or(0, |byte| byte & ((1u8 << (end % 8)) - 1));
    ones(&bits[..whole]) + u64::from(edge.count_ones())
}

/// The value of the bit at `first` of `bits`, and how many bits from there have it: at least 1, and at most `most` and those
/// there are.
#[must_use]
pub fn run(bits: &[u8], first: u64, most: u64) -> (bool, u64) {
    let bit = |at: u64| {
        usize::try_from(at / 8).ok().and_then(|at| bits.get(at)).map(|byte| byte >> (at % 8) & 1)
    };
    let Some(value) = bit(first) else { return (false, 1) };
    let whole = if value == 1 { 0xff } else { 0 };
    let mut at = first + 1;
    while at - first < most {
        let is_start = at.is_multiple_of(8) && most - (at - first) >= 8;
        let byte = usize::try_from(at / 8).ok().and_then(|at| bits.get(at));
        if is_start && byte == Some(&whole) {
            at += 8;
            continue;
        }
        if bit(at) != Some(value) {
            break;
        }
        at += 1;
    }
    (value == 1, (at - first).max(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DELTA: [u8; 16] = [7; 16];

    #[test]
    fn a_page_is_valid_only_as_it_was_written() {
        let mut page = vec![0; BYTES];
        assert_eq!(generation(&page, 0, DELTA), None, "never written");
        let (byte, mask) = place(BLOCKS_PER_PAGE - 1);
        page[byte] |= mask;
        seal(&mut page, 3, DELTA, 9);
        assert_eq!(generation(&page, 3, DELTA), Some(9));
        assert_eq!(generation(&page, 2, DELTA), None);
        assert_eq!(generation(&page, 3, [8; 16]), None);
        for at in (0..BYTES).step_by(97).chain(0..64) {
            for bit in 0..8 {
                let mut torn = page.clone();
                torn[at] ^= 1 << bit;
                assert_eq!(generation(&torn, 3, DELTA), None, "byte {at}, bit {bit}");
            }
        }
        assert_eq!(generation(&page[..512], 3, DELTA), None);
    }

    proptest! {
        #[test]
        fn a_run_is_what_counting_bits_gives(
            runs in prop::collection::vec((any::<bool>(), 1..60usize), 1..30), first in 0..1000u64, most in 1..3000u64,
        ) {
            let values: Vec<bool> = runs.into_iter().flat_map(|(value, count)| vec![value; count]).collect();
            let mut bits = vec![0; values.len().div_ceil(8)];
            for (at, _) in values.iter().enumerate().filter(|(_, value)| **value) {
                bits[at / 8] |= 1 << (at % 8);
            }
            let total = bits.len() as u64 * 8;
            let first = first % total;
            let value = |at: u64| usize::try_from(at).ok().and_then(|at| values.get(at)).copied().unwrap_or(false);
            let count = (first..total).take_while(|at| value(*at) == value(first)).count() as u64;
            prop_assert_eq!(run(&bits, first, most), (value(first), count.min(most)));
            let ones = |end: u64| (0..end).filter(|at| value(*at)).count() as u64;
            prop_assert_eq!(super::count(&bits, first), ones(first));
            prop_assert_eq!(super::count(&bits, total + most), ones(total));
            clear_from(&mut bits, first);
            prop_assert_eq!(super::count(&bits, total), ones(first));
            clear_from(&mut bits, total + most);
            prop_assert_eq!(super::count(&bits, total), ones(first));
        }
    }
}
