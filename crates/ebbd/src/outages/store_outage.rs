//! The history of one volume's store, which turns samples into events for the log. It does no I/O and reads no clock.

use std::time::{Duration, Instant};

use ebb_api::stat::OutageStat;
use ebb_volume::{FailedKind, LogLimit, StoreState};

/// Requests without a reply for this long are logged.
const SILENT_AFTER: Duration = Duration::from_secs(10);
/// The end of failures is logged after this long without one.
pub(super) const QUIET_AFTER: Duration = Duration::from_secs(OutageStat::SHOWN_SECONDS);
/// Limit of the lines of one kind of outage, and its period.
const LINES: u32 = 3;
const PERIOD: Duration = Duration::from_secs(60);

/// The counters of a store at one moment.
pub(super) struct StoreSample {
    pub(super) now: Instant,
    /// See `StoreHealth::check_unanswered`.
    pub(super) unanswered: u64,
    /// See `StoreHealth::failures`.
    pub(super) failures: [u64; 3],
    pub(super) remote: Option<StoreState>,
}

/// An event for the log; `earlier` counts the events of its kind that were omitted before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OutageEvent {
    /// A connection is lost.
    Lost { earlier: u64 },
    /// Connections were lost and made again since the last sample.
    LostBriefly { times: u64, earlier: u64 },
    /// All connections are made again.
    Reconnected { after: Duration },
    /// Requests wait for a first connection, which cannot be made.
    NotConnected { requests: u64, waited: Duration, earlier: u64 },
    /// Requests have no reply.
    NoReply { requests: u64, waited: Duration, earlier: u64 },
    /// They have completed; `failed` requests have failed meanwhile.
    RepliesAgain { after: Duration, failed: u64 },
    /// Requests fail: `count` of them since the last line.
    Fails { kind: FailedKind, count: u64 },
    /// None has failed for a while.
    FailsNoMore { failed: u64 },
}

impl OutageEvent {
    /// Whether it is the end of an outage.
    pub(super) fn is_end(&self) -> bool {
        matches!(
            self,
            OutageEvent::Reconnected { .. }
                | OutageEvent::RepliesAgain { .. }
                | OutageEvent::FailsNoMore { .. }
        )
    }
}

/// The state of a store, and what was logged of it.
pub(super) struct StoreHistory {
    connections: ConnectionHistory,
    replies: ReplyHistory,
    failures: FailureHistory,
}

struct ConnectionHistory {
    lost: u64,
    /// Since when connections are missing, and whether that was logged.
    since: Option<(Instant, bool)>,
    limit: LogLimit,
}

struct ReplyHistory {
    /// The last sample at which no request was without a reply.
    clear: Instant,
    /// Since when requests have waited, if that was logged, and how many had failed then.
    silent: Option<(Instant, u64)>,
    limit: LogLimit,
}

struct FailureHistory {
    seen: [u64; 3],
    /// How many of them were logged.
    logged: [u64; 3],
    limits: [LogLimit; 3],
    /// When the last failure was seen, and how many there were before the first one of this outage.
    last: Option<(Instant, u64)>,
}

fn limit() -> LogLimit {
    LogLimit::new(LINES, PERIOD)
}

impl StoreHistory {
    /// A store that was opened at about `now`.
    pub(super) fn new(now: Instant) -> StoreHistory {
        StoreHistory {
            connections: ConnectionHistory { lost: 0, since: None, limit: limit() },
            replies: ReplyHistory { clear: now, silent: None, limit: limit() },
            failures: FailureHistory {
                seen: [0; 3],
                logged: [0; 3],
                // The first failure at once, then one line with the count in each period.
                limits: std::array::from_fn(|_| LogLimit::new(1, PERIOD)),
                last: None,
            },
        }
    }

    /// The events since the last sample.
    pub(super) fn sample(&mut self, sample: &StoreSample) -> Vec<OutageEvent> {
        let mut events = Vec::new();
        if let Some(remote) = &sample.remote {
            events.extend(self.connections.sample(sample.now, remote));
        }
        let connected = self.connections.since.is_none();
        events.extend(self.replies.sample(sample, connected));
        self.failures.sample(sample, &mut events);
        events
    }
}

impl StoreHistory {
    /// Whether there is no outage, and no event to come without a further request.
    pub(super) fn is_clear(&self) -> bool {
        let failures = &self.failures;
        self.replies.silent.is_none() && failures.last.is_none() && failures.seen == failures.logged
    }

    /// What is wrong with the store as of the last sample, for the statistics.
    pub(super) fn outage(&self, now: Instant) -> Option<OutageStat> {
        let waited = now.saturating_duration_since(self.replies.clear);
        let silent = if waited >= SILENT_AFTER { waited } else { Duration::ZERO };
        let failed = self
            .failures
            .last
            .map_or(0, |(_, before)| self.failures.seen.iter().sum::<u64>().saturating_sub(before));
        let last = self.failures.last.filter(|_| failed > 0);
        let outage = OutageStat {
            silent_seconds: silent.as_secs_f64(),
            failed,
            last_failed_seconds: last
                .map_or(0.0, |(last, _)| now.saturating_duration_since(last).as_secs_f64()),
            ..OutageStat::default()
        };
        (outage != OutageStat::default()).then_some(outage)
    }
}

impl ConnectionHistory {
    fn sample(&mut self, now: Instant, remote: &StoreState) -> Option<OutageEvent> {
        let times = remote.lost.saturating_sub(self.lost);
        self.lost = remote.lost;
        let lacks = remote.lost > remote.reconnects;
        match self.since {
            None if lacks && times > 0 => {
                let admitted = self.limit.admit(now);
                self.since = Some((now, admitted.is_some()));
                admitted.map(|earlier| OutageEvent::Lost { earlier })
            }
            None if times > 0 => {
                let admitted = self.limit.admit(now);
                admitted.map(|earlier| OutageEvent::LostBriefly { times, earlier })
            }
            Some((since, logged)) if !lacks => {
                self.since = None;
                logged.then(|| OutageEvent::Reconnected {
                    after: now.saturating_duration_since(since),
                })
            }
            _ => None,
        }
    }
}

impl ReplyHistory {
    /// While the connection is lost, missing replies are not logged besides.
    fn sample(&mut self, sample: &StoreSample, connected: bool) -> Option<OutageEvent> {
        let failed = sample.failures.iter().sum::<u64>();
        if sample.unanswered == 0 {
            self.clear = sample.now;
            let (since, before) = self.silent.take()?;
            let after = sample.now.saturating_duration_since(since);
            return Some(OutageEvent::RepliesAgain {
                after,
                failed: failed.saturating_sub(before),
            });
        }
        let waited = sample.now.saturating_duration_since(self.clear);
        if waited < SILENT_AFTER || self.silent.is_some() || !connected {
            return None;
        }
        let earlier = self.limit.admit(sample.now)?;
        self.silent = Some((self.clear, failed));
        let requests = sample.unanswered;
        // Without a connection, no request was sent that could have a reply.
        let has_server = sample.remote.as_ref().is_none_or(|remote| remote.connections > 0);
        Some(match has_server {
            true => OutageEvent::NoReply { requests, waited, earlier },
            false => OutageEvent::NotConnected { requests, waited, earlier },
        })
    }
}

impl FailureHistory {
    fn sample(&mut self, sample: &StoreSample, events: &mut Vec<OutageEvent>) {
        let all = |counts: &[u64; 3]| counts.iter().sum::<u64>();
        if sample.failures != self.seen {
            let before = self.last.map_or(all(&self.seen), |(_, before)| before);
            self.last = Some((sample.now, before));
            self.seen = sample.failures;
        }
        for (index, kind) in FailedKind::ALL.into_iter().enumerate() {
            let count = sample.failures[index].saturating_sub(self.logged[index]);
            if count > 0 && self.limits[index].admit(sample.now).is_some() {
                self.logged[index] = sample.failures[index];
                events.push(OutageEvent::Fails { kind, count });
            }
        }
        // Without its server a store fails each request, and only gets none.
        let is_down = |remote: &StoreState| remote.connections == 0 && remote.last_error.is_some();
        if let Some((last, before)) = self.last
            && !sample.remote.as_ref().is_some_and(is_down)
            && sample.now.saturating_duration_since(last) >= QUIET_AFTER
        {
            self.last = None;
            events.push(OutageEvent::FailsNoMore {
                failed: all(&sample.failures).saturating_sub(before),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_known_while_it_lasts() {
        let start = Instant::now();
        let mut history = StoreHistory::new(start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(history.outage(at(1)), None);
        history.sample(&sample(at(5), 0, [0; 3]));
        history.sample(&sample(at(16), 2, [0; 3]));
        let silent = history.outage(at(16)).unwrap();
        assert!((silent.silent_seconds - 11.0).abs() < 0.01 && silent.failed == 0, "{silent:?}");
        history.sample(&sample(at(17), 0, [0, 3, 1]));
        let failing = OutageStat { failed: 4, last_failed_seconds: 3.0, ..OutageStat::default() };
        assert_eq!(history.outage(at(20)), Some(failing));
        history.sample(&sample(at(17) + QUIET_AFTER, 0, [0, 3, 1]));
        assert_eq!(history.outage(at(17) + QUIET_AFTER), None);
    }

    struct Rig {
        start: Instant,
        history: StoreHistory,
    }

    fn sample(now: Instant, unanswered: u64, failures: [u64; 3]) -> StoreSample {
        StoreSample { now, unanswered, failures, remote: None }
    }

    fn remote(now: Instant, lost: u64, reconnects: u64) -> StoreSample {
        let remote = StoreState { lost, reconnects, ..StoreState::default() };
        StoreSample { remote: Some(remote), ..sample(now, 0, [0; 3]) }
    }

    impl Rig {
        fn new() -> Rig {
            let start = Instant::now();
            Rig { start, history: StoreHistory::new(start) }
        }

        fn at(&mut self, second: u64, what: impl Fn(Instant) -> StoreSample) -> Vec<OutageEvent> {
            self.history.sample(&what(self.start + Duration::from_secs(second)))
        }
    }

    #[test]
    fn a_lost_connection_and_its_return_are_logged_once_each() {
        let mut rig = Rig::new();
        assert_eq!(rig.at(1, |now| remote(now, 0, 0)), []);
        assert_eq!(rig.at(2, |now| remote(now, 1, 0)), [OutageEvent::Lost { earlier: 0 }]);
        for second in 3..40 {
            // The connections of other workers are lost, too.
            assert_eq!(rig.at(second, |now| remote(now, 4, second / 20)), []);
        }
        let back = OutageEvent::Reconnected { after: Duration::from_secs(38) };
        assert_eq!(rig.at(40, |now| remote(now, 4, 4)), [back]);
        assert_eq!(rig.at(41, |now| remote(now, 4, 4)), []);
    }

    #[test]
    fn a_server_whose_connection_breaks_often_gets_a_few_lines_per_minute() {
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
    fn requests_without_a_reply_for_ten_seconds_are_logged_and_so_is_their_completion() {
        let mut rig = Rig::new();
        for second in 1..20 {
            assert_eq!(rig.at(second, |now| sample(now, 0, [0; 3])), []);
        }
        for second in 20..29 {
            assert_eq!(rig.at(second, |now| sample(now, 3, [0; 3])), [], "{second}");
        }
        let waited = SILENT_AFTER;
        let silent = OutageEvent::NoReply { requests: 3, waited, earlier: 0 };
        assert_eq!(rig.at(29, |now| sample(now, 3, [0; 3])), [silent]);
        assert_eq!(rig.at(59, |now| sample(now, 3, [0; 3])), []);
        let replies = OutageEvent::RepliesAgain { after: Duration::from_secs(41), failed: 0 };
        assert_eq!(rig.at(60, |now| sample(now, 0, [0; 3])), [replies]);
        assert_eq!(rig.at(61, |now| sample(now, 0, [0; 3])), []);
    }

    #[test]
    fn missing_replies_are_not_logged_while_the_connection_is_lost() {
        let mut rig = Rig::new();
        let waits = |now| StoreSample { unanswered: 5, ..remote(now, 1, 0) };
        assert_eq!(rig.at(1, waits), [OutageEvent::Lost { earlier: 0 }]);
        for second in 2..60 {
            assert_eq!(rig.at(second, waits), []);
        }
    }

    /// A server that is gone when the first request of a volume needs a connection.
    #[test]
    fn missing_first_connection_is_not_logged_as_silence() {
        let mut rig = Rig::new();
        let waits = |connections| {
            move |now| {
                let remote = StoreState { connections, ..StoreState::default() };
                StoreSample { remote: Some(remote), ..sample(now, 2, [0; 3]) }
            }
        };
        let waited = SILENT_AFTER;
        for second in 1..10 {
            assert_eq!(rig.at(second, waits(0)), [], "{second}");
        }
        let gone = OutageEvent::NotConnected { requests: 2, waited, earlier: 0 };
        assert_eq!(rig.at(10, waits(0)), [gone]);
        let mut rig = Rig::new();
        let silent = OutageEvent::NoReply { requests: 2, waited, earlier: 0 };
        assert_eq!(rig.at(10, waits(1)), [silent]);
    }

    #[test]
    fn failures_of_a_store_without_its_server_do_not_end() {
        let mut rig = Rig::new();
        let failed = |connections, last_error: Option<&str>| {
            let last_error = last_error.map(str::to_owned);
            move |now| {
                let state = StoreState {
                    connections,
                    last_error: last_error.clone(),
                    ..StoreState::default()
                };
                StoreSample { remote: Some(state), ..sample(now, 0, [1, 0, 0]) }
            }
        };
        let down = failed(0, Some("refused"));
        assert_eq!(rig.at(1, &down), [OutageEvent::Fails { kind: FailedKind::Read, count: 1 }]);
        assert_eq!(rig.at(100, &down), []);
        assert_eq!(
            rig.at(101, failed(1, Some("refused"))),
            [OutageEvent::FailsNoMore { failed: 1 }]
        );
    }

    #[test]
    fn many_failures_are_one_line_per_minute_and_kind() {
        let mut rig = Rig::new();
        let mut logged = Vec::new();
        for second in 1..=120u64 {
            logged.extend(rig.at(second, |now| sample(now, 0, [0, second * 100, second / 60])));
        }
        let writes = |count| OutageEvent::Fails { kind: FailedKind::Write, count };
        let flush = || OutageEvent::Fails { kind: FailedKind::Flush, count: 1 };
        assert_eq!(logged, [writes(100), flush(), writes(6000), flush()]);
        let mut logged = Vec::new();
        for second in 121..=200 {
            logged.extend(rig.at(second, |now| sample(now, 0, [0, 12_000, 2])));
        }
        assert_eq!(logged, [writes(5900), OutageEvent::FailsNoMore { failed: 12_002 }]);
    }
}
