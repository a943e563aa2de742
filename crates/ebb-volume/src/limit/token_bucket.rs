//! Token buckets, in whole numbers: no clock, no rounding. The level of a bucket is in billionths of a token, so that
//! a rate times nanoseconds is exact.
//!
//! # Invariants
//! - A request passes when the level is not negative, and takes its tokens then, also more than the bucket holds: the
//!   next request waits until this debt is paid. So a request of any size passes, and the mean rate is exact.
//! - Tokens that a late timer leaves unused stay in the bucket, up to its capacity, so that no rate is lost by it.

/// Units of the level in one token, and nanoseconds in a second.
const WHOLE: i128 = 1_000_000_000;
/// The least capacity, as the time in which it fills: timers are late by less.
pub(super) const LEAST_BURST_NS: u64 = 10_000_000;
/// The longest debt that stays when limits are changed, as the time in which it is paid.
const LONGEST_DEBT_NS: i128 = 50_000_000;

/// See the module. With a rate of 0 it has no limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenBucket {
    /// Tokens per second.
    rate: u64,
    capacity: i128,
    level: i128,
}

impl TokenBucket {
    /// Changes the rate, and the time in which an idle bucket fills. A long debt is shortened, so that the change is in
    /// force soon.
    pub(super) fn set(&mut self, rate: u64, burst_ns: u64) {
        let was_limited = self.rate != 0;
        self.rate = rate;
        self.capacity = i128::from(rate) * i128::from(burst_ns.max(LEAST_BURST_NS));
        let least = -i128::from(rate) * LONGEST_DEBT_NS;
        self.level = if was_limited { self.level.clamp(least, self.capacity) } else { 0 };
    }

    pub(super) fn is_limited(&self) -> bool {
        self.rate != 0
    }

    /// Adds the tokens of a time.
    pub(super) fn fill(&mut self, elapsed_ns: u64) {
        let tokens = i128::from(self.rate) * i128::from(elapsed_ns);
        self.level = self.level.saturating_add(tokens).min(self.capacity);
    }

    /// The time until a request may pass that leaves the tokens of the time `floor_ns` to others, nanoseconds.
    pub(super) fn wait_ns(&self, floor_ns: u64) -> u64 {
        let rate = i128::from(self.rate);
        let missing = (rate * i128::from(floor_ns)).saturating_sub(self.level);
        if rate == 0 || missing <= 0 {
            return 0;
        }
        u64::try_from(missing.saturating_add(rate - 1) / rate).unwrap_or(u64::MAX)
    }

    /// Takes tokens, whatever the level is.
    pub(super) fn take(&mut self, tokens: u64) {
        if self.rate != 0 {
            self.level = self.level.saturating_sub(i128::from(tokens) * WHOLE);
        }
    }

    /// The tokens of a time; without a limit, all.
    pub(super) fn tokens_in(&self, ns: u64) -> u64 {
        let tokens = i128::from(self.rate) * i128::from(ns) / WHOLE;
        if self.rate == 0 { u64::MAX } else { u64::try_from(tokens).unwrap_or(u64::MAX) }
    }

    /// How long the rate needs for this number of tokens, picoseconds; 0 without a limit.
    pub(super) fn time_ps(&self, tokens: u64) -> u128 {
        const PS: u128 = 1_000_000_000_000;
        (u128::from(tokens) * PS).checked_div(u128::from(self.rate)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bucket(rate: u64, burst_ms: u64) -> TokenBucket {
        let mut bucket = TokenBucket::default();
        bucket.set(rate, burst_ms * 1_000_000);
        bucket
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_and_the_next_one_pays() {
        let mut bucket = bucket(1000, 10);
        bucket.take(5000);
        assert_eq!(bucket.wait_ns(0), 5_000_000_000);
        bucket.fill(4_999_999_999);
        assert_eq!(bucket.wait_ns(0), 1);
        bucket.fill(1);
        assert!(bucket.wait_ns(0) == 0);
    }

    #[test]
    fn an_idle_bucket_fills_to_its_burst_and_no_further() {
        let mut bucket = bucket(1000, 2000);
        bucket.fill(3_600 * 1_000_000_000);
        let passed = (0..).take_while(|_| {
            let ready = bucket.wait_ns(0) == 0;
            bucket.take(1);
            ready
        });
        assert_eq!(passed.count(), 2001, "two seconds' tokens, and the one that makes the debt");
    }

    #[test]
    fn a_change_shortens_a_debt_and_no_limit_ends_it() {
        let mut bucket = bucket(1, 0);
        bucket.take(1 << 30);
        bucket.set(1000, 0);
        assert_eq!(bucket.wait_ns(0), 50_000_000);
        bucket.set(0, 0);
        assert!(bucket.wait_ns(0) == 0);
        bucket.take(7);
        bucket.set(5, 0);
        assert!(bucket.wait_ns(0) == 0, "what passed without a limit is no debt");
    }

    proptest! {
        /// Whatever the rate, the sizes and the lateness of timers: what passes in a long time is the rate.
        #[test]
        fn the_mean_rate_is_exact(rate in 1u64..2_000_000_000, size in 1u64..1_000_000, late in 0u64..9_000_000) {
            let mut bucket = bucket(rate, 0);
            let (mut now, mut passed) = (0u128, 0u128);
            for _ in 0..2000 {
                bucket.take(size);
                passed += u128::from(size);
                let wait = bucket.wait_ns(0);
                let pause = if wait == 0 { 0 } else { wait + late };
                bucket.fill(pause);
                now += u128::from(pause);
            }
            // Tokens of the time that has passed, and those of the last wait.
            let due = now * u128::from(rate) / 1_000_000_000;
            let slack = u128::from(size) + u128::from(rate) * 20_000_000 / 1_000_000_000 + 1;
            prop_assert!(passed <= due + slack && due <= passed + slack, "{passed} of {due}");
        }
    }
}
