//! The cost of a dead store for other volumes: shutdown, reload, resize, and the latency of
//! requests under load, each measured without and with the dead store, alternating within each
//! round.
//!
//! Invariants:
//! - "Alone" is the same daemon with the same healthy volumes and load, without the dead volume.
//! - The dead volume has clients with requests in flight that the store never completes.
//! - A missed target is a result, not a failure: the line says `short`. A daemon that does not
//!   start, or a step that does not end within [`rig::HANG`], is a failure, and no line is printed
//!   for it.
//!
//! Hanging devices and control groups need root.

pub mod dead;
mod load;
mod rig;

use std::io;
use std::path::Path;

use self::dead::{Dead, Kind};
use self::rig::{Rig, Siege};
use super::figure::{Bar, Better, Figure};
use super::{Error, log};

/// Most a step may take beside a dead store, of its time alone; and what is added, seconds.
const STEP_RATIO: f64 = 1.2;
const STEP_SLACK: f64 = 0.2;
/// Most the 99th percentile of latencies may be, of that alone.
const P99_RATIO: f64 = 1.5;

/// One setting of the comparison.
#[derive(Clone, Copy, Debug)]
struct Case {
    cache: &'static str,
    kind: Kind,
    siege: Siege,
}

impl Case {
    fn prefix(self) -> String {
        format!("outage_{}{}_{}", self.kind.name(), self.siege.suffix(), self.cache)
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for cache in ["none", "writethrough", "writeback"] {
        for kind in [Kind::Silent, Kind::Gone, Kind::Device] {
            cases.push(Case { cache, kind, siege: Siege::None });
        }
        for siege in [Siege::Headers, Siege::SilentStore] {
            cases.push(Case { cache, kind: Kind::Silent, siege });
        }
    }
    cases
}

/// What one round of one side gave.
#[derive(Clone, Copy, Debug)]
struct Round {
    p99_us: f64,
    reload_s: f64,
    resize_s: f64,
    stop_s: f64,
}

/// Runs all cases the options ask for; returns how many failed to run.
///
/// # Errors
/// Nothing can be measured at all, or `print` fails.
pub fn run(
    options: &super::Options,
    mut print: impl FnMut(&Figure) -> io::Result<()>,
) -> Result<usize, Error> {
    let daemon = super::daemon_path()?;
    let place = super::place()?;
    let mut failed = 0;
    for case in cases() {
        let prefix = case.prefix();
        let wanted = ["p99_us", "reload_s", "resize_s", "stop_s"]
            .iter()
            .any(|name| options.wants(&format!("{prefix}_{name}")));
        if !wanted {
            continue;
        }
        log(format_args!("{prefix}"));
        match measure(case, options, &daemon, &place) {
            Ok(figures) => figures
                .iter()
                .filter(|figure| options.wants(&figure.name))
                .try_for_each(&mut print)
                .map_err(super::io_context("writing a figure to stdout"))?,
            Err(error) => {
                failed += 1;
                log(format_args!("{prefix} FAILED: {error}"));
            }
        }
    }
    Ok(failed)
}

fn measure(
    case: Case,
    options: &super::Options,
    daemon: &Path,
    place: &Path,
) -> Result<Vec<Figure>, Error> {
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let dead = Dead::make(case.kind, place)?;
        beside.push(round(case, Some(&dead), options, daemon, place)?);
        drop(dead);
        alone.push(round(case, None, options, daemon, place)?);
    }
    Ok(figures(&case.prefix(), &beside, &alone))
}

fn round(
    case: Case,
    dead: Option<&Dead>,
    options: &super::Options,
    daemon: &Path,
    place: &Path,
) -> Result<Round, Error> {
    let mut rig = Rig::start(daemon, place, case.cache, dead, case.siege)?;
    let p99_us = rig.load(options.seconds)?;
    let reload_s = rig.reload()?;
    let resize_s = rig.resize()?;
    let stop_s = rig.stop()?;
    // The kernel does not end a process that waits for a device.
    if let Some(dead) = dead {
        dead.revive();
    }
    rig.finish()?;
    Ok(Round { p99_us, reload_s, resize_s, stop_s })
}

fn figures(prefix: &str, beside: &[Round], alone: &[Round]) -> Vec<Figure> {
    let column =
        |rounds: &[Round], of: fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<_>>();
    let figure = |name: &str, of: fn(&Round) -> f64, bar: Bar| {
        let rounds = [column(beside, of), column(alone, of)];
        Figure::from_rounds(format!("{prefix}_{name}"), &rounds, Better::Lower, bar)
    };
    let step = |name: &str, of: fn(&Round) -> f64| {
        let mut figure = figure(name, of, Bar::None)?;
        figure.bar = Bar::AtMost(figure.peer? * STEP_RATIO + STEP_SLACK);
        Some(figure)
    };
    [
        figure("p99_us", |round| round.p99_us, Bar::AtMostRatio(P99_RATIO)),
        step("reload_s", |round| round.reload_s),
        step("resize_s", |round| round.resize_s),
        step("stop_s", |round| round.stop_s),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_may_take_a_fifth_more_and_200_ms() {
        let round = |s: f64| Round { p99_us: s, reload_s: s, resize_s: s, stop_s: s };
        let all = figures("x", &[round(1.3)], &[round(1.0)]);
        assert_eq!(all.len(), 4);
        assert!(all.iter().all(Figure::meets_bar));
        let slow = figures("x", &[round(1.6)], &[round(1.0)]);
        assert!(slow.iter().all(|figure| !figure.meets_bar()));
    }

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let mut names: Vec<_> = cases().into_iter().map(Case::prefix).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
