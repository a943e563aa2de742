//! The parts of an image's L2 tables that are in memory.
//!
//! # Invariants
//! - At most [`MEMORY`] bytes for each image, allocated as slices are loaded. A slice that is found allocates nothing.
//! - No lock is held across an await, and none for longer than a look at one slice.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::map::SLICE_ENTRIES;

/// Bytes of the slices of one image, at most.
const MEMORY: usize = 1 << 20;
/// Slices with the same remainder of their numbers share a set, which keeps those that were used last.
const SETS: usize = 240;
const SET_SLICES: usize = 8;

const _: () = assert!(SETS * (size_of::<Mutex<Set>>() + SET_SLICES * size_of::<Kept>()) < MEMORY);

#[derive(Debug)]
struct Kept {
    number: u64,
    /// When it was used last.
    used: u64,
    entries: [u64; SLICE_ENTRIES],
}

#[derive(Debug, Default)]
struct Set {
    slices: Vec<Kept>,
    uses: u64,
}

/// The slices of one image.
#[derive(Debug)]
pub(super) struct Slices {
    sets: Box<[Mutex<Set>]>,
}

impl Slices {
    pub(super) fn new() -> Slices {
        Slices { sets: std::iter::repeat_with(Mutex::default).take(SETS).collect() }
    }

    fn set(&self, number: u64) -> Option<MutexGuard<'_, Set>> {
        let index = usize::try_from(number % SETS as u64).ok()?;
        Some(self.sets.get(index)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks at a slice; `None` if it is not in memory.
    #[inline]
    pub(super) fn look<T>(
        &self,
        number: u64,
        look: impl FnOnce(&[u64; SLICE_ENTRIES]) -> T,
    ) -> Option<T> {
        let mut set = self.set(number)?;
        set.uses += 1;
        let uses = set.uses;
        let kept = set.slices.iter_mut().find(|kept| kept.number == number)?;
        kept.used = uses;
        Some(look(&kept.entries))
    }

    /// Keeps a slice, in place of the one of its set that was not used for longest.
    pub(super) fn keep(&self, number: u64, entries: &[u64; SLICE_ENTRIES]) {
        let Some(mut set) = self.set(number) else { return };
        set.uses += 1;
        let (entries, used) = (*entries, set.uses);
        let kept = Kept { number, used, entries };
        // Two requests may have loaded it.
        if set.slices.iter().any(|kept| kept.number == number) {
            return;
        }
        if set.slices.len() < SET_SLICES {
            set.slices.push(kept);
        } else if let Some(oldest) = set.slices.iter_mut().min_by_key(|kept| kept.used) {
            *oldest = kept;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_bounded_and_what_was_used_last_stays() {
        let slices = Slices::new();
        let found = |number| slices.look(number, |entries| entries[0]);
        assert_eq!(found(7), None);
        for number in 0..100_000 {
            slices.keep(number, &[number; SLICE_ENTRIES]);
            // One that is used again and again.
            assert_eq!(found(7), (number >= 7).then_some(7));
        }
        assert_eq!(found(99_999), Some(99_999));
        assert_eq!(found(8), None);
        let sets = slices.sets.iter().map(|set| set.lock().unwrap().slices.capacity());
        let bytes = sets.map(|kept| kept * size_of::<Kept>() + size_of::<Mutex<Set>>());
        assert!(bytes.sum::<usize>() <= MEMORY);
    }
}
