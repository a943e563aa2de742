//! The content of a test store: what reads return, and separately what a power failure leaves.
//!
//! # Invariants
//! - A sector is *unflushed* from its write until a flush or FUA covers it, or a loss discards it.
//! - A *lost* sector was discarded by a loss, and not written since. Reads may still return its
//!   data, as from a page cache, until it is evicted; then they return what is stable.

use super::FaultRandom;

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

/// A sector after a failed flush.
#[derive(Debug)]
pub(super) struct SectorAfterLoss {
    pub(super) sector: usize,
    pub(super) data: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct DiskContents {
    /// What reads return.
    pub(super) seen: Vec<u8>,
    /// What a power failure leaves.
    pub(super) stable: Vec<u8>,
    pub(super) unflushed: Sectors,
    pub(super) lost: Sectors,
}

fn span(sector: usize, size: usize) -> std::ops::Range<usize> {
    (sector * SECTOR).min(size)..((sector + 1) * SECTOR).min(size)
}

impl DiskContents {
    pub(super) fn new(size: usize) -> DiskContents {
        let sectors = size.div_ceil(SECTOR);
        DiskContents {
            seen: vec![0; size],
            stable: vec![0; size],
            unflushed: Sectors::with(sectors),
            lost: Sectors::with(sectors),
        }
    }

    /// Writes data that no flush covers yet. Old unflushed data may become stable meanwhile.
    pub(super) fn write(&mut self, at: usize, data: &[u8], random: &FaultRandom) -> bool {
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

    /// Makes a sector's data stable.
    pub(super) fn save(&mut self, sector: usize) {
        let range = span(sector, self.seen.len());
        self.stable[range.clone()].copy_from_slice(&self.seen[range]);
        self.unflushed.put(sector, false);
    }

    /// Makes a range stable, except for lost sectors.
    pub(super) fn save_range(&mut self, at: usize, length: usize) {
        for sector in at / SECTOR..(at + length).div_ceil(SECTOR) {
            if self.unflushed.has(sector) {
                self.save(sector);
            }
        }
    }

    /// Any subset of the unflushed sectors is lost, and the remaining ones become stable. Returns the
    /// stable content of each of them.
    pub(super) fn lose(&mut self, random: &FaultRandom) -> Vec<SectorAfterLoss> {
        let all = self.unflushed.list();
        // All, none, or any: subsets of one sector are as likely as those of nearly all.
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
        let left = |sector: usize| SectorAfterLoss {
            sector,
            data: self.stable[span(sector, self.stable.len())].to_vec(),
        };
        all.into_iter().map(left).collect()
    }

    fn evict(&mut self, sector: usize) {
        let range = span(sector, self.seen.len());
        self.seen[range.clone()].copy_from_slice(&self.stable[range]);
    }

    /// Evicts all lost sectors: reads return what is stable.
    pub(super) fn evict_lost(&mut self) {
        for sector in self.lost.list() {
            self.evict(sector);
        }
    }

    /// The power fails: any subset of the unflushed sectors is stable.
    pub(super) fn power_cut(&mut self, random: &FaultRandom) {
        self.lose(random);
        self.seen.copy_from_slice(&self.stable);
        self.lost = Sectors::with(self.seen.len().div_ceil(SECTOR));
    }

    /// Resizes it: data beyond the new end is discarded, and new space is zeroed.
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
