//! Repeatable pseudo-random numbers: splitmix64, small and good enough for jitter.

/// A seeded source.
#[derive(Debug, Clone)]
pub(crate) struct SimRandom(u64);

impl SimRandom {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number around `middle`, uniformly within `ppm` parts per million of it.
    pub(crate) fn around(&mut self, middle: u64, ppm: u32) -> u64 {
        let span = ebb_writeback::units::part(middle, ppm);
        middle - span + self.next() % (2 * span + 1)
    }
}
