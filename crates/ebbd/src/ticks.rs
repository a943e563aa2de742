//! When periodic work is due: at multiples of its period since the start of the daemon, so that all periodic tasks of an
//! idle worker wake it at the same moment, once a second.

use std::time::{Duration, Instant};

/// The time from `now` to the next multiple of `period` since `started`; never 0, for a period above 0.
pub(crate) fn until_tick(now: Instant, started: Instant, period: Duration) -> Duration {
    let passed = now.saturating_duration_since(started).as_nanos();
    let past = passed.checked_rem(period.as_nanos()).unwrap_or(0);
    period.saturating_sub(Duration::from_nanos(u64::try_from(past).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_all_tasks_are_at_the_same_moments() {
        let started = Instant::now();
        let until = |millis, period| {
            let now = started + Duration::from_millis(millis);
            until_tick(now, started, Duration::from_secs(period)).as_millis()
        };
        assert_eq!((until(0, 1), until(1, 1), until(999, 1), until(1000, 1)), (1000, 999, 1, 1000));
        assert_eq!((until(1300, 1), until(1300, 2), until(2300, 2)), (700, 700, 1700));
        let before = until_tick(started, started + Duration::from_secs(5), Duration::from_secs(1));
        assert_eq!(before, Duration::from_secs(1), "the clock of a test may be behind");
        assert_eq!(until_tick(started, started, Duration::ZERO), Duration::ZERO);
    }
}
