//! Numbers at the front of a slice, in little-endian byte order.

/// Parses numbers from the front of a slice; `None` when too few bytes remain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NumberReader<'a>(&'a [u8]);

impl<'a> NumberReader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// All bytes that remain.
    pub(crate) const fn rest(self) -> &'a [u8] {
        self.0
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Writes numbers one after the other into an array; what does not fit is left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NumberWriter<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> NumberWriter<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// The array, and how many bytes of it were written.
    pub(crate) const fn finish(self) -> ([u8; N], usize) {
        (self.bytes, self.len)
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        let end = self.len.saturating_add(bytes.len());
        if let Some(place) = self.bytes.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
            self.len = end;
        }
        self
    }

    pub(crate) fn u8(self, number: u8) -> Self {
        self.bytes(&[number])
    }

    pub(crate) fn u16(self, number: u16) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(crate) fn u32(self, number: u32) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    pub(crate) fn u64(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_never_reads_past_the_end() {
        let mut reader = NumberReader::new(&[1, 2, 3, 4, 5]);
        assert_eq!(reader.u64(), None);
        assert_eq!(reader.u32(), Some(0x0403_0201));
        assert_eq!(reader.u16(), None);
        assert_eq!(reader.rest(), [5]);
    }

    #[test]
    fn a_writer_never_writes_past_the_end() {
        let written = NumberWriter::<5>::new().u16(0x0201).u8(3).u32(7).u8(4);
        assert_eq!(written.finish(), ([1, 2, 3, 4, 0], 4));
    }
}
