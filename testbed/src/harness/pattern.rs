//! Reproducible random numbers and disk content.
//!
//! Content is a function of a *stamp*: each 512-byte sector carries its stamp and its own
//! place, so that a sector found later tells which write it came from, and whether it is where
//! it belongs. Stamp 0 is a disk never written: zeroes.

/// Bytes in a sector, the unit in which a disk may tear a write.
pub const SECTOR: usize = 512;

/// A small seeded generator (SplitMix64): good enough to choose offsets, and the same anywhere.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts from `seed`; the same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Seed of this run: `EBBD_TEST_SEED` if set, else `default`. Tests print it when they fail.
    #[must_use]
    pub fn seed(default: u64) -> u64 {
        std::env::var("EBBD_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..limit`; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits().checked_rem(limit).unwrap_or(0)
    }
}

/// Content for `length` bytes at byte `offset` of a disk, both multiples of [`SECTOR`].
///
/// Every sector begins with its stamp and its number; the rest follows from both.
#[must_use]
pub fn content(stamp: u64, offset: u64, length: usize) -> Vec<u8> {
    let mut out = vec![0_u8; length];
    if stamp == 0 {
        return out;
    }
    let first = offset / SECTOR as u64;
    for (sector, bytes) in (first..).zip(out.chunks_mut(SECTOR)) {
        let mut random = Random::new(stamp.rotate_left(32) ^ sector);
        for (i, word) in bytes.chunks_mut(8).enumerate() {
            let value = match i {
                0 => stamp,
                1 => sector,
                _ => random.bits(),
            };
            word.copy_from_slice(&value.to_be_bytes()[..word.len()]);
        }
    }
    out
}

/// The stamp in a sector, if the sector at byte `offset` holds exactly what [`content`] makes.
#[must_use]
pub fn stamp_of(sector: &[u8], offset: u64) -> Option<u64> {
    let stamp = u64::from_be_bytes(sector.get(..8)?.try_into().ok()?);
    (sector == content(stamp, offset, sector.len())).then_some(stamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_contains_its_stamp_and_its_number() {
        let disk = content(7, 4096, 2 * SECTOR);
        assert_eq!(stamp_of(&disk[..SECTOR], 4096), Some(7));
        assert_eq!(stamp_of(&disk[SECTOR..], 4096 + 512), Some(7));
        assert_eq!(stamp_of(&disk[SECTOR..], 4096), None, "in the wrong place");
        let mut torn = disk.clone();
        torn[300] ^= 1;
        assert_eq!(stamp_of(&torn[..SECTOR], 4096), None, "one bit changed");
        assert_eq!(stamp_of(&[0; SECTOR], 0), Some(0), "never written");
    }

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let (mut a, mut b) = (Random::new(1), Random::new(1));
        assert!((0..100).all(|_| a.bits() == b.bits()));
        assert!((0..1000).all(|_| a.below(10) < 10));
    }
}
