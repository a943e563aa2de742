//! Random numbers from a seed.

/// A generator of numbers that a seed determines: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from `seed`; any seed is as good as another.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends, and is used as a generator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next().checked_rem(end).unwrap_or(0)
    }

    /// An index of a list of `count` items; 0 if it is empty.
    pub fn index(&mut self, count: usize) -> usize {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        usize::try_from(self.below(count)).unwrap_or(0)
    }

    /// True in `part` of `whole` cases.
    pub fn chance(&mut self, part: u64, whole: u64) -> bool {
        self.below(whole) < part
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let words = (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(count).collect()
    }
}

/// The seed of this run: the number in the environment variable `name` if it is set, else `default`.
/// Tests print it when they fail.
///
/// # Panics
/// The variable is not a number: a mistake would repeat another run.
#[must_use]
pub fn seed(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")),
        Err(_) => default,
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    /// The published sequence of the seed 1234567.
    #[test]
    fn numbers_are_those_of_split_mix() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn choices_are_within_their_bounds() {
        let mut random = Random::new(1);
        assert!((0..1000).all(|_| random.below(7) < 7 && random.index(3) < 3));
        assert_eq!((random.below(0), random.index(0)), (0, 0));
        let chances = (0..10_000).filter(|_| random.chance(1, 4)).count();
        assert!((2200..2800).contains(&chances), "{chances}");
        assert_eq!(random.bytes(13).len(), 13);
    }
}
