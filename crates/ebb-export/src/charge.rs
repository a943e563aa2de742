//! What a request is charged for, from its connection's or ring's memory and from its volume's share.
//!
//! Invariant: a volume is guaranteed its reserve and no more. A request that needs more is executed in pieces while
//! memory is short, and each piece is charged no more than the reserve, so that it can always be granted.

use ebb_io::{BufPool, QueueShare};

/// What a request is charged beside its data, bytes.
pub const REQUEST_BYTES: usize = 512;
/// The longest piece of a request that is executed in pieces, bytes.
pub const PIECE: usize = 1 << 20;
/// Lower bound of the longest piece, bytes.
const PAGE: usize = 4096;

/// The longest piece for which the volume's reserve suffices, bytes: a power of two, as the size of a buffer is.
#[must_use]
pub fn longest_piece(queue_share: &QueueShare) -> usize {
    piece_within(queue_share.share().reserve())
}

fn piece_within(reserve: usize) -> usize {
    let most = reserve.saturating_sub(REQUEST_BYTES).min(PIECE);
    (most.max(PAGE) / 2 + 1).next_power_of_two()
}

/// What a piece of `length` bytes takes from the volume's share: its buffer, and the `bounce` bytes that the store needs
/// for partially covered blocks, as far as the reserve allows.
#[must_use]
#[inline]
pub fn piece_bytes(queue_share: &QueueShare, length: usize, bounce: usize) -> usize {
    let buffer = BufPool::footprint(length);
    match bounce {
        0 => buffer,
        bounce => (buffer + bounce).min(queue_share.share().reserve()).max(buffer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_a_power_of_two_for_which_the_reserve_suffices() {
        for (reserve, piece) in [
            (0, PAGE),
            (PAGE, PAGE),
            (PAGE + REQUEST_BYTES, PAGE),
            (2 * PAGE + REQUEST_BYTES - 1, PAGE),
            (2 * PAGE + REQUEST_BYTES, 2 * PAGE),
            ((1 << 20) + REQUEST_BYTES, PIECE),
            (usize::MAX, PIECE),
        ] {
            assert_eq!(piece_within(reserve), piece, "{reserve}");
        }
    }
}
