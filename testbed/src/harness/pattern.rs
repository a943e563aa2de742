//! Reproducible random numbers and disk content.
//!
//! Content is a function of a *stamp*: each 512-byte sector carries its stamp and its own
//! place, so that a sector found later tells which write it came from, and whether it is where
//! it belongs. Stamp 0 is a disk never written: zeroes.

pub use seeded::Random;

/// Bytes in a sector, the unit in which a disk may tear a write.
pub const SECTOR: usize = 512;

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
                _ => random.next(),
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
        assert!((0..100).all(|_| a.next() == b.next()));
        assert!((0..1000).all(|_| a.below(10) < 10));
    }
}
