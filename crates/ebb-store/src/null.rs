//! A store that keeps nothing, for benchmarks of the layers above it.

const ZEROES: &[u8; 4096] = &[0; 4096];

/// Reads return zeroes, writes are discarded.
#[derive(Debug)]
pub struct NullStore {
    size: u64,
}

impl NullStore {
    /// A store of `size` bytes.
    pub fn new(size: u64) -> NullStore {
        NullStore { size }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn read_in_place(&self, length: u64, mut see: impl FnMut(&[u8])) {
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let here = left.min(ZEROES.len());
            see(&ZEROES[..here]);
            left -= here;
        }
    }

    pub(crate) fn write_in_place(&self, length: u64, mut put: impl FnMut(&mut [u8])) {
        let mut forgotten = [0; ZEROES.len()];
        let mut left = usize::try_from(length).unwrap_or(usize::MAX);
        while left > 0 {
            let here = left.min(forgotten.len());
            put(&mut forgotten[..here]);
            left -= here;
        }
    }
}
