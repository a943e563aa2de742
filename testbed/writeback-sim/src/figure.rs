//! The figures of a run, and the bars they must meet.

use std::fmt;

use crate::world::{SAMPLE, Sample, SimRun};
use ebb_writeback::units::{Nanos, SECOND};

/// The bar of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// None; for comparison only.
    None,
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// This, within this many percent.
    Near(f64, f64),
}

/// One figure of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Its name, with the unit; no blanks.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Its bar, under this law.
    pub bar: Bar,
}

impl Figure {
    /// Whether the bar is met.
    #[must_use]
    pub fn meets_bar(&self) -> bool {
        match self.bar {
            Bar::None => true,
            Bar::AtLeast(least) => self.value >= least,
            Bar::AtMost(most) => self.value <= most,
            Bar::Near(goal, percent) => (self.value - goal).abs() <= goal * percent / 100.0,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bar::None => f.write_str("-"),
            Bar::AtLeast(least) => write!(f, ">={least}"),
            Bar::AtMost(most) => write!(f, "<={most}"),
            Bar::Near(goal, percent) => write!(f, "{goal}±{percent}%"),
        }
    }
}

/// Seconds.
#[must_use]
pub fn seconds(time: Nanos) -> f64 {
    time as f64 / SECOND as f64
}

/// Milliseconds.
pub(crate) fn millis(time: Nanos) -> f64 {
    time as f64 / 1e6
}

fn index(at: Nanos) -> usize {
    usize::try_from(at / SAMPLE).unwrap_or(usize::MAX)
}

/// The samples of a device between two moments.
#[must_use]
pub fn between(samples: &[Sample], from: Nanos, to: Nanos) -> &[Sample] {
    let end = index(to).min(samples.len());
    samples.get(index(from).min(end)..end).unwrap_or_default()
}

/// The mean of a value over samples; 0 without samples.
#[must_use]
pub fn mean(samples: &[Sample], what: impl Fn(&Sample) -> u64) -> f64 {
    let sum: f64 = samples.iter().map(|sample| what(sample) as f64).sum();
    sum / (samples.len().max(1) as f64)
}

/// How long after `from` a value first reaches `goal`; infinite if it never does.
pub(crate) fn reached(
    samples: &[Sample],
    from: Nanos,
    goal: f64,
    what: impl Fn(&Sample) -> u64,
) -> f64 {
    let after = between(samples, from, Nanos::MAX);
    let at = after.iter().position(|sample| what(sample) as f64 >= goal);
    at.map_or(f64::INFINITY, |steps| steps as f64 * seconds(SAMPLE))
}

/// How long after `from` a value is within 10 % of `goal` for good.
pub(crate) fn settled(
    samples: &[Sample],
    from: Nanos,
    goal: f64,
    what: impl Fn(&Sample) -> u64,
) -> f64 {
    let after = between(samples, from, Nanos::MAX);
    let off = |sample: &Sample| (what(sample) as f64 - goal).abs() > goal / 10.0;
    let last = after.iter().rposition(off);
    last.map_or(0.0, |steps| (steps + 1) as f64 * seconds(SAMPLE))
}

fn first_and_last(samples: &[Sample]) -> (Sample, Sample, f64) {
    let first = samples.first().copied().unwrap_or_default();
    let last = samples.last().copied().unwrap_or_default();
    let span = samples.len().saturating_sub(1).max(1) as f64 * seconds(SAMPLE);
    (first, last, span)
}

/// Percent of the time a device was busy.
pub(crate) fn utilisation(samples: &[Sample]) -> f64 {
    let (first, last, span) = first_and_last(samples);
    (seconds(last.busy.saturating_sub(first.busy)) / span * 100.0).min(100.0)
}

/// Megabytes per second a device wrote.
pub(crate) fn throughput(samples: &[Sample]) -> f64 {
    let (first, last, span) = first_and_last(samples);
    last.written.saturating_sub(first.written) as f64 / 1e6 / span
}

/// Standard deviation of the threshold over its mean.
pub(crate) fn unrest(samples: &[Sample]) -> f64 {
    let middle = mean(samples, |sample| sample.threshold);
    let square = |sample: &Sample| (sample.threshold as f64 - middle).powi(2);
    let variance = samples.iter().map(square).sum::<f64>() / (samples.len().max(1) as f64);
    if middle > 0.0 { variance.sqrt() / middle } else { 0.0 }
}

/// Lengths in ms, sorted, of the pauses of these writers that ended within the span.
pub(crate) fn pauses(
    run: &SimRun,
    writers: impl IntoIterator<Item = usize>,
    (from, to): (Nanos, Nanos),
) -> Vec<f64> {
    let mut lengths: Vec<f64> = writers
        .into_iter()
        .flat_map(|writer| run.pauses.get(writer).into_iter().flatten())
        .filter(|(at, _)| (from..to).contains(at))
        .map(|(_, length)| millis(*length))
        .collect();
    lengths.sort_by(f64::total_cmp);
    lengths
}

/// The given percentile of sorted values; 0 without values.
#[must_use]
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let place = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0.0)
}
