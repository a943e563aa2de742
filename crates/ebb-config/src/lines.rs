//! The lines of a text, by offset.

/// The offsets at which the lines of a text begin, to find the line of an offset.
pub(super) struct Lines(Vec<usize>);

impl Lines {
    pub(super) fn new(text: &[u8]) -> Self {
        let ends = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
        Self(ends.map(|(at, _)| at + 1).collect())
    }

    /// The number of the line, from 1, that the byte at `offset` is in; the last one for an offset
    /// past the end.
    pub(super) fn number(&self, offset: usize) -> usize {
        1 + self.0.partition_point(|start| *start <= offset)
    }
}
