//! Files with keys, some of which are credentials that systemd passes to the service.

use std::borrow::Cow;
use std::path::PathBuf;

use ebb_advice::Advice;
use ebb_config::KeyFile;

/// Where systemd puts the credentials of a service.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// A credential that was not passed to this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("systemd has passed no credential {name} to this process")]
pub struct MissingCredential {
    /// Its name.
    pub name: String,
}

impl Advice for MissingCredential {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let name = &self.name;
        let remedy = format!(
            "add `LoadCredential={name}:PATH` to the service (`systemctl edit ebbd`) and restart it, \
             or name the file by its path"
        );
        Some(remedy.into())
    }
}

/// The path of a file with a key.
///
/// # Errors
/// [`MissingCredential`].
pub(crate) fn path_of_key(file: &KeyFile) -> Result<PathBuf, MissingCredential> {
    key_path(file, credentials_folder())
}

/// The folder of the credentials that systemd has passed.
pub(crate) fn credentials_folder() -> Option<PathBuf> {
    std::env::var_os(CREDENTIALS).map(PathBuf::from)
}

/// The path of a file with a key, where credentials are in `folder`.
fn key_path(file: &KeyFile, folder: Option<PathBuf>) -> Result<PathBuf, MissingCredential> {
    let (name, folder) = match (file, folder) {
        (KeyFile::Path(path), _) => return Ok(path.clone()),
        (KeyFile::Credential(name), folder) => (name, folder),
    };
    let path = folder.map(|folder| folder.join(name)).filter(|path| path.exists());
    path.ok_or_else(|| MissingCredential { name: name.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_files_or_credentials_that_were_passed() {
        let folder = tempfile::tempdir().unwrap();
        let passed = folder.path().join("key");
        std::fs::write(&passed, "secret").unwrap();
        let [key, other] = ["key", "other"].map(|name| KeyFile::Credential(name.to_owned()));
        let there = Some(folder.path().to_owned());
        assert_eq!(key_path(&key, there.clone()).unwrap(), passed);
        for (file, folder) in [(&other, there), (&key, None)] {
            let error = key_path(file, folder).unwrap_err();
            assert!(error.remedy().unwrap().contains("LoadCredential="), "{error}");
        }
        let path = KeyFile::Path("/absent".into());
        assert_eq!(key_path(&path, None).unwrap(), PathBuf::from("/absent"));
    }
}
