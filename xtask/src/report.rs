//! What is printed while tests run, and at the end.

use std::io::Write;

use crate::Result;
use crate::plan::{key, taken, taken_file};
use crate::schedule::{Ended, Outcome};

/// Shorter tests are not worth a line.
const SLOW_SECONDS: f64 = 5.0;
/// Lines of a failed test's log.
const LINES: usize = 60;
/// Failed tests whose logs are printed.
const LOGS: usize = 20;

pub(crate) fn say(text: &str) {
    // A reader that is gone needs no more of it.
    let _ = writeln!(std::io::stdout(), "{text}");
}

pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A job has ended.
pub(crate) fn ended(ended: &Ended) {
    if !ended.failed.is_empty() {
        say(&format!("FAILED {:6.1} s  {}", ended.taken.seconds, ended.failed.join(", ")));
    } else if ended.taken.seconds >= SLOW_SECONDS {
        say(&format!("    ok {:6.1} s  {}", ended.taken.seconds, ended.name));
    }
}

/// Prints the end of each failed test's log and the sum, and keeps the times. Returns true if all
/// tests passed.
pub(crate) fn finish(outcome: &Outcome) -> Result<bool> {
    for ended in outcome.ended.iter().filter(|ended| !ended.failed.is_empty()).take(LOGS) {
        say(&format!("\n---- {} ({})", ended.failed.join(", "), ended.log.display()));
        let text = std::fs::read(&ended.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines = text.lines().collect::<Vec<_>>();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            say(&line.chars().take(400).collect::<String>());
        }
    }
    let mut all = taken(&outcome.target);
    let is_full_scale = outcome.is_full_scale;
    all.extend(outcome.ended.iter().map(|ended| (key(&ended.name, is_full_scale), ended.taken)));
    let text = serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?;
    let file = taken_file(&outcome.target);
    std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    say("");
    let failed = outcome.ended.iter().flat_map(|ended| &ended.failed).collect::<Vec<_>>();
    failed.iter().for_each(|name| say(&format!("failed: {name}")));
    let failed = failed.len();
    let all = outcome.ended.iter().map(|ended| ended.tests).sum::<usize>();
    say(&format!("in {:.0} s: {} passed, {failed} failed", outcome.seconds, all - failed.min(all)));
    Ok(failed == 0)
}
