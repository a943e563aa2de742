//! How soon to look again: often while memory moves towards a sign, seldom while it rests.
//!
//! A look costs some 10 µs of processor time. The longest interval is bounded by how far the next
//! sign is: whatever begins right after a look must not run past it.

use std::time::{Duration, Instant};

use super::signals::Host;
use super::thresholds::Thresholds;

/// Interval while memory moves.
pub(super) const FAST: Duration = Duration::from_millis(5);
/// Longest interval while something is going on, or a sign is close: at 20 looks a second, the cost
/// stays below 0.1 % of one processor.
pub(super) const BUSY: Duration = Duration::from_millis(50);
/// Longest interval.
pub(super) const SLOW: Duration = Duration::from_secs(1);

/// Bytes per second at which memory may suddenly begin to go.
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

    /// The interval until the next look. `moved`: something else than free memory moved (stalls,
    /// lost pages, notifications). `alert`: the ladder is not calm.
    pub(super) fn next(
        &mut self,
        now: Instant,
        host: Option<&Host>,
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
                    // Several looks on the way to the sign.
                    wanted = wanted.min(time_for(headroom, rate) / 8);
                }
            }
        }
        self.interval = wanted.clamp(FAST, longest);
        self.interval
    }
}

/// What to follow, its value, and how far it is from the next sign: free memory while there is
/// plenty, what is available when free memory is down to the kernel's target, as it mostly is.
fn headroom(host: &Host, t: &Thresholds) -> (Measure, u64, u64) {
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

    fn host(free: u64, available: u64) -> Host {
        let watermarks = Some(Watermarks { min: 8 * MIB, low: 10 * MIB, high: 12 * MIB });
        Host { total: 8 * GIB, free, available: Some(available), watermarks }
    }

    /// Looks until `end`, with memory as `at(elapsed)` says. The number of looks, the last interval.
    fn run(end: Duration, at: impl Fn(Duration) -> Host) -> (u32, Duration) {
        let start = Instant::now();
        let t = Thresholds::default();
        let mut sampler = Sampler::new();
        let mut elapsed = Duration::ZERO;
        let mut looks = 0;
        while elapsed < end {
            let host = at(elapsed);
            elapsed += sampler.next(start + elapsed, Some(&host), &t, false, false);
            looks += 1;
        }
        (looks, sampler.interval())
    }

    #[test]
    fn resting_memory_is_looked_at_once_a_second() {
        let (looks, last) = run(Duration::from_secs(60), |_| host(6 * GIB, 7 * GIB));
        assert_eq!(last, SLOW);
        assert!(looks < 75, "{looks}");
    }

    #[test]
    fn a_host_full_of_page_cache_is_looked_at_seldom() {
        let (_, last) = run(Duration::from_secs(60), |_| host(11 * MIB, 6 * GIB));
        assert_eq!(last, SLOW);
        // Its free memory wavers; that is the kernel's business.
        let (looks, _) = run(Duration::from_secs(60), |at| {
            host(if at.as_millis() % 2 == 0 { 10 * MIB } else { 22 * MIB }, 6 * GIB)
        });
        assert!(looks < 75, "{looks}");
    }

    #[test]
    fn falling_memory_is_looked_at_ever_more_often() {
        let falls = |at: Duration| {
            let gone = u64::try_from(at.as_millis()).unwrap() * 100 * MIB / 1000;
            host((2 * GIB).saturating_sub(gone).max(MIB), (2 * GIB).saturating_sub(gone))
        };
        // 100 MB/s: the sign is passed after some 20 s of 24 MiB.
        let near = Duration::from_millis((2 * GIB - 24 * MIB) / (100 * MIB) * 1000);
        let (_, last) = run(near, falls);
        assert!(last <= BUSY, "{last:?}");
    }

    #[test]
    fn close_to_a_sign_a_rest_never_gets_long() {
        let (_, last) = run(Duration::from_secs(60), |_| host(11 * MIB, 820 * MIB));
        assert_eq!(last, BUSY);
    }

    #[test]
    fn nothing_known_means_seldom_and_stalls_mean_often() {
        let t = Thresholds::default();
        let now = Instant::now();
        let mut sampler = Sampler::new();
        for _ in 0..20 {
            sampler.next(now, None, &t, false, false);
        }
        assert_eq!(sampler.interval(), SLOW);
        assert_eq!(sampler.next(now, None, &t, true, false), FAST);
        for _ in 0..20 {
            sampler.next(now, None, &t, false, true);
        }
        assert_eq!(sampler.interval(), BUSY);
    }
}
