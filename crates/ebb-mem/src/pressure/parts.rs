//! Parts of the ladder: sums over a window, conditions with hysteresis, rate limits, random numbers.

use std::time::{Duration, Instant};

use super::Thresholds;
use crate::random::{STEP, mix};

pub(super) fn since(now: Instant, at: Instant) -> Duration {
    now.saturating_duration_since(at)
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// `permille` thousandths of `whole`.
pub(super) fn share(whole: u64, permille: u32) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(permille) / 1000).unwrap_or(u64::MAX)
}

/// A condition with hysteresis, and whether the ladder has yet to respond to its beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hysteresis {
    pub(super) inside: bool,
    pub(super) unhandled: bool,
}

impl Hysteresis {
    pub(super) fn update(&mut self, enters: bool, leaves: bool) {
        if leaves {
            *self = Self::default();
        } else if enters && !self.inside {
            *self = Self { inside: true, unhandled: true };
        }
    }
}

/// Rate limit for responses to unconfirmed signs of one kind: the interval doubles with each response.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimit {
    pub(super) allowed: Option<Instant>,
    pub(super) gap: Duration,
}

impl RateLimit {
    pub(super) fn pass(&mut self, now: Instant, t: &Thresholds, random: &mut SplitMix64) -> bool {
        if let Some(allowed) = self.allowed {
            if now < allowed {
                return false;
            }
            if since(now, allowed) >= t.hint_gap_max {
                self.gap = t.hint_gap;
            }
        }
        self.allowed = Some(now + random.around(self.gap));
        self.gap = (self.gap * 2).min(t.hint_gap_max);
        true
    }
}

/// A sum over about the last window: the current window, and the previous one in proportion to the time
/// that remains of the current one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    length: Duration,
    start: Instant,
    current: u64,
    previous: u64,
}

impl Window {
    pub(super) fn new(length: Duration, start: Instant) -> Self {
        Self { length, start, current: 0, previous: 0 }
    }

    pub(super) fn add(&mut self, now: Instant, amount: u64) {
        let passed = since(now, self.start);
        if passed >= self.length * 2 {
            (self.start, self.current, self.previous) = (now, 0, 0);
        } else if passed >= self.length {
            (self.previous, self.current) = (self.current, 0);
            self.start += self.length;
        }
        self.current = self.current.saturating_add(amount);
    }

    /// Call after [`Window::add`] with the same time.
    pub(super) fn sum(&self, now: Instant) -> u64 {
        let left = self.length.saturating_sub(since(now, self.start));
        let part = u128::from(self.previous) * left.as_nanos() / self.length.as_nanos().max(1);
        self.current.saturating_add(u64::try_from(part).unwrap_or(u64::MAX))
    }
}

/// Random times, deterministic for a seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Uniform from 0 up to `limit`.
    pub(super) fn below(&mut self, limit: Duration) -> Duration {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let part = (u128::from(self.next()) * u128::from(limit)) >> 64;
        Duration::from_nanos(u64::try_from(part).unwrap_or(limit))
    }

    /// Uniform within a quarter of `middle` above or below it.
    pub(super) fn around(&mut self, middle: Duration) -> Duration {
        middle - middle / 4 + self.below(middle / 2)
    }
}
