//! From a volume's configuration to the volume.

use std::sync::Arc;

use ebb_store::{FileStore, MemoryStore, NullStore, OpenError, OpenOptions, Store};
use ebb_volume::{Volume, VolumeOptions};

use crate::config::{Direct, StoreUri, VolumeConfig};

/// Opens the store of a volume; what the operator should know of it goes to the log.
///
/// # Errors
/// Those of the store, each with a remedy.
pub fn open_volume(name: &str, config: &VolumeConfig) -> Result<Arc<Volume>, OpenError> {
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
    };
    Ok(Volume::new(name, store, VolumeOptions { read_only: config.read_only }))
}
