//! What the programs print. A reader that has gone away does not end them: the exit status counts.

use std::fmt::Arguments;
use std::io::Write;

/// Prints a result.
pub fn result(line: Arguments<'_>) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints progress, or an error.
pub fn note(line: Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
