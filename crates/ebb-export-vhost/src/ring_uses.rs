//! The rings and inflight regions that connections use.
//!
//! A VMM may connect again while requests of its former connection are in flight. Two places
//! identify the former connection: the ring in guest memory, and the inflight region, because a
//! flush marks all writes in the region as stable but covers only the writes of its own connection.
//!
//! # Invariants
//! - A guest may put two rings at one place. So only connections to the same volume count, and only
//!   a closing connection delays a reply.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_guest_ring::MemoryPlace;

use crate::disk_shared::DiskShared;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RingUses(BTreeMap<MemoryPlace, Vec<Arc<DiskShared>>>);

impl RingUses {
    /// Notes that a queue of this disk uses the ring or region at this place.
    pub(crate) fn add(&mut self, place: MemoryPlace, disk: &Arc<DiskShared>) {
        self.0.entry(place).or_default().push(disk.clone());
    }

    /// Notes that a queue of this disk has ended.
    pub(crate) fn remove(&mut self, place: MemoryPlace, disk: &Arc<DiskShared>) {
        let Some(users) = self.0.get_mut(&place) else { return };
        if let Some(at) = users.iter().position(|user| Arc::ptr_eq(user, disk)) {
            users.swap_remove(at);
        }
        if users.is_empty() {
            self.0.remove(&place);
        }
    }

    /// Returns true if another connection to the volume uses the ring or region at this place.
    pub(crate) fn is_elsewhere(&self, place: MemoryPlace, disk: &DiskShared) -> bool {
        self.others(place, disk).next().is_some()
    }

    /// Returns true if a queue of another connection to the volume still uses the ring or region at
    /// this place, and that connection is closing.
    pub(crate) fn is_at_former(&self, place: MemoryPlace, disk: &DiskShared) -> bool {
        self.others(place, disk).any(|other| other.closing.load(Ordering::Relaxed))
    }

    fn others(
        &self,
        place: MemoryPlace,
        disk: &DiskShared,
    ) -> impl Iterator<Item = &Arc<DiskShared>> {
        let users = self.0.get(&place).into_iter().flatten();
        users.filter(move |other| other.number != disk.number && other.has_volume_of(disk))
    }
}
