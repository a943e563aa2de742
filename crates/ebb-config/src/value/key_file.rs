//! A file with a key, at a path or passed by systemd.

use std::fmt;
use std::path::PathBuf;

use super::uri::bad;
use super::{BadValue, path, shorten};

/// How the name of a credential begins.
const CREDENTIAL: &str = "credential:";
/// The longest name of a credential, bytes.
const NAME_BYTES: usize = 255;

/// A file with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyFile {
    /// At a path.
    Path(PathBuf),
    /// The credential of this name, which systemd passes to the service (`LoadCredential=` of systemd.exec(5)): a file of
    /// that name in `$CREDENTIALS_DIRECTORY`.
    Credential(String),
}

impl KeyFile {
    pub(super) fn parse(text: &str) -> Result<KeyFile, BadValue> {
        let Some(name) = text.strip_prefix(CREDENTIAL) else {
            return Ok(KeyFile::Path(path(text)?));
        };
        // What systemd accepts: a file name.
        let is_name = !name.is_empty()
            && name.len() <= NAME_BYTES
            && ![".", ".."].contains(&name)
            && !name.contains(|c: char| c == '/' || c == ':' || c.is_control());
        match is_name {
            true => Ok(KeyFile::Credential(name.to_owned())),
            false => Err(bad(
                format!("`{}` is no name of a credential", shorten(name)),
                "write credential:NAME, with the NAME of LoadCredential= of the service",
            )),
        }
    }
}

impl fmt::Display for KeyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyFile::Path(path) => write!(f, "{}", path.display()),
            KeyFile::Credential(name) => write!(f, "{CREDENTIAL}{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_a_file_or_a_credential() {
        let parsed = |text: &str| KeyFile::parse(text);
        assert_eq!(parsed("/etc/key"), Ok(KeyFile::Path("/etc/key".into())));
        assert_eq!(
            parsed("credential:ceph.keyring"),
            Ok(KeyFile::Credential("ceph.keyring".into()))
        );
        let long = format!("credential:{}", "x".repeat(256));
        for text in ["", "credential:", "credential:a/b", "credential:..", "credential:a:b", &long]
        {
            assert!(parsed(text).is_err(), "{text}");
        }
        for text in ["/etc/key", "credential:key"] {
            assert_eq!(parsed(text).map(|file| file.to_string()), Ok(text.to_owned()));
        }
    }
}
