//! Limits log messages that a client, a guest, a server or a broken device can cause without end: a number of
//! lines per period, and with the next line the number of suppressed ones.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limits the lines of one kind of message. Shared by threads; not for warm paths.
///
/// # Example
/// ```
/// use ebb_volume::LogLimit;
/// use std::time::{Duration, Instant};
///
/// static REFUSED: LogLimit = LogLimit::new(5, Duration::from_secs(10));
/// if let Some(suppressed) = REFUSED.admit(Instant::now()) {
///     println!("refused; {suppressed} earlier refusals were not logged");
/// }
/// ```
#[derive(Debug)]
pub struct LogLimit {
    lines: u32,
    period: Duration,
    state: Mutex<LogLimitState>,
}

#[derive(Debug)]
struct LogLimitState {
    /// When the period began.
    since: Option<Instant>,
    /// Lines written in it.
    written: u32,
    /// Lines suppressed since the last one that was written.
    suppressed: u64,
}

impl LogLimit {
    /// At most `lines` per `period`.
    #[must_use]
    pub const fn new(lines: u32, period: Duration) -> LogLimit {
        let state = LogLimitState { since: None, written: 0, suppressed: 0 };
        LogLimit { lines, period, state: Mutex::new(state) }
    }

    /// Whether a line may be written at `now`; if so, the number of lines suppressed since the last one.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= self.period) {
            state.since = Some(now);
            state.written = 0;
        }
        if state.written >= self.lines {
            state.suppressed = state.suppressed.saturating_add(1);
            return None;
        }
        state.written += 1;
        Some(std::mem::take(&mut state.suppressed))
    }

    /// The number of lines suppressed since the last one, if there are any, for a line that sums them up.
    pub fn take_suppressed(&self) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Some(std::mem::take(&mut state.suppressed)).filter(|suppressed| *suppressed > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_suppressed_and_counted() {
        let limit = LogLimit::new(3, Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let storm = |seconds, lines: u32| -> Vec<u64> {
            (0..lines).filter_map(|_| limit.admit(at(seconds))).collect()
        };
        assert_eq!(storm(0, 100), [0, 0, 0]);
        assert!(storm(9, 10).is_empty());
        assert_eq!(storm(10, 10), [107, 0, 0], "the next line reports the suppressed ones");
        assert_eq!(storm(30, 1), [7]);
        assert_eq!(storm(50, 1), [0], "reported once");
        assert_eq!(limit.take_suppressed(), None);
        assert_eq!(storm(51, 9), [0, 0]);
        assert_eq!((limit.take_suppressed(), limit.take_suppressed()), (Some(7), None));
    }
}
