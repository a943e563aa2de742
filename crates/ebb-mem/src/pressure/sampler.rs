//! The sampling interval: short while free memory falls, long while it is steady.
//!
//! A sample costs about 10 µs of processor time. The longest interval depends on the distance to the next
//! sign: a fall that begins directly after a sample must not pass the sign before the next sample.

use std::time::{Duration, Instant};

use super::signals::{Cgroup, HostSample};
use super::thresholds::Thresholds;

/// Interval while free memory changes.
pub(super) const FAST: Duration = Duration::from_millis(5);
/// Longest interval under pressure or close to a sign: at 20 samples a second the cost stays below 0.1 %
/// of one processor.
pub(super) const BUSY: Duration = Duration::from_millis(50);
/// Longest interval.
pub(super) const SLOW: Duration = Duration::from_secs(1);

/// Assumed largest rate of allocation, in bytes per second.
const SURPRISE: u64 = 2 << 30;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Measure {
    Free,
    Available,
}

pub(super) struct Sampler {
    interval: Duration,
    last: Option<(Instant, Measure, u64)>,
}

impl Sampler {
    pub(super) fn new() -> Self {
        Self { interval: FAST, last: None }
    }

    pub(super) fn interval(&self) -> Duration {
        self.interval
    }

    /// The interval until the next sample. `moved`: other signals changed (stalls, cgroup reclaims,
    /// notifications). `alert`: the ladder is not calm.
    pub(super) fn next(
        &mut self,
        now: Instant,
        (host, cgroup): (Option<&HostSample>, Option<&Cgroup>),
        t: &Thresholds,
        moved: bool,
        alert: bool,
    ) -> Duration {
        let mut longest = if alert { BUSY } else { SLOW };
        let mut wanted = if moved { FAST } else { self.interval * 2 };
        if let Some(host) = host {
            let (measure, value, headroom) = headroom(host, t);
            longest = longest.min(time_for(headroom, SURPRISE).max(BUSY));
            let before = self.last.replace((now, measure, value));
            if let Some((at, _, before)) = before.filter(|(_, kind, _)| *kind == measure) {
                let fallen = before.saturating_sub(value);
                let noise = (headroom / 16).max(host.total / 1024).max(1);
                if fallen >= noise {
                    let passed = u64::try_from(now.duration_since(at).as_millis()).unwrap_or(1);
                    let rate = fallen.saturating_mul(1000) / passed.max(1);
                    // Several samples before the sign.
                    wanted = wanted.min(time_for(headroom, rate) / 8);
                }
            }
        }
        if let Some((limit, available)) = cgroup.and_then(|it| it.limit.zip(it.available)) {
            let headroom = available.saturating_sub(limit / 1000 * u64::from(t.available_low));
            longest = longest.min(time_for(headroom, SURPRISE).max(BUSY));
        }
        self.interval = wanted.clamp(FAST, longest);
        self.interval
    }
}

/// The measure to follow, its value, and its distance to the next sign: free memory while there is plenty,
/// available memory when free memory has fallen to the kernel's target, which is the usual state.
fn headroom(host: &HostSample, t: &Thresholds) -> (Measure, u64, u64) {
    let share = |whole: u64, permille: u32| whole / 1000 * u64::from(permille);
    let near = host.watermarks.map_or(host.total / 50, |marks| share(marks.high, t.free_near));
    match host.available {
        Some(available) if host.free <= near => {
            let low = share(host.total, t.available_low);
            (Measure::Available, available, available.saturating_sub(low))
        }
        _ => (Measure::Free, host.free, host.free.saturating_sub(near)),
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    Duration::from_millis(bytes.saturating_mul(1000) / rate.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::Watermarks;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn host(free: u64, available: u64) -> HostSample {
        let watermarks = Some(Watermarks { min: 8 * MIB, low: 10 * MIB, high: 12 * MIB });
        HostSample { total: 8 * GIB, free, available: Some(available), watermarks }
    }

    /// Samples `at(elapsed)` until `end`. Returns the number of samples and the last interval.
    fn run(end: Duration, at: impl Fn(Duration) -> HostSample) -> (u32, Duration) {
        let start = Instant::now();
        let t = Thresholds::default();
        let mut sampler = Sampler::new();
        let mut elapsed = Duration::ZERO;
        let mut samples = 0;
        while elapsed < end {
            let host = at(elapsed);
            elapsed += sampler.next(start + elapsed, (Some(&host), None), &t, false, false);
            samples += 1;
        }
        (samples, sampler.interval())
    }

    #[test]
    fn steady_memory_is_sampled_once_a_second() {
        let (samples, last) = run(Duration::from_secs(60), |_| host(6 * GIB, 7 * GIB));
        assert_eq!(last, SLOW);
        assert!(samples < 75, "{samples}");
    }

    #[test]
    fn a_host_full_of_page_cache_is_sampled_once_a_second() {
        let (_, last) = run(Duration::from_secs(60), |_| host(11 * MIB, 6 * GIB));
        assert_eq!(last, SLOW);
        // Its free memory varies with the kernel's background reclaim.
        let (samples, _) = run(Duration::from_secs(60), |at| {
            host(if at.as_millis() % 2 == 0 { 10 * MIB } else { 22 * MIB }, 6 * GIB)
        });
        assert!(samples < 75, "{samples}");
    }

    #[test]
    fn falling_memory_is_sampled_more_often() {
        let falls = |at: Duration| {
            let fallen = u64::try_from(at.as_millis()).unwrap() * 100 * MIB / 1000;
            host((2 * GIB).saturating_sub(fallen).max(MIB), (2 * GIB).saturating_sub(fallen))
        };
        // 100 MB/s: the sign at 24 MiB is passed after some 20 s.
        let near = Duration::from_millis((2 * GIB - 24 * MIB) / (100 * MIB) * 1000);
        let (_, last) = run(near, falls);
        assert!(last <= BUSY, "{last:?}");
    }

    #[test]
    fn close_to_a_sign_the_interval_stays_short() {
        let (_, last) = run(Duration::from_secs(60), |_| host(11 * MIB, 820 * MIB));
        assert_eq!(last, BUSY);
    }

    #[test]
    fn without_figures_the_interval_is_long_and_stalls_make_it_short() {
        let t = Thresholds::default();
        let now = Instant::now();
        let mut sampler = Sampler::new();
        for _ in 0..20 {
            sampler.next(now, (None, None), &t, false, false);
        }
        assert_eq!(sampler.interval(), SLOW);
        assert_eq!(sampler.next(now, (None, None), &t, true, false), FAST);
        for _ in 0..20 {
            sampler.next(now, (None, None), &t, false, true);
        }
        assert_eq!(sampler.interval(), BUSY);
    }

    #[test]
    fn a_small_cgroup_is_sampled_often_and_a_large_one_is_not() {
        let t = Thresholds::default();
        let now = Instant::now();
        for (limit, available, interval) in
            [(64 * MIB, 60 * MIB, BUSY), (64 * MIB, 0, BUSY), (100 * GIB, 90 * GIB, SLOW)]
        {
            let cgroup =
                Cgroup { limit: Some(limit), available: Some(available), ..Cgroup::default() };
            let mut sampler = Sampler::new();
            for _ in 0..20 {
                sampler.next(now, (Some(&host(6 * GIB, 7 * GIB)), Some(&cgroup)), &t, false, false);
            }
            assert_eq!(sampler.interval(), interval);
        }
    }
}
