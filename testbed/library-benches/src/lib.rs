//! What the benches share: each prints its figures on stdout, one a line, and its progress on
//! stderr.

use std::fmt::Arguments;
use std::io::Write;

/// Prints a line of figures. A reader that has gone away does not end the bench.
pub fn result(line: Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints progress.
pub fn note(line: Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// The median; of an even number of values, the mean of the two in the middle.
///
/// # Panics
/// There are no values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}
