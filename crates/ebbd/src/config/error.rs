//! What is wrong with a configuration, where, and what to do about it.
//!
//! A [`ConfigError`] names the file and line or the command-line option, the key, and a remedy.
//! Text that came from outside is shortened and stripped of control characters before it enters
//! a message, so that a hostile file can neither flood nor forge log lines.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::size::SizeError;

/// What sort of mistake a [`ConfigError`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file cannot be opened or read.
    Read,
    /// The file is larger than [`super::MAX_FILE_BYTES`].
    TooLarge,
    /// The file is no TOML, or not UTF-8.
    Syntax,
    /// A key or volume option that does not exist.
    UnknownKey,
    /// A value of the wrong type, or one that does not parse.
    InvalidValue,
    /// A word that is not among the values of its key.
    UnknownChoice,
    /// A number or length outside its limits.
    OutOfRange,
    /// A key that must be there is not.
    Missing,
    /// Two settings that exclude each other.
    Conflict,
    /// The same thing given twice.
    Duplicate,
    /// No volume, or no address to serve it at.
    NothingToServe,
}

/// A mistake in the configuration file or on the command line.
///
/// It displays as one line: `FILE:LINE: KEY: message; remedy`.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConfigError {
    /// What sort of mistake it is.
    pub kind: ErrorKind,
    /// The configuration file, if the mistake is in it.
    pub file: Option<PathBuf>,
    /// The line in `file`, counted from 1.
    pub line: Option<usize>,
    /// The key (`nbd.max_request`, `volume.disk.size`) or option (`--max-request`).
    pub key: Option<Box<str>>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
    /// The error of the operating system, for [`ErrorKind::Read`].
    pub source: Option<io::Error>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}", file.display())?;
            if let Some(line) = self.line {
                write!(f, ":{line}")?;
            }
            f.write_str(": ")?;
        }
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

// The message has the text of `source` in it already, where it belongs before the remedy; a chain
// printed whole would repeat it. So it is a field, and not `Error::source`.
impl std::error::Error for ConfigError {}

/// Why a value is refused, before it is known where it stood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}; {remedy}")]
pub struct BadValue {
    /// What sort of mistake it is.
    pub kind: ErrorKind,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl BadValue {
    pub(super) fn new(
        kind: ErrorKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { kind, message: message.into(), remedy: remedy.into() }
    }
}

impl From<SizeError> for BadValue {
    fn from(error: SizeError) -> Self {
        let kind = match error {
            SizeError::Overflow(_) | SizeError::Negative(_) => ErrorKind::OutOfRange,
            _ => ErrorKind::InvalidValue,
        };
        Self::new(kind, error.to_string(), error.remedy())
    }
}

/// Where a value stood: a key in a line of a file, or an option of the command line.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) file: Option<Rc<Path>>,
    pub(super) line: Option<usize>,
    pub(super) key: Box<str>,
}

impl Place {
    /// A place on the command line.
    pub(super) fn option(key: impl Into<Box<str>>) -> Self {
        Self { file: None, line: None, key: key.into() }
    }

    /// The error `bad` at this place.
    pub(super) fn error(&self, bad: BadValue) -> ConfigError {
        ConfigError {
            kind: bad.kind,
            file: self.file.as_deref().map(Path::to_path_buf),
            line: self.line,
            key: Some(shorten(&self.key).into()),
            message: bad.message,
            remedy: bad.remedy,
            source: None,
        }
    }

    /// How another error's message refers to this place.
    pub(super) fn describe(&self) -> String {
        let key = shorten(&self.key);
        self.line.map_or_else(|| key.clone(), |line| format!("{key} in line {line}"))
    }
}

/// A value and where it stood.
#[derive(Clone, Debug)]
pub(super) struct Located<T> {
    pub(super) value: T,
    pub(super) place: Place,
}

impl<T> Located<T> {
    /// The error of `kind` at the place of this value.
    pub(super) fn error(
        &self,
        kind: ErrorKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ConfigError {
        self.place.error(BadValue::new(kind, message, remedy))
    }
}

/// The longest piece of foreign text a message repeats, in characters.
const SHORTEN_CHARS: usize = 80;

/// `text` as it may stand in a message: at most 80 characters, control characters escaped.
pub(crate) fn shorten(text: &str) -> String {
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

/// The known word that `given` was probably meant to be, if any comes near.
///
/// Case and `-` against `_` do not count; a part of a word finds the whole (`psk`, `tls_psk`).
pub(crate) fn closest<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // The distance takes time proportional to both lengths, and no known word is this long.
    if given.len() > 64 {
        return None;
    }
    let plain = |word: &str| word.to_ascii_lowercase().replace('-', "_");
    let given = plain(given);
    known
        .into_iter()
        .filter_map(|word| {
            let target = plain(word);
            let distance = strsim::levenshtein(&given, &target);
            let near = distance <= 1 + target.len() / 4 && distance < target.len();
            let part = given.len() >= 3 && target.contains(&given);
            (near || part).then_some((distance, word))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

/// The remedy for an unknown word: the likely one if there is one, else all of them.
pub(crate) fn suggest<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
    what: &str,
) -> String {
    if let Some(word) = closest(given, known.clone()) {
        return format!("did you mean `{word}`?");
    }
    let all: Vec<&str> = known.into_iter().collect();
    format!("{what}: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_word() {
        let keys = ["listen", "workers", "log", "nbd", "volume"];
        assert_eq!(closest("lsiten", keys), Some("listen"));
        assert_eq!(closest("Worker", keys), Some("workers"));
        assert_eq!(closest("volumes", keys), Some("volume"));
        assert_eq!(closest("zebra", keys), None);
        assert_eq!(closest("readonly", ["read_only", "size"]), Some("read_only"));
        assert_eq!(closest("read-only", ["read_only", "size"]), Some("read_only"));
        assert_eq!(closest("psk", ["tls", "tls_psk"]), Some("tls_psk"));
        // A swapped pair must not turn a word into its opposite.
        assert_eq!(closest("no", ["auto", "on", "off"]), None);
        assert_eq!(closest("", keys), None);
        assert_eq!(closest(&"x".repeat(1_000_000), keys), None);
    }

    #[test]
    fn foreign_text_is_tamed() {
        assert_eq!(shorten("it's"), "it's");
        assert_eq!(shorten("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(shorten(&"y".repeat(100)), format!("{}...", "y".repeat(80)));
    }

    #[test]
    fn one_line_with_everything() {
        let place =
            Place { file: Some(Rc::from(Path::new("/e.toml"))), line: Some(3), key: "a".into() };
        let error = place.error(BadValue::new(ErrorKind::Missing, "m", "r"));
        assert_eq!(error.to_string(), "/e.toml:3: a: m; r");
        let error = Place::option("--a").error(BadValue::new(ErrorKind::Missing, "m", "r"));
        assert_eq!(error.to_string(), "--a: m; r");
    }
}
