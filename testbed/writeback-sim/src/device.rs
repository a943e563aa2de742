//! A simulated device: one server with a rate, and the properties that make real devices difficult.
//!
//! Writes are served one after the other. A device is *busy* while it serves or stalls with work in its
//! queue; writes that are served but not yet reported (latency, batches) do not make it busy.

use crate::random::SimRandom;
use crate::time_of;
use ebb_writeback::units::{Nanos, bytes_in};

/// Jitter of each service time, in parts per million.
const JITTER: u32 = 100_000;

/// The properties of a device.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// Bytes per second while it serves.
    pub rate: u64,
    /// Time from the end of service to the completion, without delaying the next write.
    pub latency: Nanos,
    /// Fixed service time before each write.
    pub seek: Nanos,
    /// About this often it does nothing for this long: `(every, length)`.
    pub stalls: Option<(Nanos, Nanos)>,
    /// Completions are reported once this many bytes are served, or when the queue is empty; 0: at once.
    pub batch: u64,
    /// From this moment on nothing completes.
    pub dies: Option<Nanos>,
    /// Bytes that a rested device accepts at once, as into a cache of its own; the cache drains at its rate.
    pub burst: u64,
}

impl Model {
    /// A device with this rate in bytes per second and no other properties.
    #[must_use]
    pub fn plain(rate: u64) -> Self {
        Self { rate, ..Self::default() }
    }
}

/// The state of a device.
#[derive(Debug)]
pub(crate) struct SimDevice {
    pub(crate) model: Model,
    random: SimRandom,
    free_at: Nanos,
    busy: Nanos,
    next_stall: Nanos,
    /// The free part of [`Model::burst`], and as of when.
    rested: (u64, Nanos),
}

impl SimDevice {
    pub(crate) fn new(model: Model, seed: u64) -> Self {
        let mut random = SimRandom::new(seed);
        let next_stall = match model.stalls {
            Some((every, _)) => random.next() % every.max(1) + every / 2,
            None => Nanos::MAX,
        };
        let rested = (model.burst, 0);
        Self { model, random, free_at: 0, busy: 0, next_stall, rested }
    }

    /// Advances past the stall at `next_stall`; returns its end.
    fn stall(&mut self) -> Nanos {
        let (every, length) = self.model.stalls.unwrap_or((Nanos::MAX / 2, 0));
        let end = self.next_stall.saturating_add(length);
        let gap = self.random.around(every, 500_000).max(length);
        self.next_stall = self.next_stall.saturating_add(gap);
        end
    }

    /// Accepts a write; returns when it will have been served, or `None` for never.
    pub(crate) fn submit(&mut self, bytes: u64, now: Nanos) -> Option<Nanos> {
        let begin = self.free_at.max(now);
        let mut start = begin;
        while self.next_stall <= start {
            start = start.max(self.stall());
        }
        let left = bytes - self.take_at_once(bytes, start);
        let service = time_of(left, self.model.rate).saturating_add(self.model.seek);
        let mut end = start.saturating_add(self.random.around(service, JITTER));
        while self.next_stall < end {
            let before = self.next_stall;
            end = end.saturating_add(self.stall() - before);
        }
        if self.model.dies.is_some_and(|dies| end >= dies) {
            return None;
        }
        self.busy = self.busy.saturating_add(end - begin);
        self.free_at = end;
        self.rested.1 = end;
        Some(end)
    }

    /// The bytes of a write that take no time, since the device was idle until `start`.
    fn take_at_once(&mut self, bytes: u64, start: Nanos) -> u64 {
        let (before, since) = self.rested;
        let more = bytes_in(self.model.rate, start.saturating_sub(since));
        let there = before.saturating_add(more).min(self.model.burst);
        let taken = bytes.min(there);
        self.rested = (there - taken, start);
        taken
    }

    /// Busy time up to `now`.
    pub(crate) fn busy_at(&self, now: Nanos) -> Nanos {
        self.busy.saturating_sub(self.free_at.saturating_sub(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_writeback::units::{MILLISECOND, SECOND};

    #[test]
    fn a_device_serves_at_its_rate_minus_stalls() {
        let stalls = Some((SECOND, 100 * MILLISECOND));
        for (model, expected) in [
            (Model::plain(100_000_000), 100.0),
            (Model { stalls, ..Model::plain(100_000_000) }, 90.0),
            (Model { seek: 10 * MILLISECOND, ..Model::plain(100_000_000) }, 50.0),
        ] {
            let mut device = SimDevice::new(model, 1);
            let mut end = 0;
            for _ in 0..5000 {
                end = device.submit(1_000_000, 0).unwrap();
            }
            let rate = 5_000.0 / (end as f64 / SECOND as f64);
            assert!((rate - expected).abs() < 1.5, "{rate} {expected}");
            assert_eq!(device.busy_at(end), end);
        }
    }

    #[test]
    fn an_idle_device_accepts_a_burst_at_once() {
        let model = Model { burst: 5_000_000, ..Model::plain(10_000_000) };
        let mut device = SimDevice::new(model, 1);
        assert_eq!(device.submit(3_000_000, 0), Some(0));
        let second = device.submit(3_000_000, 0).unwrap();
        assert!(second.abs_diff(100 * MILLISECOND) < 11 * MILLISECOND, "{second}");
        // Half a second later all of it is free again, and not more.
        let later = second + SECOND / 2;
        assert_eq!(device.submit(5_000_000, later), Some(later));
        assert!(device.submit(1_000_000, later).unwrap() > later + 80 * MILLISECOND);
    }

    #[test]
    fn a_dead_device_completes_nothing() {
        let model = Model { dies: Some(SECOND), ..Model::plain(1_000_000) };
        let mut device = SimDevice::new(model, 1);
        assert!(device.submit(500_000, 0).is_some());
        assert!(device.submit(800_000, 0).is_none());
        assert!(device.submit(1, 2 * SECOND).is_none());
    }
}
