//! The inflight region: what a queue has in flight, for a successor of this process.
//!
//! Source: the vhost-user protocol, "Inflight I/O tracking". One region per queue, each padded to 64 bytes, in memory that
//! the frontend keeps.
//!
//! Invariants
//! - After any store, a successor finds every chain that was taken and not published to the driver, and no other.
//! - Nothing that is read is trusted, and nothing is read but when a region is opened, and the descriptors of a packed
//!   queue's chains when they are taken again. A peer that changes a region harms its own queue.
//! - Dead processes are the only case: what one process stored in order, another one sees in order.

use std::sync::Arc;

use ebb_export::{Backing, UnstableRecord};
use ebb_guest_ring::SharedMemory;

use crate::area::Area;
use crate::region_backing::RegionBacking;

#[cfg(target_endian = "big")]
compile_error!("regions and rings are little-endian");

/// Bytes of the header and of an entry.
pub(crate) const SPLIT_LAYOUT: (usize, usize) = (16, 16);
pub(crate) const PACKED_LAYOUT: (usize, usize) = (32, 32);
/// The version of regions; 0 is a region that was not initialised.
pub(crate) const VERSION: u16 = 1;
/// Where a region of either format has its version first.
const VERSION_WORD: usize = 8;
/// Where a region has its features.
const FEATURES: usize = 0;
/// Regions are multiples of it.
const ALIGN: usize = 64;

/// Why a region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InflightFault {
    #[error("the inflight region is smaller than its queues need")]
    TooSmall,
    #[error("the inflight region has an unknown version")]
    Version,
    #[error("the inflight region is one of a queue of another size")]
    Size,
    #[error("the inflight region contradicts itself or the ring")]
    Corrupt,
}

/// Bytes of the region of one queue.
fn region_bytes(packed: bool, size: u16) -> usize {
    let (header, entry) = if packed { PACKED_LAYOUT } else { SPLIT_LAYOUT };
    (header + entry * usize::from(size)).next_multiple_of(ALIGN)
}

/// Bytes of the regions of `queues` queues with `size` descriptors each.
pub(crate) fn bytes_for(packed: bool, queues: u16, size: u16) -> usize {
    region_bytes(packed, size) * usize::from(queues)
}

/// Parts of the region's features that no other backend uses, each stored on its own: which opening
/// of the volume has acknowledged writes from memory that no flush has covered, [`LOST`] if writes
/// are lost, 0 if neither; whether the guest has switched the write cache off; and whether the
/// volume was closed with all acknowledged writes stable.
const UNSTABLE: usize = FEATURES;
const WRITE_THROUGH: usize = FEATURES + 4;
const SETTLED: usize = FEATURES + 6;
/// Acknowledged writes are lost.
const LOST: u32 = 1;

/// The number in a region for an opening of a volume: neither 0 nor [`LOST`].
pub(crate) fn opening_number(opening: u64) -> u32 {
    u32::try_from(opening >> 32).unwrap_or(u32::MAX).max(LOST + 1)
}

/// What a region says of acknowledged writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordedWrites {
    /// All are stable.
    Stable,
    /// Some are in the memory of this opening of the volume.
    Unstable,
    /// Some are lost, or were in the memory of a process that was killed.
    Lost,
}

/// Where the region of one queue records that.
#[derive(Debug)]
pub(crate) struct InflightRecord {
    area: Area<SharedMemory>,
    /// Of the volume.
    opening: u32,
    /// The end of the whole region.
    backing: Option<RegionBacking>,
}

impl InflightRecord {
    /// What was recorded, by a predecessor or by this opening of the volume.
    pub(crate) fn writes(&self) -> RecordedWrites {
        match self.area.load_u32(UNSTABLE) {
            0 => RecordedWrites::Stable,
            number if number == self.opening => RecordedWrites::Unstable,
            _ => RecordedWrites::Lost,
        }
    }

    /// Returns true if all acknowledged writes were stable when the last daemon ended. New writes
    /// change that, so only the first call returns true.
    pub(crate) fn take_settled(&self) -> bool {
        let settled = self.area.load_u16(SETTLED) != 0;
        self.area.store_u16(SETTLED, 0);
        settled
    }

    /// Whether the guest had switched the write cache off.
    pub(crate) fn is_write_through(&self) -> bool {
        self.area.load_u16(WRITE_THROUGH) != 0
    }

    /// Records whether the guest has switched the write cache off: a frontend does not tell a successor.
    pub(crate) fn note_write_through(&self, off: bool) {
        self.area.store_u16(WRITE_THROUGH, off.into());
    }
}

impl UnstableRecord for InflightRecord {
    fn note_unstable(&self, unstable: bool) {
        self.area.store_u32(UNSTABLE, if unstable { self.opening } else { 0 });
    }

    fn note_lost(&self) {
        self.area.store_u32(UNSTABLE, LOST);
    }

    fn note_settled(&self) {
        self.area.store_u16(SETTLED, 1);
    }

    fn note_backing(&self, backing: &Backing) {
        self.backing.iter().for_each(|record| record.note(backing));
    }

    fn note_layers(&self, backing: &Backing) {
        self.backing.iter().for_each(|record| record.note_layers(backing));
    }
}

/// The region of one queue.
#[derive(Debug)]
pub(crate) struct QueueInflight {
    pub(crate) area: Area<SharedMemory>,
    /// The end of the whole region.
    backing: Option<RegionBacking>,
}

impl QueueInflight {
    /// The region of a queue, counted from 0, in memory for queues with `size` descriptors each.
    pub(crate) fn find(
        memory: &Arc<SharedMemory>,
        packed: bool,
        queue: u16,
        size: u16,
    ) -> Result<QueueInflight, InflightFault> {
        let bytes = region_bytes(packed, size);
        let area = Area::part(memory, bytes * usize::from(queue), bytes);
        let area = area.ok_or(InflightFault::TooSmall)?;
        Ok(QueueInflight { area, backing: RegionBacking::find(memory) })
    }

    /// Whether no queue was served with it.
    pub(crate) fn is_unused(&self) -> bool {
        quarters(self.area.load_u64(VERSION_WORD))[0] == 0
    }

    /// Where it records unstable writes of this opening of a volume.
    pub(crate) fn record(&self, opening: u64) -> InflightRecord {
        let (area, backing) = (self.area.clone(), self.backing.clone());
        InflightRecord { area, opening: opening_number(opening), backing }
    }
}

/// The 16-bit numbers of a word.
pub(crate) fn quarters(word: u64) -> [u16; 4] {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    [[a, b], [c, d], [e, f], [g, h]].map(u16::from_le_bytes)
}

/// The word of four numbers.
pub(crate) fn word_of(quarters: [u16; 4]) -> u64 {
    quarters.iter().rev().fold(0, |word, quarter| word << 16 | u64::from(*quarter))
}

/// Entries in the order in which they are to be taken again, the next one last; and the counter for the one after them.
pub(crate) fn in_order(mut entries: Vec<(u64, u16)>) -> (Vec<u16>, u64) {
    entries.sort_unstable_by_key(|(counter, _)| std::cmp::Reverse(*counter));
    let counter = entries.first().map_or(0, |(counter, _)| counter.wrapping_add(1));
    (entries.into_iter().map(|(_, entry)| entry).collect(), counter)
}
