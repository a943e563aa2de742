//! Columns of a latency heat map: how many requests took how long, in 24 bytes.
//!
//! A column has [`ROWS`] rows, two for each doubling of the time from one microsecond on. Each is a number of four bits,
//! the logarithm of the count.

use std::time::Duration;

use ebb_volume::LatencySnapshot;

/// Rows of a heat map: to 17 s.
pub(super) const ROWS: usize = 48;
/// The start of the first row, nanoseconds.
const FIRST: u64 = 1024;
/// Doublings of the count for each step of a row's number: the largest, 15, is 16 million.
const DOUBLINGS: f64 = 24.0 / 15.0;

/// A column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeatColumn([u8; ROWS / 2]);

/// The row of the bucket that ends at `end`.
fn row(end: Duration) -> usize {
    let nanos = u64::try_from(end.as_nanos()).unwrap_or(u64::MAX).saturating_sub(1).max(FIRST);
    let doublings = (nanos / FIRST).ilog2();
    let start = FIRST << doublings;
    let upper = nanos - start >= start / 2;
    let row = usize::try_from(2 * doublings).unwrap_or(ROWS) + usize::from(upper);
    row.min(ROWS - 1)
}

/// The start of a row, seconds.
#[allow(clippy::cast_precision_loss, reason = "below 2^53")]
fn start(row: usize) -> f64 {
    let from = FIRST << (row / 2);
    (if row % 2 == 1 { from + from / 2 } else { from }) as f64 / 1e9
}

/// The ends of all rows, seconds.
pub(super) fn bounds() -> Vec<f64> {
    (0..=ROWS).map(start).collect()
}

impl HeatColumn {
    /// The column of these times.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 to 15"
    )]
    pub(super) fn of(times: &LatencySnapshot) -> HeatColumn {
        let mut counts = [0u64; ROWS];
        for (end, count) in times.buckets() {
            if let Some(sum) = counts.get_mut(row(end)) {
                *sum = sum.saturating_add(count);
            }
        }
        let mut column = HeatColumn::default();
        for (pair, byte) in counts.chunks(2).zip(&mut column.0) {
            let code =
                |count: u64| ((count as f64 + 1.0).log2() / DOUBLINGS).ceil().min(15.0) as u8;
            *byte = pair.iter().rev().fold(0, |byte, count| byte << 4 | code(*count));
        }
        column
    }

    /// Whether it has no request.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    /// The rows that are not empty, and their approximate counts.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "below 2^25, and rows below 48"
    )]
    pub(super) fn rows(&self) -> Vec<(u8, u64)> {
        let codes = self.0.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        let known = codes.zip(0u8..).filter(|(code, _)| *code > 0);
        // The middle of what has this code.
        let count = |code: u8| ((f64::from(code) - 0.5) * DOUBLINGS).exp2().max(1.0).round() as u64;
        known.map(|(code, row)| (row, count(code))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_the_row_of_its_bounds() {
        let bounds = bounds();
        assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]) && bounds.len() == ROWS + 1);
        for nanos in [1025, 1280, 1536, 1537, 2048, 2049, 90_000, 1_000_000, 8_000_000_000u64] {
            let time = Duration::from_nanos(nanos);
            let row = row(time);
            let seconds = time.as_secs_f64();
            assert!(bounds[row] < seconds && seconds <= bounds[row + 1], "{nanos}: {row}");
        }
        assert_eq!((row(Duration::ZERO), row(Duration::from_secs(1_000_000))), (0, ROWS - 1));
    }
}
