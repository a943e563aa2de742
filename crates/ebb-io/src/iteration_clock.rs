//! Times for statistics, with few readings of the clock: a request takes little longer than two of them.
//!
//! The start of an iteration is when its completions were processed: requests that arrived since the iteration
//! before arrived by then. It is the reading that the worker makes for its timers, too.

use std::cell::Cell;
use std::time::Instant;

use crate::worker::Io;

/// Calls of [`IterationClock::recent`] that read the clock at the start of an iteration, and after those one of how
/// many does.
const EXACT: u32 = 2;
const ONE_OF: u32 = 8;

#[derive(Debug)]
pub(crate) struct IterationClock {
    start: Cell<Instant>,
    recent: Cell<Instant>,
    calls: Cell<u32>,
}

impl IterationClock {
    pub(crate) fn new(now: Instant) -> IterationClock {
        IterationClock { start: Cell::new(now), recent: Cell::new(now), calls: Cell::new(0) }
    }

    pub(crate) fn begin(&self, now: Instant) {
        self.start.set(now);
        self.recent.set(now);
        self.calls.set(0);
    }

    #[inline]
    pub(crate) fn start(&self) -> Instant {
        self.start.get()
    }

    /// The time, read from the clock by the first [`EXACT`] calls of an iteration and one of [`ONE_OF`] later ones.
    #[inline]
    pub(crate) fn recent(&self) -> Instant {
        let calls = self.calls.get();
        self.calls.set(calls.wrapping_add(1));
        if calls < EXACT || calls.is_multiple_of(ONE_OF) {
            self.recent.set(ebb_mem::clock::now());
        }
        self.recent.get()
    }
}

impl Io {
    /// When this iteration of the worker's loop began: what it processes had arrived by then. Reads no clock.
    #[inline]
    pub fn iteration_start(&self) -> Instant {
        self.clock().start()
    }

    /// The time for statistics: under load one call of eight reads the clock; the other calls return its result.
    #[inline]
    pub fn recent_time(&self) -> Instant {
        self.clock().recent()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_eight_calls_reads_the_clock() {
        let clock = IterationClock::new(Instant::now());
        let mut readings = 0;
        clock.begin(Instant::now());
        let mut last = clock.start();
        for _ in 0..800 {
            let now = clock.recent();
            assert!(now >= last);
            readings += u32::from(now != last);
            last = now;
        }
        // The clock's resolution may let two readings be the same.
        assert!((1..=102).contains(&readings), "{readings}");
        assert!(clock.start() <= last);
        clock.begin(last);
        assert_eq!(clock.start(), last);
    }
}
