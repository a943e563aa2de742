//! The state directory: volumes that were added while the daemon ran, and sizes and limits that were changed. The daemon
//! owns it.
//!
//! `DIR/volumes` has one file for each volume, `NAME.toml` with the name percent-encoded. It has the keys of a table
//! `[volume.NAME]` at its top, or only a `size` and limits, which a volume of the configuration has instead of its own.
//! `DIR/groups` has the limits of groups (`state/groups.rs`).
//!
//! # Invariants
//! - A file is complete or absent, also after a power cut: it is written under a temporary name, made stable, renamed, and
//!   the directory is made stable. Temporary files that were left over are removed when the daemon starts.
//! - A change that cannot be made stable is undone, or the error says that it is not: [`StateError::is_applied`].
//! - A name is encoded in one way, so that no two files are about one volume, and no name leaves the directory.
//! - A file that cannot be used concerns its own volume only.
//! - One daemon at a time uses a directory ([`StateLock`]).

mod created;
mod directory;
#[cfg(any(test, feature = "state-faults"))]
mod faults;
mod groups;
mod lock;
mod mounts;
mod new_volume;
mod overrides;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ebb_advice::Advice;

pub use self::directory::StateStep;
use self::directory::{StateFolder, fails};
#[cfg(any(test, feature = "state-faults"))]
pub use self::faults::StateFaults;
pub use self::new_volume::{NewVolume, allow_list, check_name, key_named_at_run_time};
use super::error::{ConfigError, ConfigErrorKind, Located};
use super::file::{self, StateLayer};
use super::file_names::{decode, encode};
use super::parameter_values::check_limits;
use super::show::volume_table;
use super::value::{KeySource, volume_name, volume_size};
use super::volume_check::check_volume;
use super::{Config, VolumeConfig, VolumeOrigin};
use rustix::fs::OFlags;

pub use self::lock::StateLock;
pub use self::mounts::unmounted_point;
pub use self::overrides::VolumeOverrides;

/// What the names of the files end with.
const ENDING: &str = ".toml";
/// What the names of temporary files begin with. No name of a volume is encoded so.
const TEMPORARY: &str = ".new-";
/// The longest file name, bytes.
const MAX_FILE_NAME: usize = 255;
/// The longest file, bytes.
const MAX_STATE_BYTES: u64 = 64 << 10;
/// The size of a file that tries out the directory: more than most volumes need.
const TRIED_BYTES: usize = 4096;
/// The most files.
const MAX_FILES: usize = 65_536;
/// How files are opened: a link, or a FIFO without a writer, must not be followed or waited for.
const OPEN: i32 = OFlags::NONBLOCK.union(OFlags::NOFOLLOW).bits().cast_signed();

/// The state directory. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    volumes: PathBuf,
}

/// What the state directory has of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredVolume {
    /// Everything.
    Whole(Box<VolumeConfig>),
    /// What a volume of the configuration has instead of its own settings.
    Overrides(Box<VolumeOverrides>),
}

/// The state directory could not be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The name is too long for a file name.
    #[error("the name of the volume has {bytes} bytes as a file name, more than {MAX_FILE_NAME}")]
    LongName {
        /// Bytes of the file name.
        bytes: usize,
    },
    /// The directory has another definition of the volume.
    #[error("{path} has another definition of the volume", path = path.display())]
    DefinedTwice {
        /// The file with the other definition.
        path: PathBuf,
    },
    /// Another daemon has the directory.
    #[error("{path}: another daemon uses this state directory", path = path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A change could not be made stable, and was undone only in part.
    #[error(
        "cannot {action} {path}: {source}; {outcome}",
        path = path.display(),
        outcome = match applied {
            true => "that is done nevertheless, and a power cut may undo it",
            false => "that is undone, and the next start after a power cut may find it done",
        }
    )]
    NotStable {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
        /// Whether the directory has the change.
        applied: bool,
    },
}

impl Advice for StateError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            StateError::LongName { .. } => "choose a shorter one",
            StateError::DefinedTwice { .. } => {
                "remove that file, or the volume from the configuration, and reload"
            }
            StateError::InUse { .. } => {
                "stop that one, or give each daemon its own directory with `state`"
            }
            StateError::Io { .. } => {
                "check the state directory and the free space of its file system"
            }
            StateError::NotStable { .. } => {
                "check the state directory and its file system, and try again"
            }
        };
        Some(remedy.into())
    }
}

impl StateError {
    /// Whether the directory has the change that failed, although it may not be stable.
    pub fn is_applied(&self) -> bool {
        matches!(self, StateError::NotStable { applied: true, .. })
    }
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> StateError + 'a {
    move |source| StateError::Io { action, path: path.to_owned(), source }
}

/// The name of the file of a volume.
fn file_name(volume: &str) -> String {
    encode(volume) + ENDING
}

/// The volume that a file is about; `None` if [`file_name`] does not make its name.
fn volume_of(file: &str) -> Option<String> {
    let volume = volume_name(&decode(file.strip_suffix(ENDING)?)?).ok()?;
    (file_name(&volume) == file).then_some(volume)
}

/// The files of a state directory.
#[derive(Debug, Default)]
struct StateFiles {
    volumes: BTreeMap<String, Result<StoredVolume, ConfigError>>,
    /// Files that are about no volume.
    foreign: Vec<PathBuf>,
}

impl StateDir {
    /// The state directory at `path`, which need not exist.
    pub fn new(path: &Path) -> StateDir {
        StateDir { volumes: path.join("volumes") }
    }

    /// The state directory itself.
    pub fn root(&self) -> &Path {
        self.volumes.parent().unwrap_or(&self.volumes)
    }

    /// The folder of volumes.
    pub fn folder(&self) -> &Path {
        &self.volumes
    }

    /// The device and the inode of the folder of volumes, if it exists. Blocks.
    pub fn folder_number(&self) -> Option<(u64, u64)> {
        let found = fs::metadata(&self.volumes).ok()?;
        Some((found.dev(), found.ino()))
    }

    /// The file of a volume.
    pub fn path_of(&self, volume: &str) -> PathBuf {
        self.volumes.join(file_name(volume))
    }

    /// The mount point of `/etc/fstab` at or above the directory at which nothing is mounted, if there is one. Blocks.
    fn unmounted(&self) -> Option<PathBuf> {
        match fails(&self.volumes, StateStep::FindMount) {
            Ok(()) => mounts::unmounted_point(&self.volumes),
            Err(_) => self.volumes.parent().map(Path::to_owned),
        }
    }

    fn remove_temporaries(&self) -> Result<(), StateError> {
        let read = failed("read", &self.volumes);
        for entry in fs::read_dir(&self.volumes).map_err(&read)? {
            let entry = entry.map_err(&read)?;
            if entry.file_name().as_encoded_bytes().starts_with(TEMPORARY.as_bytes()) {
                let path = entry.path();
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(())
    }

    /// To be called before it is read again. If it was in use, its absence is an error: its volumes would be withdrawn. So is
    /// that of its file system.
    /// Otherwise it is created, as far as that is possible.
    ///
    /// # Errors
    /// A message with the remedy.
    pub fn found(&self, used: bool) -> Result<(), ConfigError> {
        if let Some(point) = self.unmounted() {
            return Err(ConfigError {
                remedy: format!("mount it: `mount {}`", point.display()),
                ..self.unreadable(not_mounted(&point))
            });
        }
        match fs::metadata(&self.volumes) {
            Err(error) if used && error.kind() == ErrorKind::NotFound => Err(ConfigError {
                remedy: "mount or restore it; to forget the volumes that it had, create it empty"
                    .to_owned(),
                ..self.unreadable(error)
            }),
            Err(_) => {
                // The next change of a volume that is to be kept reports why.
                let _ = self.create();
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    fn create(&self) -> Result<(), StateError> {
        if let Some(point) = self.unmounted() {
            return Err(failed("create", &self.volumes)(not_mounted(&point)));
        }
        let made = DirBuilder::new().recursive(true).mode(0o750).create(&self.volumes);
        made.map_err(failed("create", &self.volumes))
    }

    fn read(&self) -> Result<StateFiles, ConfigError> {
        let mut files = StateFiles::default();
        let listed =
            fails(&self.volumes, StateStep::List).and_then(|()| fs::read_dir(&self.volumes));
        let entries = match listed {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(files),
            entries => entries.map_err(|error| self.unreadable(error))?,
        };
        for entry in entries {
            let path = entry.map_err(|error| self.unreadable(error))?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| name.starts_with(TEMPORARY)) {
                continue;
            }
            let Some(volume) = name.and_then(volume_of) else {
                files.foreign.push(path);
                continue;
            };
            match read_file(&self.volumes, &path) {
                // It was removed meanwhile.
                Ok(None) => {}
                Ok(Some(text)) => {
                    let stored = parse(&volume, &text, &path);
                    files.volumes.insert(volume, stored);
                }
                Err(error) => {
                    files.volumes.insert(volume, Err(error));
                }
            }
            if files.volumes.len() + files.foreign.len() > MAX_FILES {
                return Err(self.unreadable(io::Error::other("it has more than 65536 files")));
            }
        }
        Ok(files)
    }

    fn unreadable(&self, source: io::Error) -> ConfigError {
        ConfigError {
            kind: ConfigErrorKind::Read,
            file: Some(self.volumes.clone()),
            line: None,
            key: None,
            message: format!("cannot read the state directory: {source}"),
            remedy: "let the daemon's user read it, or choose another one with `state`".to_owned(),
            source: Some(source),
        }
    }

    /// Writes what the daemon knows of a volume, in place of what it knew before. It is stable when this returns. Blocks. One
    /// call for a volume at a time.
    ///
    /// # Errors
    /// [`StateError`]; then the file is the old one, unless [`StateError::is_applied`].
    pub fn write_atomically(&self, volume: &str, stored: &StoredVolume) -> Result<(), StateError> {
        let path = self.checked_path(volume)?;
        StateFolder(&self.volumes).replace(&path, &text(stored))
    }

    /// Makes the file of a volume stable that an earlier call may have left unstable. Does nothing
    /// where there is no directory. Blocks.
    ///
    /// # Errors
    /// [`StateError`]; the directory has the file.
    pub fn make_stable(&self, volume: &str) -> Result<(), StateError> {
        match StateFolder(&self.volumes).make_stable() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            made => made.map_err(|source| {
                let path = self.path_of(volume);
                StateError::NotStable { action: "make stable", path, source, applied: true }
            }),
        }
    }

    /// Whether the file of a volume is there, and defines it. Blocks.
    ///
    /// # Errors
    /// [`StateError`]: the file, which may be intact, cannot be read now.
    pub fn defines(&self, volume: &str) -> Result<bool, StateError> {
        let path = self.checked_path(volume)?;
        match read_file(&self.volumes, &path) {
            Err(ConfigError { source: Some(source), .. }) => {
                Err(StateError::Io { action: "read", path, source })
            }
            Err(_) | Ok(None) => Ok(false),
            Ok(Some(text)) => Ok(matches!(parse(volume, &text, &path), Ok(StoredVolume::Whole(_)))),
        }
    }

    /// Checks that a change of the directory would succeed as it is now, before something that has
    /// to be kept there is done. Blocks.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn try_out(&self) -> Result<(), StateError> {
        StateFolder(&self.volumes).try_out(TRIED_BYTES)
    }

    /// Changes what a volume of the configuration has instead of its own settings. A file that makes no sense is replaced by
    /// what is `in_force` with the change. Blocks. One call for a volume at a time.
    ///
    /// # Errors
    /// As for [`StateDir::write_atomically`], and [`StateError::DefinedTwice`].
    pub fn change_overrides(
        &self,
        volume: &str,
        in_force: VolumeOverrides,
        change: impl FnOnce(&mut VolumeOverrides),
    ) -> Result<(), StateError> {
        let path = self.checked_path(volume)?;
        let text = match read_file(&self.volumes, &path) {
            // What cannot be read now may be intact.
            Err(ConfigError { source: Some(source), .. }) => {
                return Err(StateError::Io { action: "read", path, source });
            }
            Err(_) => Some(String::new()),
            Ok(text) => text,
        };
        let mut overrides = match text.map(|text| parse(volume, &text, &path)) {
            Some(Ok(StoredVolume::Overrides(overrides))) => overrides,
            Some(Ok(StoredVolume::Whole(_))) => return Err(StateError::DefinedTwice { path }),
            Some(Err(_)) => Box::new(in_force),
            None => Box::default(),
        };
        change(&mut overrides);
        if overrides.is_empty() {
            return self.remove(volume).map(drop);
        }
        self.write_atomically(volume, &StoredVolume::Overrides(overrides))
    }

    /// Removes the file of a volume, and returns whether there was one. Its absence is stable when this returns. Blocks.
    ///
    /// # Errors
    /// [`StateError`]; then the next start may find the file.
    pub fn remove(&self, volume: &str) -> Result<bool, StateError> {
        StateFolder(&self.volumes).remove(&self.path_of(volume))
    }

    /// Gives the file of the volume `from` to the volume `to`, which must have none. Blocks.
    ///
    /// # Errors
    /// [`StateError`]; the file is that of `to` if [`StateError::is_applied`], and of `from` otherwise.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StateError> {
        StateFolder(&self.volumes).rename(&self.path_of(from), &self.checked_path(to)?)
    }

    /// The path of the file of a volume, if its name is not too long.
    ///
    /// # Errors
    /// [`StateError::LongName`].
    pub fn checked_path(&self, volume: &str) -> Result<PathBuf, StateError> {
        match file_name(volume).len() {
            bytes if bytes > MAX_FILE_NAME => Err(StateError::LongName { bytes }),
            _ => Ok(self.path_of(volume)),
        }
    }
}

fn read_file(folder: &Path, path: &Path) -> Result<Option<String>, ConfigError> {
    let bad = |message: String, source| ConfigError {
        kind: ConfigErrorKind::Read,
        file: Some(path.to_owned()),
        line: None,
        key: None,
        message,
        remedy: "correct it, or remove it, and reload".to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let opened = fails(folder, StateStep::Read)
        .and_then(|()| OpenOptions::new().read(true).custom_flags(OPEN).open(path));
    let regular = opened.and_then(|file| match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    });
    let read = regular.and_then(|file| file.take(MAX_STATE_BYTES + 1).read_to_end(&mut bytes));
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(format!("cannot read the file: {error}"), Some(error))),
        Ok(length) if u64::try_from(length).is_ok_and(|length| length > MAX_STATE_BYTES) => {
            return Err(bad("the file is too large for one volume".to_owned(), None));
        }
        Ok(_) => {}
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|_| bad("the file is not UTF-8 text".to_owned(), None))
}

/// The volume of a file with this `text`.
fn parse(volume: &str, text: &str, path: &Path) -> Result<StoredVolume, ConfigError> {
    match file::parse_state(volume, text, path)? {
        StateLayer::Whole(layer) => {
            let checked = check_volume(&layer)?;
            if let (Some(given), Some(KeySource::Command(_))) =
                (&layer.encryption, &checked.encryption)
            {
                // A process that can write this file could run programs as the daemon's user.
                return Err(given.error(
                    ConfigErrorKind::Conflict,
                    "a file of the state directory cannot name a program",
                    "use key-file:PATH or credential:NAME, or define the volume in the configuration file",
                ));
            }
            Ok(StoredVolume::Whole(Box::new(checked.made())))
        }
        StateLayer::Overrides { size, size_replaces, limits, limit_group } => {
            let checked =
                |Located { value, place }| volume_size(value).map_err(|bad| place.error(bad));
            let size = size.map(checked).transpose()?;
            let limits = check_limits(&limits)?;
            let limit_group = limit_group.map(|group| group.value);
            let overrides = VolumeOverrides { size, size_replaces, limits, limit_group };
            Ok(StoredVolume::Overrides(Box::new(overrides)))
        }
    }
}

/// The text of a file.
fn text(stored: &StoredVolume) -> String {
    let table = match stored {
        StoredVolume::Overrides(overrides) => overrides.table(),
        StoredVolume::Whole(volume) => volume_table(&volume.made()),
    };
    format!("# Written by ebbd: change it with `ebbd volume` and `ebbd limit`.\n{table}")
}

fn not_mounted(point: &Path) -> io::Error {
    io::Error::other(format!("nothing is mounted at {}, and /etc/fstab has it", point.display()))
}

/// Adds the volumes of the state directory to `config`.
pub(super) fn merge(config: &mut Config, state: &StateDir) -> Result<(), ConfigError> {
    if let Some(point) = state.unmounted() {
        let warning = format!(
            "the volumes of the state directory are not served: {}; mount it, and reload",
            not_mounted(&point)
        );
        config.warnings.push(warning.clone());
        config.unmounted = Some(warning);
    }
    let StateFiles { volumes, foreign } = state.read()?;
    config.note_foreign(foreign);
    groups::merge(config, state)?;
    for (name, stored) in volumes {
        let path = state.path_of(&name);
        let defined = match config.origins.get(&name) {
            Some(VolumeOrigin::Configuration(place)) => Some(place.clone()),
            _ => None,
        };
        match (stored, defined) {
            (Ok(StoredVolume::Whole(_)), Some(place)) => config.warnings.push(format!(
                "{}: the volume is also defined at {place}, and that one is served: remove one of them",
                path.display()
            )),
            (Ok(StoredVolume::Whole(mut volume)), None) => {
                if volume.default && config.volumes.values().any(|other| other.default) {
                    let path = path.display();
                    let warning = format!("{path}: default: another volume is the default: remove this key");
                    config.warnings.push(warning);
                    volume.default = false;
                }
                config.origins.insert(name.clone(), VolumeOrigin::State);
                config.volumes.insert(name, *volume);
            }
            (Ok(StoredVolume::Overrides(overrides)), Some(_)) => {
                if let Some(volume) = config.volumes.get_mut(&name) {
                    let mut overrides = *overrides;
                    if overrides.has_stale_size(volume) {
                        overrides.size = None;
                        config.warnings.push(format!(
                            "{}: its size is ignored, since the configuration of the volume had `{}` when it was written: \
                             `ebbd volume resize` writes a new one",
                            path.display(),
                            overrides.size_replaces.as_deref().unwrap_or_default()
                        ));
                    }
                    config.replaced.insert(name, volume.clone());
                    overrides.apply(volume);
                }
            }
            (Ok(StoredVolume::Overrides(_)), None) => {
                let warning = format!(
                    "{}: these are settings of a volume that the configuration does not have: add it there, or run `ebbd volume remove`",
                    path.display()
                );
                config.warnings.push(warning.clone());
                config.orphans.insert(name, warning);
            }
            (Err(error), _) => drop(config.broken.insert(name, error.to_string())),
        }
    }
    config.note_socket_conflicts();
    Ok(())
}

impl Config {
    /// Notes volumes of the state directory that cannot have the socket that they ask for.
    fn note_socket_conflicts(&mut self) {
        let refused = self.refused_sockets();
        let kept = refused
            .iter()
            .filter(|(name, _)| self.origins.get(*name) == Some(&VolumeOrigin::State));
        let conflicts = kept.map(|(name, bad)| {
            format!("volume {name}: not served over vhost-user: {}; {}", bad.message, bad.remedy)
        });
        let conflicts: Vec<_> = conflicts.collect();
        self.warnings.extend(conflicts);
    }

    /// Notes files that are about no volume and no group.
    fn note_foreign(&mut self, foreign: Vec<PathBuf>) {
        let warning = |path| {
            format!("{path:?}: this is not a file that ebbd wrote, and is ignored: remove it")
        };
        self.warnings.extend(foreign.into_iter().map(warning));
    }

    /// Leaves a volume of the configuration the settings that it has in `old` instead of its own.
    pub fn keep_overrides(&mut self, name: &str, old: &Config) {
        let Some((own, in_force)) = old.replaced.get(name).zip(old.volumes.get(name)) else {
            return;
        };
        let mut overrides = VolumeOverrides::between(own, in_force);
        let Some(volume) = self.volumes.get_mut(name) else { return };
        if let Some(own) = self.replaced.remove(name) {
            *volume = own;
        }
        if overrides.has_stale_size(volume) {
            overrides.size = None;
        }
        self.replaced.insert(name.to_owned(), volume.clone());
        overrides.apply(volume);
    }
}

#[cfg(test)]
mod tests;
