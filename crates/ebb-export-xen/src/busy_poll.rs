//! Busy polling of an empty ring, before its worker sleeps.
//!
//! Sleeping and being woken costs more than many requests: the guest's event, two context switches,
//! system calls, and the same again in the hypervisor. Where the next requests usually come sooner than
//! that, the worker polls the ring, as KVM polls for an idle virtual processor (Linux,
//! `Documentation/virt/kvm/halt-polling.rst`). The guest then need not send an event either.
//!
//! Invariants: an unsuccessful poll takes no longer than `poll_us` for each preceding request and
//! [`LONGEST`] in all, and a ring is polled only if its last pause was shorter than that. So the
//! processor time spent on unsuccessful polls is bounded by the requests served, and an idle ring costs
//! nothing.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The longest poll, however many requests preceded it.
const LONGEST: Duration = Duration::from_micros(1000);

/// A ring is lightly loaded if it had no more requests than this since its last pause.
const LIGHT: u32 = 8;

/// The recent load of a ring; see the module.
#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    /// Requests since the last pause.
    requests: Cell<u32>,
    /// When the ring became empty, if it is.
    empty: Cell<Option<Instant>>,
    /// How long it was empty the last time; unknown at first.
    pause: Cell<Option<Duration>>,
}

impl BusyPoll {
    /// Notes that requests were consumed; `now` is used if the ring was empty before.
    pub(crate) fn note_requests(&self, requests: u32, now: Instant) {
        if let Some(since) = self.empty.take() {
            self.pause.set(Some(now.saturating_duration_since(since)));
            self.requests.set(0);
        }
        self.requests.set(self.requests.get().saturating_add(requests));
    }

    /// True if few requests came since the last pause: a lightly loaded ring should not wait for the
    /// time slices of heavily loaded ones.
    pub(crate) fn is_light(&self) -> bool {
        self.requests.get() <= LIGHT
    }

    /// Until when to poll the empty ring, if each preceding request allows `each`. `None`: do not poll. The
    /// first of these calls begins the pause.
    pub(crate) fn poll_until(&self, each: Duration, now: Instant) -> Option<Instant> {
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
    fn a_ring_is_polled_only_while_its_pauses_are_short() {
        let (poll, mut now) = (BusyPoll::default(), Instant::now());
        poll.note_requests(1, now);
        assert_eq!(poll.poll_until(EACH, now), None, "nothing is known yet");
        now += us(20);
        poll.note_requests(1, now);
        assert_eq!(poll.poll_until(EACH, now), Some(now + EACH));
        assert_eq!(poll.poll_until(EACH, now + us(50)), None, "only once per pause");
        now += us(900);
        poll.note_requests(1, now);
        assert_eq!(poll.poll_until(EACH, now), None, "the last pause was long");
        now += us(900);
        poll.note_requests(30, now);
        assert_eq!(poll.poll_until(EACH, now), Some(now + LONGEST), "more requests allow more");
        now += us(10);
        poll.note_requests(30, now);
        assert_eq!(poll.poll_until(Duration::ZERO, now), None, "0 disables polling");
    }

    proptest! {
        /// Whatever a guest does, the time of unsuccessful polls is bounded by its requests.
        #[test]
        fn time_of_unsuccessful_polls_is_bounded(
            steps in prop::collection::vec((1u32..40, 0u64..2000), 1..200),
        ) {
            let (poll, mut now) = (BusyPoll::default(), Instant::now());
            let (mut unsuccessful, mut served) = (Duration::ZERO, 0);
            for (requests, pause) in steps {
                poll.note_requests(requests, now);
                served += requests;
                let came = now + us(pause);
                if let Some(until) = poll.poll_until(EACH, now) {
                    prop_assert!(until <= now + LONGEST);
                    if until < came {
                        unsuccessful += until - now;
                    }
                }
                now = came;
            }
            prop_assert!(unsuccessful <= EACH * served, "{:?} for {}", unsuccessful, served);
        }
    }
}
