//! The scenarios R1 to R4 on real devices and in the simulator: figures, distances, plots.

use std::fmt::Write as _;
use std::path::Path;

use writeback_sim::figure::{Bar as SimBar, Figure as Measured};
use writeback_sim::law::Law;
use writeback_sim::plot::{Curve, svg};
use writeback_sim::real::{ALL, apart, target};
use writeback_sim::scenario::Scenario;
use writeback_sim::world::{self, Sample, Setup, SimRun};

use super::devices::Rig;
use super::{Error, Options};
use crate::bench::figure::{Bar, Figure};
use crate::bench::workdir::Workdir;
use crate::bench::{io_context, log};

/// How far a real run may be from the simulated one, percent.
const APART: f64 = 20.0;
/// Tries to run without a sign of memory pressure from the host.
const TRIES: usize = 3;

/// The names of distances of curves.
const DISTANCES: [&str; 2] = ["held_curve_apart_pct", "threshold_curve_apart_pct"];

/// One scenario, run both ways.
struct Pair {
    scenario: &'static Scenario,
    setup: Setup,
    real: (SimRun, Vec<Measured>),
    model: (SimRun, Vec<Measured>),
}

/// Takes the figures of a measurement by its name, or its failure.
pub type Report<'a> = &'a mut dyn FnMut(&str, Result<Vec<Figure>, Error>) -> Result<(), Error>;

/// Runs the selected scenarios.
///
/// # Errors
/// Those of `report`, or plots cannot be written.
pub fn all(
    daemon: &Path,
    work: &Workdir,
    options: &Options,
    report: Report<'_>,
) -> Result<(), Error> {
    let mut table = INTRODUCTION.to_owned();
    let mut complete = true;
    for scenario in &ALL {
        let (name, setup) = (prefix(scenario), (scenario.setup)(Law::Horizon));
        let model = world::run(&setup).map_err(|error| Error::Failed {
            program: "the simulator".into(),
            what: error.to_string(),
        })?;
        let model = measured(scenario, &setup, model);
        let names = model.1.iter().map(|figure| figure.name).chain(DISTANCES);
        if !names.into_iter().any(|figure| options.wants(&name, &[figure])) {
            complete = false;
            continue;
        }
        match real(daemon, work, scenario, &setup) {
            Ok(run) => {
                let real = measured(scenario, &setup, run);
                let pair = Pair { scenario, setup, real, model };
                report(&name, Ok(pair.figures()))?;
                if let Some(out) = &options.out {
                    let path = out.join(format!("{}.svg", scenario.id));
                    std::fs::write(&path, pair.plot())
                        .map_err(io_context(format!("writing {}", path.display())))?;
                }
                table.push_str(&pair.table());
            }
            Err(error) => {
                complete = false;
                report(&name, Err(error))?;
            }
        }
    }
    if let Some(out) = options.out.as_ref().filter(|_| complete) {
        let path = out.join("REAL.md");
        std::fs::write(&path, table).map_err(io_context(format!("writing {}", path.display())))?;
    }
    Ok(())
}

fn prefix(scenario: &Scenario) -> String {
    format!("writeback_{}_", scenario.id.to_lowercase())
}

fn measured(scenario: &Scenario, setup: &Setup, run: SimRun) -> (SimRun, Vec<Measured>) {
    let figures = (scenario.measure)(setup, &run);
    (run, figures)
}

fn real(
    daemon: &Path,
    work: &Workdir,
    scenario: &Scenario,
    setup: &Setup,
) -> Result<SimRun, Error> {
    let mut tries = 0;
    loop {
        tries += 1;
        let rig = Rig::start(daemon, work, setup)?;
        let (run, pressure) = rig.run(setup)?;
        if pressure == 0 || tries == TRIES {
            log(format_args!("{}: run {tries}, {pressure} signs of memory pressure", scenario.id));
            return Ok(run);
        }
        log(format_args!("{}: {pressure} signs of memory pressure: again", scenario.id));
    }
}

impl Pair {
    fn shown<'a>(&self, run: &'a SimRun) -> &'a [Sample] {
        run.devices.get(self.scenario.shown).map_or(&[], Vec::as_slice)
    }

    /// Mean distances of the curves of the device that is shown: what it holds, its threshold.
    fn distances(&self) -> [(&'static str, f64); 2] {
        let (real, model) = (self.shown(&self.real.0), self.shown(&self.model.0));
        let whole = target(&self.setup, model);
        [
            (DISTANCES[0], apart(real, model, |sample| sample.held, whole)),
            (DISTANCES[1], apart(real, model, |sample| sample.threshold, whole)),
        ]
    }

    fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        for (real, model) in self.real.1.iter().zip(&self.model.1) {
            let name = format!("{}{}", prefix(self.scenario), real.name);
            let Some((ours, peer, bar, whole)) = cost(real, model) else {
                let bar = Bar::None;
                figures.push(Figure { name, ours: real.value, peer: Some(model.value), bar });
                continue;
            };
            let name = match real.bar {
                SimBar::AtLeast(_) => name.replace("_pct", "_lacks_pct"),
                _ => name,
            };
            figures.push(Figure {
                name: name.clone(),
                ours,
                peer: Some(peer),
                bar: Bar::AtMost(bar),
            });
            let apart = (ours - peer).abs() / whole * 100.0;
            let name = format!("{name}_apart_pct");
            figures.push(Figure { name, ours: apart, peer: None, bar: Bar::AtMost(APART) });
        }
        for (name, apart) in self.distances() {
            let name = format!("{}{name}", prefix(self.scenario));
            figures.push(Figure { name, ours: apart, peer: None, bar: Bar::AtMost(APART) });
        }
        figures
    }

    fn plot(&self) -> String {
        let title = format!("{}: {}", self.scenario.id, self.scenario.title);
        let line = |name: &str, run: &SimRun| Curve {
            name: name.into(),
            samples: self.shown(run).to_vec(),
        };
        // The last colour is that of our law in other plots; here it is the real thing's.
        let none = || Curve { name: String::new(), samples: Vec::new() };
        let lines =
            [line("simulated", &self.model.0), none(), none(), none(), line("real", &self.real.0)];
        svg(&title, &lines)
    }

    fn table(&self) -> String {
        let Scenario { id, title, .. } = self.scenario;
        let mut out = format!("\n## {id}: {title}\n\n[curves]({id}.svg)\n\n");
        out.push_str("| | real | simulated | bar |\n|---|---|---|---|\n");
        for (real, model) in self.real.1.iter().zip(&self.model.1) {
            // Writing to a String does not fail.
            let _ = writeln!(
                out,
                "| {} | {:.2} | {:.2} | {} |",
                real.name, real.value, model.value, real.bar
            );
        }
        for (name, apart) in self.distances() {
            let _ = writeln!(out, "| {name} | {apart:.1} | | <={APART} |");
        }
        out
    }
}

/// A figure with a bar as a cost: real, simulated, the bar, and what distances are a part of: the bar, or
/// for what should be at least so much all of it.
fn cost(real: &Measured, model: &Measured) -> Option<(f64, f64, f64, f64)> {
    match real.bar {
        SimBar::AtMost(most) => Some((real.value, model.value, most, most)),
        SimBar::AtLeast(least) => {
            let lacks = |value: f64| (100.0 - value).max(0.0);
            Some((lacks(real.value), lacks(model.value), lacks(least), 100.0))
        }
        SimBar::Near(..) | SimBar::None => None,
    }
}

const INTRODUCTION: &str = "\
# Writeback, on real devices beside simulated ones

A real daemon before `nbdkit --threads=1 --filter=rate null`, with real writers, and the same
scenario in the simulator; made by `make bench-writeback BENCH=\"--real docs/results/writeback\"`. The
simulated devices follow from how the real ones are made (their rate, and a quarter of a second of it
that they take at once after a rest), not from what came out. These are the results of one run on one machine.

A curve's distance is the mean difference of the two over the whole run, in percent of the threshold that
the simulated device has at the end of its load.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_and_what_they_are_measured_by() {
        let figure = |value, bar| Measured { name: "x", value, bar };
        let most = SimBar::AtMost(2.0);
        assert_eq!(cost(&figure(1.5, most), &figure(1.0, most)), Some((1.5, 1.0, 2.0, 2.0)));
        let least = SimBar::AtLeast(98.0);
        assert_eq!(cost(&figure(97.0, least), &figure(101.0, least)), Some((3.0, 0.0, 2.0, 100.0)));
        assert_eq!(cost(&figure(97.0, SimBar::None), &figure(1.0, SimBar::None)), None);
    }
}
