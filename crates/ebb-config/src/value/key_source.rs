//! Where the key of an encrypted volume is.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::KeyFile;
use super::uri::bad;
use crate::error::BadValue;
use crate::shorten::shorten;

/// Where the key of an encrypted volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file, all bytes of which are the key.
    File(KeyFile),
    /// A program by its whole path, and its arguments. It writes the key to its standard output.
    Command(Vec<String>),
}

impl FromStr for KeySource {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.split_once(':') {
            Some(("key-file", path)) if Path::new(path).is_absolute() => {
                Ok(Self::File(KeyFile::Path(path.into())))
            }
            Some(("key-file", path)) => Err(bad(
                format!("`{}` is no absolute path", shorten(path)),
                "write a path that begins with /: key-file:/etc/ebbd/disk.key",
            )),
            Some(("credential", _)) => KeyFile::parse(text).map(Self::File),
            Some(("command", words)) if words.starts_with('/') => {
                Ok(Self::Command(words.split_ascii_whitespace().map(str::to_owned).collect()))
            }
            Some(("command", words)) => Err(bad(
                format!("`{}` does not begin with the absolute path of a program", shorten(words)),
                "write command:/usr/bin/program and its arguments",
            )),
            // The text may be a key: it is not repeated.
            _ => Err(bad(
                "this does not say where the key is".to_owned(),
                "write key-file:PATH or credential:NAME, or in the configuration file command:PROGRAM; a key itself belongs in none",
            )),
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file @ KeyFile::Path(_)) => write!(f, "key-file:{file}"),
            Self::File(file @ KeyFile::Credential(_)) => write!(f, "{file}"),
            Self::Command(words) => write!(f, "command:{}", words.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_a_file_a_credential_or_the_output_of_a_program() {
        for text in
            ["key-file:/etc/disk.key", "credential:disk.key", "command:/bin/get-key -n disk"]
        {
            assert_eq!(text.parse::<KeySource>().unwrap().to_string(), text);
        }
        for (text, what) in [
            ("key-file:disk.key", "no absolute path"),
            ("key-file:", "no absolute path"),
            ("credential:a/b", "no name of a credential"),
            ("command:get-key", "absolute path of a program"),
            ("command:", "absolute path of a program"),
        ] {
            let error = text.parse::<KeySource>().unwrap_err();
            assert!(error.message.contains(what) && !error.remedy.is_empty(), "{text}: {error:?}");
        }
    }

    #[test]
    fn what_may_be_a_key_is_not_repeated() {
        for text in ["hunter2", "passphrase:hunter2", ""] {
            let error = text.parse::<KeySource>().unwrap_err();
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }
}
