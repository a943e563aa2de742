//! Text in messages: untrusted text, bounded and without control characters, and counts.

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

/// A count with a noun whose plural ends with an s: `1 client`, `2 clients`.
pub fn plural(count: u64, noun: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_no_plural() {
        let all = [0, 1, 2].map(|count| plural(count, "client"));
        assert_eq!(all, ["0 clients", "1 client", "2 clients"]);
    }
}
