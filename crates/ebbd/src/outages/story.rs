//! What is to be told of one volume's store, from one look to the next: by value, without I/O and clock.

use std::time::{Duration, Instant};

use ebb_volume::{FailedKind, LogLimit, StoreState};

/// Requests without an answer for so long are told of.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests that fail no more for so long are told of.
pub(super) const QUIET: Duration = Duration::from_secs(60);
/// Lines of a kind of trouble in a period.
const LINES: u32 = 3;
const PERIOD: Duration = Duration::from_secs(60);

/// A store at a moment.
pub(super) struct Look {
    pub(super) now: Instant,
    /// See `Watched::unanswered`.
    pub(super) unanswered: u64,
    /// See `Watched::failures`.
    pub(super) failures: [u64; 3],
    pub(super) remote: Option<StoreState>,
}

/// What is to be told; `earlier` counts what was left out before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tale {
    /// A connection is lost.
    Lost { earlier: u64 },
    /// Connections were lost and are there again.
    LostForAMoment { times: u64, earlier: u64 },
    /// All connections are there again.
    Back { after: Duration },
    /// Requests have no answer.
    Silent { requests: u64, waited: Duration, earlier: u64 },
    /// They have ended, or so many requests have failed meanwhile.
    Answers { after: Duration, failed: u64 },
    /// Requests fail, so many since the last line.
    Fails { kind: FailedKind, count: u64 },
    /// None has failed for a while.
    FailsNoMore { failed: u64 },
}

impl Tale {
    /// Trouble that is over.
    pub(super) fn is_good(&self) -> bool {
        matches!(self, Tale::Back { .. } | Tale::Answers { .. } | Tale::FailsNoMore { .. })
    }
}

/// What was told so far.
pub(super) struct Story {
    links: Links,
    answers: Answers,
    failures: Failures,
}

struct Links {
    lost: u64,
    /// Since when connections lack, and whether that was told.
    since: Option<(Instant, bool)>,
    limit: LogLimit,
}

struct Answers {
    /// When nothing was unanswered.
    clear: Instant,
    /// Since when requests wait that were told of, and how many had failed then.
    silent: Option<(Instant, u64)>,
    limit: LogLimit,
}

struct Failures {
    seen: [u64; 3],
    /// As many as were told of.
    told: [u64; 3],
    limits: [LogLimit; 3],
    /// When the last one was seen, and how many there were before the first, if any was told of.
    last: Option<(Instant, u64)>,
}

fn limit() -> LogLimit {
    LogLimit::new(LINES, PERIOD)
}

impl Story {
    /// A store that was opened at about `now`.
    pub(super) fn new(now: Instant) -> Story {
        Story {
            links: Links { lost: 0, since: None, limit: limit() },
            answers: Answers { clear: now, silent: None, limit: limit() },
            failures: Failures {
                seen: [0; 3],
                told: [0; 3],
                // The first at once, then how many in each period.
                limits: std::array::from_fn(|_| LogLimit::new(1, PERIOD)),
                last: None,
            },
        }
    }

    /// What is new.
    pub(super) fn look(&mut self, look: &Look) -> Vec<Tale> {
        let mut tales = Vec::new();
        if let Some(remote) = &look.remote {
            tales.extend(self.links.look(look.now, remote));
        }
        let connected = self.links.since.is_none();
        tales.extend(self.answers.look(look, connected));
        self.failures.look(look, &mut tales);
        tales
    }
}

impl Links {
    fn look(&mut self, now: Instant, remote: &StoreState) -> Option<Tale> {
        let times = remote.lost.saturating_sub(self.lost);
        self.lost = remote.lost;
        let lacks = remote.lost > remote.reconnects;
        match self.since {
            None if lacks && times > 0 => {
                let admitted = self.limit.admit(now);
                self.since = Some((now, admitted.is_some()));
                admitted.map(|earlier| Tale::Lost { earlier })
            }
            None if times > 0 => {
                let admitted = self.limit.admit(now);
                admitted.map(|earlier| Tale::LostForAMoment { times, earlier })
            }
            Some((since, told)) if !lacks => {
                self.since = None;
                told.then(|| Tale::Back { after: now.saturating_duration_since(since) })
            }
            _ => None,
        }
    }
}

impl Answers {
    /// A store without its connection is told of as such.
    fn look(&mut self, look: &Look, connected: bool) -> Option<Tale> {
        let failed = look.failures.iter().sum::<u64>();
        if look.unanswered == 0 {
            self.clear = look.now;
            let (since, before) = self.silent.take()?;
            let after = look.now.saturating_duration_since(since);
            return Some(Tale::Answers { after, failed: failed.saturating_sub(before) });
        }
        let waited = look.now.saturating_duration_since(self.clear);
        if waited < PATIENCE || self.silent.is_some() || !connected {
            return None;
        }
        let earlier = self.limit.admit(look.now)?;
        self.silent = Some((self.clear, failed));
        Some(Tale::Silent { requests: look.unanswered, waited, earlier })
    }
}

impl Failures {
    fn look(&mut self, look: &Look, tales: &mut Vec<Tale>) {
        let all = |counts: &[u64; 3]| counts.iter().sum::<u64>();
        if look.failures != self.seen {
            let before = self.last.map_or(all(&self.seen), |(_, before)| before);
            self.last = Some((look.now, before));
            self.seen = look.failures;
        }
        for (index, kind) in FailedKind::ALL.into_iter().enumerate() {
            let count = look.failures[index].saturating_sub(self.told[index]);
            if count > 0 && self.limits[index].admit(look.now).is_some() {
                self.told[index] = look.failures[index];
                tales.push(Tale::Fails { kind, count });
            }
        }
        if let Some((last, before)) = self.last
            && look.now.saturating_duration_since(last) >= QUIET
        {
            self.last = None;
            tales.push(Tale::FailsNoMore { failed: all(&look.failures).saturating_sub(before) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rig {
        start: Instant,
        story: Story,
    }

    fn look(now: Instant, unanswered: u64, failures: [u64; 3]) -> Look {
        Look { now, unanswered, failures, remote: None }
    }

    fn remote(now: Instant, lost: u64, reconnects: u64) -> Look {
        let remote = StoreState { lost, reconnects, ..StoreState::default() };
        Look { remote: Some(remote), ..look(now, 0, [0; 3]) }
    }

    impl Rig {
        fn new() -> Rig {
            let start = Instant::now();
            Rig { start, story: Story::new(start) }
        }

        fn at(&mut self, second: u64, what: impl Fn(Instant) -> Look) -> Vec<Tale> {
            self.story.look(&what(self.start + Duration::from_secs(second)))
        }
    }

    #[test]
    fn a_lost_connection_and_its_return_are_told_once_each() {
        let mut rig = Rig::new();
        assert_eq!(rig.at(1, |now| remote(now, 0, 0)), []);
        assert_eq!(rig.at(2, |now| remote(now, 1, 0)), [Tale::Lost { earlier: 0 }]);
        for second in 3..40 {
            // The connections of other workers are lost, too.
            assert_eq!(rig.at(second, |now| remote(now, 4, second / 20)), []);
        }
        let back = Tale::Back { after: Duration::from_secs(38) };
        assert_eq!(rig.at(40, |now| remote(now, 4, 4)), [back]);
        assert_eq!(rig.at(41, |now| remote(now, 4, 4)), []);
    }

    #[test]
    fn a_server_that_comes_and_goes_writes_a_few_lines_a_minute() {
        let mut rig = Rig::new();
        let mut lines = 0;
        for second in 1..=600 {
            let moment = second % 3 == 0;
            let (lost, back) = (second, if moment { second } else { second - 1 });
            lines += rig.at(second, |now| remote(now, lost, back)).len();
        }
        assert!((11..=11 * 6).contains(&lines), "{lines} lines in ten minutes");
    }

    #[test]
    fn what_has_no_answer_for_ten_seconds_is_told_and_so_is_its_end() {
        let mut rig = Rig::new();
        for second in 1..20 {
            assert_eq!(rig.at(second, |now| look(now, 0, [0; 3])), []);
        }
        for second in 20..29 {
            assert_eq!(rig.at(second, |now| look(now, 3, [0; 3])), [], "{second}");
        }
        let waited = PATIENCE;
        let silent = Tale::Silent { requests: 3, waited, earlier: 0 };
        assert_eq!(rig.at(29, |now| look(now, 3, [0; 3])), [silent]);
        assert_eq!(rig.at(59, |now| look(now, 3, [0; 3])), []);
        let answers = Tale::Answers { after: Duration::from_secs(41), failed: 0 };
        assert_eq!(rig.at(60, |now| look(now, 0, [0; 3])), [answers]);
        assert_eq!(rig.at(61, |now| look(now, 0, [0; 3])), []);
    }

    #[test]
    fn a_store_whose_server_is_lost_is_not_told_of_as_silent_besides() {
        let mut rig = Rig::new();
        let waits = |now| Look { unanswered: 5, ..remote(now, 1, 0) };
        assert_eq!(rig.at(1, waits), [Tale::Lost { earlier: 0 }]);
        for second in 2..60 {
            assert_eq!(rig.at(second, waits), []);
        }
    }

    #[test]
    fn a_storm_of_failures_is_a_line_a_minute_for_each_kind() {
        let mut rig = Rig::new();
        let mut told = Vec::new();
        for second in 1..=120u64 {
            told.extend(rig.at(second, |now| look(now, 0, [0, second * 100, second / 60])));
        }
        let writes = |count| Tale::Fails { kind: FailedKind::Write, count };
        let flush = || Tale::Fails { kind: FailedKind::Flush, count: 1 };
        assert_eq!(told, [writes(100), flush(), writes(6000), flush()]);
        let mut told = Vec::new();
        for second in 121..=200 {
            told.extend(rig.at(second, |now| look(now, 0, [0, 12_000, 2])));
        }
        assert_eq!(told, [writes(5900), Tale::FailsNoMore { failed: 12_002 }]);
    }
}
