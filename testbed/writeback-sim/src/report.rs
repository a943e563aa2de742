//! All scenarios under all laws, as a table in Markdown with links to the curves.

use std::fmt::Write;

use crate::figure::{Bar, Figure};
use crate::law::{LAWS, Law, name};
use crate::plot::{Curve, svg};
use crate::scenario::{ALL, Scenario};
use crate::world;
use ebb_writeback::WritebackError;

/// One scenario under one law.
#[derive(Debug, Clone)]
pub struct LawResult {
    /// The law.
    pub law: Law,
    /// What was measured.
    pub figures: Vec<Figure>,
    /// The curve of the plotted device.
    pub line: Curve,
}

/// One scenario under all laws.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The scenario.
    pub scenario: &'static Scenario,
    /// In the order of [`LAWS`].
    pub results: Vec<LawResult>,
}

/// Runs a scenario under one law.
///
/// # Errors
/// The controller's error for options it does not accept.
pub fn measure(
    scenario: &'static Scenario,
    law: Law,
) -> std::result::Result<LawResult, WritebackError> {
    let setup = (scenario.setup)(law);
    let mut run = world::run(&setup)?;
    let figures = (scenario.measure)(&setup, &run);
    let samples = std::mem::take(&mut run.devices[scenario.shown]);
    Ok(LawResult { law, figures, line: Curve { name: name(law), samples } })
}

/// Runs everything; takes some seconds.
///
/// # Errors
/// As [`measure`].
pub fn all() -> std::result::Result<Vec<Comparison>, WritebackError> {
    let compare = |scenario| {
        let results = LAWS.iter().map(|law| measure(scenario, *law));
        Ok(Comparison { scenario, results: results.collect::<std::result::Result<_, _>>()? })
    };
    ALL.iter().map(compare).collect()
}

const INTRODUCTION: &str = "\
# Writeback, simulated

Each scenario under each law, in a simulated world with one seed. Made by `cargo run --release -p
testbed --bin sim-writeback -- --out docs/results/writeback`, and held up to date by the tests of
`writeback-sim`. A value in **bold** has a bar, and misses it where it says so.

The world is a model: devices serve one write after the other with ±10 % jitter, stall, complete in
batches; the flusher is ideal. The Linux laws are their formulas, in that world, with 64 MiB always in
flight. Their ramps and hand-overs agree with those that were published (100 s, 25 s and 10 s are
4.32 half-periods: 92 s, 23 s, 9.8 s); their pauses and how busy they keep disks are orders of
magnitude, and kinder than what was measured on real machines. Names end in the unit; `never` means not within the run.
[REAL.md](REAL.md) has real devices beside simulated ones.
";

/// A figure's text in the table.
#[must_use]
pub fn cell(figure: &Figure) -> String {
    let text = if figure.value.is_infinite() {
        "never".to_owned()
    } else if figure.value >= 1000.0 {
        format!("{:.0}", figure.value)
    } else {
        format!("{:.2}", figure.value)
    };
    match (figure.bar, figure.meets_bar()) {
        (Bar::None, _) => text,
        (_, true) => format!("**{text}**"),
        (_, false) => format!("**{text}, short**"),
    }
}

/// The bars of a figure under all laws.
fn bars(comparison: &Comparison, index: usize) -> String {
    let figures = comparison.results.iter().filter_map(|result| result.figures.get(index));
    let bars: Vec<String> =
        figures.filter(|f| f.bar != Bar::None).map(|f| f.bar.to_string()).collect();
    if bars.is_empty() { "-".to_owned() } else { bars.join(", ") }
}

/// The table, with links to `ID.svg`.
#[must_use]
pub fn markdown(comparisons: &[Comparison]) -> String {
    let mut out = INTRODUCTION.to_owned();
    for comparison in comparisons {
        let Scenario { id, title, .. } = comparison.scenario;
        // Writing to a string cannot fail.
        let _ = write!(out, "\n## {id}: {title}\n\n[curves]({id}.svg)\n\n| |");
        for result in &comparison.results {
            let _ = write!(out, " {} |", name(result.law));
        }
        out.push_str(" bar |\n|---|");
        out.push_str(&"---|".repeat(comparison.results.len() + 1));
        out.push('\n');
        let first = comparison.results.first().map_or(&[][..], |result| &result.figures);
        for (index, figure) in first.iter().enumerate() {
            let _ = write!(out, "| {} |", figure.name);
            for result in &comparison.results {
                let text = result.figures.get(index).map(cell).unwrap_or_default();
                let _ = write!(out, " {text} |");
            }
            let _ = writeln!(out, " {} |", bars(comparison, index));
        }
    }
    out
}

/// The files of the report: their names and contents.
#[must_use]
pub fn files(comparisons: &[Comparison]) -> Vec<(String, String)> {
    let mut files = vec![("README.md".to_owned(), markdown(comparisons))];
    for comparison in comparisons {
        let Scenario { id, title, .. } = comparison.scenario;
        let lines: Vec<Curve> =
            comparison.results.iter().map(|result| result.line.clone()).collect();
        files.push((format!("{id}.svg"), svg(&format!("{id}: {title}"), &lines)));
    }
    files
}
