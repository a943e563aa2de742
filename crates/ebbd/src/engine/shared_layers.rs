//! Volumes that have two snapshots of another volume below them while those are merged: its clones,
//! and the snapshots that are served.
//!
//! They go on with the former files. A successor finds the merged file instead: their guests record
//! that before the file gets its name.

use std::sync::Arc;

use ebb_cache::MergedPair;
use ebb_control::Refused;
use ebb_volume::Volume;

use super::definitions::ReservedNames;
use super::{Engine, lock};

/// The volumes that share two layers which are about to be merged. No other operation changes them
/// meanwhile.
pub(super) struct SharedLayers {
    of: Arc<Volume>,
    pair: MergedPair,
    _names: ReservedNames,
}

impl Engine {
    /// Has the guests of all volumes but `of` that have both layers record the merged one as well.
    ///
    /// # Errors
    /// Another operation changes one of the volumes.
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

    /// The merged file has its name.
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
