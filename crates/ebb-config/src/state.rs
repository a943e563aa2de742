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
//! - A name is encoded in one way, so that no two files are about one volume, and no name leaves the directory.
//! - A file that cannot be used concerns its own volume only.
//! - One daemon at a time uses a directory ([`StateLock`]).

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::{ConfigError, ConfigErrorKind, Located, ValueLocation};
use super::file::{self, StateLayer};
use super::layer::{LimitsLayer, VolumeLayer};
use super::resolve::{check_limits, check_volume};
use super::show::{limits_table, volume_table};
use super::value::{CacheMode, Choice, DirectMode, StoreUri, volume_name, volume_size};
use super::{Config, LimitsConfig, VolumeConfig, VolumeOrigin};
use crate::Size;
use rustix::fs::OFlags;

mod groups;
mod lock;

pub use self::lock::StateLock;

/// What the names of the files end with.
const ENDING: &str = ".toml";
/// What the names of temporary files begin with. No name of a volume is encoded so.
const TEMPORARY: &str = ".new-";
/// The longest file name, bytes.
const MAX_FILE_NAME: usize = 255;
/// The longest file, bytes.
const MAX_STATE_BYTES: u64 = 64 << 10;
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

/// Settings that a volume of the configuration has instead of its own; absent where it has its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOverrides {
    /// Its size.
    pub size: Option<Size>,
    /// What the configuration had when the size was remembered, as [`VolumeConfig::store_and_size`]: the size is for nothing
    /// else.
    pub size_replaces: Option<String>,
    /// Its limits.
    pub limits: LimitsConfig,
    /// Its group of limits; `none` for no group.
    pub limit_group: Option<String>,
}

impl VolumeOverrides {
    /// Whether there is none.
    fn is_empty(&self) -> bool {
        let none = |size| VolumeOverrides { size_replaces: size, ..VolumeOverrides::default() };
        *self == none(self.size_replaces.clone())
    }

    /// Whether the size is that of another store, or replaced another size.
    fn has_stale_size(&self, volume: &VolumeConfig) -> bool {
        let replaces = self.size_replaces.as_ref();
        self.size.is_some() && replaces.is_some_and(|text| *text != volume.store_and_size())
    }

    fn apply(&self, volume: &mut VolumeConfig) {
        if let Some(size) = self.size {
            volume.set_size(size);
        }
        volume.limits = self.limits.over(&volume.limits);
        if let Some(group) = &self.limit_group {
            volume.limit_group = Some(group.clone());
        }
    }

    fn table(&self) -> toml::Table {
        let VolumeOverrides { size, size_replaces, limits, limit_group } = self;
        let size = size.map(|size| ("size".to_owned(), size.to_string().into()));
        let of = |key: &str, text: &Option<String>| Some((key.to_owned(), text.clone()?.into()));
        let group = of("limit_group", limit_group);
        let replaces = of("size_replaces", size_replaces);
        limits_table(limits).chain(size).chain(replaces).chain(group).collect()
    }
}

impl LimitsConfig {
    /// These limits, and where one is not given, that of `other`.
    #[must_use]
    pub fn over(&self, other: &LimitsConfig) -> LimitsConfig {
        LimitsConfig {
            iops: self.iops.or(other.iops),
            read_iops: self.read_iops.or(other.read_iops),
            write_iops: self.write_iops.or(other.write_iops),
            bandwidth: self.bandwidth.or(other.bandwidth),
            read_bandwidth: self.read_bandwidth.or(other.read_bandwidth),
            write_bandwidth: self.write_bandwidth.or(other.write_bandwidth),
            burst_ms: self.burst_ms.or(other.burst_ms),
        }
    }
}

/// The state directory could not be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The name is too long for a file name.
    #[error(
        "the name of the volume has {bytes} bytes as a file name, more than {MAX_FILE_NAME}: choose a shorter one"
    )]
    LongName {
        /// Bytes of the file name.
        bytes: usize,
    },
    /// The directory has another definition of the volume.
    #[error(
        "{path} has another definition of the volume: remove that file, or the volume from the configuration, and reload",
        path = path.display()
    )]
    DefinedTwice {
        /// The file with the other definition.
        path: PathBuf,
    },
    /// Another daemon has the directory.
    #[error(
        "{path}: another daemon uses this state directory: stop that one, or give each daemon a directory of its own with \
         `state`",
        path = path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {action} {path}: {source}: check the state directory and the free space of its file system", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> StateError + 'a {
    move |source| StateError::Io { action, path: path.to_owned(), source }
}

/// The name of the file of a volume.
fn file_name(volume: &str) -> String {
    let mut name = String::with_capacity(volume.len() + ENDING.len());
    for (at, byte) in volume.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') || byte == b'.' && at > 0 {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("%{byte:02X}"));
        }
    }
    name + ENDING
}

/// The volume that a file is about; `None` if [`file_name`] does not make its name.
fn volume_of(file: &str) -> Option<String> {
    let encoded = file.strip_suffix(ENDING)?;
    let (mut bytes, mut rest) = (Vec::new(), encoded.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = rest.get(2..)?;
        } else {
            bytes.push(*first);
        }
    }
    let volume = volume_name(&String::from_utf8(bytes).ok()?).ok()?;
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

    /// The file of a volume.
    pub fn path_of(&self, volume: &str) -> PathBuf {
        self.volumes.join(file_name(volume))
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

    /// To be called before it is read again. If it was in use, its absence is an error: its volumes would be withdrawn.
    /// Otherwise it is created, as far as that is possible.
    ///
    /// # Errors
    /// A message with the remedy.
    pub fn found(&self, used: bool) -> Result<(), ConfigError> {
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
        let made = DirBuilder::new().recursive(true).mode(0o750).create(&self.volumes);
        made.map_err(failed("create", &self.volumes))
    }

    fn read(&self) -> Result<StateFiles, ConfigError> {
        let mut files = StateFiles::default();
        let entries = match fs::read_dir(&self.volumes) {
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
            match read_file(&path) {
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
    /// [`StateError`]; then the file may be the old one or the new one.
    pub fn write_atomically(&self, volume: &str, stored: &StoredVolume) -> Result<(), StateError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let path = self.checked_path(volume)?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = self.volumes.join(format!("{TEMPORARY}{}-{number}", std::process::id()));
        let written = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o640).open(&temporary)?;
            file.write_all(text(stored).as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        if let Err(error) = written() {
            // The next start removes it, if this fails, too.
            let _ = fs::remove_file(&temporary);
            return Err(failed("write", &path)(error));
        }
        self.make_stable()
    }

    /// Changes what a volume of the configuration has instead of its own settings. Blocks. One call for a volume at a time.
    ///
    /// # Errors
    /// As for [`StateDir::write_atomically`], and [`StateError::DefinedTwice`]. A file that cannot be used is replaced.
    pub fn change_overrides(
        &self,
        volume: &str,
        change: impl FnOnce(&mut VolumeOverrides),
    ) -> Result<(), StateError> {
        let path = self.checked_path(volume)?;
        let text = read_file(&path).ok().flatten();
        let mut overrides = match text.and_then(|text| parse(volume, &text, &path).ok()) {
            Some(StoredVolume::Overrides(overrides)) => overrides,
            Some(StoredVolume::Whole(_)) => return Err(StateError::DefinedTwice { path }),
            None => Box::default(),
        };
        change(&mut overrides);
        if overrides.is_empty() {
            return self.remove(volume);
        }
        self.write_atomically(volume, &StoredVolume::Overrides(overrides))
    }

    /// Removes the file of a volume, if there is one. Its absence is stable when this returns. Blocks.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn remove(&self, volume: &str) -> Result<(), StateError> {
        let path = self.path_of(volume);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(failed("remove", &path)).and_then(|()| self.make_stable()),
        }
    }

    /// Gives the file of the volume `from` to the volume `to`, which must have none. Blocks.
    ///
    /// # Errors
    /// [`StateError`]; the file is that of one of the two.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StateError> {
        let (old, new) = (self.path_of(from), self.checked_path(to)?);
        fs::rename(&old, new).map_err(failed("rename", &old))?;
        self.make_stable()
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

    fn make_stable(&self) -> Result<(), StateError> {
        let synced = File::open(&self.volumes).and_then(|folder| folder.sync_all());
        synced.map_err(failed("write", &self.volumes))
    }
}

fn read_file(path: &Path) -> Result<Option<String>, ConfigError> {
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
    let opened = OpenOptions::new().read(true).custom_flags(OPEN).open(path);
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
        StateLayer::Whole(layer) => check_volume(&layer).map(Box::new).map(StoredVolume::Whole),
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
        StoredVolume::Whole(volume) => volume_table(volume),
    };
    format!("# Written by ebbd: change it with `ebbd volume` and `ebbd limit`.\n{table}")
}

/// Adds the volumes of the state directory to `config`.
pub(super) fn merge(config: &mut Config, state: &StateDir) -> Result<(), ConfigError> {
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
            (Ok(StoredVolume::Overrides(_)), None) => config.warnings.push(format!(
                "{}: these are settings of a volume that the configuration does not have: add it there, or run `ebbd volume remove`",
                path.display()
            )),
            (Err(error), _) => drop(config.broken.insert(name, error.to_string())),
        }
    }
    Ok(())
}

impl Config {
    /// Notes files that are about no volume and no group.
    fn note_foreign(&mut self, foreign: Vec<PathBuf>) {
        let warning = |path| {
            format!("{path:?}: this is not a file that ebbd wrote, and is ignored: remove it")
        };
        self.warnings.extend(foreign.into_iter().map(warning));
    }
}

impl VolumeConfig {
    /// The store and the size, to be compared.
    pub fn store_and_size(&self) -> String {
        let size = self.size.map(|size| format!(" {size}")).unwrap_or_default();
        format!("{}{size}", self.store)
    }

    /// Notes a new size, if the configuration of this store has one. Returns whether it has.
    pub fn set_size(&mut self, size: Size) -> bool {
        match &mut self.store {
            StoreUri::Memory(old) => *old = size,
            StoreUri::File(_) if self.size.is_some() => self.size = Some(size),
            StoreUri::File(_) | StoreUri::Null(_) | StoreUri::Nbd(_) => return false,
        }
        true
    }
}

/// A volume to be added: its settings as text, each as in the configuration file.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields are the keys of the configuration file")]
pub struct NewVolume {
    pub name: String,
    pub store: String,
    pub size: Option<String>,
    pub create: Option<bool>,
    pub read_only: Option<bool>,
    pub shared: Option<bool>,
    pub direct: Option<String>,
    pub cache: Option<String>,
    pub bdi: Option<String>,
}

impl NewVolume {
    /// Its configuration.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn config(self) -> Result<VolumeConfig, ConfigError> {
        let place = |key: &str| ValueLocation::option(key);
        let name = volume_name(&self.name).map_err(|bad| place("name").error(bad))?;
        if matches!(name.as_str(), "." | "..") {
            return Err(Located { value: (), place: place("name") }.error(
                ConfigErrorKind::InvalidValue,
                format!(
                    "`{name}` cannot be the name of a volume, because paths treat it specially"
                ),
                "choose another name",
            ));
        }
        let store = self.store.parse().map_err(|bad| place("store").error(bad))?;
        let size = self.size.map(|text| {
            let size = text.parse::<Size>().map_err(|error| place("size").error(error.into()));
            size.map(|value| Located { value, place: place("size") })
        });
        let flag =
            |key: &str, on: Option<bool>| on.map(|value| Located { value, place: place(key) });
        let bdi = self.bdi.map(|text| {
            let bdi = volume_name(&text).map_err(|bad| place("bdi").error(bad));
            bdi.map(|value| Located { value, place: place("bdi") })
        });
        check_volume(&VolumeLayer {
            place: place("store"),
            store: Located { value: store, place: place("store") },
            size: size.transpose()?,
            create: flag("create", self.create),
            read_only: flag("read_only", self.read_only),
            shared: flag("shared", self.shared),
            direct: choice::<DirectMode>("direct", self.direct)?,
            cache: choice::<CacheMode>("cache", self.cache)?,
            bdi: bdi.transpose()?,
            default: None,
            max_buffer_pages: None,
            buffer_squeeze_duration_ms: None,
            limits: LimitsLayer::default(),
            limit_group: None,
            name,
        })
    }
}

fn choice<T: Choice>(key: &str, text: Option<String>) -> Result<Option<Located<T>>, ConfigError> {
    let Some(text) = text else { return Ok(None) };
    let place = ValueLocation::option(key);
    let value = T::parse(&text).map_err(|bad| place.error(bad))?;
    Ok(Some(Located { value, place }))
}

/// Checks the name of a volume.
///
/// # Errors
/// If a volume added at run time cannot have it.
pub fn check_name(name: &str) -> Result<(), ConfigError> {
    let null = "null:512".to_owned();
    NewVolume { name: name.to_owned(), store: null, ..NewVolume::default() }.config().map(drop)
}

#[cfg(test)]
mod tests;
