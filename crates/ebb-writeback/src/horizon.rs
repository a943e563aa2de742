//! Our law on one device: free below half of the threshold, then paced down to nothing at it.
//!
//! Invariants:
//! - **The rule of seed `001`, exact**: while what the device holds stays at or below half of its
//!   threshold, no write waits for pace. From there on writers together get twice the device's rate,
//!   falling in a straight line through the rate itself at three quarters to 0 at the threshold.
//! - So the device always has between a quarter and three quarters of its horizon in hand, and what
//!   it holds never exceeds one horizon, but for one write that is larger than half of it; with a
//!   strict limit only if nothing else is held.
//! - A pause given out is taken back as soon as the pace has doubled.

use crate::fair::{Clock, Tab};
use crate::flush::Flusher;
use crate::rate::Rate;
use crate::units::{MILLISECOND, Nanos, mul_div};

/// Longest time between two questions of one who waits.
const ASK_AGAIN: Nanos = 100 * MILLISECOND;
/// The same for one who waits for the limit, which others make room in, too.
pub(crate) const LIMIT_AGAIN: Nanos = 10 * MILLISECOND;

/// What pacing decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    Free,
    Charged,
    Wait(Nanos),
}

/// One device.
#[derive(Debug, Clone)]
pub(crate) struct Ours {
    pub(crate) rate: Rate,
    pub(crate) flusher: Flusher,
    clock: Clock,
    /// The pace since the clock was last moved.
    pace: u64,
    /// Cost of a written byte, in 1/1024: writes cost something beside their bytes.
    cost: u64,
    /// Who waits does so at least until here, told at this pace.
    waiting_until: Nanos,
    waiting_pace: u64,
}

impl Ours {
    pub(crate) fn new(remembered: Option<u64>, now: Nanos) -> Self {
        let mut clock = Clock::default();
        clock.advance(0, now);
        Self {
            rate: Rate::new(remembered),
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

    /// Moves the clock on to `now`; from here on the pace is that of the new position.
    pub(crate) fn turn(&mut self, held: u64, threshold: u64, now: Nanos) {
        self.clock.advance(self.pace, now);
        self.pace = self.pace_at(held, threshold);
    }

    /// Up to here nobody waits for pace.
    pub(crate) fn free(&self, threshold: u64) -> u64 {
        if crate::shares::starting(self.rate.proven(), threshold.saturating_add(1)).is_some() {
            // The threshold is what the device has proven so far: it grows with each completion.
            threshold / 4 * 3
        } else {
            threshold / 2
        }
    }

    /// May a write of `bytes` go on top of `held`, which is more than is free together? The clock has
    /// been moved. With a `strict` threshold only if it fits.
    pub(crate) fn judge(
        &mut self,
        tab: &mut Tab,
        (held, threshold, strict): (u64, u64, bool),
        bytes: u64,
        now: Nanos,
    ) -> Pace {
        let after = held.saturating_add(bytes);
        let free = self.free(threshold);
        if held == 0 {
            return Pace::Free;
        }
        self.clock.look(tab);
        let wait = if after > threshold && (strict || held > free) {
            ASK_AGAIN
        } else {
            self.clock.wait(tab, self.pace).min(ASK_AGAIN)
        };
        if wait == 0 {
            return Pace::Charged;
        }
        if self.waiting_until <= now || self.pace < self.waiting_pace {
            self.waiting_pace = self.pace;
        }
        self.waiting_until = self.waiting_until.max(now.saturating_add(wait));
        Pace::Wait(now.saturating_add(wait))
    }

    /// Somebody waits for the limit: to be asked again at every completion.
    pub(crate) fn limited(&mut self, now: Nanos) -> Nanos {
        self.waiting_pace = 0;
        self.waiting_until = self.waiting_until.max(now.saturating_add(LIMIT_AGAIN));
        now.saturating_add(LIMIT_AGAIN)
    }

    /// The write goes.
    pub(crate) fn gone(&mut self, tab: &mut Tab, pace: Pace, (bytes, io_cost): (u64, u64)) {
        if pace == Pace::Free {
            self.clock.forgive(tab);
            return;
        }
        let cost = bytes.saturating_add(io_cost);
        self.clock.charge(tab, cost, self.pace);
        // What a byte costs lately: the pace is in cost, the device's rate in bytes.
        let newest = mul_div(cost, 1024, bytes).min(1 << 20);
        self.cost = (self.cost * 63 + newest) / 64;
        self.cost = self.cost.max(1024);
    }

    /// A tab to look at in passing.
    pub(crate) fn look(&mut self, tab: &mut Tab) {
        self.clock.look(tab);
    }

    /// Room was made and the clock moved: whether those who wait should ask again now.
    pub(crate) fn ask_again(&mut self, held: u64, threshold: u64, now: Nanos) -> bool {
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
