//! Repeatable jitter.

use seeded::Random;

/// A seeded source.
#[derive(Debug, Clone)]
pub(crate) struct SimRandom(Random);

impl SimRandom {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number around `middle`, uniformly within `ppm` parts per million of it.
    pub(crate) fn around(&mut self, middle: u64, ppm: u32) -> u64 {
        let span = ebb_writeback::units::part(middle, ppm);
        middle - span + self.next() % (2 * span + 1)
    }
}
