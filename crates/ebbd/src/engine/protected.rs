//! Files that the daemon trusts: its folders in the state directory, the configuration, tokens,
//! certificates, keys and the programs that write keys. No volume that an operator or a state file
//! defines may be at one: a client of such a volume could name programs and keys for the next
//! start.
//!
//! # Invariants
//! - Files are compared by their numbers, and folders at each step up to the root: a link, a second
//!   name, `..`, a bound mount or `/proc/self` leads to the same numbers.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ebb_api::Refusal;
use ebb_config::{
    Config, KeyFile, KeySource, NbdUriKeys, StoreUri, VhostSocket, VolumeConfig, VolumeOrigin,
};
use ebb_control::Refused;

use super::open::on_a_thread;
use super::{Engine, lock};
use crate::broker::HostFiles;
use crate::credentials::{credentials_folder, path_of_key};
use crate::listener::directory_of;
use crate::stores::StoreError;
use crate::vhost::WantedSockets;

/// The device and the inode of a file.
type Number = (u64, u64);

fn number(found: &Metadata) -> Number {
    (found.dev(), found.ino())
}

/// Folders that the daemon keeps in the state directory.
const STATE_FOLDERS: [&str; 4] = ["volumes", "groups", "created", "rbd"];
/// The purpose of files there.
const STATE: &str = "in a folder of the daemon's state";

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct ProtectedFiles {
    files: Vec<(&'static str, PathBuf)>,
    /// Folders with everything below.
    folders: Vec<(&'static str, PathBuf)>,
    /// Folders whose `*.pem` files count.
    certificates: Vec<PathBuf>,
    host: HostFiles,
}

impl ProtectedFiles {
    /// The files of a daemon with this configuration, which was read from the file `own`.
    pub(crate) fn of(config: &Config, state: Option<&Path>, own: Option<&Path>) -> ProtectedFiles {
        let mut all = ProtectedFiles::default();
        // Images may be next to them: packages have `state = "/var/lib/ebbd"`.
        for state in state.into_iter().chain(config.state.as_deref()) {
            let folders = STATE_FOLDERS.map(|name| (STATE, state.join(name)));
            all.folders.extend(folders);
        }
        let credentials = credentials_folder();
        all.folders.extend(credentials.map(|path| ("a credential of the service", path)));
        let file = |what| move |path: &Path| (what, path.to_owned());
        all.files.extend(own.map(file(StoreError::CONFIGURATION)));
        all.files.extend(config.web_tokens.as_deref().map(file("the file of tokens")));
        all.files.extend(config.control.as_deref().map(file("the control socket")));
        all.files.extend(config.nbd.tls_psk.as_deref().map(file("a file of keys")));
        all.certificates.extend(config.nbd.tls_certificates.clone());
        all.certificates.extend(config.web_tls_certificates.clone());
        all.host = HostFiles::of(config);
        for volume in config.volumes.values() {
            all.add_keys_of(volume);
        }
        all
    }

    /// Refuses a volume at one of these files. Blocks.
    ///
    /// # Errors
    /// [`StoreError::Protected`].
    pub(crate) fn must_not_have(&self, store: &StoreUri) -> Result<(), StoreError> {
        let (StoreUri::File(path) | StoreUri::Qcow2(path)) = store else { return Ok(()) };
        match self.purpose_of(path) {
            Some(what) => Err(StoreError::Protected { store: store.to_string(), what }),
            None => Ok(()),
        }
    }

    fn is_empty(&self) -> bool {
        let lists_are_empty = self.files.is_empty() && self.folders.is_empty();
        lists_are_empty && self.certificates.is_empty() && self.host.is_empty()
    }

    fn add_keys_of(&mut self, volume: &VolumeConfig) {
        let file = |key: &KeyFile| Some(("the key of a volume", path_of_key(key).ok()?));
        match &volume.encryption {
            Some(KeySource::File(key)) => self.files.extend(file(key)),
            Some(KeySource::Command(words)) => {
                // It may be the argument of a shell.
                let paths = words.iter().filter_map(|word| path_in(word));
                self.files
                    .extend(paths.map(|path| ("part of the command that writes a key", path)));
            }
            None => {}
        }
        match &volume.store {
            StoreUri::Rbd(uri) => {
                let passphrase = uri.encryption.iter().map(|encryption| &encryption.passphrase);
                self.files.extend(uri.keyring.iter().chain(passphrase).filter_map(file));
            }
            StoreUri::Nbd(uri) if let Some(tls) = &uri.tls => match &tls.keys {
                NbdUriKeys::System => {}
                NbdUriKeys::Certificates(folder) => self.certificates.push(folder.clone()),
                NbdUriKeys::Psk(file, _) => self.files.push(("a file of keys", file.clone())),
            },
            _ => {}
        }
    }

    /// The purpose of the file at `path`, if it is one of these. Blocks.
    pub(crate) fn purpose_of(&self, path: &Path) -> Option<String> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let found = fs::metadata(path).ok();
        // The broker looks where a link leads.
        let target = fs::canonicalize(path).ok();
        if self.host.has(path) || target.is_some_and(|target| self.host.has(&target)) {
            return Some("a file of the host outside of `open_paths`".to_owned());
        }
        // The place of the file, and where a link leads.
        let places = [fs::canonicalize(folder).ok(), fs::canonicalize(path).ok()];
        let [named, target] = places;
        let target = target.as_deref().and_then(Path::parent).map(Path::to_owned);
        let above: BTreeSet<Number> = named
            .iter()
            .chain(&target)
            .flat_map(|place| place.ancestors())
            .filter_map(|place| fs::metadata(place).ok())
            .map(|found| number(&found))
            .collect();
        let same_place = |other: &Path| {
            let place = other.parent().and_then(|folder| fs::canonicalize(folder).ok());
            place.is_some() && place == named && other.file_name() == path.file_name()
        };
        // A folder need not exist yet.
        let is_in = |place: &Path| {
            fs::metadata(place).is_ok_and(|it| above.contains(&number(&it))) || same_place(place)
        };
        if let Some((what, _)) = self.folders.iter().find(|(_, place)| is_in(place)) {
            return Some((*what).to_owned());
        }
        let is_it = |other: &Path| {
            let other_found = fs::metadata(other).ok();
            let same = found.as_ref().zip(other_found.as_ref());
            same.is_some_and(|(one, other)| number(one) == number(other)) || same_place(other)
        };
        if let Some((what, _)) = self.files.iter().find(|(_, file)| is_it(file)) {
            return Some((*what).to_owned());
        }
        let is_pem = path.extension().is_some_and(|end| end == "pem");
        let beside = |folder: &PathBuf| {
            (is_pem && same_place(&folder.join(path.file_name().unwrap_or_default())))
                || entries(folder)
                    .any(|file| file.extension().is_some_and(|it| it == "pem") && is_it(&file))
        };
        if self.certificates.iter().any(beside) {
            return Some("a certificate or its key".to_owned());
        }
        // A second name of a file of the state directory.
        let found = found.filter(|found| found.nlink() > 1 && found.is_file())?;
        let same =
            |file: &PathBuf| fs::metadata(file).is_ok_and(|it| number(&it) == number(&found));
        let mut all = self.folders.iter().flat_map(|(what, folder)| {
            let inner = entries(folder).filter(|entry| entry.is_dir()).flat_map(|it| entries(&it));
            entries(folder).chain(inner).map(|file| (*what, file))
        });
        all.find(|(_, file)| same(file)).map(|(what, _)| what.to_owned())
    }
}

/// Returns true if the volumes of this origin may be at no file that the daemon trusts: clients of
/// the control socket, or those who can write the state directory, define them.
pub(crate) fn is_confined(origin: Option<&VolumeOrigin>) -> bool {
    !matches!(origin, Some(VolumeOrigin::Configuration(_)))
}

/// The path that a word of a command is, or has behind a `=`.
fn path_in(word: &str) -> Option<PathBuf> {
    let word = match word.split_once('=') {
        Some((option, value)) if !option.contains('/') => value,
        _ => word,
    };
    word.contains('/').then(|| word.into())
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Rejects a socket whose folder is missing. The folder of a volume that is added is not made: a
/// mistaken path would leave it.
fn must_have_folder(socket: &Path) -> Result<(), Refused> {
    let Some(folder) = directory_of(socket) else { return Ok(()) };
    match fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let message = format!("vhost_user: the folder {} does not exist", folder.display());
            Err(Refused::new(
                Refusal::Invalid,
                "invalid_value",
                message,
                "make it, or choose another path",
            ))
        }
        // What else is wrong with it, opening the socket tells.
        _ => Ok(()),
    }
}

impl Engine {
    fn protected_files(&self) -> ProtectedFiles {
        let definitions = lock(&self.definitions);
        let state = self.state.as_ref().map(|state| state.root());
        match &definitions.config {
            Some(config) => ProtectedFiles::of(config, state, self.config_file.as_deref()),
            None => ProtectedFiles::default(),
        }
    }

    /// Refuses to open a file that the daemon trusts for a volume that is not defined in the
    /// configuration.
    ///
    /// # Errors
    /// [`StoreError::Protected`].
    pub(super) async fn must_be_unprotected(
        &self,
        name: &str,
        config: &VolumeConfig,
    ) -> Result<(), StoreError> {
        let (StoreUri::File(_) | StoreUri::Qcow2(_)) = &config.store else { return Ok(()) };
        if !is_confined(lock(&self.definitions).origin(name)) {
            return Ok(());
        }
        let (all, store) = (self.protected_files(), config.store.clone());
        if all.is_empty() {
            return Ok(());
        }
        on_a_thread(move || all.must_not_have(&store)).await
    }

    /// Refuses a socket at the place of a file that the daemon trusts.
    ///
    /// # Errors
    /// There is such a file, or the socket would be in a folder of the daemon's state, or its
    /// folder is missing.
    pub(super) async fn must_have_unprotected_socket(
        &self,
        config: &VolumeConfig,
    ) -> Result<(), Refused> {
        let Some(VhostSocket::Path(path)) = &config.vhost_user else { return Ok(()) };
        let (all, path) = (self.protected_files(), path.clone());
        super::manage::blocking(move || match all.purpose_of(&path) {
            Some(what) => {
                let message = format!("vhost_user: {} is {what}", path.display());
                Err(Refused::new(Refusal::Invalid, "invalid_value", message, "choose another path"))
            }
            None => must_have_folder(&path),
        })
        .await
    }

    /// Takes the sockets at files that the daemon trusts from volumes of the state directory.
    /// Blocks.
    pub(super) fn without_protected(&self, mut wanted: WantedSockets) -> WantedSockets {
        let is_named = |name: &String| {
            self.definition(name).is_some_and(|(volume, origin)| {
                volume.has_own_socket() && is_confined(Some(&origin))
            })
        };
        let (served, refused) = (&mut wanted.served, &mut wanted.refused);
        let all = OnceCell::new();
        served.retain(|path, name| {
            let all = || all.get_or_init(|| self.protected_files());
            let what =
                Some(&*name).filter(|name| is_named(name)).and_then(|_| all().purpose_of(path));
            let reason =
                what.map(|what| format!("{} is {what}: choose another path", path.display()));
            match reason {
                Some(reason) => {
                    refused.insert(name.clone(), reason);
                    false
                }
                None => true,
            }
        });
        wanted
    }
}
