//! Memory that a guest or a successor reads, and that this process changes by single stores: rings
//! and journals.
//!
//! Invariant: every store to it passes `outlives_store`, so that a simulation can end the process
//! between any two (feature `sim`).

use ebb_guest_ring::Mapping;

/// See the module. Offsets and results as for [`Mapping`].
#[derive(Debug)]
pub(crate) struct SharedStores(pub(crate) Mapping);

#[cfg(not(feature = "sim"))]
#[inline]
pub(crate) fn outlives_store() -> bool {
    true
}

/// Returns true if this process has died: its writes to xenstore have no effect.
#[cfg(all(feature = "shm", not(feature = "sim")))]
#[inline]
pub(crate) fn is_dead() -> bool {
    false
}

#[cfg(feature = "sim")]
pub(crate) use death::{is_dead, outlives_store};

impl SharedStores {
    #[inline]
    pub(crate) fn load(&self, at: usize) -> u32 {
        self.0.load(at)
    }

    #[inline]
    pub(crate) fn store(&self, at: usize, value: u32) {
        if outlives_store() {
            self.0.store(at, value);
        }
    }

    #[must_use]
    #[inline]
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) -> bool {
        self.0.read(at, to)
    }

    #[must_use]
    #[inline]
    pub(crate) fn write(&self, at: usize, from: &[u8]) -> bool {
        !outlives_store() || self.0.write(at, from)
    }

    #[must_use]
    #[inline]
    pub(crate) fn read_words(&self, at: usize, to: &mut [u64]) -> bool {
        self.0.read_words(at, to)
    }

    #[must_use]
    #[inline]
    pub(crate) fn write_words(&self, at: usize, from: &[u64]) -> bool {
        !outlives_store() || self.0.write_words(at, from)
    }
}

/// The death of this thread's process after some store.
#[cfg(feature = "sim")]
pub(crate) mod death {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    /// A process that dies in the midst of its stores to rings and journals. Its later
    /// writes to xenstore have no effect either.
    #[derive(Debug)]
    pub struct DeathAtRingStore(());

    impl DeathAtRingStore {
        /// From now on, `stores` stores of this thread have effect, and later ones none, until this
        /// is dropped.
        pub fn after(stores: u64) -> DeathAtRingStore {
            LEFT.set(stores);
            DeathAtRingStore(())
        }

        /// Whether all of them were done.
        pub fn has_come(&self) -> bool {
            is_dead()
        }
    }

    impl Drop for DeathAtRingStore {
        fn drop(&mut self) {
            LEFT.set(u64::MAX);
        }
    }

    pub(crate) fn is_dead() -> bool {
        LEFT.get() == 0
    }

    #[inline]
    pub(crate) fn outlives_store() -> bool {
        let left = LEFT.get();
        if left != u64::MAX {
            LEFT.set(left.saturating_sub(1));
        }
        left > 0
    }
}
