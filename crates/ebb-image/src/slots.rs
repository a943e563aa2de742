//! What the slots of headers and map pages hold, for programs that look at a delta that is not in use.
//!
//! A daemon needs only the copy that counts. To verify a delta means to look at the other copies, too.

use crate::header::{DeltaHeader, HEADER_BYTES, HeaderError, decode_one};
use crate::map_page;

/// What a slot of a map page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapSlot {
    /// Zeroes: it was never written.
    Empty,
    /// A valid copy of the page, with its generation.
    Valid(u64),
    /// Something else: a torn write, damage, or a page of another place or another delta.
    Damaged,
}

impl MapSlot {
    /// Looks at the bytes of a slot of page `number` of the delta with this identity.
    #[must_use]
    pub fn of(bytes: &[u8], number: u32, delta: [u8; 16]) -> MapSlot {
        match map_page::generation(bytes, number, delta) {
            Some(generation) => MapSlot::Valid(generation),
            None if is_zero(bytes) => MapSlot::Empty,
            None => MapSlot::Damaged,
        }
    }

    /// Of the slots of a page the one that counts, if one does: the valid one with the higher generation.
    #[must_use]
    pub fn newest(slots: [MapSlot; 2]) -> Option<usize> {
        match slots {
            [MapSlot::Valid(first), MapSlot::Valid(second)] => Some(usize::from(first <= second)),
            [MapSlot::Valid(_), _] => Some(0),
            [_, MapSlot::Valid(_)] => Some(1),
            _ => None,
        }
    }
}

/// The copy of a map page that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapCopy {
    /// None: the page was never stable, and the delta holds none of its blocks.
    Never,
    /// The copy in this slot.
    Slot(usize),
    /// A copy was stable, and no slot holds it: which blocks the delta holds is not known.
    Lost,
}

impl MapCopy {
    /// Finds the copy that counts. The first copy goes to the first slot, where a crash may tear
    /// it. The second slot is written above a valid copy only.
    #[must_use]
    pub fn of(slots: [MapSlot; 2]) -> MapCopy {
        match MapSlot::newest(slots) {
            Some(slot) => MapCopy::Slot(slot),
            None if slots[1] == MapSlot::Empty => MapCopy::Never,
            None => MapCopy::Lost,
        }
    }
}

/// The header in one slot; `None` if the slot holds zeroes, which it does until it is first written.
///
/// # Errors
/// [`HeaderError`].
pub fn header_in_slot(bytes: &[u8]) -> Result<Option<DeltaHeader>, HeaderError> {
    if bytes.len() == HEADER_BYTES && is_zero(bytes) {
        return Ok(None);
    }
    decode_one(bytes).map(Some)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Parent};

    const DELTA: [u8; 16] = [7; 16];

    fn page(generation: u64) -> Vec<u8> {
        let mut page = vec![0; map_page::BYTES];
        map_page::seal(&mut page, 2, DELTA, generation);
        page
    }

    #[test]
    fn a_slot_is_empty_valid_or_damaged() {
        let valid = page(4);
        assert_eq!(MapSlot::of(&vec![0; map_page::BYTES], 2, DELTA), MapSlot::Empty);
        assert_eq!(MapSlot::of(&valid, 2, DELTA), MapSlot::Valid(4));
        assert_eq!(MapSlot::of(&valid, 1, DELTA), MapSlot::Damaged, "of another page");
        assert_eq!(MapSlot::of(&valid, 2, [8; 16]), MapSlot::Damaged, "of another delta");
        let mut flipped = valid;
        flipped[4000] ^= 4;
        assert_eq!(MapSlot::of(&flipped, 2, DELTA), MapSlot::Damaged);
        assert_eq!(MapSlot::of(&[1], 2, DELTA), MapSlot::Damaged, "cut off");
    }

    #[test]
    fn the_slot_with_the_higher_generation_counts() {
        use MapSlot::{Damaged, Empty, Valid};
        let all = [
            ([Empty, Empty], None),
            ([Damaged, Empty], None),
            ([Valid(1), Empty], Some(0)),
            ([Damaged, Valid(1)], Some(1)),
            ([Valid(3), Valid(2)], Some(0)),
            ([Valid(3), Valid(4)], Some(1)),
        ];
        for (slots, expected) in all {
            assert_eq!(MapSlot::newest(slots), expected, "{slots:?}");
        }
    }

    #[test]
    fn page_is_lost_once_its_second_slot_was_written() {
        use MapSlot::{Damaged, Empty, Valid};
        let all = [
            ([Empty, Empty], MapCopy::Never),
            // A torn first write.
            ([Damaged, Empty], MapCopy::Never),
            ([Empty, Damaged], MapCopy::Lost),
            ([Damaged, Damaged], MapCopy::Lost),
            ([Damaged, Valid(2)], MapCopy::Slot(1)),
            ([Valid(1), Damaged], MapCopy::Slot(0)),
        ];
        for (slots, expected) in all {
            assert_eq!(MapCopy::of(slots), expected, "{slots:?}");
        }
    }

    #[test]
    fn a_header_slot_that_was_never_written_is_no_damage() {
        let layout = Layout::new(1 << 20).unwrap_or_else(|error| panic!("{error}"));
        let header = DeltaHeader::new(1, DELTA, layout, Parent::default());
        let mut bytes = header.encode();
        assert_eq!(header_in_slot(&bytes), Ok(Some(header)));
        bytes[120] ^= 1;
        assert_eq!(header_in_slot(&bytes), Err(HeaderError::Damaged));
        bytes[0] = 0;
        assert_eq!(header_in_slot(&bytes), Err(HeaderError::NotADelta));
        bytes.fill(0);
        assert_eq!(header_in_slot(&bytes), Ok(None));
        assert_eq!(header_in_slot(&[]), Err(HeaderError::NotADelta));
    }
}
