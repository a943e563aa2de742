//! What a test store holds: what reads see, and apart from it what a power failure leaves.
//!
//! # Invariants
//! - A sector is *unflushed* from its write until a flush or FUA covers it, or a loss takes it.
//! - A *lost* sector was taken by a loss, and not written since. Reads may go on showing its data, as
//!   a page cache does, until it is evicted; then they show what is stable.

use super::Random;

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;

/// A set of sectors.
#[derive(Clone, Debug, Default)]
pub(super) struct Sectors(Vec<u64>);

impl Sectors {
    fn with(sectors: usize) -> Sectors {
        Sectors(vec![0; sectors.div_ceil(64)])
    }

    pub(super) fn has(&self, sector: usize) -> bool {
        self.0.get(sector / 64).is_some_and(|word| word & (1 << (sector % 64)) != 0)
    }

    fn put(&mut self, sector: usize, there: bool) {
        if let Some(word) = self.0.get_mut(sector / 64) {
            let bit = 1 << (sector % 64);
            *word = if there { *word | bit } else { *word & !bit };
        }
    }

    pub(super) fn list(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for (at, &word) in self.0.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                all.push(at * 64 + usize::try_from(rest.trailing_zeros()).unwrap_or(0));
                rest &= rest - 1;
            }
        }
        all
    }
}

/// What became of a sector when a flush failed.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) sector: usize,
    pub(super) data: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Bytes {
    /// What reads see.
    pub(super) seen: Vec<u8>,
    /// What a power failure leaves.
    pub(super) stable: Vec<u8>,
    pub(super) unflushed: Sectors,
    pub(super) lost: Sectors,
}

fn span(sector: usize, size: usize) -> std::ops::Range<usize> {
    (sector * SECTOR).min(size)..((sector + 1) * SECTOR).min(size)
}

impl Bytes {
    pub(super) fn new(size: usize) -> Bytes {
        let sectors = size.div_ceil(SECTOR);
        Bytes {
            seen: vec![0; size],
            stable: vec![0; size],
            unflushed: Sectors::with(sectors),
            lost: Sectors::with(sectors),
        }
    }

    /// Writes data that no flush covers yet. Of what it overwrites some may have become stable by itself.
    pub(super) fn write(&mut self, at: usize, data: &[u8], random: &Random) -> bool {
        let Some(end) = at.checked_add(data.len()).filter(|end| *end <= self.seen.len()) else {
            return false;
        };
        for sector in at / SECTOR..end.div_ceil(SECTOR) {
            if self.unflushed.has(sector) && random.next().is_multiple_of(2) {
                self.save(sector);
            }
            self.unflushed.put(sector, true);
            self.lost.put(sector, false);
        }
        self.seen[at..end].copy_from_slice(data);
        true
    }

    /// Changes it from outside: stable at once.
    pub(super) fn change(&mut self, at: usize, data: &[u8]) {
        self.seen[at..at + data.len()].copy_from_slice(data);
        self.stable[at..at + data.len()].copy_from_slice(data);
    }

    /// A sector's data is stable now.
    pub(super) fn save(&mut self, sector: usize) {
        let range = span(sector, self.seen.len());
        self.stable[range.clone()].copy_from_slice(&self.seen[range]);
        self.unflushed.put(sector, false);
    }

    /// A range is stable now, as far as it is not lost.
    pub(super) fn save_range(&mut self, at: usize, length: usize) {
        for sector in at / SECTOR..(at + length).div_ceil(SECTOR) {
            if self.unflushed.has(sector) {
                self.save(sector);
            }
        }
    }

    /// Of what is not flushed any subset is lost, and the rest is stable. Nothing is written any more by
    /// itself afterwards. Returns what is left of each sector.
    pub(super) fn lose(&mut self, random: &Random) -> Vec<Left> {
        let all = self.unflushed.list();
        // All, none, or any: subsets with one sector are as likely as those with nearly all.
        let share = random.next() % 9;
        for &sector in &all {
            if random.next() % 8 < share {
                self.unflushed.put(sector, false);
                self.lost.put(sector, true);
                if random.next().is_multiple_of(2) {
                    self.evict(sector);
                }
            } else {
                self.save(sector);
            }
        }
        let left = |sector: usize| Left {
            sector,
            data: self.stable[span(sector, self.stable.len())].to_vec(),
        };
        all.into_iter().map(left).collect()
    }

    fn evict(&mut self, sector: usize) {
        let range = span(sector, self.seen.len());
        self.seen[range.clone()].copy_from_slice(&self.stable[range]);
    }

    /// Reads show what is stable of all that was lost.
    pub(super) fn evict_lost(&mut self) {
        for sector in self.lost.list() {
            self.evict(sector);
        }
    }

    /// The power fails: of what is not flushed any subset is there.
    pub(super) fn power_cut(&mut self, random: &Random) {
        self.lose(random);
        self.seen.copy_from_slice(&self.stable);
        self.lost = Sectors::with(self.seen.len().div_ceil(SECTOR));
    }

    /// Another size: what is cut off is gone, what is new is zeroes.
    pub(super) fn resize(&mut self, size: usize) {
        let from = size / SECTOR;
        let sectors = self.seen.len().div_ceil(SECTOR);
        for sector in from..sectors {
            self.unflushed.put(sector, false);
            self.lost.put(sector, false);
        }
        self.seen.resize(size, 0);
        self.stable.resize(size, 0);
        let words = size.div_ceil(SECTOR).div_ceil(64);
        self.unflushed.0.resize(words, 0);
        self.lost.0.resize(words, 0);
    }
}
