//! The counters of a volume at one moment, and the point between two moments.

use ebb_volume::{LatencySnapshot, Operation, Volume};

use super::DaemonFigures;
use super::ring::{Point, at};

/// Counters, and figures of the present, of a volume or of all together.
#[derive(Clone, Debug, Default)]
pub(super) struct HistoryCounters {
    /// When they were read, seconds since the start of the history.
    pub(super) taken: f64,
    reads: u64,
    writes: u64,
    read_bytes: u64,
    write_bytes: u64,
    errors: u64,
    /// Pages that reads found in the cache, and that they did not.
    hits: u64,
    misses: u64,
    /// The times of reads and writes.
    times: LatencySnapshot,
    pub(super) dirty: u64,
    pub(super) cached: u64,
    pub(super) clients: u64,
    /// Of the daemon only: lent and in use.
    memory: Option<(u64, u64)>,
}

impl HistoryCounters {
    /// The counters of a volume.
    pub(super) fn of(volume: &Volume) -> HistoryCounters {
        let stats = volume.stats();
        let (read, write) = (stats.of(Operation::Read), stats.of(Operation::Write));
        let mut times = stats.service_times(Operation::Read);
        times.add(&stats.service_times(Operation::Write));
        let cache = volume.cache().map(|cache| cache.stats()).unwrap_or_default();
        HistoryCounters {
            reads: read.requests,
            writes: write.requests,
            read_bytes: read.bytes,
            write_bytes: write.bytes,
            errors: read.errors + write.errors + stats.of(Operation::Flush).errors,
            hits: cache.hits,
            misses: cache.misses,
            times,
            ..HistoryCounters::default()
        }
    }

    /// Adds what a volume has counted between two moments.
    pub(super) fn add(&mut self, before: &HistoryCounters, now: &HistoryCounters) {
        for (sum, before, now) in [
            (&mut self.reads, before.reads, now.reads),
            (&mut self.writes, before.writes, now.writes),
            (&mut self.read_bytes, before.read_bytes, now.read_bytes),
            (&mut self.write_bytes, before.write_bytes, now.write_bytes),
            (&mut self.errors, before.errors, now.errors),
            (&mut self.hits, before.hits, now.hits),
            (&mut self.misses, before.misses, now.misses),
        ] {
            *sum = sum.wrapping_add(now.saturating_sub(before));
        }
        self.times.add(&now.times.since(&before.times));
    }

    /// Sets the figures of the present of the daemon that no volume has.
    pub(super) fn gauges(&mut self, figures: DaemonFigures) {
        self.clients = figures.clients;
        self.memory = Some((figures.lent_bytes, figures.wired_bytes));
    }

    /// Its memory besides the value itself.
    pub(super) fn bytes(&self) -> usize {
        self.times.bytes()
    }
}

/// A count as a number; it is rounded above 2^53.
#[allow(clippy::cast_precision_loss, reason = "figures of plots")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Returns the point between two moments, and the times of its requests. Rates are per second of the time between
/// the moments, which differs from the `step` of the ring by up to a second, since samples may be late. A volume that
/// was idle at first differs by more: its requests count for the whole step.
pub(super) fn point(
    before: &HistoryCounters,
    now: &HistoryCounters,
    step: u64,
) -> (Point, LatencySnapshot) {
    let step = float(step.max(1));
    let elapsed = now.taken - before.taken;
    let seconds = if (elapsed - step).abs() < 1.0 { elapsed.max(0.1) } else { step };
    let rate = |before: u64, now: u64| Some(float(now.saturating_sub(before)) / seconds);
    let times = now.times.since(&before.times);
    let quantile = |part: f64| times.quantile(part).map(|time| time.as_secs_f64());
    let hits = float(now.hits.saturating_sub(before.hits));
    let lookups = hits + float(now.misses.saturating_sub(before.misses));
    let mut point = Point::default();
    point[at::READ_IOPS] = rate(before.reads, now.reads);
    point[at::WRITE_IOPS] = rate(before.writes, now.writes);
    point[at::READ_BYTES] = rate(before.read_bytes, now.read_bytes);
    point[at::WRITE_BYTES] = rate(before.write_bytes, now.write_bytes);
    point[at::P50] = quantile(0.5);
    point[at::P99] = quantile(0.99);
    point[at::DIRTY] = Some(float(now.dirty));
    point[at::ERRORS] = rate(before.errors, now.errors);
    point[at::CLIENTS] = Some(float(now.clients));
    point[at::HIT_RATIO] = (lookups > 0.0).then(|| hits / lookups);
    point[at::CACHED] = Some(float(now.cached));
    (point[at::LENT], point[at::IN_USE]) = match now.memory {
        Some((lent, in_use)) => (Some(float(lent)), Some(float(in_use))),
        None => (None, None),
    };
    (point, times)
}
