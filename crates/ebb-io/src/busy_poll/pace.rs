//! Whether the requests of one source come quickly enough to poll for the next one.
//!
//! A source *waits* from when it has nothing to do until its next requests arrive. How long it waited says whether
//! polling would have found them. A poll is a few times as long as those that succeeded before. After a poll without success
//! the source is polled again only after some pauses that were short although the worker slept: one after the first
//! such poll, then twice as many each time. A successful poll halves that number.
//!
//! A client that the scheduler runs on the worker's own processor cannot run while the worker polls, and a worker that sleeps lets
//! it run at once: then pauses are very short without polling, and nothing is polled ([`SOCKET_CHEAP`]).

use std::time::{Duration, Instant};

/// The longest poll, however many requests preceded it.
const LONGEST: Duration = Duration::from_micros(1000);
/// What sleeping may add to a pause: the wake-ups of the processors of the worker and of its peer.
const WAKE_UPS: Duration = Duration::from_micros(100);
/// A pause of a socket that was shorter than this although the worker slept: the worker's processor did not sleep.
pub(crate) const SOCKET_CHEAP: Duration = Duration::from_micros(20);
/// A poll takes this much longer than three times the usual one.
const MARGIN: Duration = Duration::from_micros(10);
/// A source is lightly loaded if it had no more requests than this since it last waited.
const LIGHT: u32 = 8;
/// The most short pauses that pass without a poll, as a power of two.
const SKIP_MAX: u32 = 12;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SourcePace {
    /// Requests since it last waited.
    requests: u32,
    /// Since when it waits, and for how long that is worth polling.
    waiting: Option<(Instant, Duration)>,
    /// The next wait is to be polled.
    quick: bool,
    /// Unsuccessful polls, as a power of two of the short pauses that pass without a poll.
    misses: u32,
    /// Short pauses still to pass without a poll.
    skip: u32,
    /// The usual length of pauses that polls ended, a moving average.
    usual: Option<Duration>,
    /// Pauses shorter than this while the worker slept are no reason to poll.
    cheap: Duration,
}

impl SourcePace {
    /// A source for which pauses shorter than `cheap` are no reason to poll, if the worker slept.
    pub(crate) fn new(cheap: Duration) -> SourcePace {
        SourcePace { cheap, ..SourcePace::default() }
    }

    /// Notes requests, which end a wait.
    pub(crate) fn note_requests(&mut self, requests: u32, now: Instant) {
        if let Some((since, worth)) = self.waiting.take() {
            self.judge(now.saturating_duration_since(since), worth);
            self.requests = 0;
        }
        self.requests = self.requests.saturating_add(requests);
    }

    /// Learns from a wait that has ended.
    fn judge(&mut self, pause: Duration, worth: Duration) {
        if !self.quick {
            let promising = pause < worth + WAKE_UPS && pause >= self.cheap && !worth.is_zero();
            if promising {
                self.quick = self.skip == 0;
                self.skip = self.skip.saturating_sub(1);
                self.usual = None;
            }
        } else if pause <= worth {
            self.misses = self.misses.saturating_sub(1);
            self.usual = Some(self.usual.map_or(pause, |usual| (7 * usual + pause) / 8));
        } else {
            // The worker had other work meanwhile, or did not poll.
            self.quick = pause < worth + WAKE_UPS;
        }
    }

    /// Notes that the source waits, if it did not before. Until when to poll it, if each request allows `each`;
    /// `None`: not at all.
    pub(crate) fn wait(&mut self, each: Duration, now: Instant) -> Option<Instant> {
        if self.waiting.is_some() {
            return None;
        }
        let worth = each.saturating_mul(self.requests.max(1)).min(LONGEST);
        self.waiting = Some((now, worth));
        let enough = self.usual.map_or(worth, |usual| worth.min(3 * usual + MARGIN));
        (self.quick && !worth.is_zero()).then(|| now + enough)
    }

    /// The source waits no longer, without requests.
    pub(crate) fn cancel(&mut self) {
        self.waiting = None;
    }

    /// Notes that a poll ended without requests of this source.
    pub(crate) fn note_miss(&mut self) {
        self.quick = false;
        self.skip = 1 << self.misses;
        self.misses = (self.misses + 1).min(SKIP_MAX);
    }

    /// True if few requests came since it last waited: a lightly loaded source should not wait for the time
    /// slices of heavily loaded ones.
    pub(crate) fn is_light(&self) -> bool {
        self.requests <= LIGHT
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

    /// A source with a clock of its own.
    struct Rig {
        pace: SourcePace,
        now: Instant,
        polls: u32,
        missed: u32,
        /// Time of polls without success.
        lost: Duration,
    }

    impl Rig {
        fn new() -> Rig {
            let now = Instant::now();
            Rig { pace: SourcePace::default(), now, polls: 0, missed: 0, lost: Duration::ZERO }
        }

        /// The source waits for `pause`, then has `requests`. Whether it was polled.
        fn pause(&mut self, pause: Duration, requests: u32) -> bool {
            let until = self.pace.wait(EACH, self.now);
            let next = self.now + pause;
            if let Some(until) = until {
                self.polls += 1;
                if until < next {
                    self.missed += 1;
                    self.lost += until - self.now;
                    self.pace.note_miss();
                }
            }
            self.now = next;
            self.pace.note_requests(requests, self.now);
            until.is_some()
        }
    }

    #[test]
    fn a_source_is_polled_only_while_its_requests_come_quickly() {
        let mut rig = Rig::new();
        assert!(!rig.pause(us(20), 1), "nothing is known yet");
        assert!(rig.pause(us(20), 1));
        assert!(rig.pause(us(900), 1), "it was quick until now");
        assert!(!rig.pause(us(900), 1) && !rig.pause(us(900), 1), "its requests come slowly");
        assert_eq!(rig.missed, 1);
    }

    #[test]
    fn a_source_that_goes_quiet_is_not_polled_any_more() {
        let mut rig = Rig::new();
        (0..100).for_each(|_| {
            rig.pause(us(20), 1);
        });
        assert_eq!((rig.polls, rig.missed), (99, 0));
        rig.pause(us(10_000_000), 1);
        assert_eq!((rig.polls, rig.missed), (100, 1));
        assert!(rig.pace.wait(EACH, rig.now).is_none(), "one poll found nothing: sleep");
        assert!(rig.pace.wait(EACH, rig.now + us(1)).is_none(), "and it goes on sleeping");
    }

    #[test]
    fn more_requests_allow_more() {
        let mut rig = Rig::new();
        rig.pause(us(10), 1);
        for (requests, longest) in [(1, us(50)), (4, us(200)), (30, LONGEST), (u32::MAX, LONGEST)] {
            rig.pause(us(10), requests);
            rig.pace.usual = None;
            let until = rig.pace.wait(EACH, rig.now).unwrap();
            assert_eq!(until - rig.now, longest, "{requests}");
            rig.pace.note_requests(0, rig.now);
        }
    }

    #[test]
    fn a_poll_is_a_few_times_as_long_as_the_usual_one() {
        let mut rig = Rig::new();
        for _ in 0..100 {
            rig.pause(us(5), 1);
        }
        assert_eq!(rig.pace.wait(EACH, rig.now), Some(rig.now + us(25)));
    }

    /// Its pauses are short without polling, which would keep it from running.
    #[test]
    fn a_client_on_the_same_processor_is_not_polled_for() {
        let mut rig = Rig { pace: SourcePace::new(SOCKET_CHEAP), ..Rig::new() };
        assert!((0..1000).all(|_| !rig.pause(us(8), 1)));
        assert!(!rig.pause(us(60), 1) && rig.pause(us(8), 1), "it was moved to another one");
        rig.pause(us(5000), 1);
        assert!((0..1000).all(|_| !rig.pause(us(8), 1)), "and back");
    }

    #[test]
    fn zero_disables_polling_and_a_later_value_enables_it() {
        let mut pace = SourcePace::default();
        let mut now = Instant::now();
        for each in [Duration::ZERO, EACH] {
            for round in 0..100 {
                let polled = pace.wait(each, now).is_some();
                assert_eq!(polled, !each.is_zero() && round > 0, "{each:?} {round}");
                now += us(10);
                pace.note_requests(1, now);
            }
        }
    }

    #[test]
    fn a_pause_that_only_sleeping_made_long_is_tried() {
        let mut rig = Rig::new();
        rig.pause(us(120), 1);
        assert!(rig.pause(us(30), 1) && rig.pause(us(30), 1) && rig.missed == 0);
    }

    /// Pauses that look promising while the worker sleeps, but are too long for every poll.
    #[test]
    fn unsuccessful_polls_become_rare() {
        let mut rig = Rig::new();
        (0..10_000).for_each(|_| {
            rig.pause(us(120), 1);
        });
        assert_eq!((rig.polls, rig.missed), (14, 14), "after 0, 1, 3, 7, ... short pauses");
    }

    proptest! {
        /// Whatever a source does, the time of unsuccessful polls is bounded by its requests.
        #[test]
        fn time_of_unsuccessful_polls_is_bounded(
            steps in prop::collection::vec((1u32..40, 0u64..2000), 1..200),
        ) {
            let mut rig = Rig::new();
            let mut served = 1;
            for (requests, pause) in steps {
                rig.pause(us(pause), requests);
                prop_assert!(rig.lost <= EACH * served, "{:?} for {}", rig.lost, served);
                served += requests;
            }
        }

        /// A poll without success is followed by at least one pause without a poll.
        #[test]
        fn polls_pay_or_become_rare(
            pauses in prop::collection::vec(prop_oneof![Just(20u64), Just(120)], 1..500),
        ) {
            let mut rig = Rig::new();
            let count = u32::try_from(pauses.len()).unwrap();
            pauses.into_iter().for_each(|pause| {
                rig.pause(us(pause), 1);
            });
            prop_assert!(rig.missed <= 1 + count / 2, "{} of {}", rig.missed, count);
        }
    }
}
