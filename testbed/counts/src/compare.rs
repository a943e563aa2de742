//! Compares counts with the baseline.
//!
//! A figure has grown if it is more than [`TOLERANCE`] above the baseline, and by more than
//! [`SLACK`]: less than one allocation or system call in a hundred requests is start-up, or an
//! alarm of the worker.

use crate::baseline::{Counts, LISTED};

/// By what part a figure may grow.
pub const TOLERANCE: f64 = 0.02;
/// By how much any figure may grow.
pub const SLACK: f64 = 0.01;
/// The most functions shown of a figure that has grown.
const SHOWN: usize = 5;
/// The part of a figure's growth from which on a function is shown.
const SHARE: f64 = 0.1;
/// The name of figures that depend on the compiler.
const INSTRUCTIONS: &str = ".instructions";

/// The result.
#[derive(Debug, Default)]
pub struct Comparison {
    /// What to print.
    pub lines: Vec<String>,
    /// Figures that have grown, or are not in the baseline, or not measured any longer.
    pub failed: usize,
    /// The largest difference of a figure that is compared, as a part of the baseline.
    pub largest: f64,
}

/// Compares. If an entry of the environment differs, instructions are not compared, and a line says
/// so.
#[must_use]
pub fn compare(now: &Counts, baseline: &Counts) -> Comparison {
    let mut result = Comparison::default();
    let strict = |key: &str| key != "kernel";
    let value = |counts: &Counts, key: &str| {
        counts.environment.get(key).cloned().unwrap_or_else(|| "unknown".to_owned())
    };
    let differing: Vec<String> = now
        .environment
        .keys()
        .chain(baseline.environment.keys().filter(|key| !now.environment.contains_key(*key)))
        .filter(|key| strict(key) && value(now, key) != value(baseline, key))
        .map(|key| format!("{key} {}, here {}", value(baseline, key), value(now, key)))
        .collect();
    let keys = now.counts.keys().chain(baseline.counts.keys());
    let keys: std::collections::BTreeSet<_> = keys.collect();
    for key in keys {
        compare_one(key, now, baseline, differing.is_empty(), &mut result);
    }
    if !differing.is_empty() {
        result.lines.push(format!(
            "instructions are NOT compared: the baseline is of {}; the other counts are. `make counts UPDATE=1` \
             on the commit before yours makes a baseline to compare with here",
            differing.join("; ")
        ));
    }
    if result.failed > 0 {
        result.lines.push(format!(
            "{} figures failed (baseline of Linux {}, this is {}). If the change is meant, commit the baseline of \
             `make counts UPDATE=1` with it",
            result.failed,
            value(baseline, "kernel"),
            value(now, "kernel")
        ));
    }
    result
}

fn compare_one(figure: &str, now: &Counts, baseline: &Counts, same: bool, result: &mut Comparison) {
    let (Some(value), Some(base)) = (now.counts.get(figure), baseline.counts.get(figure)) else {
        let which = if now.counts.contains_key(figure) { "new" } else { "missing" };
        result.lines.push(format!("{figure} - - - {which}"));
        result.failed += 1;
        return;
    };
    let ratio = if *base > 0.0 { value / base } else { 1.0 + value };
    let grown = value - base > (base * TOLERANCE).max(SLACK);
    let status = if figure.ends_with(INSTRUCTIONS) && !same {
        "not-compared"
    } else {
        result.largest = result.largest.max((ratio - 1.0).abs());
        match grown {
            true => "grew",
            false if base - value > (base * TOLERANCE).max(SLACK) => "ok-fell",
            false => "ok",
        }
    };
    result.lines.push(format!("{figure} {value:.4} {base:.4} {ratio:.4} {status}"));
    if status == "grew" {
        result.failed += 1;
        result.lines.extend(grown_functions(figure, now, baseline, same));
    }
}

/// The functions that have grown. Those of a figure without costs are the functions whose
/// instructions have grown.
fn grown_functions(figure: &str, now: &Counts, baseline: &Counts, same: bool) -> Vec<String> {
    let load = figure.rsplit_once('.').map_or(figure, |(load, _)| load);
    let of = if now.costs.contains_key(figure) {
        figure.to_owned()
    } else {
        format!("{load}{INSTRUCTIONS}")
    };
    if of.ends_with(INSTRUCTIONS) && !same {
        return vec!["    its functions are not compared".to_owned()];
    }
    let (Some(costs), Some(old)) = (now.costs.get(&of), baseline.costs.get(&of)) else {
        return vec!["    its functions are not in the baseline".to_owned()];
    };
    // A function that is not listed had at most this.
    let unlisted = baseline.counts.get(&of).copied().unwrap_or_default() * LISTED;
    let growth =
        |function: &str, value: f64| value - old.get(function).copied().unwrap_or(unlisted);
    let mut grown: Vec<(f64, &String, f64)> = costs
        .iter()
        .map(|(function, value)| (growth(function, *value), function, *value))
        .filter(|(growth, _, _)| *growth > 0.0)
        .collect();
    grown.sort_by(|a, b| b.0.total_cmp(&a.0));
    let sum: f64 = grown.iter().map(|(growth, _, _)| growth).sum();
    let unit = of.rsplit_once('.').map_or("", |(_, unit)| unit);
    let lines: Vec<String> = grown
        .iter()
        .take(SHOWN)
        .filter(|(growth, _, _)| *growth >= sum * SHARE)
        .map(|(growth, function, value)| {
            let before = match old.get(*function) {
                Some(before) => format!("{before:.1}"),
                None => format!("less than {unlisted:.1}"),
            };
            format!("    grew: {function}: {before} to {value:.1} {unit} (+{growth:.1})")
        })
        .collect();
    match lines.is_empty() {
        true => vec![format!("    no listed function has more {unit}")],
        false => lines,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(value: f64, costs: &[(&str, f64)]) -> Counts {
        let figure = "nbd.null.read_4k.instructions".to_owned();
        let costs = costs.iter().map(|(name, cost)| ((*name).to_owned(), *cost)).collect();
        Counts {
            environment: [("rustc".to_owned(), "1".to_owned())].into(),
            counts: [(figure.clone(), value)].into(),
            costs: [(figure, costs)].into(),
        }
    }

    #[test]
    fn a_grown_figure_names_its_function() {
        let before = counts(1000.0, &[("a", 600.0), ("b", 390.0)]);
        let after = counts(1050.0, &[("a", 600.0), ("b", 389.0), ("c", 61.0)]);
        let result = compare(&after, &before);
        assert_eq!(result.failed, 1);
        assert_eq!(
            result.lines[0],
            "nbd.null.read_4k.instructions 1050.0000 1000.0000 1.0500 grew"
        );
        assert_eq!(result.lines[1], "    grew: c: less than 10.0 to 61.0 instructions (+51.0)");
        assert!(result.lines[2].starts_with("1 figures failed"), "{:?}", result.lines);
    }

    #[test]
    fn small_growth_passes_and_new_figures_fail() {
        let before = counts(1000.0, &[]);
        assert_eq!(compare(&counts(1019.0, &[]), &before).failed, 0);
        assert_eq!(compare(&counts(500.0, &[]), &before).failed, 0);
        assert_eq!(compare(&before, &Counts::default()).failed, 1);
        assert_eq!(compare(&Counts::default(), &before).failed, 1);
        let zero = counts(0.0, &[]);
        assert_eq!(compare(&counts(0.005, &[]), &zero).failed, 0);
        assert_eq!(compare(&counts(1.0, &[]), &zero).failed, 1);
    }

    #[test]
    fn instructions_of_another_compiler_are_not_compared() {
        let before = counts(1000.0, &[]);
        let mut after = counts(2000.0, &[]);
        after.environment.insert("rustc".to_owned(), "2".to_owned());
        let result = compare(&after, &before);
        assert_eq!(result.failed, 0);
        assert!(result.lines[0].ends_with("not-compared"), "{:?}", result.lines);
        assert!(result.lines[1].contains("NOT compared: the baseline is of rustc 1, here 2"));
    }
}
