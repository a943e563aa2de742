//! From a volume's configuration to the volume.

use std::sync::Arc;

use ebb_cache::{Cache, Mode};
use ebb_store::{
    FileStore, MemoryStore, NbdError, NbdStore, NullStore, OpenError, OpenOptions, Store,
};
use ebb_volume::{Volume, VolumeOptions};

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
}

/// Opens a volume: its store, and its part of `cache` if the configuration wants one.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn open_volume(
    name: &str,
    config: &VolumeConfig,
    cache: &Arc<Cache>,
) -> Result<Arc<Volume>, StoreError> {
    let store = open_store(name, config)?;
    let options = VolumeOptions { read_only: config.read_only };
    match config.cache {
        CacheMode::None => Ok(Volume::new(name, store, options)),
        CacheMode::Writethrough => {
            let cache = cache.volume(name, store.size())?;
            Ok(Volume::with_cache(name, store, options, cache))
        }
        CacheMode::Writeback => {
            let cache = cache.volume_as(name, store.size(), Mode::Writeback)?;
            Ok(Volume::with_cache(name, store, options, cache))
        }
    }
}

/// Opens the store of a volume; what the operator should know of it goes to the log.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn open_store(name: &str, config: &VolumeConfig) -> Result<Store, StoreError> {
    let store = match &config.store {
        StoreUri::File(path) => {
            let options = OpenOptions {
                read_only: config.read_only,
                direct: match config.direct {
                    Direct::Auto => ebb_store::Direct::Auto,
                    Direct::On => ebb_store::Direct::On,
                    Direct::Off => ebb_store::Direct::Off,
                },
                create: config.size.filter(|_| config.create).map(crate::size::Size::bytes),
            };
            let (store, notes) = FileStore::open(path, &options)?;
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
