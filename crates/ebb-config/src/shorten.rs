//! Untrusted text in messages: bounded, and without control characters.

/// The longest part of untrusted text that a message repeats, in characters.
const SHORTEN_CHARS: usize = 80;

/// Untrusted `text` for a message: at most 80 characters, control characters escaped.
pub fn shorten(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(SHORTEN_CHARS) {
        if matches!(c, '\'' | '"' | '\\') { out.push(c) } else { out.extend(c.escape_debug()) }
    }
    if chars.next().is_some() {
        out.push_str("...");
    }
    out
}
