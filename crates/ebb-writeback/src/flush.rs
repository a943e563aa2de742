//! How much a flusher should have in flight, in pieces of what size, and when it should begin.
//!
//! Depth rises before writers are throttled. While little is dirty, the plan is twice what the device needs
//! at its shortest latency (rate × latency). If the flusher was the bottleneck, the rate rises with the depth
//! and so does the next plan; if the device is, its latency rises instead and the plan stays. From a quarter
//! of the threshold to a half, where pacing of writers begins, depth grows to a fifth of a second of the
//! device's rate, enough for a device that completes in large batches.
//!
//! Invariants: a plan is at most three quarters of the threshold, so that there is room to refill while a
//! batch completes; a piece is at most an eighth of it (but at least 64 KiB), so that small memory means
//! smaller writes and not idle disks.

use crate::units::{Nanos, SECOND, bytes_in};

/// How long the shortest latency is remembered (twice this at most).
const MEMORY: Nanos = 5 * SECOND;
/// The smallest piece that a small threshold may cause.
const SMALLEST: u64 = 64 << 10;
/// Fraction of the threshold at which writeback begins, and at which depth is at its maximum.
const BEGIN: u64 = 4;
const FULL: u64 = 2;
/// The longest queue at the device, in time of its rate: reads must not wait behind more.
const QUEUE: Nanos = SECOND / 5;
/// Minimum number of pieces in flight.
const PIECES: u64 = 2;

/// What the flusher of one device should do now. Bytes and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushPlan {
    /// Whether to write dirty data that is neither old nor part of a flush. Data that became dirty at or
    /// before `expired`, or that a flush waits for, is written in any case.
    pub start: bool,
    /// The most bytes to have in flight.
    pub in_flight: u64,
    /// The most bytes in one write. Adjacent dirty data should be merged up to this size; send smaller pieces
    /// when less than half of `in_flight` is in flight, or when they are old or part of a flush.
    pub chunk: u64,
    /// Data that became dirty at or before this moment is overdue.
    pub expired: Nanos,
    /// After a failure: nothing may be sent before this moment.
    pub not_before: Nanos,
}

/// The shortest latency of the last seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Latency {
    current: Nanos,
    previous: Nanos,
    since: Nanos,
}

impl Latency {
    pub(crate) fn new() -> Self {
        Self { current: Nanos::MAX, previous: Nanos::MAX, since: 0 }
    }

    pub(crate) fn add(&mut self, latency: Nanos, now: Nanos) {
        if now.saturating_sub(self.since) > MEMORY {
            self.previous = std::mem::replace(&mut self.current, Nanos::MAX);
            self.since = now;
        }
        self.current = self.current.min(latency);
    }

    fn shortest(self) -> Option<Nanos> {
        Some(self.current.min(self.previous)).filter(|latency| *latency != Nanos::MAX)
    }
}

/// The flusher state of one device under the horizon law.
#[derive(Debug, Clone)]
pub(crate) struct Flusher {
    pub(crate) latency: Latency,
    /// Writeback has begun and continues until nothing is dirty.
    running: bool,
}

/// The inputs of a plan.
pub(crate) struct FlushPosition {
    pub(crate) threshold: u64,
    pub(crate) dirty: u64,
    pub(crate) writeback: u64,
    pub(crate) rate: u64,
    /// The host is short of memory, the total is near its limit, or a writer waits: write everything.
    pub(crate) urgent: bool,
    pub(crate) max_chunk: u64,
    pub(crate) max_in_flight: u64,
}

impl Flusher {
    pub(crate) fn new() -> Self {
        Self { latency: Latency::new(), running: false }
    }

    /// Nothing is held any more: the next data is collected before it is written.
    pub(crate) fn stop(&mut self) {
        self.running = false;
    }

    /// Returns `(start, in_flight, chunk)`.
    pub(crate) fn plan(&mut self, at: &FlushPosition) -> (bool, u64, u64) {
        let held = at.dirty.saturating_add(at.writeback);
        // Once begun it continues: a disk that is active anyway finishes cheaply.
        self.running = at.dirty > 0 && (self.running || at.urgent || held >= at.threshold / BEGIN);
        let chunk = (at.threshold / 8).max(SMALLEST);
        // A power of two, so that pieces match the alignment of stores.
        let chunk = (1_u64 << chunk.ilog2()).min(at.max_chunk).max(1);
        let queue = bytes_in(at.rate, QUEUE).max(PIECES * chunk);
        let most = at.max_in_flight.min(queue).min(at.threshold / 4 * 3).max(chunk);
        let needed = match self.latency.shortest() {
            Some(latency) => bytes_in(at.rate, latency).saturating_mul(2),
            None => PIECES * chunk,
        };
        let least = needed.max(PIECES * chunk).min(most);
        // The maximum is reached at half of the threshold, where pacing of writers begins.
        let begin = at.threshold / BEGIN;
        let span = (at.threshold / FULL).saturating_sub(begin).max(1);
        let level = held.saturating_sub(begin).min(span);
        let deeper = most.saturating_sub(least);
        let in_flight = least + crate::units::mul_div(deeper, level, span);
        (self.running, in_flight, chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(threshold: u64, dirty: u64, writeback: u64, rate: u64) -> FlushPosition {
        let (max_chunk, max_in_flight) = (1 << 20, 64 << 20);
        FlushPosition { threshold, dirty, writeback, rate, urgent: false, max_chunk, max_in_flight }
    }

    #[test]
    fn writeback_begins_at_a_quarter_of_the_threshold_and_continues_until_nothing_is_dirty() {
        let mut flusher = Flusher::new();
        assert!(!flusher.plan(&at(100 << 20, 24 << 20, 0, 50 << 20)).0);
        assert!(flusher.plan(&at(100 << 20, 25 << 20, 0, 50 << 20)).0);
        assert!(flusher.plan(&at(100 << 20, 1, 1 << 20, 50 << 20)).0);
        assert!(!flusher.plan(&at(100 << 20, 0, 1 << 20, 50 << 20)).0);
        assert!(!flusher.plan(&at(100 << 20, 1 << 20, 0, 50 << 20)).0);
        assert!(flusher.plan(&FlushPosition { urgent: true, ..at(100 << 20, 1, 0, 1) }).0);
        assert!(flusher.plan(&at(100 << 20, 1, 0, 1)).0);
        flusher.stop();
        assert!(!flusher.plan(&at(100 << 20, 1, 0, 1)).0);
    }

    #[test]
    fn small_memory_means_small_pieces_and_room_to_refill() {
        let mut flusher = Flusher::new();
        for threshold in [64 << 10, 1 << 20, 7 << 20, 100 << 20] {
            let (_, in_flight, chunk) = flusher.plan(&at(threshold, threshold, 0, 60 << 20));
            assert!(chunk <= (threshold / 8).max(SMALLEST) && chunk >= SMALLEST);
            assert!(in_flight <= (threshold / 4 * 3).max(chunk));
        }
    }

    #[test]
    fn depth_follows_rate_and_latency_first_and_then_what_is_dirty() {
        let mut flusher = Flusher::new();
        flusher.latency.add(SECOND / 100, 0);
        let plan =
            |dirty, rate| Flusher::plan(&mut flusher.clone(), &at(1 << 30, dirty, 0, rate)).1;
        // 100 MiB/s at 10 ms is 1 MiB in flight; twice that is planned.
        assert_eq!(plan(1 << 28, 100 << 20), 2 << 20);
        assert_eq!(plan(1 << 28, 400 << 20), 8 << 20);
        // At half of the threshold a fifth of a second, or the configured maximum.
        assert_eq!(plan(1 << 29, 100 << 20), 20 << 20);
        assert_eq!(plan(1 << 29, 400 << 20), 64 << 20);
        // A longer latency counts once the shorter one is forgotten.
        flusher.latency.add(SECOND / 50, 6 * SECOND);
        assert_eq!(flusher.plan(&at(1 << 30, 1 << 28, 0, 100 << 20)).1, 2 << 20);
        flusher.latency.add(SECOND / 50, 12 * SECOND);
        assert_eq!(flusher.plan(&at(1 << 30, 1 << 28, 0, 100 << 20)).1, 4 << 20);
    }
}
