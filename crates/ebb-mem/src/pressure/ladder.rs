//! The ladder: signals and a time in, at most one event out. No I/O, no clock, no globals.
//!
//! Every look is judged as one of:
//! - a *hint*: one sign by itself. It leads to L1, and is damped per kind: each unconfirmed answer
//!   doubles the time until the next, so that false alarms cost little.
//! - *confirmed*: two signs of different kinds at about the same time, or one that is strong by
//!   itself. It leads to L1, and to L2 when it is seen again [`Thresholds::again_after`] later.
//! - *full stall*: everything stalls (on the host: confirmed by another sign). L2 at once.
//! - *next to nothing left*: L3, at most once in [`Thresholds::last_gap`].
//!
//! Host-wide free memory near the watermark is the usual state of a machine whose memory is full of
//! page cache, and host-wide stalls may be those of somebody inside a small cgroup: both are worth
//! one L1 when they begin, and count further only together with little *available* memory or with
//! lent pages lost. Pressure falls one level at a time, each after its hold.

use std::time::{Duration, Instant};

use super::parts::{Damper, Edge, Random, Window, micros, share, since};
use super::signals::{Cgroup, Host};
use super::{Cause, Level, Signals, Thresholds, ThresholdsError};

/// A decision of the ladder, to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The level from now on.
    pub level: Level,
    /// Why.
    pub cause: Cause,
}

/// Kinds of signs. A notification cannot say whose stall it was, so it counts as the host's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    HostStall,
    OwnStall,
    Free,
    Available,
    Cgroup,
    Notice,
}

const KINDS: usize = 6;

/// Two kinds of which each confirms the other.
const PAIRS: [(Kind, Kind); 4] = [
    (Kind::HostStall, Kind::Available),
    (Kind::Notice, Kind::Available),
    (Kind::Available, Kind::Free),
    (Kind::OwnStall, Kind::Cgroup),
];

#[derive(Clone, Copy)]
struct Sign {
    level: Level,
    cause: Cause,
    confirmed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    level: Level,
    cause: Cause,
    due: Instant,
}

/// The state machine behind the levels.
#[derive(Debug)]
pub struct Ladder {
    t: Thresholds,
    random: Random,
    level: Level,
    since: Instant,
    /// When a sign last asked for each level or a higher one.
    supported: [Instant; 4],
    /// When the level last left L0.
    first: Option<Instant>,
    pending: Option<Pending>,
    host_some: Window,
    host_full: Window,
    own_some: Window,
    own_full: Window,
    seen: [Option<Instant>; KINDS],
    dampers: [Damper; KINDS],
    free: Edge,
    available: Edge,
    cgroup: Edge,
    /// The most that was available since it became low or last fell further, in bytes.
    available_mark: Option<u64>,
    repeat_at: Instant,
    repeat_gap: Duration,
    last_at: Option<Instant>,
    decay_at: Instant,
}

impl Ladder {
    /// A ladder at L0. `seed` spreads the times of this daemon against those of others on the host:
    /// give each its own. Times given later must not lie before `now`; if they do they count as `now`.
    ///
    /// # Errors
    /// A threshold is out of its range.
    pub fn new(t: Thresholds, seed: u64, now: Instant) -> Result<Self, ThresholdsError> {
        t.check()?;
        let mut random = Random(seed);
        let window = Window::new(t.window, now);
        let damper = Damper { allowed: None, gap: t.hint_gap };
        Ok(Self {
            // The first tick anywhere within its period: daemons started together part ways.
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
            dampers: [damper; KINDS],
            free: Edge::default(),
            available: Edge::default(),
            cgroup: Edge::default(),
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

    /// When [`Ladder::step`] must be called again at the latest, signs or none.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        let own = if self.level == Level::L0 { self.decay_at } else { self.fall_at() };
        self.pending.map_or(own, |p| p.due.min(own))
    }

    /// Whether something is going on, so that it is worth looking more often.
    #[must_use]
    pub fn alert(&self) -> bool {
        self.level != Level::L0 || self.pending.is_some()
    }

    /// Takes what was seen since the last step. At most one event comes out; publish it.
    pub fn step(&mut self, now: Instant, signals: &Signals) -> Option<Event> {
        self.note(now, signals);
        if let Some(level) = signals.injected {
            return self.inject(level, now);
        }
        if let Some(sign) = self.judge(now, signals)
            && let Some(event) = self.answer(sign, now)
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
            // An L3 asked for by hand inside `last_gap`, while L3 holds.
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

    /// Records what was seen: sums, edges, and which kinds of signs are present.
    fn note(&mut self, now: Instant, s: &Signals) {
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
            self.note_host(&host);
        }
        let cgroup = s.cgroup.is_some_and(|c| self.note_cgroup(&c));
        for (kind, here) in [
            (Kind::HostStall, !s.host_stall.some.is_zero() && self.host_some.sum(now) >= first),
            (Kind::OwnStall, !s.own_stall.some.is_zero() && self.own_some.sum(now) >= first),
            (Kind::Free, host.is_some() && self.free.inside),
            (Kind::Available, host.is_some_and(|h| h.available.is_some()) && self.available.inside),
            (Kind::Cgroup, cgroup),
            (Kind::Notice, s.notices > 0),
        ] {
            if here {
                self.seen[index(kind)] = Some(now);
            }
        }
    }

    fn note_host(&mut self, host: &Host) {
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

    fn note_cgroup(&mut self, cgroup: &Cgroup) -> bool {
        if let (Some(used), Some(limit)) = (cgroup.used, cgroup.limit) {
            let near = share(limit, self.t.cgroup_near);
            self.cgroup.update(used >= near, used < near.saturating_sub(limit / 20));
        }
        cgroup.reclaims > 0 || self.cgroup.inside
    }

    /// The most serious sign of this look, if it is one to answer.
    fn judge(&mut self, now: Instant, s: &Signals) -> Option<Sign> {
        if let Some(cause) = self.next_to_nothing(s) {
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
            for damper in &mut self.dampers {
                damper.gap = self.t.hint_gap;
            }
            let level = if self.went_on(now) { Level::L2 } else { Level::L1 };
            return Some(Sign { level, cause, confirmed: true });
        }
        let cause = self.hint(now, s)?;
        Some(Sign { level: Level::L1, cause, confirmed: false })
    }

    fn next_to_nothing(&self, s: &Signals) -> Option<Cause> {
        if s.cgroup.is_some_and(|c| c.out_of_memory > 0 || c.under_oom) {
            return Some(Cause::CgroupOutOfMemory);
        }
        let host = s.host.filter(|host| host.total > 0)?;
        let available = host.available?;
        let below_min = host.watermarks.is_some_and(|marks| host.free <= marks.min);
        let nothing = available <= share(host.total, self.t.available_last)
            || (below_min && available <= share(host.total, self.t.available_drain));
        nothing.then_some(Cause::AvailableLow)
    }

    /// The cause, if a kind seen in this look is confirmed by another seen within the last window.
    /// Kinds that are only remembered do not make a new sign.
    fn pair(&self, now: Instant) -> Option<Cause> {
        let fresh = |kind: Kind| self.seen[index(kind)] == Some(now);
        let recent =
            |kind: Kind| self.seen[index(kind)].is_some_and(|at| since(now, at) <= self.t.window);
        // In the order of what they say.
        let named = [
            (Kind::OwnStall, Cause::Stall),
            (Kind::HostStall, Cause::Stall),
            (Kind::Notice, Cause::Notice),
            (Kind::Available, Cause::AvailableLow),
            (Kind::Free, Cause::FreeNearTarget),
            (Kind::Cgroup, Cause::CgroupNearLimit),
        ];
        let confirmed = |kind: Kind| {
            PAIRS.iter().any(|(one, other)| {
                (*one == kind && recent(*other)) || (*other == kind && recent(*one))
            })
        };
        named.into_iter().find(|(kind, _)| fresh(*kind) && confirmed(*kind)).map(|(_, cause)| cause)
    }

    /// The cause, if this look shows confirmed pressure.
    fn confirmed(&mut self, now: Instant, s: &Signals, pair: Option<Cause>) -> Option<Cause> {
        let strong = micros(self.t.strong_stall);
        if !s.own_stall.some.is_zero() && self.own_some.sum(now) >= strong {
            return Some(Cause::Stall);
        }
        if let Some(Host { total: total @ 1.., available: Some(available), .. }) = s.host {
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
        pair
    }

    /// The cause, if this look shows one sign by itself and its kind may be answered again.
    fn hint(&mut self, now: Instant, s: &Signals) -> Option<Cause> {
        if self.level >= Level::L2 {
            return None;
        }
        let reclaims = s.cgroup.is_some_and(|c| c.reclaims > 0);
        let present = [
            (Kind::Cgroup, reclaims || self.cgroup.unanswered, Cause::CgroupNearLimit),
            (Kind::Available, self.available.unanswered, Cause::AvailableLow),
            (Kind::Free, self.free.unanswered, Cause::FreeNearTarget),
            (Kind::OwnStall, true, Cause::Stall),
            (Kind::HostStall, true, Cause::Stall),
            (Kind::Notice, true, Cause::Notice),
        ];
        for (kind, new, cause) in present {
            let here = new && self.seen[index(kind)] == Some(now);
            if here && self.dampers[index(kind)].pass(now, &self.t, &mut self.random) {
                match kind {
                    Kind::Cgroup => self.cgroup.unanswered = false,
                    Kind::Available => self.available.unanswered = false,
                    Kind::Free => self.free.unanswered = false,
                    _ => {}
                }
                return Some(cause);
            }
        }
        None
    }

    fn went_on(&self, now: Instant) -> bool {
        self.first.is_some_and(|first| since(now, first) >= self.t.again_after)
    }

    /// What to do about a sign: rise (at once or a little later), repeat, or only keep the level.
    fn answer(&mut self, sign: Sign, now: Instant) -> Option<Event> {
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
                self.pending = Some(Pending { level: sign.level, cause: sign.cause, due });
            }
            return None;
        }
        let again = match self.level {
            Level::L3 => sign.level == Level::L3 && self.last_allowed(now),
            Level::L2 => sign.level == Level::L2 && now >= self.repeat_at,
            // Confirmed signs wait here for `again_after`; hints have passed their damper.
            Level::L1 => !sign.confirmed,
            Level::L0 => false,
        };
        again.then(|| self.publish(self.level, sign.cause, now))
    }

    fn inject(&mut self, level: Level, now: Instant) -> Option<Event> {
        if level == Level::L3 && !self.last_allowed(now) {
            let due = self.last_at.map_or(now, |at| at + self.t.last_gap);
            self.pending = Some(Pending { level, cause: Cause::Injected, due });
            return None;
        }
        self.pending = None;
        let cause = if level == Level::L0 { Cause::Easing } else { Cause::Injected };
        Some(self.publish(level, cause, now))
    }

    fn last_allowed(&self, now: Instant) -> bool {
        self.last_at.is_none_or(|at| since(now, at) >= self.t.last_gap)
    }

    /// Whether a sign that waited out its herd delay is still there, as far as it can be seen again.
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

    fn publish(&mut self, level: Level, cause: Cause, now: Instant) -> Event {
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
        Event { level, cause }
    }
}

/// Signs of the own process or cgroup: no other daemon sees the same one.
fn local(cause: Cause) -> bool {
    matches!(cause, Cause::CgroupNearLimit | Cause::CgroupOutOfMemory)
}

fn index(kind: Kind) -> usize {
    match kind {
        Kind::HostStall => 0,
        Kind::OwnStall => 1,
        Kind::Free => 2,
        Kind::Available => 3,
        Kind::Cgroup => 4,
        Kind::Notice => 5,
    }
}
