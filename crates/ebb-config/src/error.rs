//! Errors of the configuration, each with its location and a remedy.
//!
//! A [`ConfigError`] names the file and line or the command-line option, the key, and a remedy.
//! Text of the file or the command line is shortened, and its control characters are escaped, before
//! it enters a message, so that a hostile file can neither flood nor forge log lines.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::SizeError;
use crate::shorten::shorten;

/// What sort of mistake a [`ConfigError`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// The file cannot be opened or read.
    Read,
    /// The file is larger than [`super::MAX_FILE_BYTES`].
    TooLarge,
    /// The file is not TOML, or not UTF-8.
    Syntax,
    /// A key or volume option that does not exist.
    UnknownKey,
    /// A value of the wrong type, or one that does not parse.
    InvalidValue,
    /// A word that is not among the values of its key.
    UnknownChoice,
    /// A number or length outside its limits.
    OutOfRange,
    /// A required key is missing.
    Missing,
    /// Two settings exclude each other.
    Conflict,
    /// A setting is given twice.
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
    pub kind: ConfigErrorKind,
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
    /// The error of the operating system, for [`ConfigErrorKind::Read`].
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

// The message contains the text of `source`, before the remedy, and a printed chain of errors would
// repeat it. Therefore it is a field, and not `Error::source`.
impl std::error::Error for ConfigError {}

/// Why a value is refused, without its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}; {remedy}")]
pub struct BadValue {
    /// What sort of mistake it is.
    pub kind: ConfigErrorKind,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl BadValue {
    pub(super) fn new(
        kind: ConfigErrorKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { kind, message: message.into(), remedy: remedy.into() }
    }
}

impl From<SizeError> for BadValue {
    fn from(error: SizeError) -> Self {
        let kind = match error {
            SizeError::Overflow(_) | SizeError::Negative(_) => ConfigErrorKind::OutOfRange,
            _ => ConfigErrorKind::InvalidValue,
        };
        Self::new(kind, error.to_string(), error.remedy())
    }
}

/// The location of a value: a key in a line of a file, or an option of the command line.
#[derive(Clone, Debug)]
pub(super) struct ValueLocation {
    pub(super) file: Option<Rc<Path>>,
    pub(super) line: Option<usize>,
    pub(super) key: Box<str>,
}

impl ValueLocation {
    /// A location on the command line.
    pub(super) fn option(key: impl Into<Box<str>>) -> Self {
        Self { file: None, line: None, key: key.into() }
    }

    /// The error `bad` at this location.
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

    /// The text with which the message of another error refers to this location.
    pub(super) fn describe(&self) -> String {
        let key = shorten(&self.key);
        self.line.map_or_else(|| key.clone(), |line| format!("{key} in line {line}"))
    }
}

/// A value and its location.
#[derive(Clone, Debug)]
pub(super) struct Located<T> {
    pub(super) value: T,
    pub(super) place: ValueLocation,
}

impl<T> Located<T> {
    /// The error of `kind` at the location of this value.
    pub(super) fn error(
        &self,
        kind: ConfigErrorKind,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ConfigError {
        self.place.error(BadValue::new(kind, message, remedy))
    }
}

/// The known word that is most similar to `given`, if any is similar.
///
/// Case is ignored, `-` equals `_`, and a part of a word finds the whole (`psk`, `tls_psk`).
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

/// The remedy for an unknown word: a similar one if there is one, else all of them.
pub fn suggest<'a>(
    given: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
    what: &str,
) -> String {
    if let Some(word) = closest(given, known.clone()) {
        return format!("did you mean `{word}`?");
    }
    let all: Vec<&str> = known.into_iter().collect();
    if all.is_empty() {
        return "there is none yet".to_owned();
    }
    format!("{what}: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_empty_list_of_words_is_shown() {
        assert_eq!(suggest("x", [], "the volumes are"), "there is none yet");
        assert_eq!(suggest("x", ["disk"], "the volumes are"), "the volumes are: disk");
    }

    #[test]
    fn a_similar_word_is_found() {
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
    fn untrusted_text_is_shortened_and_escaped() {
        assert_eq!(shorten("it's"), "it's");
        assert_eq!(shorten("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(shorten(&"y".repeat(100)), format!("{}...", "y".repeat(80)));
    }

    #[test]
    fn an_error_is_one_line_with_location_message_and_remedy() {
        let place = ValueLocation {
            file: Some(Rc::from(Path::new("/e.toml"))),
            line: Some(3),
            key: "a".into(),
        };
        let error = place.error(BadValue::new(ConfigErrorKind::Missing, "m", "r"));
        assert_eq!(error.to_string(), "/e.toml:3: a: m; r");
        let error =
            ValueLocation::option("--a").error(BadValue::new(ConfigErrorKind::Missing, "m", "r"));
        assert_eq!(error.to_string(), "--a: m; r");
    }
}
