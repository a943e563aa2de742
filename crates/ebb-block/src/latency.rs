//! Latency histograms: fixed memory, lock-free, each written by the workers of one slot, or by any thread in the shared slot.
//!
//! Bounds are log-linear: below one microsecond four buckets of 256 ns, from there on four buckets for each power
//! of two. A quantile is off by at most a quarter of its value. The last bucket has all times above two minutes.
//!
//! # Invariants
//! - A histogram is allocated when its first time is recorded; after that recording is one addition.
//! - Counts never decrease.

use std::sync::OnceLock;
use std::time::Duration;

use ebb_io::{WorkerCount, WorkerSlot};

/// Nanoseconds of the narrowest bucket, as a power of two.
const UNIT_BITS: u32 = 8;
/// Buckets of each power of two, as a power of two.
const SUB_BITS: u32 = 2;
const SUBS: usize = 1 << SUB_BITS;
/// The number of buckets: 112.
const BUCKETS: usize = 28 * SUBS;

/// The bucket of a time.
#[inline]
fn bucket(time: Duration) -> usize {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let units = nanos >> UNIT_BITS;
    let bits = u64::BITS - units.leading_zeros();
    let shift = bits.saturating_sub(SUB_BITS + 1);
    // From the second power of two on, the highest bit of `units >> shift` is that of the first bucket of its power.
    let bucket = u64::from(shift) * SUBS as u64 + (units >> shift);
    usize::try_from(bucket).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The shortest time of a bucket, nanoseconds.
const fn lower_bound(bucket: usize) -> u64 {
    let (power, sub) = (bucket / SUBS, bucket % SUBS);
    let units = match power {
        0 => sub,
        _ => (SUBS + sub) << (power - 1),
    };
    (units as u64) << UNIT_BITS
}

/// Counts of times, by bucket.
#[derive(Debug, Default)]
pub struct Histogram(OnceLock<Box<[WorkerCount; BUCKETS]>>);

impl Histogram {
    /// Counts a time in `slot`, to which this histogram belongs.
    #[inline]
    pub fn record(&self, slot: WorkerSlot, time: Duration) {
        let counts = match self.0.get() {
            Some(counts) => counts,
            None => self.allocate(),
        };
        counts[bucket(time)].add(slot, 1);
    }

    #[cold]
    #[inline(never)]
    fn allocate(&self) -> &[WorkerCount; BUCKETS] {
        self.0.get_or_init(|| Box::new(std::array::from_fn(|_| WorkerCount::default())))
    }

    /// The number of times.
    pub fn count(&self) -> u64 {
        self.0.get().map_or(0, |counts| counts.iter().map(WorkerCount::get).sum())
    }
}

/// The counts of a histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencySnapshot {
    /// Empty if nothing was recorded, or [`BUCKETS`] counts.
    counts: Vec<u64>,
}

impl LatencySnapshot {
    /// The sum of histograms.
    pub fn of<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> LatencySnapshot {
        let mut sum = Vec::new();
        for counts in histograms.filter_map(|histogram| histogram.0.get()) {
            sum.resize(BUCKETS, 0);
            for (sum, count) in sum.iter_mut().zip(counts.iter()) {
                *sum += count.get();
            }
        }
        LatencySnapshot { counts: sum }
    }

    /// The times that were recorded since `earlier`, a snapshot of the same histograms.
    #[must_use]
    pub fn since(&self, earlier: &LatencySnapshot) -> LatencySnapshot {
        let mut counts = self.counts.clone();
        for (count, before) in counts.iter_mut().zip(&earlier.counts) {
            *count = count.saturating_sub(*before);
        }
        LatencySnapshot { counts }
    }

    /// Adds the times of another snapshot.
    pub fn add(&mut self, other: &LatencySnapshot) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum = sum.saturating_add(*count);
        }
    }

    /// Its memory, bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.counts)
    }

    /// The number of times.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time that a fraction of the requests did not exceed (0.5: the median), interpolated within its bucket.
    /// `None` if nothing was recorded.
    #[allow(clippy::cast_precision_loss, reason = "counts and nanoseconds far below 2^53")]
    pub fn quantile(&self, fraction: f64) -> Option<Duration> {
        let total = self.count();
        let rank = (fraction.clamp(0.0, 1.0) * total as f64).max(1.0);
        let mut below = 0u64;
        for (bucket, &count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (from, to) = (lower_bound(bucket), lower_bound(bucket + 1));
            if below.saturating_add(count) as f64 >= rank {
                let part = (rank - below as f64) / count as f64;
                let nanos = from as f64 + part * (to - from) as f64;
                return Some(Duration::from_secs_f64(nanos / 1e9));
            }
            below = below.saturating_add(count);
        }
        None
    }

    /// An estimate of the sum of all times: each counts as the middle of its bucket.
    pub fn sum(&self) -> Duration {
        let middle =
            |bucket: usize| u128::from(lower_bound(bucket).midpoint(lower_bound(bucket + 1)));
        let nanos = |(bucket, count): (usize, &u64)| middle(bucket) * u128::from(*count);
        let counted = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let sum: u128 = counted.map(nanos).sum();
        Duration::from_nanos(u64::try_from(sum).unwrap_or(u64::MAX))
    }

    /// The buckets that are not empty: the end of each, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let ends = (1..=BUCKETS).map(|bucket| Duration::from_nanos(lower_bound(bucket)));
        ends.zip(self.counts.iter().copied()).filter(|(_, count)| *count > 0)
    }
}

#[cfg(test)]
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures far below 2^53"
)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_are_contiguous_and_increase() {
        assert_eq!((lower_bound(0), lower_bound(1), lower_bound(4)), (0, 256, 1024));
        for bucket in 0..BUCKETS {
            assert!(lower_bound(bucket) < lower_bound(bucket + 1));
        }
        assert!((115..125).contains(&(lower_bound(BUCKETS - 1) / 1_000_000_000)));
    }

    proptest! {
        #[test]
        fn a_time_is_in_the_bucket_between_its_bounds(nanos in prop_oneof![0..10_000u64, any::<u64>()]) {
            let at = bucket(Duration::from_nanos(nanos));
            prop_assert!(at < BUCKETS && lower_bound(at) <= nanos);
            prop_assert!(at == BUCKETS - 1 || nanos < lower_bound(at + 1));
        }

        #[test]
        fn quantiles_differ_by_at_most_a_quarter(mut times in prop::collection::vec(2_000..50_000_000_000u64, 1..400)) {
            let histogram = Histogram::default();
            times.iter().for_each(|nanos| histogram.record(WorkerSlot::SHARED, Duration::from_nanos(*nanos)));
            times.sort_unstable();
            let latency = LatencySnapshot::of([&histogram].into_iter());
            prop_assert_eq!(latency.count(), times.len() as u64);
            for fraction in [0.5, 0.9, 0.99, 1.0] {
                let rank = ((fraction * times.len() as f64).ceil() as usize).max(1);
                let exact = times[rank - 1] as f64;
                let found = latency.quantile(fraction).unwrap().as_nanos() as f64;
                prop_assert!((found / exact - 1.0).abs() <= 0.26, "{fraction}: {found} for {exact}");
            }
            let exact: u64 = times.iter().sum();
            let sum = latency.sum().as_nanos() as f64 / exact as f64;
            prop_assert!((sum - 1.0).abs() <= 0.13, "{sum}");
        }
    }

    #[test]
    fn a_difference_has_what_was_recorded_in_between() {
        let histogram = Histogram::default();
        let at = |nanos| histogram.record(WorkerSlot::SHARED, Duration::from_nanos(nanos));
        let now = || LatencySnapshot::of([&histogram].into_iter());
        let nothing = now();
        at(5_000);
        let before = now();
        at(90_000);
        at(90_000);
        let grown = now().since(&before);
        assert_eq!((grown.count(), now().since(&nothing).count(), nothing.count()), (2, 3, 0));
        assert!(grown.quantile(0.01).unwrap() > Duration::from_nanos(80_000));
        let mut sum = nothing;
        sum.add(&grown);
        sum.add(&before);
        assert_eq!(sum, now());
    }

    #[test]
    fn only_buckets_with_requests_are_listed() {
        let histogram = Histogram::default();
        assert_eq!(
            (histogram.count(), LatencySnapshot::of([&histogram].into_iter()).quantile(0.5)),
            (0, None)
        );
        assert_eq!(LatencySnapshot::of([&histogram].into_iter()).buckets().count(), 0);
        for nanos in [100, 1023, 1024, 1 << 20, (1 << 20) + 1, u64::MAX] {
            histogram.record(WorkerSlot::SHARED, Duration::from_nanos(nanos));
        }
        let buckets: Vec<_> = LatencySnapshot::of([&histogram].into_iter()).buckets().collect();
        let ends: Vec<_> = buckets.iter().map(|(end, count)| (end.as_nanos(), *count)).collect();
        assert_eq!(ends[..4], [(256, 1), (1024, 1), (1280, 1), (1_310_720, 2)]);
        assert_eq!((ends.len(), ends[4].1), (5, 1));
        assert_eq!(histogram.count(), 6);
    }
}
