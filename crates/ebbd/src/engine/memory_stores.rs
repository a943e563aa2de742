//! Stores in memory: their content lasts as long as the daemon, also over a reload that opens a
//! volume again and a takeover that fails.

use std::collections::BTreeMap;

use ebb_config::{StoreUri, VolumeConfig};
use ebb_store::{MemoryStore, Store};

use super::{Engine, Opened, lock};

/// Stores in memory, and the definitions they were opened with, by the names of their volumes.
pub type MemoryStores = BTreeMap<String, (StoreUri, MemoryStore)>;

/// The store, if it is in memory.
pub(super) fn memory_of(store: &Store) -> Option<MemoryStore> {
    match store {
        Store::Memory(memory) => Some(memory.clone()),
        _ => None,
    }
}

/// To be called after a volume was withdrawn that is to be served as `new` says.
pub(super) fn warn_if_lost(name: &str, old: &VolumeConfig, new: &VolumeConfig) {
    // A delta in memory is not opened again.
    let is_kept = old.base.is_none() && old.store == new.store;
    if matches!(old.store, StoreUri::Memory(_)) && !is_kept {
        log_lost(name);
    }
}

fn log_lost(name: &str) {
    tracing::warn!(volume = name, "its content in memory was lost: its definition changed");
}

impl Engine {
    /// The stores in memory of all volumes that are served or were until the stop: their content
    /// lasts as long as these do.
    pub fn memory_stores(&self) -> MemoryStores {
        let mut stores = lock(&self.kept_memory).clone();
        let slots = lock(&self.slots);
        let own =
            slots.iter().filter_map(|(name, slot)| Some((name.clone(), slot.memory_store()?)));
        stores.extend(own);
        stores
    }

    /// To be called before the start: volumes of these names have these stores.
    pub fn keep_memory(&self, stores: MemoryStores) {
        *lock(&self.kept_memory) = stores;
    }

    /// Lets go of stores whose volumes are not among these.
    pub(super) fn keep_memory_of(&self, volumes: &BTreeMap<String, VolumeConfig>) {
        lock(&self.kept_memory).retain(|name, _| volumes.contains_key(name));
    }

    /// The store that a volume has, or that is kept for it, unless its definition has changed. Its
    /// size may be another: it was resized.
    pub(super) fn kept_memory(&self, name: &str, config: &VolumeConfig) -> Option<Opened> {
        let own = lock(&self.slots).get(name).and_then(|slot| slot.memory_store());
        let kept = || lock(&self.kept_memory).get(name).cloned();
        let (uri, store) = own.or_else(kept)?;
        if uri != config.store {
            log_lost(name);
            return None;
        }
        Some(Opened::new(name, config, Store::Memory(store), None))
    }
}
