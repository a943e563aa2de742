//! The test of memory pressure on real Xen: what dom0 swaps while 23 disks are used one after the
//! other, and all at once, by the duration of a squeeze.
//!
//! The neighbour's memory does not fit next to what idle disks could keep, so what is not released
//! is swapped. Counts of pages; seconds are those of the machine, whose clock counts instructions.

use crate::Result;
use crate::bench::figure::{Bar, Better, Figure, median};
use crate::harness::binary;
use crate::xen::Machine;
use std::path::Path;
use std::time::Duration;

/// The settings that are compared: name, `buffer_squeeze_duration_ms`, `max_buffer_pages`.
const SETTINGS: [(&str, u32, u32); 5] = [
    ("default", 10, 1024),
    ("off", 0, 1024),
    ("1ms", 1, 1024),
    ("100ms", 100, 1024),
    ("nopool", 0, 0),
];
/// The bar of the seed's test, pages.
const SWAPPED_MOST: f64 = 1000.0;
/// "As without squeeze": so much longer at most.
const SAME_SPEED: f64 = 1.05;

/// How the test is run.
#[derive(Debug, Clone, Copy)]
pub struct Pressure {
    /// Whether guest pages stay mapped; else the hypervisor copies.
    pub persistent: bool,
    /// The daemon's `idle_memory`.
    pub idle_memory: &'static str,
    /// Rounds through all settings: every other one in the opposite order.
    pub rounds: u32,
}

/// Runs the test and gives its figures.
///
/// # Errors
/// The machine cannot be booted, or a load failed; the error shows the consoles.
pub fn pressure(daemon: &Path, how: Pressure) -> Result<Vec<Figure>> {
    let load = binary::release("testbed", "guest-load")?;
    let outcome = Machine::new(include_str!("pressure.sh"))
        .file("pressure-guest.sh", include_str!("pressure-guest.sh"))
        .file("persistent", if how.persistent { "on" } else { "off" })
        .file("options", format!("--idle-memory {}", how.idle_memory))
        .file("settings", settings(how.rounds))
        .guest(1, 512)
        .dom0_mib(600)
        .program(daemon)
        .program(&load)
        .guest_program(&load)
        .limit(Duration::from_secs(3000))
        .ok()?;
    let mode = if how.persistent { "persistent" } else { "copy" };
    let prefix = format!("xen_pressure_{mode}_{}", how.idle_memory);
    let swaps = rows(&outcome.answers("swap"));
    let seconds = rows(&outcome.answers("peer.seconds"));
    let of = |rows: &[Row], setting: &str, phase: &str, value: fn(&[f64]) -> Option<f64>| {
        let rows = rows.iter().filter(|row| row.setting == setting && row.phase == phase);
        rows.filter_map(|row| value(&row.numbers)).collect::<Vec<f64>>()
    };
    let mut figures = Vec::new();
    for (what, value) in [("pswpin", swapped_in as fn(&[f64]) -> _), ("pswpout", swapped_out)] {
        let alone = of(&swaps, "neighbour", "alone", value);
        let name = format!("{prefix}_neighbour_alone_{what}");
        figures.extend(Figure::from_rounds(name, &[alone], Better::Lower, Bar::None));
        for phase in ["turns", "all"] {
            for (setting, _, _) in SETTINGS {
                let ours = of(&swaps, setting, phase, value);
                let bar = match (setting, phase) {
                    ("default", "turns") => Bar::AtMost(SWAPPED_MOST),
                    _ => Bar::None,
                };
                let name = format!("{prefix}_{phase}_{setting}_{what}");
                figures.extend(Figure::from_rounds(name, &[ours], Better::Lower, bar));
            }
        }
    }
    for (setting, _, _) in SETTINGS {
        for (phase, peer) in [("turns", "off"), ("all", "nopool")] {
            let both = [of(&seconds, setting, phase, span), of(&seconds, peer, phase, span)];
            let bar = if setting == "default" { Bar::AtMostRatio(SAME_SPEED) } else { Bar::None };
            let name = format!("{prefix}_{phase}_{setting}_seconds_against_{peer}");
            figures.extend(Figure::from_rounds(name, &both, Better::Lower, bar));
        }
    }
    // All at once, no worse than with no pool: what was swapped in both directions.
    let both = ["default", "nopool"].map(|setting| median(&of(&swaps, setting, "all", swapped)));
    if let [Some(ours), Some(peer)] = both {
        let bar = match peer > 0.0 {
            true => Bar::AtMostRatio(1.0),
            false => Bar::AtMost(0.0),
        };
        let name = format!("{prefix}_all_default_swapped_against_nopool");
        figures.push(Figure { name, ours, peer: Some(peer), bar });
    }
    match figures.len() > SETTINGS.len() * 4 {
        true => Ok(figures),
        false => Err(outcome.unexpected("figures of all settings")),
    }
}

/// The settings, in order. The first does not count: the first run makes the neighbour swap what it
/// does not use, and maps what was released meanwhile.
fn settings(rounds: u32) -> String {
    let line = |&(name, squeeze, pages): &(&str, u32, u32)| format!("{name} {squeeze} {pages}\n");
    let mut lines = vec!["warm 10 1024\n".to_owned()];
    for round in 0..rounds {
        match round % 2 {
            0 => lines.extend(SETTINGS.iter().map(line)),
            _ => lines.extend(SETTINGS.iter().rev().map(line)),
        }
    }
    lines.concat()
}

/// "SETTING PHASE NUMBER...".
#[derive(Debug)]
struct Row {
    setting: String,
    phase: String,
    numbers: Vec<f64>,
}

fn rows(answers: &[String]) -> Vec<Row> {
    let row = |text: &String| {
        let mut words = text.split(' ');
        let (setting, phase) = (words.next()?.to_owned(), words.next()?.to_owned());
        Some(Row { setting, phase, numbers: words.filter_map(|n| n.parse().ok()).collect() })
    };
    answers.iter().filter_map(row).collect()
}

/// Of "in out" before and after.
fn swapped_in(numbers: &[f64]) -> Option<f64> {
    Some(numbers.get(2)? - numbers.first()?)
}

fn swapped_out(numbers: &[f64]) -> Option<f64> {
    Some(numbers.get(3)? - numbers.get(1)?)
}

fn swapped(numbers: &[f64]) -> Option<f64> {
    Some(swapped_in(numbers)? + swapped_out(numbers)?)
}

/// Of "start end".
fn span(numbers: &[f64]) -> Option<f64> {
    Some(numbers.get(1)? - numbers.first()?)
}
