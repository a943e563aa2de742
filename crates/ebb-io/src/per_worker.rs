//! Counts that workers write, in slots: one for each worker, and one for workers beyond those and for other threads.
//!
//! # Invariants
//! - A slot other than [`WorkerSlot::SHARED`] belongs to one worker at a time, and only the thread of that worker has
//!   a [`WorkerSlot`] of it. So [`WorkerCount`] adds to it without a locked instruction, which would wait until
//!   all stores before it have left the processor (20 ns in the middle of a request). `Gauge` of ebb-mem counts in the
//!   same way, where each worker has a set of its own.
//! - Slots do not share cache lines.

use std::marker::PhantomData;
use std::ops::Index;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of slots.
const SLOTS: usize = 8;

/// Bits of the slots that belong to workers.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// A slot, see the [module](self). It stays on its thread.
#[derive(Clone, Copy, Debug)]
pub struct WorkerSlot {
    index: u8,
    _thread: PhantomData<*const ()>,
}

impl WorkerSlot {
    /// The slot of all that have no other.
    pub const SHARED: WorkerSlot = WorkerSlot { index: 0, _thread: PhantomData };

    /// A slot for a [`PerWorker`] of atomic values, or for a test with one thread: no worker may have the slot.
    #[cfg(any(test, feature = "testing"))]
    pub fn of(number: u64) -> WorkerSlot {
        let index = u8::try_from(number % SLOTS as u64).unwrap_or(0);
        WorkerSlot { index, ..WorkerSlot::SHARED }
    }
}

/// The slot of a worker, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct OwnSlot(WorkerSlot);

impl OwnSlot {
    /// A free slot, or [`WorkerSlot::SHARED`].
    pub(crate) fn take() -> OwnSlot {
        // Acquire and Release: the counts of the worker that had the slot before are seen.
        let index = (1..).take(SLOTS - 1).find(|index: &u8| {
            let bit = 1 << index;
            TAKEN.fetch_or(bit, Ordering::Acquire) & bit == 0
        });
        OwnSlot(WorkerSlot { index: index.unwrap_or(0), ..WorkerSlot::SHARED })
    }

    #[inline]
    pub(crate) fn slot(&self) -> WorkerSlot {
        self.0
    }
}

impl Drop for OwnSlot {
    fn drop(&mut self) {
        if self.0.index != 0 {
            TAKEN.fetch_and(!(1 << self.0.index), Ordering::Release);
        }
    }
}

/// A count in one slot.
#[derive(Debug, Default)]
pub struct WorkerCount(AtomicU64);

impl WorkerCount {
    /// Adds to the count in `slot`, of which this is one; wraps around.
    #[inline]
    pub fn add(&self, slot: WorkerSlot, amount: u64) {
        if slot.index == 0 {
            self.0.fetch_add(amount, Ordering::Relaxed);
        } else {
            let count = self.0.load(Ordering::Relaxed);
            self.0.store(count.wrapping_add(amount), Ordering::Relaxed);
        }
    }

    /// The count, for any thread.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine<T>(T);

/// A value for each slot.
#[derive(Debug, Default)]
pub struct PerWorker<T>([CacheLine<T>; SLOTS]);

impl<T> PerWorker<T> {
    /// The values of all slots.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|line| &line.0)
    }
}

impl<T> Index<WorkerSlot> for PerWorker<T> {
    type Output = T;

    #[inline]
    fn index(&self, slot: WorkerSlot) -> &T {
        &self.0[usize::from(slot.index) % SLOTS].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn slots_are_in_cache_lines_of_their_own() {
        let values = PerWorker::<u64>::default();
        let lines: HashSet<_> =
            values.iter().map(|value| std::ptr::from_ref(value).addr() / 64).collect();
        assert_eq!(lines.len(), SLOTS);
    }

    /// Other tests of this process have workers, too.
    #[test]
    fn no_two_workers_have_the_same_slot_unless_it_is_the_shared_one() {
        let count = PerWorker::<WorkerCount>::default();
        std::thread::scope(|scope| {
            for _ in 0..2 * SLOTS {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let own = OwnSlot::take();
                        for _ in 0..100 {
                            count[own.slot()].add(own.slot(), 1);
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(count.iter().map(WorkerCount::get).sum::<u64>(), 2 * SLOTS as u64 * 10_000);
    }

    #[test]
    fn workers_have_slots_of_their_own_while_there_are_any() {
        let own: Vec<_> = (0..2 * SLOTS).map(|_| OwnSlot::take()).collect();
        let slots: Vec<_> = own.iter().map(|own| own.0.index).filter(|index| *index != 0).collect();
        assert_eq!(slots.iter().collect::<HashSet<_>>().len(), slots.len());
        assert!(slots.len() < SLOTS);
    }
}
