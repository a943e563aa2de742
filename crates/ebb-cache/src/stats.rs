//! What the cache is made with, and the figures it shows.

use std::fmt;
use std::str::FromStr;

use crate::shard::Tally;

/// Bytes of a page, for gauges.
const PAGE: u64 = crate::pages::PAGE;

/// How a volume uses the cache: the words people know from QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Every request goes to the store.
    #[default]
    None,
    /// Reads are served from memory; a write is acknowledged when the store has it.
    Writethrough,
    /// Writes are acknowledged from memory, and reach the store later; a flush waits for that.
    Writeback,
}

impl Mode {
    /// The word for it: `none`, `writethrough` or `writeback`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Writethrough => "writethrough",
            Mode::Writeback => "writeback",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is no mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no cache mode `{0}`: use none, writethrough or writeback")]
pub struct ModeError(String);

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Mode, ModeError> {
        [Mode::None, Mode::Writethrough, Mode::Writeback]
            .into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| ModeError(text.to_owned()))
    }
}

/// The figures of one volume's part of the cache: gauges in bytes, counters since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeCacheStats {
    /// Memory with cached data behind it: wired, or lent and not known to be taken (seed `002`).
    pub bufspace: u64,
    /// Of that, what the kernel may not take.
    pub bufwiredspace: u64,
    /// Address space of all buffers.
    pub bufkvaspace: u64,
    /// Data that the store does not have yet.
    pub dirty: u64,
    /// Buffers.
    pub buffers: u64,
    /// Tables that all this is found with.
    pub tables: u64,
    /// Pages (4 KiB) that reads found here.
    pub hits: u64,
    /// Of those, pages that were lent at the time, and still there.
    pub lent_hits: u64,
    /// Pages that reads had to take from the store.
    pub misses: u64,
    /// Pages that reads wanted and the kernel had taken; each is a miss, too.
    pub lost_hits: u64,
    /// Pages found taken by the scan.
    pub reclaimed: u64,
    /// Pages that went to make room.
    pub evictions: u64,
    /// Pages put in.
    pub insertions: u64,
    /// Of those, by read-ahead.
    pub read_ahead: u64,
}

impl VolumeCacheStats {
    pub(crate) fn add(&mut self, tally: &Tally, tables: usize) {
        self.bufspace += tally.held() * PAGE;
        self.bufwiredspace += (tally.address - tally.lent) * PAGE;
        self.bufkvaspace += tally.address * PAGE;
        self.dirty += tally.dirty * PAGE;
        self.buffers += tally.buffers;
        self.tables += tables as u64;
        self.hits += tally.hits;
        self.lent_hits += tally.lent_hits;
        self.misses += tally.misses;
        self.lost_hits += tally.lost_hits;
        self.reclaimed += tally.reclaimed;
        self.evictions += tally.evicted;
        self.insertions += tally.inserted;
        self.read_ahead += tally.ahead;
    }

    fn sum(&mut self, other: &VolumeCacheStats) {
        self.bufspace += other.bufspace;
        self.bufwiredspace += other.bufwiredspace;
        self.bufkvaspace += other.bufkvaspace;
        self.dirty += other.dirty;
        self.buffers += other.buffers;
        self.tables += other.tables;
        self.hits += other.hits;
        self.lent_hits += other.lent_hits;
        self.misses += other.misses;
        self.lost_hits += other.lost_hits;
        self.reclaimed += other.reclaimed;
        self.evictions += other.evictions;
        self.insertions += other.insertions;
        self.read_ahead += other.read_ahead;
    }

    /// Hits per page read, 0 to 1; 0 if nothing was read.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        let share = |value: u64| u32::try_from(value.min(1 << 31)).map_or(0.0, f64::from);
        let all = self.hits.saturating_add(self.misses);
        // Down to 31 bits: a ratio needs no more.
        let shift = (64 - all.leading_zeros()).saturating_sub(31);
        if all == 0 { 0.0 } else { share(self.hits >> shift) / share(all >> shift) }
    }
}

/// The figures of the whole cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Sums over all volumes, those that are closed left out.
    pub total: VolumeCacheStats,
    /// Each volume, by name.
    pub volumes: Vec<(String, VolumeCacheStats)>,
    /// What the cache may hold at this moment, bytes.
    pub limit: u64,
    /// What it may hold when memory is plenty, bytes.
    pub max: u64,
    /// What it keeps under pressure, bytes.
    pub min: u64,
    /// False after a last resort until calm: requests go to the store.
    pub admits: bool,
    /// Buffers that found no memory; the data was served all the same.
    pub refused: u64,
    /// Looks for pages that the kernel took.
    pub scans: u64,
    /// Bytes returned because others were about to need them, since the start.
    pub receded: u64,
}

impl CacheStats {
    pub(crate) fn push(&mut self, name: &str, stats: VolumeCacheStats) {
        self.total.sum(&stats);
        self.volumes.push((name.to_owned(), stats));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_words() {
        for mode in [Mode::None, Mode::Writethrough, Mode::Writeback] {
            assert_eq!(mode.to_string().parse::<Mode>(), Ok(mode));
        }
        let text = "fast".parse::<Mode>().unwrap_err().to_string();
        assert_eq!(text, "no cache mode `fast`: use none, writethrough or writeback");
    }

    #[test]
    fn a_hit_ratio_of_large_numbers_is_right() {
        let stats = |hits, misses| VolumeCacheStats { hits, misses, ..VolumeCacheStats::default() };
        assert!(stats(0, 0).hit_ratio().abs() < 1e-9);
        assert!((stats(3, 1).hit_ratio() - 0.75).abs() < 1e-9);
        assert!((stats(3 << 50, 1 << 50).hit_ratio() - 0.75).abs() < 1e-6);
    }
}
