//! Which connections use which rings and inflight regions.
//!
//! A VMM that connects again finds its former connection, whose requests are in flight. That one is
//! known by its ring's place in the guest's memory, and by its region: a flush notes in all of it
//! that earlier writes are stable, but covers only its own connection's writes.
//!
//! Invariant: a guest puts its rings where it likes, also two at one place. So only connections to
//! the same volume count, and only one that is ending holds a reply back.

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

    /// A queue of this disk has ended.
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

    /// Returns true if another connection to the volume has requests of the ring in flight, and is
    /// ending.
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
