//! Each line of the log has a message: a constant that an operator can search for.

use super::{Finding, Source, positions};

const MACROS: [&str; 5] = [
    "tracing::error!(",
    "tracing::warn!(",
    "tracing::info!(",
    "tracing::debug!(",
    "tracing::trace!(",
];

/// Calls that log fields only.
pub(crate) fn log_lines(source: &Source) -> Vec<Finding> {
    let hint = "end the fields with a message: a short constant phrase";
    let calls = MACROS.iter().flat_map(|name| {
        let after = |at: usize| at + name.len();
        positions(&source.code, name).into_iter().map(after).collect::<Vec<_>>()
    });
    let silent = calls.filter(|at| !has_message(&source.code, *at));
    silent.map(|at| source.finding("log line", source.line_at(at), hint)).collect()
}

/// Returns true if one of the arguments that begin at `from` is a literal.
fn has_message(code: &str, from: usize) -> bool {
    let (mut depth, mut begins) = (0_usize, true);
    for byte in code.bytes().skip(from) {
        match byte {
            b'"' if begins && depth == 0 => return true,
            b'(' | b'[' | b'{' => depth += 1,
            b')' if depth == 0 => return false,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        begins = byte == b',' || (begins && byte.is_ascii_whitespace());
    }
    false
}
