//! Recently evicted keys: fingerprints in a table of fixed size.
//!
//! A key that is read again soon after its eviction was worth keeping. Each key takes four bytes: 16 bits of
//! its hash besides the bucket's number, and 16 bits of eviction time, in units (grains) of evicted pages. A
//! false match (at worst 1 in 8,000 lookups) only keeps a page for longer.
//!
//! Invariants: the table does not grow; a key is forgotten once the requested number of other pages was
//! evicted, or earlier if its bucket overflows, oldest first.

/// Entries where one key may be stored: half a cache line.
const WAYS: usize = 8;

/// Ages have at least this many steps until as many pages were evicted as there are entries. With sixteen
/// pages per slot that is sixteen times as many steps until a key is forgotten. The 16 bits of an entry count
/// four times that, and old entries have been overwritten before their age wraps.
const STEPS: u64 = 1024;

/// 32 bits of a key's hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint(u32);

impl Fingerprint {
    pub(super) const ZERO: Fingerprint = Fingerprint(0);

    pub(super) fn of(key: u64) -> Fingerprint {
        // Neighbours differ in few low bits: multiply, then fold the high half into the low one, twice.
        let mixed = (key ^ key >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Fingerprint(u32::try_from(mixed >> 32).unwrap_or_default())
    }
}

/// An evicted key: tag and grain; 0 is none.
type Ghost = u32;

/// The table.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// Buckets of [`WAYS`]; their number is a power of two.
    table: Vec<[Ghost; WAYS]>,
    /// Pages evicted so far.
    evicted: u64,
    /// Pages in a grain, as a shift.
    grain: u32,
}

impl Ghosts {
    /// A table for `entries` keys.
    pub(super) fn with_capacity(entries: u32) -> Ghosts {
        let entries = u64::from(entries).max(64).next_power_of_two();
        let grain = (entries / STEPS).max(1).ilog2();
        let buckets = usize::try_from(entries).unwrap_or(usize::MAX) / WAYS;
        Ghosts { table: vec![[0; WAYS]; buckets], evicted: 0, grain }
    }

    /// Keys it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.table.len() * WAYS
    }

    /// Remembers the evicted key of `pages` pages.
    pub(super) fn add(&mut self, fingerprint: Fingerprint, pages: u32) {
        self.evicted += u64::from(pages);
        let now = self.now();
        let (bucket, tag) = self.place(fingerprint);
        let bucket = &mut self.table[bucket];
        let (mut way, mut oldest) = (0, 0);
        for (at, ghost) in bucket.iter().enumerate() {
            // A free entry, or the same key again.
            if *ghost == 0 || ghost >> 16 == tag {
                way = at;
                break;
            }
            let age = now.wrapping_sub(grain_of(*ghost));
            if age >= oldest {
                (way, oldest) = (at, age);
            }
        }
        bucket[way] = tag << 16 | u32::from(now);
    }

    /// Whether a key is among the last `limit` evicted pages; it is forgotten by that.
    pub(super) fn take(&mut self, fingerprint: Fingerprint, limit: u64) -> bool {
        let now = self.now();
        let most = u16::try_from(limit >> self.grain).unwrap_or(u16::MAX);
        let (bucket, tag) = self.place(fingerprint);
        for ghost in &mut self.table[bucket] {
            if *ghost != 0 && *ghost >> 16 == tag {
                let age = now.wrapping_sub(grain_of(*ghost));
                *ghost = 0;
                return age <= most;
            }
        }
        false
    }

    /// The current grain; an entry is never 0, since tags are not 0.
    fn now(&self) -> u16 {
        u16::try_from(self.evicted >> self.grain & 0xFFFF).unwrap_or_default()
    }

    /// A key's bucket and tag.
    fn place(&self, fingerprint: Fingerprint) -> (usize, u32) {
        let buckets = self.table.len();
        let hash = usize::try_from(fingerprint.0).unwrap_or_default();
        // The tag comes from the high half, and is mixed so that it shares no bits with the bucket in large
        // tables.
        let tag = fingerprint.0.wrapping_mul(0x85EB_CA6B) >> 16;
        (hash & (buckets - 1), tag.max(1))
    }

    /// Size of the table in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<[Ghost; WAYS]>()
    }
}

fn grain_of(ghost: Ghost) -> u16 {
    u16::try_from(ghost & 0xFFFF).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_remembered_until_the_limit_of_evicted_pages_is_reached() {
        let mut ghosts = Ghosts::with_capacity(4096);
        let fingerprint = Fingerprint::of;
        for key in 0..1000 {
            ghosts.add(fingerprint(key), 1);
        }
        assert!(ghosts.take(fingerprint(999), 100));
        assert!(!ghosts.take(fingerprint(999), 100), "taken");
        assert!(ghosts.take(fingerprint(910), 100));
        assert!(!ghosts.take(fingerprint(800), 100), "too old");
        assert!(!ghosts.take(fingerprint(5000), 4096), "never seen");
    }

    #[test]
    fn a_large_slot_counts_as_its_pages() {
        let mut ghosts = Ghosts::with_capacity(4096);
        (0..1000).for_each(|key| ghosts.add(Fingerprint::of(key), 16));
        assert!(ghosts.take(Fingerprint::of(950), 1600));
        assert!(!ghosts.take(Fingerprint::of(800), 1600), "3200 pages were evicted since");
        assert!(ghosts.take(Fingerprint::of(10), 16_000));
    }

    #[test]
    fn a_full_table_finds_most_keys_and_has_few_false_matches() {
        let mut ghosts = Ghosts::with_capacity(1 << 16);
        let keys = 1_u64 << 16;
        for key in 0..keys {
            ghosts.add(Fingerprint::of(key << 4), 1);
        }
        assert_eq!(ghosts.capacity(), 1 << 16);
        let mut mistaken = 0;
        for key in keys..2 * keys {
            mistaken += u32::from(ghosts.take(Fingerprint::of(key << 4), 1 << 16));
        }
        let mut found = 0;
        for key in 0..keys {
            found += u32::from(ghosts.take(Fingerprint::of(key << 4), 1 << 16));
        }
        assert!(found > 50_000, "{found} of {keys}");
        assert!(mistaken < 40, "{mistaken} of {keys}");
    }

    #[test]
    fn a_table_in_long_use_forgets_by_age() {
        let mut ghosts = Ghosts::with_capacity(2048);
        for key in 0..1_000_000 {
            ghosts.add(Fingerprint::of(key), 1);
        }
        let recent =
            (999_000..1_000_000).filter(|key| ghosts.take(Fingerprint::of(*key), 1024)).count();
        let old = (0..990_000).filter(|key| ghosts.take(Fingerprint::of(*key), 1024)).count();
        assert!(recent > 900, "{recent}");
        assert!(old < 2_000, "{old}");
    }
}
