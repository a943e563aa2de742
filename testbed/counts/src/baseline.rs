//! The committed counts, one a line, and the machine that made them.
//!
//! `environment KEY VALUE`, `count FIGURE VALUE`, `cost FIGURE VALUE FUNCTION`. Functions are
//! listed from [`LISTED`] of a figure on.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::callgrind::Costs;

/// The part of a figure from which on a function is listed.
pub const LISTED: f64 = 0.01;

const HEAD: &str = "\
# Counts of one request: EXPORT.VOLUME.LOAD.COUNT. `make counts` compares with them, and
# `make counts UPDATE=1` writes them. CONTRIBUTING.md says when.
";

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// What counts depend on besides the code.
    pub environment: BTreeMap<String, String>,
    /// Figures.
    pub counts: BTreeMap<String, f64>,
    /// Costs of functions by figure.
    pub costs: BTreeMap<String, Costs>,
}

impl Counts {
    /// Reads what [`Counts::write`] has written.
    ///
    /// # Errors
    /// The first line that is not understood.
    pub fn read(text: &str) -> Result<Counts, String> {
        let mut counts = Counts::default();
        for (number, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            counts.read_line(line).ok_or_else(|| format!("line {}: `{line}`", number + 1))?;
        }
        Ok(counts)
    }

    fn read_line(&mut self, line: &str) -> Option<()> {
        let (kind, rest) = line.split_once(' ')?;
        let (key, rest) = rest.split_once(' ')?;
        match kind {
            "environment" => _ = self.environment.insert(key.to_owned(), rest.to_owned()),
            "count" => _ = self.counts.insert(key.to_owned(), rest.parse().ok()?),
            "cost" => {
                let (value, function) = rest.split_once(' ')?;
                let costs = self.costs.entry(key.to_owned()).or_default();
                costs.insert(function.to_owned(), value.parse().ok()?);
            }
            _ => return None,
        }
        Some(())
    }

    /// The text of the file.
    #[must_use]
    pub fn write(&self) -> String {
        let mut text = HEAD.to_owned();
        for (key, value) in &self.environment {
            let _ = writeln!(text, "environment {key} {value}");
        }
        for (figure, value) in &self.counts {
            let _ = writeln!(text, "count {figure} {value:.4}");
        }
        for (figure, costs) in &self.costs {
            let least = self.counts.get(figure).copied().unwrap_or_default() * LISTED;
            for (function, value) in costs.iter().filter(|(_, value)| **value >= least) {
                let _ = writeln!(text, "cost {figure} {value:.1} {function}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_baseline_is_read_and_small_functions_left_out() {
        let costs = [("big<T> as X".to_owned(), 900.0), ("small".to_owned(), 9.0)];
        let mut counts = Counts {
            environment: [("rustc".to_owned(), "1.95.0 (a b)".to_owned())].into(),
            counts: [("a.b.c.instructions".to_owned(), 1000.5)].into(),
            costs: [("a.b.c.instructions".to_owned(), costs.into())].into(),
        };
        let read = Counts::read(&counts.write()).unwrap();
        counts.costs.get_mut("a.b.c.instructions").unwrap().remove("small");
        assert_eq!(read, counts);
        assert_eq!(Counts::read("count a").unwrap_err(), "line 1: `count a`");
    }
}
