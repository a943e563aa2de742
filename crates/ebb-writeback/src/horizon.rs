//! The horizon law on one device: unpaced below half of the threshold, then paced down to zero at it.
//!
//! Invariants:
//! - While the device holds at most half of its threshold, no write waits. From there on its writers together
//!   get twice the device's rate, falling linearly through the rate itself at three quarters to 0 at the
//!   threshold.
//! - So the device always has between a quarter and three quarters of its horizon to write, and never holds
//!   more than one horizon, except for one write that is larger than half of it; with a strict limit only if
//!   nothing else is held.
//! - Waiting writers retry when the pace has doubled since their pauses were assigned.

use crate::fair::{VirtualClock, VolumeAccount};
use crate::flush::Flusher;
use crate::rate::RateEstimate;
use crate::units::{MILLISECOND, Nanos, mul_div};

/// The longest time before a waiting writer retries.
const RETRY: Nanos = 100 * MILLISECOND;
/// The same for a writer that waits for the limit, where other devices may make room.
pub(crate) const LIMIT_RETRY: Nanos = 10 * MILLISECOND;

/// A decision of pacing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PaceDecision {
    Free,
    Charged,
    Wait(Nanos),
}

/// The state of one device.
#[derive(Debug, Clone)]
pub(crate) struct HorizonState {
    pub(crate) rate: RateEstimate,
    pub(crate) flusher: Flusher,
    clock: VirtualClock,
    /// The pace since the clock was last advanced.
    pace: u64,
    /// Cost of a written byte, in 1/1024: a write costs more than its bytes.
    cost: u64,
    /// Waiting writers were assigned pauses that end at this moment or later, at this pace.
    waiting_until: Nanos,
    waiting_pace: u64,
}

impl HorizonState {
    pub(crate) fn new(remembered: Option<u64>, now: Nanos) -> Self {
        let mut clock = VirtualClock::default();
        clock.advance(0, now);
        Self {
            rate: RateEstimate::new(remembered),
            flusher: Flusher::new(),
            clock,
            pace: 0,
            cost: 1024,
            waiting_until: 0,
            waiting_pace: 0,
        }
    }

    /// Cost units per second for all writers when the device holds this much.
    fn pace_at(&self, held: u64, threshold: u64) -> u64 {
        let left = threshold.saturating_sub(held).min(threshold / 2);
        let paced = mul_div(self.rate.value().saturating_mul(4), left, threshold);
        mul_div(paced, self.cost, 1024)
    }

    /// Advances the clock to `now`; from here on the pace is that of the new position.
    pub(crate) fn advance(&mut self, held: u64, threshold: u64, now: Nanos) {
        self.clock.advance(self.pace, now);
        self.pace = self.pace_at(held, threshold);
    }

    /// Up to this many held bytes no write is paced.
    pub(crate) fn free(&self, threshold: u64) -> u64 {
        if crate::shares::starting(self.rate.proven(), threshold.saturating_add(1)).is_some() {
            // The threshold is what the device has proven so far; it grows with each completion.
            threshold / 4 * 3
        } else {
            threshold / 2
        }
    }

    /// Whether a write of `bytes` may be added to `held`; together they exceed the unpaced part. The clock
    /// has been advanced. With a `strict` threshold only if it fits.
    pub(crate) fn decide(
        &mut self,
        account: &mut VolumeAccount,
        (held, threshold, strict): (u64, u64, bool),
        bytes: u64,
        now: Nanos,
    ) -> PaceDecision {
        let after = held.saturating_add(bytes);
        let free = self.free(threshold);
        if held == 0 {
            return PaceDecision::Free;
        }
        self.clock.update_behind(account);
        let wait = if after > threshold && (strict || held > free) {
            RETRY
        } else {
            self.clock.wait(account, self.pace).min(RETRY)
        };
        if wait == 0 {
            return PaceDecision::Charged;
        }
        if self.waiting_until <= now || self.pace < self.waiting_pace {
            self.waiting_pace = self.pace;
        }
        self.waiting_until = self.waiting_until.max(now.saturating_add(wait));
        PaceDecision::Wait(now.saturating_add(wait))
    }

    /// A writer waits for the limit: it should retry at every completion.
    pub(crate) fn limited(&mut self, now: Nanos) -> Nanos {
        self.waiting_pace = 0;
        self.waiting_until = self.waiting_until.max(now.saturating_add(LIMIT_RETRY));
        now.saturating_add(LIMIT_RETRY)
    }

    /// Charges a granted write.
    pub(crate) fn charge(
        &mut self,
        account: &mut VolumeAccount,
        pace: PaceDecision,
        (bytes, io_cost): (u64, u64),
    ) {
        if pace == PaceDecision::Free {
            self.clock.forget_debt(account);
            return;
        }
        let cost = bytes.saturating_add(io_cost);
        self.clock.charge(account, cost, self.pace);
        // The recent cost per byte: the pace is in cost, the device's rate in bytes.
        let newest = mul_div(cost, 1024, bytes).min(1 << 20);
        self.cost = (self.cost * 63 + newest) / 64;
        self.cost = self.cost.max(1024);
    }

    /// Updates an account that is visited in passing.
    pub(crate) fn refresh(&mut self, account: &mut VolumeAccount) {
        self.clock.update_behind(account);
    }

    /// Room was made and the clock advanced: whether waiting writers should retry now.
    pub(crate) fn retry_reservation(&mut self, held: u64, threshold: u64, now: Nanos) -> bool {
        if self.waiting_until <= now {
            return false;
        }
        let again =
            held < self.free(threshold) || self.pace >= self.waiting_pace.saturating_mul(2).max(1);
        if again {
            self.waiting_until = 0;
        }
        again
    }
}
