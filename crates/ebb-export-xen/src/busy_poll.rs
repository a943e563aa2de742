//! Whether it pays to look at a ring that has run empty for a while, before its worker sleeps.
//!
//! To sleep and be woken costs more than many requests: the guest's event, two changes of task, calls
//! of the system, and the same once more in the hypervisor. Where the next requests come sooner than
//! that is worth, the ring is looked at instead, as KVM does for a processor that has nothing to do.
//! The guest need not send an event then, either.
//!
//! Invariants: a look that finds nothing took no longer than the requests before it are worth
//! (`poll_us` for each, [`LONGEST`] for all), and the next pause is slept through: a ring is looked at
//! only if its last pause would have been short enough. So processor time that is spent in vain is
//! bounded by the requests that were served, and a ring at rest costs nothing.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The longest a ring is looked at, however many requests it brought.
const LONGEST: Duration = Duration::from_micros(1000);

/// Requests at a time that are few.
const LIGHT: u32 = 8;

/// How a ring's requests come; see the module.
#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    /// Requests since the last pause.
    requests: Cell<u32>,
    /// When the ring ran empty, if it is.
    empty: Cell<Option<Instant>>,
    /// How long it was empty the last time; nobody knows at first.
    pause: Cell<Option<Duration>>,
}

impl BusyPoll {
    /// Requests were taken; `now` counts if the ring was empty before.
    pub(crate) fn took(&self, requests: u32, now: Instant) {
        if let Some(since) = self.empty.take() {
            self.pause.set(Some(now.saturating_duration_since(since)));
            self.requests.set(0);
        }
        self.requests.set(self.requests.get().saturating_add(requests));
    }

    /// Few requests came since the last pause: whoever has so little to do should not wait for those
    /// who have much.
    pub(crate) fn is_light(&self) -> bool {
        self.requests.get() <= LIGHT
    }

    /// The ring is empty: until when to look at it, if `each` is what a request is worth. The pause
    /// began with the first of these calls.
    pub(crate) fn look_until(&self, each: Duration, now: Instant) -> Option<Instant> {
        if self.empty.get().is_some() {
            return None;
        }
        self.empty.set(Some(now));
        let worth = each.saturating_mul(self.requests.get()).min(LONGEST);
        self.pause.get().filter(|pause| *pause < worth).map(|_| now + worth)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EACH: Duration = Duration::from_micros(50);

    fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn a_ring_is_looked_at_once_its_pauses_are_short_and_no_more_when_one_is_long() {
        let (pace, mut now) = (BusyPoll::default(), Instant::now());
        pace.took(1, now);
        assert_eq!(pace.look_until(EACH, now), None, "nothing is known yet");
        now += us(20);
        pace.took(1, now);
        assert_eq!(pace.look_until(EACH, now), Some(now + EACH));
        assert_eq!(pace.look_until(EACH, now + us(50)), None, "once for each pause");
        now += us(900);
        pace.took(1, now);
        assert_eq!(pace.look_until(EACH, now), None, "the last pause was long");
        now += us(900);
        pace.took(30, now);
        assert_eq!(pace.look_until(EACH, now), Some(now + LONGEST), "many are worth more");
        now += us(10);
        pace.took(30, now);
        assert_eq!(pace.look_until(Duration::ZERO, now), None, "0 is never");
    }

    proptest! {
        /// Whatever a guest does: time spent in vain is less than its requests are worth.
        #[test]
        fn time_spent_in_vain_is_bounded(
            steps in prop::collection::vec((1u32..40, 0u64..2000), 1..200),
        ) {
            let (pace, mut now) = (BusyPoll::default(), Instant::now());
            let (mut vain, mut served) = (Duration::ZERO, 0);
            for (requests, pause) in steps {
                pace.took(requests, now);
                served += requests;
                let came = now + us(pause);
                if let Some(until) = pace.look_until(EACH, now) {
                    prop_assert!(until <= now + LONGEST);
                    if until < came {
                        vain += until - now;
                    }
                }
                now = came;
            }
            prop_assert!(vain <= EACH * served, "{:?} for {}", vain, served);
        }
    }
}
