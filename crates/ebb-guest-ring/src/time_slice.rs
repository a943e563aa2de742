//! How long a ring goes on while other tasks of its worker wait.
//!
//! A ring yields after a little work if a lightly loaded ring or another task is waiting, and after a long time slice in
//! any case: rings that alternate often find their pages evicted from the processor's cache (`docs/adr/0006-turns.md`).
//!
//! Work is measured in units of one copy of a mapped page.

use ebb_io::Io;

/// Work after which a ring yields if other work is waiting: about a ring of small requests.
const QUANTUM: usize = 32;
/// Work between two checks for that.
const STEP: usize = 8;
/// Work after which a ring yields in any case.
pub(crate) const SLICE: usize = 2048;

/// The work of a ring since it yielded last.
#[derive(Debug, Default)]
pub struct TimeSlice {
    spent: usize,
}

impl TimeSlice {
    /// Adds the cost of a request; true if the ring is to yield now.
    #[must_use]
    #[inline]
    pub fn spend(&mut self, cost: usize, io: &Io) -> bool {
        self.spend_while(cost, || io.has_other_work())
    }

    #[inline]
    fn spend_while(&mut self, cost: usize, has_other_work: impl FnOnce() -> bool) -> bool {
        let before = self.spent / STEP;
        self.spent += cost;
        let check = self.spent >= QUANTUM && self.spent / STEP > before;
        self.spent >= SLICE || (check && has_other_work())
    }

    /// Begins anew, after the ring has yielded.
    #[inline]
    pub fn renew(&mut self) {
        self.spent = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The requests of `cost` until the ring yields, and how often it checked for other work.
    fn requests(cost: usize, other_work_from: usize) -> (usize, usize) {
        let (mut slice, mut checks) = (TimeSlice::default(), 0);
        let yields = |number: &usize| {
            slice.spend_while(cost, || {
                checks += 1;
                *number >= other_work_from
            })
        };
        let count = (1..).find(yields).unwrap_or_default();
        (count, checks)
    }

    #[test]
    fn a_ring_yields_after_a_quantum_to_other_work_and_after_a_slice_in_any_case() {
        assert_eq!(requests(1, 0), (QUANTUM, 1));
        assert_eq!(requests(1, 33), (40, 2), "it checks after each step of work");
        assert_eq!(requests(1, usize::MAX), (SLICE, (SLICE - QUANTUM) / STEP));
        assert_eq!(requests(SLICE, usize::MAX).0, 1);
        let mut slice = TimeSlice::default();
        assert!(slice.spend_while(SLICE, || false));
        slice.renew();
        assert!(!slice.spend_while(1, || true), "a new slice has begun");
    }
}
