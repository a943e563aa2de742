//! From a volume's configuration to the volume.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use ebb_cache::{Cache, Mode};
use ebb_store::{
    FileStore, MemoryStore, NbdError, NbdStore, NullStore, OpenError, OpenOptions, Store,
};
use ebb_volume::{Stop, Volume, VolumeOptions};

use crate::config::{CacheMode, Direct, StoreUri, VolumeConfig};

/// Why the store of a volume could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file or block device.
    #[error(transparent)]
    File(#[from] OpenError),
    /// A remote export.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// No place in the cache.
    #[error(transparent)]
    Cache(#[from] ebb_cache::Error),
    /// No place on its backing device.
    #[error(transparent)]
    Bdi(#[from] ebb_writeback::Error),
    /// No thread to open it on.
    #[error("no thread to open it on: raise TasksMax, or the limit of processes")]
    Thread(#[source] std::io::Error),
    /// Another volume has the file.
    #[error(
        "{store}: volume {other} is on the same file: give each a file of its own, or set \
         `read_only = true` for both"
    )]
    SameFile {
        /// The store.
        store: String,
        /// The other volume.
        other: String,
        /// Sent when that has the file no more.
        gone: Arc<Stop>,
    },
    /// The thread that opened it ended.
    #[error("opening it was interrupted")]
    Interrupted,
}

impl StoreError {
    /// The message with its causes, in a line.
    pub fn full_text(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            let cause = error.to_string();
            // A transparent error and its source say the same.
            if !text.ends_with(&cause) {
                text = format!("{text}: {cause}");
            }
            source = error.source();
        }
        text
    }
}

/// Makes a volume of an opened store on backing device `device`, with its part of `cache` if the configuration wants
/// one.
///
/// # Errors
/// [`StoreError::Cache`].
pub fn make_volume(
    name: &str,
    config: &VolumeConfig,
    store: Store,
    device: &str,
    cache: &Arc<Cache>,
) -> Result<Arc<Volume>, StoreError> {
    let options = VolumeOptions { read_only: config.read_only, shared: config.shared };
    let mode = match config.cache {
        CacheMode::None => None,
        CacheMode::Writethrough => Some(Mode::Writethrough),
        CacheMode::Writeback => Some(Mode::Writeback),
    };
    let volume = match mode {
        None => Volume::new(name, store, options),
        Some(mode) => {
            let cache = cache.volume_as(name, store.size(), mode)?;
            Volume::with_cache(name, store, options, cache)
        }
    };
    volume.join(cache.memory().shares(), device);
    Ok(volume)
}

/// Whether two configurations name the same bytes: the same file by whatever path, the same export of a server.
pub fn same_target(one: &StoreUri, other: &StoreUri) -> bool {
    match (one, other) {
        (StoreUri::File(_), StoreUri::File(_)) => FileIdentity::of(one) == FileIdentity::of(other),
        (StoreUri::Nbd(one), StoreUri::Nbd(other)) => {
            (&one.address, &one.export) == (&other.address, &other.export)
        }
        _ => false,
    }
}

/// What tells a file, or the device behind a node, from all others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileIdentity {
    /// A file, by its file system and number.
    File(u64, u64),
    /// A block device.
    Device(u64),
    /// A file that is not there yet.
    Path(PathBuf),
}

impl FileIdentity {
    /// That of a store, if it is a file; may block.
    pub fn of(store: &StoreUri) -> Option<FileIdentity> {
        let StoreUri::File(path) = store else { return None };
        Some(match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => FileIdentity::Device(found.rdev()),
            Ok(found) => FileIdentity::File(found.dev(), found.ino()),
            Err(_) => FileIdentity::Path(path.clone()),
        })
    }
}

/// The size of the file that opening the volume would make, if there is none yet.
pub fn to_be_created(config: &VolumeConfig) -> Option<u64> {
    match (&config.store, config.size) {
        (StoreUri::File(path), Some(size)) if config.create && !path.exists() => Some(size.bytes()),
        _ => None,
    }
}

/// Looks whether a store could be opened, without changing anything and without its lock.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn inspect(config: &VolumeConfig) -> Result<(), StoreError> {
    match &config.store {
        StoreUri::File(path) => Ok(ebb_store::inspect(path, &file_options(config))?),
        // A server may let in one client only: it is asked when the old connection is gone.
        StoreUri::Memory(_) | StoreUri::Null(_) | StoreUri::Nbd(_) => Ok(()),
    }
}

fn file_options(config: &VolumeConfig) -> OpenOptions {
    OpenOptions {
        read_only: config.read_only,
        direct: match config.direct {
            Direct::Auto => ebb_store::Direct::Auto,
            Direct::On => ebb_store::Direct::On,
            Direct::Off => ebb_store::Direct::Off,
        },
        create: config.size.filter(|_| config.create).map(crate::size::Size::bytes),
    }
}

/// Opens the store of a volume; what the operator should know of it goes to the log.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn open_store(name: &str, config: &VolumeConfig) -> Result<Store, StoreError> {
    let store = match &config.store {
        StoreUri::File(path) => {
            let (store, notes) = FileStore::open(path, &file_options(config))?;
            for note in notes {
                tracing::warn!(volume = name, "{note}");
            }
            Store::File(store)
        }
        StoreUri::Memory(size) => Store::Memory(MemoryStore::new(size.bytes())),
        StoreUri::Null(size) => Store::Null(NullStore::new(size.bytes())),
        StoreUri::Nbd(options) => {
            let mut options = ebb_store::NbdOptions::clone(options);
            options.read_only = config.read_only;
            options.jitter_seed = seed();
            let (store, notes) = NbdStore::open(options)?;
            for note in notes {
                tracing::info!(volume = name, "{note}");
            }
            Store::Nbd(store)
        }
    };
    Ok(store)
}

/// A number that differs from daemon to daemon, so that not all come back at once.
fn seed() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    since.as_secs() << 32 ^ u64::from(since.subsec_nanos()) ^ u64::from(std::process::id())
}
