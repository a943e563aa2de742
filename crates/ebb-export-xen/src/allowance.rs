//! What the devices of one guest may make the backend ask of xenstored.
//!
//! A guest writes to its nodes as often as it likes, and xenstored serves all guests with one thread. Each request to
//! xenstored on behalf of a guest is taken from that guest's allowance, which refills with time. A guest that has
//! used it up is looked at again when it has some: later, and no other guest waits for that.
//!
//! Invariant: what a guest has taken is at most [`BURST`] for each of its devices, [`RATE`] a second, and one step of the
//! state machine.

use std::time::{Duration, Instant};

/// Requests a device may cause at once: enough to connect with all rings, to leave and to connect again.
const BURST: u32 = 1000;
/// Requests that each guest gets back in a second.
const RATE: u32 = 100;

/// See the module.
#[derive(Debug)]
pub(crate) struct Allowance {
    devices: u32,
    /// What is left; less than nothing after a step that took more than there was.
    left: i64,
    /// Up to when it was refilled.
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { devices: 0, left: 0, at: now }
    }

    /// The guest has one more device, which comes with an allowance of its own.
    pub(crate) fn add_device(&mut self) {
        self.devices = self.devices.saturating_add(1);
        self.left = (self.left + i64::from(BURST)).min(self.most());
    }

    /// The guest has one device less; false if it has none any more.
    pub(crate) fn remove_device(&mut self) -> bool {
        self.devices = self.devices.saturating_sub(1);
        self.left = self.left.min(self.most());
        self.devices > 0
    }

    fn most(&self) -> i64 {
        i64::from(self.devices) * i64::from(BURST)
    }

    /// Takes what was asked of xenstored.
    pub(crate) fn take(&mut self, requests: u64) {
        self.left = self.left.saturating_sub(i64::try_from(requests).unwrap_or(i64::MAX));
    }

    /// When the guest may cause requests: not before this time.
    pub(crate) fn ready_at(&self) -> Instant {
        let short = u32::try_from(1_i64.saturating_sub(self.left)).unwrap_or(if self.left > 0 {
            0
        } else {
            u32::MAX
        });
        self.at + Duration::from_secs(short.into()) / RATE
    }

    /// Whether the guest may cause requests at `now`.
    pub(crate) fn is_ready(&mut self, now: Instant) -> bool {
        let span = now.saturating_duration_since(self.at);
        let earned = span.as_nanos() * u128::from(RATE) / Duration::from_secs(1).as_nanos();
        if earned > 0 {
            // The part of a request that is not earned yet counts the next time.
            let taken =
                u32::try_from(earned).ok().map(|earned| Duration::from_secs(earned.into()) / RATE);
            self.at = taken.map_or(now, |taken| self.at + taken);
            let earned = i64::try_from(earned).unwrap_or(i64::MAX);
            self.left = self.left.saturating_add(earned).min(self.most());
        }
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_the_rate_and_never_more_than_a_burst() {
        let begun = Instant::now();
        let mut now = begun;
        let mut allowance = Allowance::new(now);
        assert!(!allowance.is_ready(now), "no device, nothing");
        allowance.add_device();
        assert!(allowance.is_ready(now) && allowance.ready_at() <= now);
        allowance.take(u64::from(BURST) + 50);
        assert!(!allowance.is_ready(now));
        // Asking often changes nothing.
        let at = allowance.ready_at();
        while now < at {
            assert!(!allowance.is_ready(now), "{:?} before its time", at - now);
            now += Duration::from_millis(3);
        }
        assert!(allowance.is_ready(at));
        assert_eq!(at - begun, Duration::from_millis(510));
        now = at + Duration::from_secs(3_000_000_000);
        assert!(allowance.is_ready(now));
        assert_eq!(allowance.left, i64::from(BURST));
        allowance.take(u64::MAX);
        assert!(!allowance.is_ready(now + Duration::from_secs(60)));
        let _ = allowance.ready_at();
        assert!(!allowance.remove_device());
    }

    #[test]
    fn each_request_is_paid_for() {
        let begun = Instant::now();
        let mut now = begun;
        let mut allowance = Allowance::new(now);
        allowance.add_device();
        let mut taken = 0;
        while now < begun + Duration::from_secs(60) {
            if allowance.is_ready(now) {
                allowance.take(7);
                taken += 7;
            }
            now += Duration::from_micros(777);
        }
        assert!((7000 - 20..=7000 + 7).contains(&taken), "{taken}");
    }
}
