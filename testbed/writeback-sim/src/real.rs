//! Scenarios that run on real devices as well as simulated ones: R1 to R4, with the same set-up and figures
//! for both.
//!
//! They are the reported cases, reduced to fit any machine: rates that two processors can move besides
//! everything else, and half a minute each. The model of a real device follows from its construction (its
//! rate, what it accepts at once after idle time, the one write it serves at a time), never from the results.

use crate::device::Model;
use crate::figure::{
    Bar, Figure, between, mean, pauses, percentile, reached, seconds, settled, throughput,
};
use crate::law::Law;
use crate::scenario::{
    MB, Scenario, destination, device, drain, figure, longest, scenario, setup, shown,
};
use crate::world::{Sample, Setup, SimRun, WriterModel};
use ebb_writeback::BdiOptions;
use ebb_writeback::units::{MILLISECOND, Nanos, SECOND};

/// All of them.
pub const ALL: [Scenario; 5] = [
    scenario("R1a", "hand-over 60 to 60 MB/s at 10 s, limit 1280 MB", 1, over::<60, 60>, of_over),
    scenario("R1b", "hand-over 120 to 20 MB/s at 10 s, limit 1280 MB", 1, over::<120, 20>, of_over),
    scenario("R2", "5 MB/s stick, beside it 120 MB/s from 8 s, limit 1280 MB", 0, stick, of_stick),
    scenario("R3", "5 MB/s stick dies at 8 s beside 120 MB/s, limit 1280 MB", 0, dead, of_dead),
    scenario("R4", "7 MB for a 60 MB/s device, 4 writers", 0, small, of_small),
];

/// When the writer of the first device ends and that of the second begins.
const CHANGE: Nanos = 10 * SECOND;
/// When the fast disk's writer begins, and the end of its measurement.
const FAST: Nanos = 8 * SECOND;
const FAST_END: Nanos = 20 * SECOND;
/// When the stick dies, in the scenario where it does.
const DEATH: Nanos = 8 * SECOND;
/// The speed of a writer that is not throttled.
const SPEED: u64 = 300 * MB;
/// A device accepts at once what it can write in this time, after idle time.
const REST: Nanos = SECOND / 4;
/// Several times what all devices need, so that the scenario is the same on a host that is a little short of
/// memory, where the limit is halved.
const LIMIT: u64 = 1280 * MB;
/// The limit of the small device.
const SMALL: u64 = 7 * MB;

fn disk(rate: u64) -> Model {
    Model { burst: ebb_writeback::units::bytes_in(rate * MB, REST), ..Model::plain(rate * MB) }
}

fn writer(device: usize, from: Nanos, to: Nanos) -> WriterModel {
    WriterModel { speed: SPEED, span: (from, to), ..WriterModel::stream(device) }
}

fn over<const A: u64, const B: u64>(law: Law) -> Setup {
    let devices = vec![device(disk(A)), device(disk(B))];
    let writers = vec![writer(0, 0, CHANGE), writer(1, CHANGE, 2 * CHANGE)];
    Setup { devices, writers, ..setup(law, LIMIT, 20) }
}

fn of_over(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let second = &run.devices[1];
    let end = between(second, setup.length - 3 * SECOND, setup.length);
    let held = mean(end, |sample| sample.held);
    let goal = mean(end, |sample| sample.threshold);
    let right = settled(second, CHANGE, goal, |sample| sample.threshold);
    let occupied = reached(second, CHANGE, held * 0.9, |sample| sample.held);
    let rate = setup.devices[1].0.rate;
    let after = between(second, CHANGE + SECOND, setup.length);
    let waits = pauses(run, [1], (0, Nanos::MAX));
    vec![
        figure(setup, "threshold_right_s", right, Bar::AtMost(1.0)),
        figure(setup, "occupancy_90_s", occupied, Bar::AtMost(5.0)),
        figure(setup, "drain_s", drain(held, rate), Bar::AtMost(2.0)),
        figure(setup, "busy_pct", share(after, rate), Bar::AtLeast(98.0)),
        shown("pause_max_ms", longest(&waits)),
    ]
}

/// What a device wrote, in percent of what it could have written.
fn share(samples: &[Sample], rate: u64) -> f64 {
    (throughput(samples) * 1e6 / rate as f64 * 100.0).min(100.0)
}

fn stick(law: Law) -> Setup {
    let devices = vec![device(disk(5)), device(disk(120))];
    let writers = vec![writer(0, 0, FAST_END), writer(1, FAST, FAST_END)];
    Setup { devices, writers, ..setup(law, LIMIT, 24) }
}

/// The maximum time in seconds to write what the first device held.
fn longest_drain(setup: &Setup, run: &SimRun) -> f64 {
    let most = run.devices[0].iter().map(|sample| sample.held).max().unwrap_or(0);
    drain(most as f64, setup.devices[0].0.rate)
}

fn fast_speed(setup: &Setup, run: &SimRun) -> f64 {
    share(between(&run.devices[1], FAST + SECOND, FAST_END), setup.devices[1].0.rate)
}

fn of_stick(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let waits = pauses(run, [0], (0, FAST_END));
    let stick = &run.devices[0];
    let after = between(stick, FAST_END, setup.length);
    let clean = after.iter().position(|sample| sample.held == 0);
    let clean = clean.map_or(f64::INFINITY, |steps| steps as f64 * seconds(crate::world::SAMPLE));
    let goal = destination(setup, stick);
    vec![
        figure(setup, "longest_drain_s", longest_drain(setup, run), Bar::AtMost(5.0)),
        figure(setup, "clean_after_s", clean, Bar::AtMost(3.0)),
        figure(setup, "fast_speed_pct", fast_speed(setup, run), Bar::AtLeast(98.0)),
        figure(setup, "pause_p99_ms", percentile(&waits, 99), Bar::AtMost(200.0)),
        figure(setup, "pause_max_ms", longest(&waits), Bar::AtMost(400.0)),
        shown("threshold_end_mb", goal / 1e6),
    ]
}

fn dead(law: Law) -> Setup {
    let mut setup = stick(law);
    setup.devices[0].0.dies = Some(DEATH);
    setup.writers[0].span.1 = Nanos::MAX;
    Setup { length: FAST_END, ..setup }
}

fn of_dead(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let pinned = mean(between(&run.devices[0], FAST_END - SECOND, FAST_END), |s| s.held);
    vec![
        figure(setup, "pinned_s", drain(pinned, setup.devices[0].0.rate), Bar::AtMost(2.0)),
        figure(setup, "fast_speed_pct", fast_speed(setup, run), Bar::AtLeast(98.0)),
    ]
}

fn small(law: Law) -> Setup {
    let options = BdiOptions { max_bytes: SMALL, strict_limit: true, ..BdiOptions::default() };
    let writers = (0..4).map(|_| writer(0, 0, Nanos::MAX)).collect();
    Setup { devices: vec![(disk(60), options)], writers, ..setup(law, LIMIT, 12) }
}

fn of_small(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let disk = &run.devices[0];
    let most = disk.iter().map(|sample| sample.held).max().unwrap_or(0);
    let waits = pauses(run, 0..4, (SECOND, Nanos::MAX));
    let after = between(disk, SECOND, setup.length);
    let full = most as f64 / SMALL as f64 * 100.0;
    vec![
        figure(setup, "busy_pct", share(after, setup.devices[0].0.rate), Bar::AtLeast(99.0)),
        figure(setup, "pause_p99_ms", percentile(&waits, 99), Bar::AtMost(120.0)),
        figure(setup, "pause_max_ms", longest(&waits), Bar::AtMost(120.0)),
        figure(setup, "fullest_pct", full, Bar::AtMost(100.0)),
    ]
}

/// Mean distance of two curves of one device, in percent of `whole` of the second.
#[must_use]
pub fn apart(real: &[Sample], model: &[Sample], what: impl Fn(&Sample) -> u64, whole: f64) -> f64 {
    let count = real.len().min(model.len());
    let pairs = real.iter().zip(model);
    let sum: f64 = pairs.map(|(a, b)| what(a).abs_diff(what(b)) as f64).sum();
    sum / (count.max(1) as f64) / whole.max(1.0) * 100.0
}

/// The reference for the curves of the plotted device: its threshold at the end of its load, in bytes.
#[must_use]
pub fn target(setup: &Setup, samples: &[Sample]) -> f64 {
    let end = setup.writers.iter().map(|writer| writer.span.1.min(setup.length)).max();
    let end = end.unwrap_or(setup.length);
    mean(between(samples, end.saturating_sub(3 * SECOND), end), |sample| sample.threshold)
}

/// The shortest wait of a write that counts as a pause, as in the law.
pub const PAUSE: Nanos = MILLISECOND;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world;

    #[test]
    fn every_bar_is_met_in_the_simulator() {
        for scenario in &ALL {
            let setup = (scenario.setup)(Law::Horizon);
            let run = world::run(&setup).unwrap();
            for figure in (scenario.measure)(&setup, &run) {
                assert!(figure.meets_bar(), "{} {} {}", scenario.id, figure.name, figure.value);
            }
        }
    }

    #[test]
    fn the_distance_of_a_curve_from_itself_is_zero() {
        let samples: Vec<Sample> =
            (0..10).map(|held| Sample { held, ..Sample::default() }).collect();
        let held = |sample: &Sample| sample.held;
        assert!(apart(&samples, &samples, held, 10.0).abs() < f64::EPSILON);
        let other = vec![Sample::default(); 10];
        assert!((apart(&samples, &other, held, 10.0) - 45.0).abs() < 1e-9);
    }
}
