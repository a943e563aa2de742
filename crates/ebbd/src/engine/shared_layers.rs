//! Merging two snapshots that other volumes also have below them: clones, and served snapshots.
//!
//! Those volumes keep the old files open, while the next daemon opens the merged file. So exports
//! record the merged layers, for their guests, before the file is renamed.

use std::sync::Arc;

use ebb_cache::MergedPair;
use ebb_control::Refused;
use ebb_volume::Volume;

use super::definitions::ReservedNames;
use super::{Engine, lock};

/// Two layers that are about to be merged, and the reserved names of the other volumes that have
/// them: no other operation changes those volumes meanwhile.
pub(super) struct SharedLayers {
    of: Arc<Volume>,
    pair: MergedPair,
    _names: ReservedNames,
}

impl Engine {
    /// Has exports record the merged layer for the guests of all volumes but `of` that have both
    /// layers.
    ///
    /// # Errors
    /// If another operation changes one of the volumes.
    pub(super) fn note_next_merge(
        self: &Arc<Self>,
        of: &Arc<Volume>,
        pair: MergedPair,
    ) -> Result<SharedLayers, Refused> {
        let volumes = self.sharers(of, &pair);
        let names: Vec<_> = volumes.iter().map(|volume| volume.name()).collect();
        let names = self.reserve(&names.iter().map(|name| &***name).collect::<Vec<_>>())?;
        for volume in &volumes {
            volume.layers().note_next_merge(&pair);
            self.guests.note_backing(volume);
        }
        Ok(SharedLayers { of: of.clone(), pair, _names: names })
    }

    /// Notes that the merged file has its name, and has exports record that.
    pub(super) fn note_merged(&self, shared: &SharedLayers) {
        // Also those that were opened meanwhile.
        for volume in self.sharers(&shared.of, &shared.pair) {
            volume.layers().note_next_merge(&shared.pair);
            volume.layers().note_merged(shared.pair.clone());
            self.guests.note_backing(&volume);
        }
    }

    /// Returns the volumes except `of` that have both layers.
    fn sharers(&self, of: &Arc<Volume>, pair: &MergedPair) -> Vec<Arc<Volume>> {
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let served = slots.iter().filter_map(|slot| slot.served()).map(|(volume, _)| volume);
        let others = served.filter(|volume| !Arc::ptr_eq(volume, of));
        others.filter(|volume| volume.layers().has_pair(pair)).collect()
    }
}
