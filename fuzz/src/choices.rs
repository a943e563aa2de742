//! Decodes fuzzer input as choices.

/// A supply of choices. When the bytes are used up, every choice is the first, and nothing rare
/// happens any more.
pub struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    /// Choices out of these bytes.
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// Whether the bytes are used up.
    pub fn is_exhausted(&self) -> bool {
        self.0.is_empty()
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }

    /// A number below `bound`, which is 1 to 256.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    /// True once in sixteen times.
    pub fn rarely(&mut self) -> bool {
        self.byte() >= 0xf0
    }

    /// True half of the time.
    pub fn often(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
