//! What went lately: fingerprints of keys, in a table of fixed size.
//!
//! A key that comes back soon after it went was worth keeping. Four bytes are kept of each: 16 bits of
//! its hash beside the bucket's number, and 16 bits of when it went, in units (grains) of pages that went. A mistaken
//! key (about 1 in 8,000 of those asked for at worst) only makes a page stay for longer.
//!
//! Invariants: the table has its size; a key is forgotten once as many pages of others went as are asked for,
//! or earlier if its bucket overflows, oldest first.

/// Entries that one key may be at: half a cache line.
const WAYS: usize = 8;

/// Ages are told apart in at least so many steps until as many pages went as there are entries. Where slots
/// have sixteen pages each it is as many times the steps until a key is forgotten: the 16 bits of an entry are
/// four times that, and old entries have been overwritten before their age wraps.
const STEPS: u64 = 1024;

/// 32 bits of a key's hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Print(u32);

impl Print {
    pub(super) const ZERO: Print = Print(0);

    pub(super) fn of(key: u64) -> Print {
        // Neighbours differ in few low bits: multiply, then fold the high half into the low one, twice.
        let mixed = (key ^ key >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Print(u32::try_from(mixed >> 32).unwrap_or_default())
    }
}

/// A departed key: tag and grain; 0 is none.
type Ghost = u32;

/// The table.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// Buckets of [`WAYS`]; their number is a power of two.
    table: Vec<[Ghost; WAYS]>,
    /// Pages that went so far.
    departed: u64,
    /// Pages in a grain, as a shift.
    grain: u32,
}

impl Ghosts {
    /// A table for `entries` keys.
    pub(super) fn with_capacity(entries: u32) -> Ghosts {
        let entries = u64::from(entries).max(64).next_power_of_two();
        let grain = (entries / STEPS).max(1).ilog2();
        let buckets = usize::try_from(entries).unwrap_or(usize::MAX) / WAYS;
        Ghosts { table: vec![[0; WAYS]; buckets], departed: 0, grain }
    }

    /// Keys it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.table.len() * WAYS
    }

    /// Remembers a key of so many pages that goes.
    pub(super) fn add(&mut self, print: Print, pages: u32) {
        self.departed += u64::from(pages);
        let now = self.now();
        let (bucket, tag) = self.place(print);
        let bucket = &mut self.table[bucket];
        let (mut way, mut oldest) = (0, 0);
        for (at, ghost) in bucket.iter().enumerate() {
            // Free, or the same key again: its own place.
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

    /// Whether a key is among the last `limit` pages that went; it is forgotten with that.
    pub(super) fn take(&mut self, print: Print, limit: u64) -> bool {
        let now = self.now();
        let most = u16::try_from(limit >> self.grain).unwrap_or(u16::MAX);
        let (bucket, tag) = self.place(print);
        for ghost in &mut self.table[bucket] {
            if *ghost != 0 && *ghost >> 16 == tag {
                let age = now.wrapping_sub(grain_of(*ghost));
                *ghost = 0;
                return age <= most;
            }
        }
        false
    }

    /// The grain of now; never 0 in an entry together with tag 0, since tags are not 0.
    fn now(&self) -> u16 {
        u16::try_from(self.departed >> self.grain & 0xFFFF).unwrap_or_default()
    }

    /// A key's bucket and tag.
    fn place(&self, print: Print) -> (usize, u32) {
        let buckets = self.table.len();
        let hash = usize::try_from(print.0).unwrap_or_default();
        // The tag comes from the high half, and is mixed so that large tables do not share bits with it.
        let tag = print.0.wrapping_mul(0x85EB_CA6B) >> 16;
        (hash & (buckets - 1), tag.max(1))
    }

    /// Bytes of the table.
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
    fn a_key_is_remembered_until_as_many_others_went() {
        let mut ghosts = Ghosts::with_capacity(4096);
        let print = Print::of;
        for key in 0..1000 {
            ghosts.add(print(key), 1);
        }
        assert!(ghosts.take(print(999), 100));
        assert!(!ghosts.take(print(999), 100), "taken");
        assert!(ghosts.take(print(910), 100));
        assert!(!ghosts.take(print(800), 100), "too old");
        assert!(!ghosts.take(print(5000), 4096), "never seen");
    }

    #[test]
    fn large_ones_go_as_so_many_pages() {
        let mut ghosts = Ghosts::with_capacity(4096);
        (0..1000).for_each(|key| ghosts.add(Print::of(key), 16));
        assert!(ghosts.take(Print::of(950), 1600));
        assert!(!ghosts.take(Print::of(800), 1600), "3200 pages went since");
        assert!(ghosts.take(Print::of(10), 16_000));
    }

    #[test]
    fn most_of_a_full_table_is_found_and_little_else() {
        let mut ghosts = Ghosts::with_capacity(1 << 16);
        let keys = 1_u64 << 16;
        for key in 0..keys {
            ghosts.add(Print::of(key << 4), 1);
        }
        assert_eq!(ghosts.capacity(), 1 << 16);
        let mut mistaken = 0;
        for key in keys..2 * keys {
            mistaken += u32::from(ghosts.take(Print::of(key << 4), 1 << 16));
        }
        let mut found = 0;
        for key in 0..keys {
            found += u32::from(ghosts.take(Print::of(key << 4), 1 << 16));
        }
        assert!(found > 50_000, "{found} of {keys}");
        assert!(mistaken < 40, "{mistaken} of {keys}");
    }

    #[test]
    fn a_table_used_for_long_forgets_by_age() {
        let mut ghosts = Ghosts::with_capacity(2048);
        for key in 0..1_000_000 {
            ghosts.add(Print::of(key), 1);
        }
        let recent = (999_000..1_000_000).filter(|key| ghosts.take(Print::of(*key), 1024)).count();
        let old = (0..990_000).filter(|key| ghosts.take(Print::of(*key), 1024)).count();
        assert!(recent > 900, "{recent}");
        assert!(old < 2_000, "{old}");
    }
}
