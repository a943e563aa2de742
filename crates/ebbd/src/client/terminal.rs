//! Text for a terminal: parts of it come from clients, guests, servers and images.
//!
//! A line of the text may end with a name, and a name may have a line feed. Control characters in
//! replies of the daemon therefore become stand-ins before anything reads the reply, code points of
//! a private use area, which [`terminal_text`] writes as escapes.

use std::borrow::Cow;
use std::fmt::Write;

use ebb_image::is_shown;

/// The stand-in of the control character U+0000; the others follow.
const STAND_INS: u32 = 0xf_0000;

/// The control character that `c` stands for.
fn control(c: char) -> Option<char> {
    let number = u32::from(c).checked_sub(STAND_INS)?;
    char::from_u32(number).filter(|c| c.is_control())
}

/// The JSON text `json` with stand-ins for the control characters that its strings have.
pub(super) fn with_stand_ins(json: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len());
    let mut rest = json;
    while let Some((&first, after)) = rest.split_first() {
        // Outside of strings there is no backslash.
        let (escaped, length) = match rest {
            [b'\\', b'b', ..] => (Some(8), 2),
            [b'\\', b't', ..] => (Some(9), 2),
            [b'\\', b'n', ..] => (Some(10), 2),
            [b'\\', b'f', ..] => (Some(12), 2),
            [b'\\', b'r', ..] => (Some(13), 2),
            [b'\\', b'u', b'0', b'0', high, low, ..] => {
                let digits = std::str::from_utf8(&[*high, *low]).ok().map(str::to_owned);
                (digits.and_then(|digits| u32::from_str_radix(&digits, 16).ok()), 6)
            }
            [b'\\', _, ..] => (None, 2),
            _ => (None, 1),
        };
        let stand_in = escaped.and_then(|number| char::from_u32(STAND_INS + number));
        match stand_in.filter(|c| control(*c).is_some()) {
            Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            None if length == 1 => out.push(first),
            None => out.extend_from_slice(rest.get(..length).unwrap_or(rest)),
        }
        rest = if length == 1 { after } else { rest.get(length..).unwrap_or_default() };
    }
    out
}

/// Text with control characters in the places of their stand-ins.
pub(super) fn restored(text: &str) -> String {
    text.chars().map(|c| control(c).unwrap_or(c)).collect()
}

/// Length of a colour or another attribute (`ESC [ digits m`) at the start of `text`, bytes.
fn attribute(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("\x1b[")?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    rest[end..].starts_with('m').then_some(2 + end + 1)
}

/// Text in which the terminal obeys nothing but colours: characters that control it, or that change
/// the order of the text after them, are written as `\uXXXX`, which means the same in JSON.
pub fn terminal_text(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| (is_shown(c) && control(c).is_none()) || matches!(c, '\n' | '\t');
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
            let _ = write!(safe, "\\u{:04x}", u32::from(control(c).unwrap_or(c)));
        }
        rest = &rest[length..];
    }
    Cow::Owned(safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_replies_are_escaped() {
        let body = serde_json::json!({ "a\n": "b\r\t\u{8}\u{c}\x1b[31m\0\\n \"\u{e4}\\" });
        let json = with_stand_ins(body.to_string().as_bytes());
        let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let text = value["a\u{f000a}"].as_str().unwrap();
        assert!(!text.contains(char::is_control), "{text:?}");
        assert_eq!(restored(text), body["a\n"].as_str().unwrap());
        let shown = "b\\u000d\\u0009\\u0008\\u000c\\u001b[31m\\u0000\\n \"\u{e4}\\";
        assert_eq!(terminal_text(text), shown);
        // With `--json` it means the same.
        let again = value.to_string();
        let again: serde_json::Value = serde_json::from_str(&terminal_text(&again)).unwrap();
        assert_eq!(again, body);
        for cut in ["\\", "\\u", "\\u00", "\\u001", "\\u00zz", "a\\u0041\\u00e4\\/"] {
            assert_eq!(with_stand_ins(cut.as_bytes()), cut.as_bytes());
        }
    }

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
