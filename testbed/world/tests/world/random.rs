//! The random numbers of a world: all that is random comes from here.

#[derive(Clone, Debug)]
pub(crate) struct Random(seeded::Random);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        let seed = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15;
        Random(seeded::Random::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// Below `count`, which is not 0.
    pub(crate) fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    pub(crate) fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % count as u64).unwrap()
    }

    /// From `from` to `to`, both included.
    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True in `percent` of 100 cases.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// An independent generator, whose numbers do not depend on what is drawn from this one later.
    pub(crate) fn fork(&mut self) -> Random {
        Random::new(self.next())
    }
}
