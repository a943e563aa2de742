//! The acceptance figures of writeback ([`testbed::bench::command`] describes the output). The peer is Linux's current
//! algorithm.
//!
//! Figures are costs: less is better, so that a target of at least 99 % busy is shown as at most 1
//! % idle. First come simulated devices, then real ones, which are slow stores behind a daemon.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use testbed::bench::figure::{Bar, Figure};
use testbed::bench::writeback::{self, Options};
use testbed::bench::{command, log};
use writeback_sim::figure::{self, Figure as Measured};
use writeback_sim::law::Law;
use writeback_sim::report::measure;
use writeback_sim::scenario::{ALL, Scenario};

const HELP: &str = "\
usage: bench-writeback [--only PATTERN] [--real DIR]

  --only PATTERN  only figures whose name contains PATTERN
  --real DIR      real devices only, with plots and a table of them written to DIR
";

type Print<'a> = &'a mut dyn FnMut(&Figure) -> io::Result<()>;

/// The command line's options.
#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    only: Option<String>,
    real: Option<PathBuf>,
}

fn parse(arguments: &[String]) -> Option<Asked> {
    let mut asked = Asked::default();
    for pair in arguments.chunks(2) {
        let [option, value] = pair else { return None };
        match option.as_str() {
            "--only" => asked.only = Some(value.clone()),
            "--real" => asked.real = Some(value.into()),
            _ => return None,
        }
    }
    Some(asked)
}

/// All scenarios in the simulator.
fn simulated(print: Print) -> Result<(), String> {
    for scenario in &ALL {
        let run = |law| {
            measure(scenario, law)
                .map(|result| result.figures)
                .map_err(|error| format!("{} does not start: {error}", scenario.id))
        };
        let (ours, peer) = (run(Law::Horizon)?, run(Law::Linux)?);
        let mut figures = Vec::new();
        if scenario.id.starts_with("T1") && !scenario.id.starts_with("T10") {
            for shift in [2, 0, -1] {
                figures.extend(oracle(scenario, shift, &run(Law::LinuxOld { shift })?));
            }
        }
        figures.extend(ours.iter().zip(&peer).filter_map(|(a, b)| cost(scenario, a, b)));
        for figure in &figures {
            print(figure).map_err(|error| format!("cannot write to stdout: {error}"))?;
        }
    }
    Ok(())
}

/// How far the old law is from what was published for it, in percent.
fn oracle(scenario: &Scenario, shift: i8, figures: &[Measured]) -> Option<Figure> {
    let figure = figures.first()?;
    let figure::Bar::Near(published, percent) = figure.bar else { return None };
    let ours = (figure.value - published).abs() / published * 100.0;
    let name = format!("writeback_{}_oracle{shift:+}_off_pct", scenario.id.to_lowercase());
    Some(Figure { name, ours, peer: None, bar: Bar::AtMost(percent) })
}

/// A figure that has a bar, as a cost.
fn cost(scenario: &Scenario, ours: &Measured, peer: &Measured) -> Option<Figure> {
    let prefix = format!("writeback_{}", scenario.id.to_lowercase());
    let name = |name: &str| format!("{prefix}_{name}");
    let figure = match ours.bar {
        figure::Bar::AtMost(most) => Figure {
            name: name(ours.name),
            ours: ours.value,
            peer: Some(peer.value),
            bar: Bar::AtMost(most),
        },
        figure::Bar::AtLeast(least) => {
            let whole = if ours.name.ends_with("_pct") { 1.0 } else { 100.0 };
            let lacks = |value: f64| (100.0 - value * whole).max(0.0);
            let lacking = ours.name.trim_end_matches("_pct").replace("busy", "idle");
            let lacking = lacking.replace("speed", "lost").replace("to_fastest", "behind");
            Figure {
                name: name(&format!("{lacking}_pct")),
                ours: lacks(ours.value),
                peer: Some(lacks(peer.value)),
                bar: Bar::AtMost(lacks(least)),
            }
        }
        figure::Bar::Near(..) | figure::Bar::None => return None,
    };
    Some(figure)
}

fn run(asked: Asked, mut print: impl FnMut(&Figure) -> io::Result<()>) -> bool {
    let mut failed = false;
    if asked.real.is_none() {
        log("simulated devices");
        if let Err(error) = simulated(&mut print) {
            log(format_args!("simulated devices: {error}"));
            failed = true;
        }
    }
    log("real devices");
    match writeback::run(&Options { only: asked.only, out: asked.real }, print) {
        Ok(0) => failed,
        Ok(_) => true,
        Err(error) => {
            log(format_args!("real devices: {error}"));
            true
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(asked) = parse(&arguments) else {
        log(HELP);
        return ExitCode::from(2);
    };
    let only = asked.only.clone();
    let print = |figure: &Figure| {
        if only.as_ref().is_some_and(|pattern| !figure.name.contains(pattern.as_str())) {
            return Ok(());
        }
        command::print(figure)
    };
    if run(asked, print) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_in_pairs() {
        let parse = |words: &[&str]| {
            super::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(parse(&[]), Some(Asked::default()));
        let both = Asked { only: Some("r2".into()), real: Some("/d".into()) };
        assert_eq!(parse(&["--only", "r2", "--real", "/d"]), Some(both));
        assert_eq!(parse(&["--only"]), None);
        assert_eq!(parse(&["--fast", "x"]), None);
    }
}
