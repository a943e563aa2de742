//! [`PageStates`]: what is known of each map page of a delta, one byte each.
//!
//! # Invariants
//! - A state that was never set is [`UNKNOWN`], and takes no memory: most clones of a large base use few pages.
//! - Looking at a state allocates nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// The state of a map page: not looked at yet; never written; the slot that counts; that slot holds something else now.
pub(crate) const UNKNOWN: u8 = 0;
pub(crate) const EMPTY: u8 = 1;
pub(crate) const FIRST: u8 = 2;
pub(crate) const SECOND: u8 = 3;
pub(crate) const DAMAGED: u8 = 4;

/// The slot that is written next.
pub(crate) fn other_slot(state: u8) -> u8 {
    if state == FIRST { SECOND } else { FIRST }
}

/// States that are allocated together.
const TOGETHER: u32 = 256;
const SIZE: usize = 256;

type Chunk = Box<[AtomicU8; SIZE]>;

/// See the module.
pub(crate) struct PageStates {
    chunks: Box<[OnceLock<Chunk>]>,
    pages: u32,
}

impl PageStates {
    /// Of so many pages.
    pub(crate) fn new(pages: u32) -> PageStates {
        let chunks = pages.div_ceil(TOGETHER);
        PageStates { chunks: (0..chunks).map(|_| OnceLock::new()).collect(), pages }
    }

    /// The state of a page; `None` beyond the last one.
    #[inline]
    pub(crate) fn load(&self, page: u32) -> Option<u8> {
        let (chunk, place) = self.place(page)?;
        let state = chunk.get().and_then(|states| states.get(place));
        Some(state.map_or(UNKNOWN, |state| state.load(Ordering::Acquire)))
    }

    /// The state of a page, to be changed.
    pub(crate) fn state(&self, page: u32) -> Option<&AtomicU8> {
        let (chunk, place) = self.place(page)?;
        let new = || Box::new([const { AtomicU8::new(UNKNOWN) }; SIZE]);
        chunk.get_or_init(new).get(place)
    }

    /// Sets the state of each page from `first` on that is known.
    pub(crate) fn set_known(&self, first: u32, state: u8) {
        for (page, states) in (0..).step_by(SIZE).zip(&self.chunks) {
            let Some(states) = states.get().filter(|_| page + TOGETHER > first) else { continue };
            let states =
                states.iter().skip(usize::try_from(first.saturating_sub(page)).unwrap_or(SIZE));
            for known in states.filter(|known| known.load(Ordering::Acquire) != UNKNOWN) {
                known.store(state, Ordering::Release);
            }
        }
    }

    #[inline]
    fn place(&self, page: u32) -> Option<(&OnceLock<Chunk>, usize)> {
        let chunk = usize::try_from(page / TOGETHER).ok().filter(|_| page < self.pages)?;
        Some((self.chunks.get(chunk)?, usize::try_from(page % TOGETHER).ok()?))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn states_are_unknown_until_they_are_set_and_none_is_beyond_the_end() {
        let states = PageStates::new(600);
        assert_eq!(
            [0, 599, 600].map(|page| states.load(page)),
            [Some(UNKNOWN), Some(UNKNOWN), None]
        );
        for page in [0, 255, 256, 599] {
            states.state(page).unwrap_or_else(|| panic!("{page}")).store(FIRST, Ordering::Release);
        }
        states.set_known(255, SECOND);
        let known = (0..600).filter(|page| states.load(*page) == Some(SECOND));
        assert_eq!(known.collect::<Vec<_>>(), [255, 256, 599]);
        states.set_known(1, FIRST);
        let known = (0..600).filter(|page| states.load(*page) == Some(FIRST));
        assert_eq!(known.collect::<Vec<_>>(), [0, 255, 256, 599]);
        assert!(states.state(600).is_none() && states.state(u32::MAX).is_none());
    }
}
