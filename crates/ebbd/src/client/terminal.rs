//! Text for a terminal: parts of it come from clients, guests, servers and images.

use std::borrow::Cow;
use std::fmt::Write;

use ebb_image::is_shown;

/// Length of a colour or another attribute (`ESC [ digits m`) at the start of `text`, bytes.
fn attribute(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("\x1b[")?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    rest[end..].starts_with('m').then_some(2 + end + 1)
}

/// Text in which the terminal obeys nothing but colours: characters that control it, or that change
/// the order of the text after them, are written as `\uXXXX`, which means the same in JSON.
pub fn terminal_text(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| is_shown(c) || matches!(c, '\n' | '\t');
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let (mut safe, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        let length = attribute(rest).unwrap_or(c.len_utf8());
        let part = &rest[..length];
        if is_plain(c) || length > c.len_utf8() {
            safe.push_str(part);
        } else {
            // None of these is beyond the first plane. Writing to a string does not fail.
            let _ = write!(safe, "\\u{:04x}", u32::from(c));
        }
        rest = &rest[length..];
    }
    Cow::Owned(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_colours_and_nothing_else() {
        let plain = "a\tb\n\u{e4} \"x\"";
        assert!(matches!(terminal_text(plain), Cow::Borrowed(text) if text == plain));
        let coloured = "\x1b[31mred\x1b[0m\x1b[38;5;9mx\x1b[39m";
        assert_eq!(terminal_text(coloured), coloured);
        for (text, safe) in [
            ("a\u{202e}b", "a\\u202eb"),
            ("\u{2066}\u{200f}\u{2028}", "\\u2066\\u200f\\u2028"),
            ("\x1b[2J\x1b]0;title\x07\r", "\\u001b[2J\\u001b]0;title\\u0007\\u000d"),
            ("\u{9b}31m\x1b", "\\u009b31m\\u001b"),
            ("\x1b[31", "\\u001b[31"),
        ] {
            assert_eq!(terminal_text(text), safe, "{text:?}");
        }
        let json = serde_json::json!({ "error": "a\u{202e}b\u{9b}" }).to_string();
        let same: serde_json::Value = serde_json::from_str(&terminal_text(&json)).unwrap();
        assert_eq!(same["error"], "a\u{202e}b\u{9b}");
    }
}
