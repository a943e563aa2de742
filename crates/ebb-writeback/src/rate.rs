//! The rate of a device: the mean over its busy time, independent of idle time.
//!
//! Time counts only while something is in flight, and a window ends with a completion, so that devices that
//! complete in batches or stall are measured correctly. Linux's bandwidth estimate falls towards 0 under
//! bursts, or starts with a guess far too high.
//!
//! Invariants:
//! - Idle time changes nothing; the estimate is never 0.
//! - A window in which the flusher had nothing more to send shows the load, not the capability of the device:
//!   it may raise the estimate but not lower it.
//! - One deviating window (a stall, a burst into a device's cache) moves the mean by its weight in time; two
//!   consecutive ones on the same side replace it, since the device has changed.
//! - While a device is new, the slower window counts at once: what it first accepted into a cache of its own
//!   is not its rate, and a threshold based on that would have to be drained.

use crate::units::{MILLISECOND, Nanos, RATE_MOST, mul_div};

/// Assumed of a device that was never measured: slow, since too high a guess fills memory.
pub(crate) const PRIOR: u64 = 4_000_000;
/// Busy time after which a completion ends a window.
const WINDOW: Nanos = 100 * MILLISECOND;
/// Number of windows in the mean.
const WINDOWS: usize = 16;
/// The open window counts as well until there are this many.
const FEW: usize = 4;

/// Bytes completed, and the busy time for that.
#[derive(Debug, Clone, Copy, Default)]
struct RateWindow {
    bytes: u64,
    busy: Nanos,
    /// The bytes of these that completed while more was waiting to be sent.
    pressed: u64,
}

impl RateWindow {
    fn rate(self) -> u64 {
        mul_div(self.bytes, crate::units::SECOND, self.busy)
    }
}

/// The rate estimate of one device.
#[derive(Debug, Clone)]
pub(crate) struct RateEstimate {
    closed: [RateWindow; WINDOWS],
    /// How many of `closed` count, and the position of the next one.
    filled: usize,
    next: usize,
    open: RateWindow,
    /// Busy time is counted up to this moment; only while busy.
    mark: Nanos,
    /// Bytes completed since the device was added: what it has proven to accept.
    proven: u64,
    remembered: bool,
    /// Windows closed since the device was added, up to the number that matters.
    seen: usize,
    value: u64,
}

impl RateEstimate {
    pub(crate) fn new(remembered: Option<u64>) -> Self {
        Self {
            closed: [RateWindow::default(); WINDOWS],
            filled: 0,
            next: 0,
            open: RateWindow::default(),
            mark: 0,
            proven: 0,
            remembered: remembered.is_some(),
            seen: 0,
            value: remembered.unwrap_or(PRIOR).max(1),
        }
    }

    /// Bytes per second; never 0.
    pub(crate) fn value(&self) -> u64 {
        self.value
    }

    /// Bytes the device has completed; unlimited for a device with a remembered rate.
    pub(crate) fn proven(&self) -> u64 {
        if self.remembered { u64::MAX } else { self.proven }
    }

    /// The first write is in flight after idle time.
    pub(crate) fn busy(&mut self, now: Nanos) {
        self.mark = now;
    }

    /// A write of `bytes` completed; `more` says whether the flusher has more to send. Returns the busy time
    /// since the last completion.
    pub(crate) fn completed(&mut self, bytes: u64, more: bool, now: Nanos) -> Nanos {
        let busy = now.saturating_sub(self.mark);
        self.mark = now;
        self.proven = self.proven.saturating_add(bytes);
        self.open.bytes = self.open.bytes.saturating_add(bytes);
        self.open.busy = self.open.busy.saturating_add(busy);
        if more {
            self.open.pressed = self.open.pressed.saturating_add(bytes);
        }
        if self.open.busy >= WINDOW {
            self.close();
        } else if self.filled < FEW && self.open.busy >= WINDOW / 100 && !self.remembered {
            self.value = self.mean(true).max(1);
        }
        busy
    }

    /// A write failed: its time does not count for the rate.
    pub(crate) fn failed(&mut self, now: Nanos) -> Nanos {
        let busy = now.saturating_sub(self.mark);
        self.mark = now;
        busy
    }

    fn close(&mut self) {
        let window = std::mem::take(&mut self.open);
        let rate = window.rate();
        let pressed = window.pressed >= window.bytes / 2;
        if !pressed && rate <= self.value && self.filled > 0 {
            return;
        }
        let previous = self.closed[(self.next + WINDOWS - 1) % WINDOWS];
        self.closed[self.next] = window;
        self.next = (self.next + 1) % WINDOWS;
        self.filled = (self.filled + 1).min(WINDOWS);
        let high = |rate: u64| rate > self.value / 4 * 5;
        let low = |rate: u64| rate < self.value / 4 * 3;
        let both = |far: &dyn Fn(u64) -> bool| far(rate) && far(previous.rate());
        self.seen = (self.seen + 1).min(FEW + 1);
        if self.seen > 1 && self.seen <= FEW && rate < previous.rate() / 4 * 3 {
            self.filled = 1;
        } else if self.filled > 2 && (both(&high) || both(&low)) {
            self.filled = 2;
        }
        self.value = self.mean(false).max(1);
    }

    /// The mean over the newest windows that count.
    fn mean(&self, with_open: bool) -> u64 {
        let newest =
            (1..=self.filled).map(|back| self.closed[(self.next + WINDOWS - back) % WINDOWS]);
        let open = with_open.then_some(self.open);
        let (mut bytes, mut busy) = (0_u64, 0_u64);
        for window in newest.chain(open) {
            bytes = bytes.saturating_add(window.bytes);
            busy = busy.saturating_add(window.busy);
        }
        mul_div(bytes, crate::units::SECOND, busy).min(RATE_MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SECOND;

    /// Completes `bytes` every `every` ns, `count` times, from `now` on.
    fn run(
        rate: &mut RateEstimate,
        now: &mut Nanos,
        bytes: u64,
        every: Nanos,
        count: u32,
        more: bool,
    ) {
        for _ in 0..count {
            *now += every;
            rate.completed(bytes, more, *now);
        }
    }

    #[test]
    fn a_new_device_is_known_after_its_first_completions() {
        let (mut rate, mut now) = (RateEstimate::new(None), 5);
        assert_eq!(rate.value(), PRIOR);
        rate.busy(now);
        run(&mut rate, &mut now, 1_000_000, 20 * MILLISECOND, 2, true);
        assert_eq!(rate.value(), 50_000_000);
        assert_eq!(rate.proven(), 2_000_000);
    }

    #[test]
    fn a_new_device_is_not_rated_by_what_its_cache_accepts() {
        let (mut rate, mut now) = (RateEstimate::new(None), 0);
        rate.busy(now);
        run(&mut rate, &mut now, 1_000_000, MILLISECOND, 5, true);
        assert!(rate.value() > 500_000_000, "{}", rate.value());
        run(&mut rate, &mut now, 1_000_000, 50 * MILLISECOND, 4, true);
        assert_eq!(rate.value(), 20_000_000, "after the second window");
        // Later one slow window is one of many.
        run(&mut rate, &mut now, 1_000_000, 50 * MILLISECOND, 16, true);
        run(&mut rate, &mut now, 1_000_000, 100 * MILLISECOND, 1, true);
        assert!(rate.value() > 18_000_000, "{}", rate.value());
    }

    #[test]
    fn idle_time_and_light_load_do_not_lower_the_estimate() {
        let (mut rate, mut now) = (RateEstimate::new(None), 0);
        for _ in 0..20 {
            rate.busy(now);
            run(&mut rate, &mut now, 1_000_000, 10 * MILLISECOND, 100, true);
            now += 5 * SECOND;
            rate.busy(now);
            run(&mut rate, &mut now, 4096, 5 * MILLISECOND, 1, false);
        }
        assert!((99_000_000..=100_000_000).contains(&rate.value()), "{}", rate.value());
    }

    #[test]
    fn one_stall_counts_by_its_duration_and_a_change_is_detected_in_two_windows() {
        let (mut rate, mut now) = (RateEstimate::new(None), 0);
        rate.busy(now);
        run(&mut rate, &mut now, 1_000_000, 10 * MILLISECOND, 200, true);
        run(&mut rate, &mut now, 1_000_000, 100 * MILLISECOND, 1, true);
        assert!(rate.value() > 93_000_000, "{}", rate.value());
        run(&mut rate, &mut now, 1_000_000, 10 * MILLISECOND, 20, true);
        run(&mut rate, &mut now, 1_000_000, 100 * MILLISECOND, 2, true);
        assert_eq!(rate.value(), 10_000_000);
        run(&mut rate, &mut now, 1_000_000, MILLISECOND, 200, true);
        assert_eq!(rate.value(), 1_000_000_000);
    }
}
