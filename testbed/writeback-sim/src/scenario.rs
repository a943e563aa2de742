//! The scenarios T1 to T12: what is set up, what is measured, and the bars.
//!
//! Sizes and rates are those of the reports they come from; MB is 10⁶ bytes.

use crate::device::Model;
use crate::figure::{
    Bar, Figure, between, mean, millis, pauses, percentile, reached, seconds, settled, throughput,
    unrest, utilisation,
};
use crate::law::Law;
use crate::world::{SAMPLE, Sample, Setup, SimAction, SimRun, WriterModel};
use ebb_writeback::units::{MILLISECOND, Nanos, SECOND, WHOLE};
use ebb_writeback::{BdiOptions, PressureLevel};

pub(crate) const MB: u64 = 1_000_000;

/// One scenario.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Short name, without blanks.
    pub id: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// What its curves show: the device, and why.
    pub shown: usize,
    /// Creates the set-up.
    pub setup: fn(Law) -> Setup,
    /// Evaluates the run.
    pub measure: fn(&Setup, &SimRun) -> Vec<Figure>,
}

/// All of them.
pub const ALL: [Scenario; 22] = [
    scenario("T1", "fresh ramp: 50 MB/s, limit 782 MB", 0, ramp::<50, 782>, of_ramp),
    scenario("T1b", "fresh ramp: 60 MB/s, limit 543 MB", 0, ramp::<60, 543>, of_ramp),
    scenario(
        "T2a",
        "hand-over 150 to 150 MB/s at 40 s, limit 800 MB",
        1,
        over::<150, 150>,
        of_over,
    ),
    scenario("T2b", "hand-over 500 to 20 MB/s at 40 s, limit 800 MB", 1, over::<500, 20>, of_over),
    scenario("T2c", "hand-over 20 to 500 MB/s at 40 s, limit 800 MB", 1, over::<20, 500>, of_over),
    scenario(
        "T3a",
        "join: 150 MB/s beside 150 at 40 s, limit 800 MB",
        1,
        join::<150, 150>,
        of_join,
    ),
    scenario("T3b", "join: 20 MB/s beside 500 at 40 s, limit 800 MB", 1, join::<500, 20>, of_join),
    scenario("T3c", "join: 500 MB/s beside 20 at 40 s, limit 800 MB", 1, join::<20, 500>, of_join),
    scenario("T4", "12 disks, 100 MB/s, limit 1180 MB, a writer each", 0, jbod::<1>, of_jbod),
    scenario("T4x", "12 disks, 100 MB/s, limit 1180 MB, 10 writers each", 0, jbod::<10>, of_jbod),
    scenario(
        "T4b",
        "12 disks, 100 MB/s, limit 120 MB, batches of 4 MB",
        0,
        small_jbod,
        of_small_jbod,
    ),
    scenario("T5", "5 MB/s stick that stalls, beside 500 MB/s from 15 s", 0, stick, of_stick),
    scenario("T6", "the stick dies at 10 s", 0, dead_stick, of_dead_stick),
    scenario("T7", "4 disks, 104 MB/s, limit 177 MB, batches of 8 MB", 0, nas::<8>, of_nas),
    scenario("T7b", "4 disks, 104 MB/s, limit 177 MB, batches of 16 MB", 0, nas::<16>, of_nas),
    scenario("T8", "60 MB/s, limit 7 MB, 4 writers", 0, tiny::<0, 0>, of_tiny),
    scenario(
        "T8b",
        "60 MB/s, limit 7 MB, batches of 1 MB, stalls of 60 ms",
        0,
        tiny::<1, 60>,
        of_tiny,
    ),
    scenario(
        "T8c",
        "60 MB/s, limit 7 MB, batches of 2 MB, stalls of 60 ms",
        0,
        tiny::<2, 60>,
        of_tiny,
    ),
    scenario("T9", "1 MB/s on an idle disk beside 8 heavy writers", 1, light, of_light),
    scenario("T10", "limit cut in half at 10 s, again by pressure at 20 s", 0, cut, of_cut),
    scenario("T11", "1000 MB/s that a flusher's depth of two holds to 578", 0, deep, of_deep),
    scenario("T12", "bursts of 99 MB each 5 s on 100 MB/s", 0, burst, of_burst),
];

/// Linux's estimates need some time; pauses of steady load are counted from this moment.
const WARM: Nanos = 10 * SECOND;

type Make = fn(Law) -> Setup;
type Measure = fn(&Setup, &SimRun) -> Vec<Figure>;

pub(crate) const fn scenario(
    id: &'static str,
    title: &'static str,
    shown: usize,
    setup: Make,
    measure: Measure,
) -> Scenario {
    Scenario { id, title, shown, setup, measure }
}

/// The scenario of this name.
#[must_use]
pub fn by_id(id: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.id == id)
}

pub(crate) fn setup(law: Law, limit: u64, length: u64) -> Setup {
    Setup {
        law,
        limit,
        background: WHOLE / 2,
        devices: Vec::new(),
        writers: Vec::new(),
        actions: Vec::new(),
        length: length * SECOND,
        seed: 1,
    }
}

pub(crate) fn device(model: Model) -> (Model, BdiOptions) {
    (model, BdiOptions::default())
}

/// The bars apply to the horizon law; the others are shown beside it.
pub(crate) fn figure(setup: &Setup, name: &'static str, value: f64, bar: Bar) -> Figure {
    Figure { name, value, bar: if setup.law == Law::Horizon { bar } else { Bar::None } }
}

pub(crate) fn shown(name: &'static str, value: f64) -> Figure {
    Figure { name, value, bar: Bar::None }
}

pub(crate) fn longest(sorted: &[f64]) -> f64 {
    sorted.last().copied().unwrap_or(0.0)
}

pub(crate) fn drain(held: f64, rate: u64) -> f64 {
    held / (rate as f64)
}

/// The value a threshold climbs to: for Linux the whole limit, for the horizon law its final value.
pub(crate) fn destination(setup: &Setup, samples: &[Sample]) -> f64 {
    if setup.law == Law::Horizon {
        let end = setup.length;
        mean(between(samples, end - 5 * SECOND, end), |sample| sample.threshold)
    } else {
        setup.limit as f64
    }
}

// T1.

fn ramp<const RATE: u64, const LIMIT: u64>(law: Law) -> Setup {
    let devices = vec![device(Model::plain(RATE * MB))];
    Setup { devices, writers: vec![WriterModel::stream(0)], ..setup(law, LIMIT * MB, 150) }
}

fn of_ramp(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let disk = &run.devices[0];
    let goal = destination(setup, disk) * 0.95;
    let rate = setup.devices[0].0.rate;
    // Published for these machines; the reports name no others.
    let bar = match (setup.law, rate / MB) {
        (Law::LinuxOld { shift: 2 }, 50) => Bar::Near(92.0, 5.0),
        (Law::LinuxOld { shift: 0 }, 50) => Bar::Near(23.0, 5.0),
        (Law::LinuxOld { shift: -1 }, 60) => Bar::Near(9.8, 5.0),
        (Law::Horizon, _) => Bar::AtMost(1.0),
        _ => Bar::None,
    };
    let value = reached(disk, 0, goal, |sample| sample.threshold);
    let end = between(disk, 100 * SECOND, 150 * SECOND);
    let waits = pauses(run, [0], (SECOND, Nanos::MAX));
    vec![
        Figure { name: "threshold_t95_s", value, bar },
        figure(setup, "drain_s", drain(mean(end, |s| s.held), rate), Bar::AtMost(2.0)),
        figure(
            setup,
            "busy_pct",
            utilisation(between(disk, SECOND, 150 * SECOND)),
            Bar::AtLeast(99.0),
        ),
        shown("pause_p99_ms", percentile(&waits, 99)),
        shown("pause_max_ms", longest(&waits)),
    ]
}

// T2.

const CHANGE: Nanos = 40 * SECOND;

fn pair(law: Law, rates: [u64; 2], first_ends: Nanos) -> Setup {
    let devices = rates.iter().map(|rate| device(Model::plain(rate * MB))).collect();
    let request = 256 << 10;
    let writers = vec![
        WriterModel { span: (0, first_ends), request, ..WriterModel::stream(0) },
        WriterModel { span: (CHANGE, Nanos::MAX), request, ..WriterModel::stream(1) },
    ];
    let length = if matches!(law, Law::LinuxOld { .. }) { 120 } else { 70 };
    Setup { devices, writers, ..setup(law, 800 * MB, length) }
}

fn over<const A: u64, const B: u64>(law: Law) -> Setup {
    pair(law, [A, B], CHANGE)
}

/// When the second device's threshold is right, how full the device is, and when.
fn of_second(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let disk = &run.devices[1];
    let end = between(disk, setup.length - 5 * SECOND, setup.length);
    let rate = setup.devices[1].0.rate;
    let threshold = |sample: &Sample| sample.threshold;
    let right = if setup.law == Law::Horizon {
        settled(disk, CHANGE, destination(setup, disk), threshold)
    } else {
        // Beside another device Linux's share is the part of the completions.
        let ends =
            run.devices.iter().map(|disk| between(disk, setup.length - 5 * SECOND, setup.length));
        let all: f64 = ends.map(throughput).sum();
        let part = throughput(end) / all.max(1.0);
        reached(disk, CHANGE, setup.limit as f64 * part * 0.9, threshold)
    };
    let held = mean(end, |sample| sample.held);
    let peak = disk.iter().map(|sample| sample.held).max().unwrap_or(0);
    vec![
        figure(setup, "threshold_right_s", right, Bar::AtMost(1.0)),
        figure(
            setup,
            "occupancy_90_s",
            reached(disk, CHANGE, held * 0.9, |s| s.held),
            Bar::AtMost(5.0),
        ),
        figure(setup, "drain_s", drain(held, rate), Bar::AtMost(2.0)),
        shown("drain_peak_s", drain(peak as f64, rate)),
    ]
}

fn of_over(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let mut figures = of_second(setup, run);
    let after = between(&run.devices[1], CHANGE + SECOND / 2, setup.length);
    let waits = pauses(run, [1], (0, Nanos::MAX));
    figures.push(figure(setup, "busy_pct", utilisation(after), Bar::AtLeast(99.0)));
    figures.push(shown("pause_max_ms", longest(&waits)));
    figures
}

// T3.

fn join<const A: u64, const B: u64>(law: Law) -> Setup {
    pair(law, [A, B], Nanos::MAX)
}

fn of_join(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let mut figures = of_second(setup, run);
    let waits = |writer| longest(&pauses(run, [writer], (CHANGE, Nanos::MAX)));
    let first = between(&run.devices[0], CHANGE, setup.length);
    let rate = setup.devices[0].0.rate as f64 / 1e6;
    figures.push(figure(setup, "old_pause_max_ms", waits(0), Bar::AtMost(150.0)));
    figures.push(shown("new_pause_max_ms", waits(1)));
    figures.push(figure(
        setup,
        "old_speed_pct",
        throughput(first) / rate * 100.0,
        Bar::AtLeast(98.0),
    ));
    figures
}

// T4.

fn disks(law: Law, limit: u64, model: &Model, count: usize, writers_each: usize) -> Setup {
    let devices = (0..count).map(|_| device(model.clone())).collect();
    let writers =
        (0..count * writers_each).map(|index| WriterModel::stream(index % count)).collect();
    Setup { devices, writers, ..setup(law, limit, 30) }
}

fn jbod<const WRITERS: usize>(law: Law) -> Setup {
    let stalls = Some((2 * SECOND, 100 * MILLISECOND));
    let model = Model { stalls, batch: 2 * MB, ..Model::plain(100 * MB) };
    Setup { length: 40 * SECOND, ..disks(law, 1180 * MB, &model, 12, WRITERS) }
}

/// After the start: the least busy disk, the spread of speeds, the variation of thresholds.
fn of_disks(setup: &Setup, run: &SimRun) -> (f64, f64, f64) {
    let late: Vec<&[Sample]> =
        run.devices.iter().map(|disk| between(disk, 2 * SECOND, setup.length)).collect();
    let least = |values: Vec<f64>| values.into_iter().fold(f64::INFINITY, f64::min);
    let busy = least(late.iter().map(|disk| utilisation(disk)).collect());
    let speeds: Vec<f64> = late.iter().map(|disk| throughput(disk)).collect();
    let most = speeds.iter().copied().fold(0.0, f64::max);
    let unrests: f64 = late.iter().map(|disk| unrest(disk)).sum();
    (busy, least(speeds) / most, unrests / (late.len().max(1) as f64))
}

fn all_pauses(setup: &Setup, run: &SimRun) -> Vec<f64> {
    pauses(run, 0..setup.writers.len(), (WARM, Nanos::MAX))
}

fn total_speed(setup: &Setup, run: &SimRun) -> f64 {
    run.devices.iter().map(|disk| throughput(between(disk, 2 * SECOND, setup.length))).sum()
}

fn of_jbod(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let (busy, spread, unrest) = of_disks(setup, run);
    let waits = all_pauses(setup, run);
    vec![
        figure(setup, "worst_busy_pct", busy, Bar::AtLeast(99.0)),
        figure(setup, "slowest_to_fastest", spread, Bar::AtLeast(0.95)),
        figure(setup, "pause_p99_ms", percentile(&waits, 99), Bar::AtMost(50.0)),
        shown("pause_max_ms", longest(&waits)),
        shown("threshold_cov", unrest),
    ]
}

// T4b.

fn small_jbod(law: Law) -> Setup {
    let stalls = Some((2 * SECOND, 100 * MILLISECOND));
    let model = Model { stalls, batch: 4 * MB, ..Model::plain(100 * MB) };
    disks(law, 120 * MB, &model, 12, 1)
}

fn of_small_jbod(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let (busy, spread, unrest) = of_disks(setup, run);
    let waits = all_pauses(setup, run);
    vec![
        figure(setup, "worst_busy_pct", busy, Bar::AtLeast(98.0)),
        shown("slowest_to_fastest", spread),
        shown("speed_mb_s", total_speed(setup, run)),
        figure(setup, "fullest_pct", run.fullest as f64 / 1e4, Bar::AtMost(100.0)),
        shown("pause_p99_ms", percentile(&waits, 99)),
        shown("pause_max_ms", longest(&waits)),
        shown("threshold_cov", unrest),
    ]
}

// T5 and T6.

const FAST_FROM: Nanos = 15 * SECOND;

fn stick(law: Law) -> Setup {
    let stalls = Some((4 * SECOND, 400 * MILLISECOND));
    let slow = Model { stalls, ..Model::plain(5 * MB) };
    let devices = vec![device(slow), device(Model::plain(500 * MB))];
    let fast = WriterModel { request: 512 << 10, ..WriterModel::stream(1) };
    let writers = vec![
        WriterModel { span: (0, 30 * SECOND), ..WriterModel::stream(0) },
        WriterModel { span: (FAST_FROM, Nanos::MAX), ..fast },
    ];
    Setup { devices, writers, ..setup(law, 1600 * MB, 40) }
}

fn fast_speed(setup: &Setup, run: &SimRun) -> Figure {
    let after = between(&run.devices[1], FAST_FROM + SECOND / 2, setup.length);
    figure(setup, "fast_speed_pct", throughput(after) / 5.0, Bar::AtLeast(98.0))
}

fn of_stick(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let disk = &run.devices[0];
    let peak = disk.iter().map(|sample| sample.held).max().unwrap_or(0);
    let waits = pauses(run, [0], (0, Nanos::MAX));
    let after = between(disk, 30 * SECOND, setup.length);
    let clean = after.iter().position(|sample| sample.held == 0);
    let clean = clean.map_or(f64::INFINITY, |steps| steps as f64 * seconds(SAMPLE));
    vec![
        figure(setup, "drain_peak_s", drain(peak as f64, 5 * MB), Bar::AtMost(5.0)),
        fast_speed(setup, run),
        shown("stick_pause_p50_ms", percentile(&waits, 50)),
        figure(setup, "stick_pause_p99_ms", percentile(&waits, 99), Bar::AtMost(200.0)),
        figure(setup, "stick_pause_max_ms", longest(&waits), Bar::AtMost(400.0)),
        figure(setup, "clean_after_stop_s", clean, Bar::AtMost(5.0)),
    ]
}

fn dead_stick(law: Law) -> Setup {
    let mut setup = stick(law);
    setup.devices[0].0.dies = Some(10 * SECOND);
    setup
}

fn of_dead_stick(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let pinned = run.devices[0].last().map_or(0, |sample| sample.held);
    let horizons = drain(pinned as f64, 5 * MB) / 2.0;
    vec![
        fast_speed(setup, run),
        figure(setup, "pinned_horizons", horizons, Bar::AtMost(1.0)),
        shown("fast_pause_max_ms", longest(&pauses(run, [1], (0, Nanos::MAX)))),
    ]
}

// T7.

fn nas<const BATCH: u64>(law: Law) -> Setup {
    let stalls = Some((SECOND, 80 * MILLISECOND));
    let model = Model { stalls, batch: BATCH * MB, ..Model::plain(104 * MB) };
    Setup { background: WHOLE / 3 * 2, ..disks(law, 177 * MB, &model, 4, 1) }
}

fn of_nas(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let (busy, spread, unrest) = of_disks(setup, run);
    let waits = all_pauses(setup, run);
    vec![
        figure(setup, "worst_busy_pct", busy, Bar::AtLeast(99.0)),
        figure(setup, "spread_pct", (1.0 - spread) * 100.0, Bar::AtMost(5.0)),
        figure(setup, "pause_p99_ms", percentile(&waits, 99), Bar::AtMost(50.0)),
        shown("pause_max_ms", longest(&waits)),
        shown("threshold_cov", unrest),
    ]
}

// T8.

fn tiny<const BATCH: u64, const STALL: u64>(law: Law) -> Setup {
    let stalls = (STALL > 0).then_some((SECOND, STALL * MILLISECOND));
    let model = Model { stalls, batch: BATCH * MB, ..Model::plain(60 * MB) };
    Setup { length: 60 * SECOND, ..disks(law, 7 * MB, &model, 1, 4) }
}

fn of_tiny(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let (busy, _, _) = of_disks(setup, run);
    let waits = pauses(run, 0..4, (0, Nanos::MAX));
    vec![
        figure(setup, "busy_pct", busy, Bar::AtLeast(99.0)),
        shown("pause_p99_ms", percentile(&waits, 99)),
        figure(setup, "pause_max_ms", longest(&waits), Bar::AtMost(119.9)),
        figure(setup, "fullest_pct", run.fullest as f64 / 1e4, Bar::AtMost(100.0)),
    ]
}

// T9.

fn light(law: Law) -> Setup {
    let devices = vec![device(Model::plain(50 * MB)), device(Model::plain(100 * MB))];
    let mut writers = vec![WriterModel::stream(0); 8];
    writers.push(WriterModel { speed: MB, request: 16 << 10, ..WriterModel::stream(1) });
    Setup { devices, writers, ..setup(law, 400 * MB, 60) }
}

fn of_light(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let heavy = pauses(run, 0..8, (WARM, Nanos::MAX));
    vec![
        figure(
            setup,
            "light_pause_max_ms",
            longest(&pauses(run, [8], (0, Nanos::MAX))),
            Bar::AtMost(10.0),
        ),
        shown("heavy_pause_p99_ms", percentile(&heavy, 99)),
        shown("heavy_pause_max_ms", longest(&heavy)),
    ]
}

// T10.

fn cut(law: Law) -> Setup {
    let devices = vec![device(Model::plain(100 * MB)), device(Model::plain(50 * MB))];
    let writers = vec![0, 0, 1, 1].into_iter().map(WriterModel::stream).collect();
    let actions = vec![
        (10 * SECOND, SimAction::Limit(150 * MB)),
        (20 * SECOND, SimAction::Pressure(PressureLevel::Squeeze)),
    ];
    Setup { devices, writers, actions, ..setup(law, 300 * MB, 30) }
}

fn of_cut(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let (busy, _, _) = of_disks(setup, run);
    vec![
        figure(
            setup,
            "pause_max_ms",
            longest(&pauses(run, 0..4, (0, Nanos::MAX))),
            Bar::AtMost(200.0),
        ),
        figure(setup, "fullest_pct", run.fullest as f64 / 1e4, Bar::AtMost(100.0)),
        figure(setup, "divided_pct", run.divided as f64 / 1e4, Bar::AtMost(100.0)),
        figure(setup, "worst_busy_pct", busy, Bar::AtLeast(99.0)),
    ]
}

// T11.

fn deep(law: Law) -> Setup {
    // Two writes of 1 MiB each 3.63 ms: 578 MB/s.
    let model = Model { latency: 2_580_000, ..Model::plain(1000 * MB) };
    let max_in_flight = if law == Law::Horizon { 64 << 20 } else { 2 << 20 };
    let options = BdiOptions { max_in_flight, ..BdiOptions::default() };
    let writer = WriterModel { speed: 300 * MB, request: 256 << 10, ..WriterModel::stream(0) };
    Setup { devices: vec![(model, options)], writers: vec![writer; 4], ..setup(law, 8000 * MB, 30) }
}

fn of_deep(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let disk = &run.devices[0];
    let full = disk.windows(2).position(|pair| (pair[1].busy - pair[0].busy) * 100 > SAMPLE * 95);
    let until = full.map_or(setup.length, |steps| SAMPLE * (steps as u64 + 1));
    let waited = pauses(run, 0..4, (0, until)).iter().fold(0.0, |sum, wait| sum + wait);
    let late = between(disk, SECOND, setup.length);
    vec![
        figure(setup, "paused_pct", waited / 4.0 / millis(until) * 100.0, Bar::AtMost(2.0)),
        shown("full_after_s", full.map_or(f64::INFINITY, |_| seconds(until))),
        figure(setup, "busy_pct", utilisation(late), Bar::AtLeast(95.0)),
        shown("speed_mb_s", throughput(late)),
    ]
}

// T12.

fn burst(law: Law) -> Setup {
    let burst = Some((99 * MB, 5 * SECOND));
    let writers = vec![WriterModel { burst, ..WriterModel::stream(0) }];
    let devices = vec![device(Model::plain(100 * MB))];
    Setup { devices, writers, ..setup(law, 800 * MB, 60) }
}

fn of_burst(setup: &Setup, run: &SimRun) -> Vec<Figure> {
    let late = between(&run.devices[0], 50 * SECOND, setup.length);
    let off = |sample: &Sample| (sample.bandwidth as f64 / 1e6 - 100.0).abs();
    let worst = late.iter().map(off).fold(0.0, f64::max);
    vec![
        figure(setup, "estimate_off_pct", worst, Bar::AtMost(20.0)),
        shown("pause_max_ms", longest(&pauses(run, [0], (0, Nanos::MAX)))),
    ]
}
