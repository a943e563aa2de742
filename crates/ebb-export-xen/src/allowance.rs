//! Limits the xenstore requests that one guest's devices can cause: a token bucket per guest.
//!
//! A guest can write to its nodes as often as it likes, and xenstored serves all guests with one thread.
//! Each request that the backend sends to xenstored because of a guest is charged to that guest's bucket.
//! The devices of a guest whose bucket is empty are checked again when it has refilled; other guests are
//! not delayed.
//!
//! Invariant: a guest causes at most [`BURST`] requests for each of its devices, plus [`RATE`] a second, plus
//! those of one step of the state machine.

use std::time::{Duration, Instant};

/// Requests a device can cause at once: enough to connect with all rings, disconnect and connect again.
const BURST: u32 = 1000;
/// Requests that are added to each guest's bucket per second.
const RATE: u32 = 100;

/// See the module.
#[derive(Debug)]
pub(crate) struct Allowance {
    devices: u32,
    /// Remaining requests; negative after a step that took more than there were.
    left: i64,
    /// The time up to which it was refilled.
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { devices: 0, left: 0, at: now }
    }

    /// Adds a device, with its burst of requests.
    pub(crate) fn add_device(&mut self) {
        self.devices = self.devices.saturating_add(1);
        self.left = (self.left + i64::from(BURST)).min(self.most());
    }

    /// Removes a device; false if the guest has no other one.
    pub(crate) fn remove_device(&mut self) -> bool {
        self.devices = self.devices.saturating_sub(1);
        self.left = self.left.min(self.most());
        self.devices > 0
    }

    fn most(&self) -> i64 {
        i64::from(self.devices) * i64::from(BURST)
    }

    /// Charges `requests` to the bucket.
    pub(crate) fn take(&mut self, requests: u64) {
        self.left = self.left.saturating_sub(i64::try_from(requests).unwrap_or(i64::MAX));
    }

    /// The earliest time at which the guest may cause requests.
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
            // The fraction of a request is kept for the next call.
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
        assert!(!allowance.is_ready(now), "there is no device");
        allowance.add_device();
        assert!(allowance.is_ready(now) && allowance.ready_at() <= now);
        allowance.take(u64::from(BURST) + 50);
        assert!(!allowance.is_ready(now));
        // Calling it often changes nothing.
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
    fn each_xenstore_request_is_charged() {
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
