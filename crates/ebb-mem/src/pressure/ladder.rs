//! The ladder: the state machine of pressure levels. It takes signals and a time and returns at most one
//! event. No I/O, no clock, no globals.
//!
//! Every sample is classified as one of:
//! - a *hint*: one sign by itself. It leads to L1 and is rate-limited per kind: each response to an
//!   unconfirmed sign doubles the time until the next, so that false alarms cost little.
//! - *confirmed*: two signs of different kinds at about the same time, or one that is strong by
//!   itself. It leads to L1, and to L2 when it is seen again [`Thresholds::again_after`] later.
//! - *full stall*: all tasks stall (on the host: confirmed by another sign). It leads to L2 at once.
//! - *almost no memory*: L3, at most once in [`Thresholds::last_gap`].
//!
//! A cgroup that is near its limit because of page cache is in its usual state, and leads to one
//! L1. Where its limit leaves little without the page cache, the kernel kills next: the shares of
//! the host's available memory apply to it, up to an amount that is enough for a group of any size,
//! and the sign is strong by itself: version 1 has no stall information that could confirm it. Only
//! the hard limit leads to L3: the kernel throttles at `memory.high`, and does not kill.
//!
//! Host-wide free memory near the watermark is the usual state of a machine whose memory is full of
//! page cache, and host-wide stalls may be those of tasks in a small cgroup. Each of them leads to one L1
//! when it begins, and counts further only together with little *available* memory. The level falls one
//! step at a time, each after its hold time.

use std::time::{Duration, Instant};

use super::parts::{Hysteresis, RateLimit, SplitMix64, Window, micros, share, since};
use super::signals::{Cgroup, HostSample};
use super::{Cause, Level, Signals, Thresholds, ThresholdsError};

/// A decision of the ladder, to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LadderEvent {
    /// The level from now on.
    pub level: Level,
    /// Why.
    pub cause: Cause,
}

/// Kinds of signs. A notification cannot tell which task stalled, so it counts as the host's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SignKind {
    HostStall,
    OwnStall,
    Free,
    Available,
    Cgroup,
    Notice,
}

const KINDS: usize = 6;

/// Above these amounts a cgroup has enough left, whatever part of its limit they are: for a hint,
/// L2 and L3.
const CGROUP_LOW: u64 = 256 << 20;
const CGROUP_DRAIN: u64 = 128 << 20;
const CGROUP_LAST: u64 = 64 << 20;

/// Pairs of kinds that confirm each other.
const PAIRS: [(SignKind, SignKind); 4] = [
    (SignKind::HostStall, SignKind::Available),
    (SignKind::Notice, SignKind::Available),
    (SignKind::Available, SignKind::Free),
    (SignKind::OwnStall, SignKind::Cgroup),
];

#[derive(Clone, Copy)]
struct Sign {
    level: Level,
    cause: Cause,
    confirmed: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingRise {
    level: Level,
    cause: Cause,
    due: Instant,
}

/// The state machine behind the levels.
#[derive(Debug)]
pub struct Ladder {
    t: Thresholds,
    random: SplitMix64,
    level: Level,
    since: Instant,
    /// When a sign last indicated each level or a higher one.
    supported: [Instant; 4],
    /// When the level last left L0.
    first: Option<Instant>,
    pending: Option<PendingRise>,
    host_some: Window,
    host_full: Window,
    own_some: Window,
    own_full: Window,
    seen: [Option<Instant>; KINDS],
    rate_limits: [RateLimit; KINDS],
    free: Hysteresis,
    available: Hysteresis,
    cgroup: Hysteresis,
    /// Little of the cgroup's limit is left, page cache not counted.
    cgroup_low: Hysteresis,
    /// The largest amount of available memory since it became low or last fell further, in bytes.
    available_mark: Option<u64>,
    repeat_at: Instant,
    repeat_gap: Duration,
    last_at: Option<Instant>,
    decay_at: Instant,
}

impl Ladder {
    /// A ladder at L0. `seed` spreads the times of this daemon against those of other daemons on the host:
    /// use a different one for each. Later times must not be before `now`; if they are, they count as `now`.
    ///
    /// # Errors
    /// A threshold is out of its range.
    pub fn new(t: Thresholds, seed: u64, now: Instant) -> Result<Self, ThresholdsError> {
        t.check()?;
        let mut random = SplitMix64(seed);
        let window = Window::new(t.window, now);
        let rate_limit = RateLimit { allowed: None, gap: t.hint_gap };
        Ok(Self {
            // The first tick is at a random time within its period, so that daemons started together differ.
            decay_at: now + random.below(t.decay),
            repeat_at: now,
            repeat_gap: t.repeat,
            random,
            level: Level::L0,
            since: now,
            supported: [now; 4],
            first: None,
            pending: None,
            host_some: window,
            host_full: window,
            own_some: window,
            own_full: window,
            seen: [None; KINDS],
            rate_limits: [rate_limit; KINDS],
            free: Hysteresis::default(),
            available: Hysteresis::default(),
            cgroup: Hysteresis::default(),
            cgroup_low: Hysteresis::default(),
            available_mark: None,
            last_at: None,
            t,
        })
    }

    /// The level now.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// The thresholds in force.
    #[must_use]
    pub fn thresholds(&self) -> &Thresholds {
        &self.t
    }

    /// When [`Ladder::step`] must be called again at the latest, with or without signs.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        let own = if self.level == Level::L0 { self.decay_at } else { self.fall_at() };
        self.pending.map_or(own, |p| p.due.min(own))
    }

    /// Whether the level is above L0 or about to rise, so that sources should be sampled more often.
    #[must_use]
    pub fn alert(&self) -> bool {
        self.level != Level::L0 || self.pending.is_some()
    }

    /// Processes the signals since the last step. Returns at most one event, to be published.
    pub fn step(&mut self, now: Instant, signals: &Signals) -> Option<LadderEvent> {
        self.record(now, signals);
        if let Some(level) = signals.injected {
            return self.inject(level, now);
        }
        if let Some(sign) = self.classify(now, signals)
            && let Some(event) = self.respond(sign, now)
        {
            return Some(event);
        }
        if let Some(pending) = self.pending
            && now >= pending.due
        {
            self.pending = None;
            if pending.level > self.level && self.still_holds(pending.cause) {
                return Some(self.publish(pending.level, pending.cause, now));
            }
            // An L3 requested by hand within `last_gap`, while L3 holds.
            if pending.cause == Cause::Injected {
                return Some(self.publish(pending.level, pending.cause, now));
            }
        }
        if self.level == Level::L0 {
            if now < self.decay_at {
                return None;
            }
            return Some(self.publish(Level::L0, Cause::Decay, now));
        }
        if now >= self.fall_at() {
            return Some(self.publish(self.level.below(), Cause::Easing, now));
        }
        None
    }

    /// Records the signals: sums, conditions, and which kinds of signs are present.
    fn record(&mut self, now: Instant, s: &Signals) {
        let first = micros(self.t.first_stall);
        for (window, amount) in [
            (&mut self.host_some, micros(s.host_stall.some)),
            (&mut self.host_full, micros(s.host_stall.full)),
            (&mut self.own_some, micros(s.own_stall.some)),
            (&mut self.own_full, micros(s.own_stall.full)),
        ] {
            window.add(now, amount);
        }
        let host = s.host.filter(|host| host.total > 0);
        if let Some(host) = host {
            self.record_host(&host);
        }
        let cgroup = s.cgroup.is_some_and(|c| self.record_cgroup(&c));
        for (kind, here) in [
            (SignKind::HostStall, !s.host_stall.some.is_zero() && self.host_some.sum(now) >= first),
            (SignKind::OwnStall, !s.own_stall.some.is_zero() && self.own_some.sum(now) >= first),
            (SignKind::Free, host.is_some() && self.free.inside),
            (
                SignKind::Available,
                host.is_some_and(|h| h.available.is_some()) && self.available.inside,
            ),
            (SignKind::Cgroup, cgroup),
            (SignKind::Notice, s.notices > 0),
        ] {
            if here {
                self.seen[index(kind)] = Some(now);
            }
        }
    }

    fn record_host(&mut self, host: &HostSample) {
        if let Some(marks) = host.watermarks {
            let near = share(marks.high, self.t.free_near);
            self.free.update(host.free <= near, host.free > near.saturating_add(near / 2));
        }
        if let Some(available) = host.available {
            let low = share(host.total, self.t.available_low);
            self.available.update(available <= low, available > low.saturating_add(low / 4));
            self.available_mark = if self.available.inside {
                Some(self.available_mark.map_or(available, |mark| mark.max(available)))
            } else {
                None
            };
        }
    }

    fn record_cgroup(&mut self, cgroup: &Cgroup) -> bool {
        if let (Some(used), Some(limit)) = (cgroup.used, cgroup.limit) {
            let near = share(limit, self.t.cgroup_near);
            self.cgroup.update(used >= near, used < near.saturating_sub(limit / 20));
        }
        if let Some((limit, available)) = cgroup_room(cgroup) {
            let low = share(limit, self.t.available_low).min(CGROUP_LOW);
            self.cgroup_low.update(available <= low, available > low.saturating_add(low / 4));
        }
        cgroup.reclaims > 0 || self.cgroup.inside || self.cgroup_low.inside
    }

    /// The most serious sign of this sample, if it needs a response.
    fn classify(&mut self, now: Instant, s: &Signals) -> Option<Sign> {
        if let Some(cause) = self.almost_no_memory(s) {
            return Some(Sign { level: Level::L3, cause, confirmed: true });
        }
        let pair = self.pair(now);
        let full = micros(self.t.full_stall);
        let own_full = !s.own_stall.full.is_zero() && self.own_full.sum(now) >= full;
        let host_full = !s.host_stall.full.is_zero() && self.host_full.sum(now) >= full;
        if own_full || (host_full && pair.is_some()) {
            return Some(Sign { level: Level::L2, cause: Cause::FullStall, confirmed: true });
        }
        if let Some(cause) = self.confirmed(now, s, pair) {
            for rate_limit in &mut self.rate_limits {
                rate_limit.gap = self.t.hint_gap;
            }
            let level = if self.continues(now) { Level::L2 } else { Level::L1 };
            return Some(Sign { level, cause, confirmed: true });
        }
        let cause = self.hint(now, s)?;
        Some(Sign { level: Level::L1, cause, confirmed: false })
    }

    fn almost_no_memory(&self, s: &Signals) -> Option<Cause> {
        if s.cgroup.is_some_and(|c| c.out_of_memory > 0 || c.under_oom) {
            return Some(Cause::CgroupOutOfMemory);
        }
        if s.cgroup.is_some_and(|cgroup| {
            cgroup_room(&cgroup).is_some_and(|(limit, available)| {
                let last = share(limit, self.t.available_last).min(CGROUP_LAST);
                cgroup.available_to_max.unwrap_or(available) <= last
            })
        }) {
            return Some(Cause::CgroupNearLimit);
        }
        let host = s.host.filter(|host| host.total > 0)?;
        let available = host.available?;
        let below_min = host.watermarks.is_some_and(|marks| host.free <= marks.min);
        let nothing = available <= share(host.total, self.t.available_last)
            || (below_min && available <= share(host.total, self.t.available_drain));
        nothing.then_some(Cause::AvailableLow)
    }

    /// The cause, if a kind seen in this sample is confirmed by another one seen within the last window.
    /// Two kinds seen earlier do not make a new sign.
    fn pair(&self, now: Instant) -> Option<Cause> {
        let fresh = |kind: SignKind| self.seen[index(kind)] == Some(now);
        let recent = |kind: SignKind| {
            self.seen[index(kind)].is_some_and(|at| since(now, at) <= self.t.window)
        };
        // The most specific cause first.
        let named = [
            (SignKind::OwnStall, Cause::Stall),
            (SignKind::HostStall, Cause::Stall),
            (SignKind::Notice, Cause::Notice),
            (SignKind::Available, Cause::AvailableLow),
            (SignKind::Free, Cause::FreeNearTarget),
            (SignKind::Cgroup, Cause::CgroupNearLimit),
        ];
        let confirmed = |kind: SignKind| {
            PAIRS.iter().any(|(one, other)| {
                (*one == kind && recent(*other)) || (*other == kind && recent(*one))
            })
        };
        named.into_iter().find(|(kind, _)| fresh(*kind) && confirmed(*kind)).map(|(_, cause)| cause)
    }

    /// The cause, if this sample shows confirmed pressure.
    fn confirmed(&mut self, now: Instant, s: &Signals, pair: Option<Cause>) -> Option<Cause> {
        let strong = micros(self.t.strong_stall);
        if !s.own_stall.some.is_zero() && self.own_some.sum(now) >= strong {
            return Some(Cause::Stall);
        }
        if let Some(HostSample { total: total @ 1.., available: Some(available), .. }) = s.host {
            if available <= share(total, self.t.available_drain) {
                return Some(Cause::AvailableLow);
            }
            if let Some(mark) = self.available_mark
                && mark.saturating_sub(available) >= share(total, self.t.available_fall).max(1)
            {
                self.available_mark = Some(available);
                return Some(Cause::AvailableLow);
            }
        }
        // The kernel kills at a cgroup's limit, and may do so without a stall before.
        if s.cgroup.as_ref().and_then(cgroup_room).is_some_and(|(limit, available)| {
            available <= share(limit, self.t.available_drain).min(CGROUP_DRAIN)
        }) {
            return Some(Cause::CgroupNearLimit);
        }
        pair
    }

    /// The cause, if this sample shows a single sign whose rate limit allows a response.
    fn hint(&mut self, now: Instant, s: &Signals) -> Option<Cause> {
        if self.level >= Level::L2 {
            return None;
        }
        let reclaims = s.cgroup.is_some_and(|c| c.reclaims > 0);
        let present = [
            (
                SignKind::Cgroup,
                reclaims || self.cgroup.unhandled || self.cgroup_low.unhandled,
                Cause::CgroupNearLimit,
            ),
            (SignKind::Available, self.available.unhandled, Cause::AvailableLow),
            (SignKind::Free, self.free.unhandled, Cause::FreeNearTarget),
            (SignKind::OwnStall, true, Cause::Stall),
            (SignKind::HostStall, true, Cause::Stall),
            (SignKind::Notice, true, Cause::Notice),
        ];
        for (kind, new, cause) in present {
            let here = new && self.seen[index(kind)] == Some(now);
            if here && self.rate_limits[index(kind)].pass(now, &self.t, &mut self.random) {
                match kind {
                    SignKind::Cgroup => {
                        self.cgroup.unhandled = false;
                        self.cgroup_low.unhandled = false;
                    }
                    SignKind::Available => self.available.unhandled = false,
                    SignKind::Free => self.free.unhandled = false,
                    _ => {}
                }
                return Some(cause);
            }
        }
        None
    }

    fn continues(&self, now: Instant) -> bool {
        self.first.is_some_and(|first| since(now, first) >= self.t.again_after)
    }

    /// The response to a sign: rise (at once or after the herd delay), repeat, or keep the level.
    fn respond(&mut self, sign: Sign, now: Instant) -> Option<LadderEvent> {
        for at in self.supported.iter_mut().take(sign.level.index() + 1) {
            *at = now;
        }
        if sign.level > self.level {
            let limit = match sign.level {
                Level::L3 if !self.last_allowed(now) => return None,
                Level::L3 => Duration::ZERO,
                _ if local(sign.cause) => Duration::ZERO,
                Level::L2 => self.t.herd_delay * 5,
                _ => self.t.herd_delay,
            };
            if limit.is_zero() {
                return Some(self.publish(sign.level, sign.cause, now));
            }
            if self.pending.is_none_or(|p| p.level < sign.level) {
                let due = now + self.random.below(limit);
                let due = self.pending.map_or(due, |p| due.min(p.due));
                self.pending = Some(PendingRise { level: sign.level, cause: sign.cause, due });
            }
            return None;
        }
        let again = match self.level {
            Level::L3 => sign.level == Level::L3 && self.last_allowed(now),
            Level::L2 => sign.level == Level::L2 && now >= self.repeat_at,
            // Confirmed signs wait for `again_after`; hints have passed their rate limit.
            Level::L1 => !sign.confirmed,
            Level::L0 => false,
        };
        again.then(|| self.publish(self.level, sign.cause, now))
    }

    fn inject(&mut self, level: Level, now: Instant) -> Option<LadderEvent> {
        if level == Level::L3 && !self.last_allowed(now) {
            let due = self.last_at.map_or(now, |at| at + self.t.last_gap);
            self.pending = Some(PendingRise { level, cause: Cause::Injected, due });
            return None;
        }
        self.pending = None;
        let cause = if level == Level::L0 { Cause::Easing } else { Cause::Injected };
        Some(self.publish(level, cause, now))
    }

    fn last_allowed(&self, now: Instant) -> bool {
        self.last_at.is_none_or(|at| since(now, at) >= self.t.last_gap)
    }

    /// Whether a sign is still present after its herd delay, as far as that can be checked.
    fn still_holds(&self, cause: Cause) -> bool {
        match cause {
            Cause::FreeNearTarget => self.free.inside,
            Cause::AvailableLow => self.available.inside,
            _ => true,
        }
    }

    fn fall_at(&self) -> Instant {
        let hold = match self.level {
            Level::L0 | Level::L1 => self.t.hold_squeeze,
            Level::L2 => self.t.hold_drain,
            Level::L3 => self.t.hold_last,
        };
        self.supported[self.level.index()].max(self.since) + hold
    }

    fn publish(&mut self, level: Level, cause: Cause, now: Instant) -> LadderEvent {
        if level != self.level {
            self.since = now;
        }
        if level == Level::L0 {
            self.first = None;
            self.repeat_gap = self.t.repeat;
            self.decay_at = now + self.random.around(self.t.decay);
        } else {
            self.first.get_or_insert(now);
        }
        if cause.is_event() {
            for at in self.supported.iter_mut().take(level.index() + 1) {
                *at = now;
            }
            if level == Level::L3 {
                self.last_at = Some(now);
            }
        }
        if level == Level::L2 {
            self.repeat_at = now + self.random.around(self.repeat_gap);
            self.repeat_gap = (self.repeat_gap * 2).min(self.t.repeat_max);
        }
        self.level = level;
        if self.pending.is_some_and(|p| p.level <= level) {
            self.pending = None;
        }
        LadderEvent { level, cause }
    }
}

/// The limit of a cgroup, and its unused rest, in bytes.
fn cgroup_room(cgroup: &Cgroup) -> Option<(u64, u64)> {
    Some((cgroup.limit.filter(|limit| *limit > 0)?, cgroup.available?))
}

/// Signs of the process's own cgroup: no other daemon sees the same one.
fn local(cause: Cause) -> bool {
    matches!(cause, Cause::CgroupNearLimit | Cause::CgroupOutOfMemory)
}

fn index(kind: SignKind) -> usize {
    match kind {
        SignKind::HostStall => 0,
        SignKind::OwnStall => 1,
        SignKind::Free => 2,
        SignKind::Available => 3,
        SignKind::Cgroup => 4,
        SignKind::Notice => 5,
    }
}
