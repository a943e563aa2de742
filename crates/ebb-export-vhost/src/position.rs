//! A place in the ring of a packed virtqueue.
//!
//! Invariant: the index is less than the ring's size, which is 32768 at most.

/// Flags of descriptors, set to the wrap counter of its last writer.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A place in the ring, and the number of laps before it, modulo 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Position {
    /// The place `count` descriptors further on in a ring of `size`, which is not less than `count`.
    #[inline]
    pub(crate) fn after(self, count: u16, size: u16) -> Position {
        // No overflow: the size is at most 32768.
        let index = self.index + count;
        if index < size {
            Position { index, wrap: self.wrap }
        } else {
            Position { index: index - size, wrap: !self.wrap }
        }
    }

    /// As the protocols have it: the index, and the wrap counter in bit 15.
    pub(crate) fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    pub(crate) fn of_bits(bits: u16) -> Position {
        Position { index: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// Whether a descriptor here with these flags is available.
    #[inline]
    pub(crate) fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    /// The flags by which a descriptor here is used.
    #[inline]
    pub(crate) fn used_flags(self) -> u16 {
        if self.wrap { AVAILABLE | USED } else { 0 }
    }
}
