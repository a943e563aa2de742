//! The end of an inflight region: the store that the guest's requests are for.
//!
//! The protocol gives a region to the queues; the frontend maps as many bytes as the backend asks
//! for, keeps them, and brings them back. The last bytes of a region that this backend made say
//! which volume and store the guest is attached to. A region without them, of another backend or an
//! earlier version, says nothing.
//!
//! Invariant: the mark is stored last, so that a record is found whole or not at all.

use std::sync::Arc;

use ebb_export::{Backing, BackingChange, RecordedBacking};
use ebb_guest_ring::{SharedMemory, write_barrier};

use crate::area::Area;

/// Bytes of the record.
pub(crate) const RECORD_BYTES: usize = 1024;
/// Marks a record, and its format.
const MARK: u64 = u64::from_le_bytes(*b"ebbdvub1");
const AT_DIGEST: usize = 8;
const AT_SIZE: usize = 16;
const AT_LENGTH: usize = 24;
const AT_PLACE: usize = 32;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct RegionBacking {
    memory: Arc<SharedMemory>,
    area: Area<SharedMemory>,
    offset: usize,
}

impl RegionBacking {
    /// The place of the record in a region; `None` if that is too small for one.
    pub(crate) fn find(memory: &Arc<SharedMemory>) -> Option<RegionBacking> {
        let offset = memory.bytes().checked_sub(RECORD_BYTES)?;
        let area = Area::part(memory, offset, RECORD_BYTES)?;
        Some(RegionBacking { memory: memory.clone(), area, offset })
    }

    /// Records the store in a region that this backend has made.
    pub(crate) fn begin(&self, backing: &Backing) {
        self.store(backing);
        write_barrier();
        self.area.store_u64(0, MARK);
    }

    /// Records a store that has taken the place of another one while the guest was attached, if
    /// there is a record.
    pub(crate) fn note(&self, backing: &Backing) {
        if self.area.load_u64(0) == MARK {
            self.area.store_u64(AT_DIGEST, 0);
            write_barrier();
            self.store(backing);
        }
    }

    fn store(&self, backing: &Backing) {
        let place = backing.place();
        let bytes = place.as_bytes();
        let bytes = &bytes[..bytes.len().min(RECORD_BYTES - AT_PLACE)];
        // Within the area, which ends where the memory ends.
        let _ = self.memory.write(self.offset + AT_PLACE, bytes);
        self.area.store_u64(AT_LENGTH, bytes.len() as u64);
        self.area.store_u64(AT_SIZE, backing.size);
        write_barrier();
        self.area.store_u64(AT_DIGEST, backing.digest());
    }

    /// Checks that the guest of a region may go on with this volume.
    pub(crate) fn check(&self, now: &Backing) -> Result<(), BackingChange> {
        if self.area.load_u64(0) != MARK {
            return Ok(());
        }
        let length = usize::try_from(self.area.load_u64(AT_LENGTH)).unwrap_or(usize::MAX);
        let mut place = vec![0; length.min(RECORD_BYTES - AT_PLACE)];
        let _ = self.memory.read(self.offset + AT_PLACE, &mut place);
        let place = String::from_utf8_lossy(&place);
        // The frontend may have written it.
        let place = place.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        let (digest, size) = (self.area.load_u64(AT_DIGEST), self.area.load_u64(AT_SIZE));
        now.continues(&RecordedBacking { digest, size, place })
    }
}
