//! Finds zeroes within data, so that the reply to a read can send them as holes.

/// A range of data that is entirely zero, or has to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRun {
    /// First byte, counted from the start of the data.
    pub offset: usize,
    /// Bytes, at least 1.
    pub len: usize,
    /// Every byte is zero.
    pub zero: bool,
}

/// Splits `data` into blocks of `block` bytes, the last one possibly shorter, and merges adjacent blocks
/// of the same kind: runs of zeroes and of data alternate, and cover `data` without a gap. A block counts as
/// zero only if all of its bytes are zero. A `block` of 0 means 1.
///
/// Each byte is read at most once; a block is read only up to the first byte that is not zero.
pub fn zero_runs(data: &[u8], block: usize) -> impl Iterator<Item = DataRun> {
    Runs { data, block: block.max(1), offset: 0, known: None }
}

struct Runs<'a> {
    data: &'a [u8],
    block: usize,
    offset: usize,
    /// Whether the block at `offset` is zero, if that was found when the run before it ended.
    known: Option<bool>,
}

impl Runs<'_> {
    fn block_at(&self, start: usize) -> &[u8] {
        let end = start.saturating_add(self.block).min(self.data.len());
        &self.data[start..end]
    }
}

impl Iterator for Runs<'_> {
    type Item = DataRun;

    fn next(&mut self) -> Option<DataRun> {
        if self.offset >= self.data.len() {
            return None;
        }
        let offset = self.offset;
        let known = self.known.take();
        let first = self.block_at(offset);
        let zero = known.unwrap_or_else(|| is_zero(first));
        let mut end = offset + first.len();
        while end < self.data.len() {
            let next = self.block_at(end);
            if is_zero(next) != zero {
                self.known = Some(!zero);
                break;
            }
            end += next.len();
        }
        self.offset = end;
        Some(DataRun { offset, len: end - offset, zero })
    }
}

/// Whether all bytes are zero. If the first group is zero, all are exactly if each byte equals the one that is
/// a group before it: that is one `memcmp`, for which the C library uses the widest vectors of the processor and
/// which stops at the first difference.
fn is_zero(data: &[u8]) -> bool {
    const GROUP: usize = 64;
    match data.split_first_chunk::<GROUP>() {
        Some((first, rest)) => *first == [0; GROUP] && *rest == data[..rest.len()],
        None => data.iter().all(|byte| *byte == 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn runs(data: &[u8], block: usize) -> Vec<(usize, usize, bool)> {
        zero_runs(data, block).map(|run| (run.offset, run.len, run.zero)).collect()
    }

    #[test]
    fn adjacent_blocks_of_the_same_kind_are_merged() {
        let mut data = vec![0; 4096 * 5 + 100];
        assert_eq!(runs(&data, 4096), [(0, 20580, true)]);
        data[4096 * 2] = 1;
        data[4096 * 4 - 1] = 1;
        assert_eq!(runs(&data, 4096), [(0, 8192, true), (8192, 8192, false), (16384, 4196, true)]);
        *data.last_mut().unwrap() = 1;
        assert_eq!(runs(&data, 4096)[2..], [(16384, 4096, true), (20480, 100, false)]);
        assert_eq!(runs(&[], 4096), []);
        assert_eq!(runs(&[0, 1], 0), [(0, 1, true), (1, 1, false)]);
        assert_eq!(runs(&[0, 1], usize::MAX), [(0, 2, false)]);
    }

    #[test]
    fn one_nonzero_byte_anywhere_is_found() {
        let mut data = [0_u8; 300];
        assert!(is_zero(&data));
        for at in 0..data.len() {
            data[at] = 0x80;
            assert!(!is_zero(&data), "byte {at}");
            data[at] = 0;
        }
    }

    proptest! {
        #[test]
        fn runs_equal_those_of_a_simple_implementation(
            data in proptest::collection::vec(prop_oneof![9 => Just(0_u8), 1 => any::<u8>()], 0..300),
            block in 1_usize..70,
        ) {
            let mut slow: Vec<(usize, usize, bool)> = Vec::new();
            for (index, piece) in data.chunks(block).enumerate() {
                let zero = piece.iter().all(|byte| *byte == 0);
                match slow.last_mut() {
                    Some(last) if last.2 == zero => last.1 += piece.len(),
                    _ => slow.push((index * block, piece.len(), zero)),
                }
            }
            prop_assert_eq!(runs(&data, block), slow);
        }
    }
}
