//! Opens the store of a volume's configuration, and makes the volume of it.

mod error;
mod found;
mod options;
mod unlocking;

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_block::BlockStore;
use ebb_cache::{Cache, CachedStore, Layers, Mode};
use ebb_config::{CacheMode, KeySource, StoreUri, VolumeConfig};
use ebb_store::{
    EncryptedError, EncryptedStore, FileNumber, FileStore, ForeignFormat, MemoryStore, NbdStore,
    NullStore, OpenError, OpenOptions, Qcow2Error, Qcow2Store, RbdOptions, RbdStore, Store,
};
use ebb_volume::{Volume, VolumeOptions};

use crate::volume_key::read_key;
pub use error::{HeldAs, StoreError};
pub use found::FoundInstead;
pub use options::nbd_options;
use options::{direct_mode, rbd_options, seed};
pub(crate) use unlocking::Unlocking;
pub use unlocking::is_unlocking;

/// An opened store with its part of the cache, if the configuration has one.
///
/// # Errors
/// [`StoreError::Cache`].
pub fn with_cache(
    name: &str,
    config: &VolumeConfig,
    store: Store,
    cache: &Arc<Cache>,
) -> Result<CachedStore, StoreError> {
    let mode = match config.cache {
        CacheMode::None => Mode::None,
        CacheMode::Writethrough => Mode::Writethrough,
        CacheMode::Writeback => Mode::Writeback,
    };
    Ok(CachedStore::new(cache, name, store, mode)?)
}

/// Makes a volume of its layers on backing device `device`.
pub fn make_volume(
    name: &str,
    config: &VolumeConfig,
    layers: impl Into<Layers>,
    device: &str,
    cache: &Arc<Cache>,
) -> Arc<Volume> {
    let options = VolumeOptions { read_only: config.read_only, shared: config.shared };
    let volume = Volume::new(name, layers, options);
    volume.join(cache.memory().shares(), device);
    volume
}

/// Whether `new` leads to the same data as `old`, which has the file `open` open: the same file by any path, or the
/// same export of a server. May block.
///
/// # Errors
/// [`StoreError::Moved`]: `new` has the path of `old`, which leads to another file now, or to none. That file may be
/// blank, so it is not served unless the operator changes the path or uses another volume.
pub fn same_target(
    old: &StoreUri,
    open: Option<&StoreTarget>,
    new: &StoreUri,
) -> Result<bool, StoreError> {
    match (old, new) {
        (StoreUri::File(was), StoreUri::File(path))
        | (StoreUri::Qcow2(was), StoreUri::Qcow2(path)) => {
            let found = StoreTarget::of(new)?;
            let Some(open) = open else { return Ok(StoreTarget::of(old)? == found) };
            if found.as_ref() == Some(open) {
                return Ok(true);
            }
            if place(was) != place(path) {
                return Ok(false);
            }
            let found = match found {
                Some(StoreTarget::Path(_)) | None => FoundInstead::Nothing,
                Some(_) => FoundInstead::Other,
            };
            Err(StoreError::Moved { store: new.to_string(), found })
        }
        (StoreUri::Nbd(one), StoreUri::Nbd(other)) => {
            Ok((&one.server, &one.export) == (&other.server, &other.export))
        }
        (StoreUri::Rbd(_), StoreUri::Rbd(_)) => Ok(StoreTarget::of(old)? == StoreTarget::of(new)?),
        _ => Ok(false),
    }
}

/// A path whose directory is resolved, so that two spellings of it are equal.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, path.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// The file that opening a volume must find.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Any file; a new one is created if the configuration has `create`.
    #[default]
    Any,
    /// No file: the configuration has `create`, and an existing file is refused.
    None,
    /// Any file; none is created.
    Existing,
    /// The file that the volume had before: no new file is created in its place, and no other one is accepted.
    File(StoreTarget),
    /// As [`Expected::File`], with any size, because it was served before.
    AsItWas(StoreTarget),
}

impl Expected {
    /// The `file`, if it existed.
    pub fn file(file: Option<StoreTarget>) -> Expected {
        match file {
            Some(file @ (StoreTarget::File(..) | StoreTarget::Device(_))) => Expected::File(file),
            Some(StoreTarget::Path(_) | StoreTarget::Remote(..) | StoreTarget::Image(..))
            | None => Expected::Any,
        }
    }

    /// The same file with any size.
    #[must_use]
    pub fn as_it_was(self) -> Expected {
        match self {
            Expected::File(file) => Expected::AsItWas(file),
            other => other,
        }
    }

    fn identity(&self) -> Option<&StoreTarget> {
        match self {
            Expected::Any | Expected::None | Expected::Existing => None,
            Expected::File(file) | Expected::AsItWas(file) => Some(file),
        }
    }
}

/// The identity of a file, of the device behind a device node, or of an export.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreTarget {
    /// A file, by the number of its file system and its inode.
    File(u64, u64),
    /// A block device.
    Device(u64),
    /// A file that does not exist yet.
    Path(PathBuf),
    /// An export of an NBD server, by the address and the name in the configuration: another address of the same server
    /// is another identity.
    Remote(String, String),
    /// An image of a Ceph cluster, by the `ceph.conf` in the configuration and the names of its pool, namespace, image and
    /// snapshot, with zero bytes between them.
    Image(String, String),
}

impl StoreTarget {
    /// The file at the path of a store, or its export; `None` if it is neither. May block.
    ///
    /// # Errors
    /// Those of `stat`, except ENOENT, which means that the file does not exist.
    pub fn of(store: &StoreUri) -> Result<Option<StoreTarget>, StoreError> {
        let path = match store {
            StoreUri::File(path) | StoreUri::Qcow2(path) => path.clone(),
            StoreUri::Nbd(uri) => {
                let (server, export) = (uri.server.to_string(), uri.export.clone());
                return Ok(Some(StoreTarget::Remote(server, export)));
            }
            StoreUri::Rbd(uri) => {
                let conf = uri.conf.as_ref().map(|conf| conf.display().to_string());
                // Names may contain the signs that `rbd` puts between them.
                let snapshot = uri.snapshot.clone().unwrap_or_default();
                let names = [&uri.pool, &uri.namespace, &uri.image, &snapshot].map(String::as_str);
                return Ok(Some(StoreTarget::Image(conf.unwrap_or_default(), names.join("\0"))));
            }
            StoreUri::Memory(_) | StoreUri::Null(_) => return Ok(None),
        };
        Ok(Some(match std::fs::metadata(&path) {
            Ok(found) if found.file_type().is_block_device() => StoreTarget::Device(found.rdev()),
            Ok(found) => StoreTarget::File(found.dev(), found.ino()),
            Err(error) => match error.kind() {
                ErrorKind::NotFound => StoreTarget::Path(path),
                // Opening it read-only would not help.
                ErrorKind::PermissionDenied => {
                    return Err(OpenError::Denied { path, read_only: true }.into());
                }
                _ => {
                    let action = "check whether it exists";
                    return Err(OpenError::at_path(path, action, error).into());
                }
            },
        }))
    }

    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            StoreTarget::Remote(..) => "export",
            StoreTarget::Image(..) => "image",
            _ => "file",
        }
    }

    /// The identity of an open store, if it is a file.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of_open(store: &Store) -> Result<Option<StoreTarget>, StoreError> {
        let Some(number) = store.number() else { return Ok(None) };
        match number {
            Ok(FileNumber::File { device, inode }) => Ok(Some(StoreTarget::File(device, inode))),
            Ok(FileNumber::Device(number)) => Ok(Some(StoreTarget::Device(number))),
            Err(source) => {
                let (path, action) = (PathBuf::from(store.identity().place), "identify the file");
                Err(OpenError::Io { path, action, source }.into())
            }
        }
    }
}

/// The size of the volume whose file opening it would create, if it does not exist yet.
pub fn to_be_created(config: &VolumeConfig) -> Option<u64> {
    match (&config.store, config.size) {
        (StoreUri::File(path), Some(size))
            if config.create && path.try_exists().is_ok_and(|there| !there) =>
        {
            Some(size.bytes())
        }
        _ => None,
    }
}

/// Refuses to create a file in a mount point at which nothing is mounted.
///
/// # Errors
/// [`StoreError::NotMounted`].
fn must_be_mounted(config: &VolumeConfig) -> Result<(), StoreError> {
    let StoreUri::File(path) = &config.store else { return Ok(()) };
    // The size of an overlay may be its base's.
    if !config.create || !path.try_exists().is_ok_and(|there| !there) {
        return Ok(());
    }
    let found = place(path);
    let point = [path.as_path(), &found].into_iter().find_map(ebb_config::unmounted_point);
    match point {
        Some(point) => Err(StoreError::NotMounted { store: config.store.to_string(), point }),
        None => Ok(()),
    }
}

/// Refuses a volume that would write to the configuration file `own`, also one that this defines:
/// the broker keeps the file from the daemon. May block.
///
/// # Errors
/// [`StoreError::Protected`].
pub fn must_not_be_configuration(
    config: &VolumeConfig,
    own: Option<&Path>,
) -> Result<(), StoreError> {
    let (Some(own), StoreUri::File(_), false) = (own, &config.store, config.read_only) else {
        return Ok(());
    };
    // A store that cannot be looked at is not opened either.
    let of = |store: &StoreUri| StoreTarget::of(store).ok().flatten();
    let found = of(&config.store);
    if found.is_none() || found != of(&StoreUri::File(own.into())) {
        return Ok(());
    }
    let (store, what) = (config.store.to_string(), StoreError::CONFIGURATION.to_owned());
    Err(StoreError::Protected { store, what })
}

/// Checks whether a store can be opened, without changing anything and without its lock.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn inspect(config: &VolumeConfig) -> Result<(), StoreError> {
    must_be_mounted(config)?;
    match &config.store {
        // How large a delta has to be depends on its base.
        StoreUri::File(path) if config.base.is_some() && config.create => {
            let absent = path.try_exists().is_ok_and(|there| !there);
            let existing = VolumeConfig { create: false, size: None, ..config.clone() };
            let new = OpenOptions { create: Some(512), ..OpenOptions::default() };
            if absent { Ok(ebb_store::inspect(path, &new)?) } else { inspect(&existing) }
        }
        StoreUri::File(path) => {
            let options = file_options(config, &Expected::Any);
            match &config.encryption {
                None => Ok(ebb_store::inspect(path, &options)?),
                Some(key) => Ok(EncryptedStore::inspect(path, &options, &read_key(key)?)?),
            }
        }
        StoreUri::Qcow2(path) => Ok(Qcow2Store::inspect(path, direct_mode(config))?),
        // A server may accept only one client, which is still the old connection.
        StoreUri::Memory(_) | StoreUri::Null(_) | StoreUri::Nbd(_) => Ok(()),
        // The daemon that has it open has its lock.
        StoreUri::Rbd(_) => Ok(()),
    }
}

/// Whether another process has the file of a volume locked; may block.
pub fn is_in_use(config: &VolumeConfig) -> bool {
    match &config.store {
        StoreUri::File(path) | StoreUri::Qcow2(path) => {
            ebb_store::is_in_use(path, &file_options(config, &Expected::Any))
        }
        StoreUri::Memory(_) | StoreUri::Null(_) | StoreUri::Nbd(_) | StoreUri::Rbd(_) => false,
    }
}

/// The format of a volume's file, if it is not that of a raw disk; may block. An error is reported where the file is
/// opened.
pub fn foreign_format(config: &VolumeConfig) -> Option<ForeignFormat> {
    match &config.store {
        // A delta, or to be one.
        StoreUri::File(_) if config.base.is_some() => None,
        // The tail of the file is ciphertext, and its head a header that was checked.
        StoreUri::File(_) if config.encryption.is_some() => None,
        StoreUri::File(path) => ForeignFormat::of_path(path).ok().flatten(),
        StoreUri::Qcow2(_)
        | StoreUri::Memory(_)
        | StoreUri::Null(_)
        | StoreUri::Nbd(_)
        | StoreUri::Rbd(_) => None,
    }
}

fn file_options(config: &VolumeConfig, expected: &Expected) -> OpenOptions {
    let size = config.size.filter(|_| config.create && !matches!(expected, Expected::AsItWas(_)));
    OpenOptions {
        read_only: config.read_only,
        direct: direct_mode(config),
        create: size.map(ebb_config::Size::bytes),
        // The header of a delta says its size.
        any_size: config.base.is_some(),
        existing: expected.identity().is_some() || *expected == Expected::Existing,
        only_new: *expected == Expected::None,
    }
}

/// The size that the configuration promises of an existing file: opening a smaller one fails.
pub fn promised_size(config: &VolumeConfig) -> Option<u64> {
    let StoreUri::File(_) = &config.store else { return None };
    file_options(config, &Expected::Any).least_size()
}

/// Fails if fewer descriptors would be free than volumes leave to clients.
fn check_descriptors(store: &StoreUri, workers: usize) -> Result<(), StoreError> {
    let few = |limit| StoreError::Descriptors { store: store.to_string(), limit };
    crate::descriptors::check_volumes(workers).map_err(few)
}

/// What an operator should know of a store that was opened.
#[derive(Debug, Default)]
pub struct OpenNotes {
    /// It is probably not what the operator wants.
    pub warnings: Vec<String>,
    /// How it was opened.
    details: Vec<String>,
}

impl OpenNotes {
    fn warnings(all: impl IntoIterator<Item = impl ToString>) -> OpenNotes {
        let warnings = all.into_iter().map(|note| note.to_string()).collect();
        OpenNotes { warnings, ..OpenNotes::default() }
    }
}

/// As [`open_noting`], and logs the notes for the operator.
///
/// # Errors
/// As for [`open_noting`].
pub fn open_store(
    name: &str,
    config: &VolumeConfig,
    expected: &Expected,
    for_whom: (usize, Option<&Path>),
) -> Result<Store, StoreError> {
    let (store, notes) = open_noting(name, config, expected, for_whom)?;
    for note in notes.warnings {
        tracing::warn!(volume = name, "{note}");
    }
    for note in notes.details {
        tracing::info!(volume = name, "{note}");
    }
    Ok(store)
}

/// Opens the store of a volume for this number of workers. Records of locks are kept in the state
/// directory, if there is one.
///
/// # Errors
/// Those of the store, each with a remedy; [`StoreError::Descriptors`].
pub fn open_noting(
    name: &str,
    config: &VolumeConfig,
    expected: &Expected,
    (workers, state): (usize, Option<&Path>),
) -> Result<(Store, OpenNotes), StoreError> {
    if matches!(config.store, StoreUri::Memory(_) | StoreUri::Null(_)) {
        return open_any_store(name, config, expected, state);
    }
    must_be_mounted(config)?;
    check_descriptors(&config.store, workers)?;
    let opened = open_any_store(name, config, expected, state)?;
    // Again: others were opened meanwhile, and a remote store has yet to connect.
    check_descriptors(&config.store, workers)?;
    Ok(opened)
}

/// Opens an encrypted volume, for which it takes a second of processor time.
fn open_encrypted(
    name: &str,
    (path, key): (&Path, &KeySource),
    config: &VolumeConfig,
    expected: &Expected,
) -> Result<(Store, OpenNotes), StoreError> {
    let _unlocking = Unlocking::begin();
    let (key, options) = (read_key(key)?, file_options(config, expected));
    let (store, notes) = match EncryptedStore::open(path, &options, &key) {
        Err(EncryptedError::File(OpenError::Missing { .. })) if expected.identity().is_some() => {
            return Err(StoreError::Moved {
                store: config.store.to_string(),
                found: FoundInstead::Nothing,
            });
        }
        outcome => outcome?,
    };
    if store.was_made() {
        let (bytes, path) = (store.size(), path.display());
        tracing::info!(volume = name, bytes, "created a new encrypted file: {path}");
    }
    Ok((Store::Encrypted(store), OpenNotes::warnings(notes)))
}

fn open_any_store(
    name: &str,
    config: &VolumeConfig,
    expected: &Expected,
    state: Option<&Path>,
) -> Result<(Store, OpenNotes), StoreError> {
    let moved = |found| StoreError::Moved { store: config.store.to_string(), found };
    let (store, notes) = match &config.store {
        StoreUri::File(path) if let Some(key) = &config.encryption => {
            open_encrypted(name, (path, key), config, expected)?
        }
        StoreUri::File(path) => {
            let (store, notes) = match FileStore::open(path, &file_options(config, expected)) {
                Err(OpenError::Missing { .. }) if expected.identity().is_some() => {
                    return Err(moved(FoundInstead::Nothing));
                }
                outcome => outcome?,
            };
            if store.was_made() {
                let (bytes, path) = (store.size(), path.display());
                tracing::info!(volume = name, bytes, "created a new file: {path}");
            }
            (Store::File(store), OpenNotes::warnings(notes))
        }
        StoreUri::Qcow2(path) => {
            let (store, notes) = match Qcow2Store::open(path, direct_mode(config)) {
                Err(Qcow2Error::Missing { .. }) if expected.identity().is_some() => {
                    return Err(moved(FoundInstead::Nothing));
                }
                outcome => outcome?,
            };
            (Store::Qcow2(store), OpenNotes::warnings(notes))
        }
        StoreUri::Memory(size) => {
            (Store::Memory(MemoryStore::new(size.bytes())), OpenNotes::default())
        }
        StoreUri::Null(size) => (Store::Null(NullStore::new(size.bytes())), OpenNotes::default()),
        StoreUri::Nbd(uri) => {
            let mut options = nbd_options(uri);
            options.read_only = config.read_only;
            options.jitter_seed = seed();
            let (store, notes) = NbdStore::open(options)?;
            let details = notes.into_iter().map(|note| note.to_string()).collect();
            (Store::Nbd(store), OpenNotes { details, ..OpenNotes::default() })
        }
        StoreUri::Rbd(uri) => {
            let records = state.map(|state| state.join("rbd"));
            let options = RbdOptions { read_only: config.read_only, records, ..rbd_options(uri)? };
            let (store, notes) = RbdStore::open(options)?;
            (Store::Rbd(store), OpenNotes::warnings(notes))
        }
    };
    if let Some(expected) = expected.identity()
        && matches!(store, Store::File(_) | Store::Qcow2(_) | Store::Encrypted(_))
        && StoreTarget::of_open(&store)?.as_ref() != Some(expected)
    {
        return Err(moved(FoundInstead::Other));
    }
    Ok((store, notes))
}
