//! The end of an inflight region: the store that the guest's requests are for.
//!
//! The protocol gives a region to the queues; the frontend maps as many bytes as the backend asks
//! for, keeps them, and brings them back. The last bytes of a region that this backend made say
//! which volume and store the guest is attached to. A region without them, of another backend or an
//! earlier version, says nothing.
//!
//! Invariants
//! - The mark is stored last, so that a record is found whole or not at all.
//! - From then on one of the two digests is that of the disk, or, while its layers are exchanged,
//!   each is that of a disk that a kill may leave. Another digest is stored by a single store.

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
/// After the place: earlier versions have no more than a long place there.
const AT_NEXT: usize = RECORD_BYTES - 8;

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

    /// Records a store that has taken the place of another one while the guest was attached, or
    /// is about to, if there is a record.
    pub(crate) fn note(&self, backing: &Backing) {
        if self.area.load_u64(0) == MARK {
            self.area.store_u64(AT_SIZE, backing.size);
            self.store_layers(backing);
        }
    }

    /// As [`RegionBacking::note`], but keeps the size that the guest was told, unless the
    /// disk is smaller, or about to be: it is being shrunk.
    pub(crate) fn note_layers(&self, backing: &Backing) {
        if self.area.load_u64(0) == MARK {
            if self.area.load_u64(AT_SIZE) > backing.size {
                self.area.store_u64(AT_SIZE, backing.size);
            }
            self.store_layers(backing);
        }
    }

    fn store(&self, backing: &Backing) {
        self.area.store_u64(AT_SIZE, backing.size);
        self.store_layers(backing);
    }

    fn store_layers(&self, backing: &Backing) {
        let digest = backing.digest();
        if self.area.load_u64(AT_DIGEST) != digest {
            self.area.store_u64(AT_NEXT, digest);
            write_barrier();
            let place = backing.place();
            let bytes = place.as_bytes();
            let bytes = &bytes[..bytes.len().min(AT_NEXT - AT_PLACE)];
            // Within the area, which ends where the memory ends.
            let _ = self.memory.write(self.offset + AT_PLACE, bytes);
            self.area.store_u64(AT_LENGTH, bytes.len() as u64);
            write_barrier();
            self.area.store_u64(AT_DIGEST, digest);
            write_barrier();
        }
        self.area.store_u64(AT_NEXT, backing.next_digest());
    }

    /// Checks that the guest of a region may go on with this volume.
    pub(crate) fn check(&self, now: &Backing) -> Result<(), BackingChange> {
        if self.area.load_u64(0) != MARK {
            return Ok(());
        }
        let length = usize::try_from(self.area.load_u64(AT_LENGTH)).unwrap_or(usize::MAX);
        let mut place = vec![0; length.min(AT_NEXT - AT_PLACE)];
        let _ = self.memory.read(self.offset + AT_PLACE, &mut place);
        let place = String::from_utf8_lossy(&place);
        // The frontend may have written it.
        let place = place.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        let [digest, next, size] = [AT_DIGEST, AT_NEXT, AT_SIZE].map(|at| self.area.load_u64(at));
        now.continues(&RecordedBacking { digest, next, size, place })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::area::crash;
    use crate::memory::testing::memfd;

    fn backing(key: &str, next: Option<&str>) -> Backing {
        let store = ebb_volume::Identity::of_key(key.to_owned());
        let next = next.map(str::to_owned);
        Backing { volume: "disk".to_owned(), store, next, size: 8, ..Backing::default() }
    }

    /// A kill before any store leaves a record with which the guest goes on over the layers that it
    /// finds, and over no others.
    #[test]
    fn kill_at_any_store_leaves_the_layers_that_are_there() {
        let fd = memfd(RECORD_BYTES);
        let memory = SharedMemory::map(fd.as_fd(), 0, RECORD_BYTES, Arc::default()).unwrap();
        let record = RegionBacking::find(&Arc::new(memory)).unwrap();
        let (former, both) = (backing("a", None), backing("a", Some("b above a")));
        let next = backing("b above a", None);
        let steps = [(&former, &both, &former), (&both, &next, &next)];
        for (before, after, found) in steps {
            for stores in 0.. {
                record.store(&next);
                record.begin(before);
                crash::die_after(stores);
                record.note(after);
                let all_done = crash::revive();
                assert_eq!(record.check(found), Ok(()), "{stores}");
                assert!(record.check(&backing("c", None)).is_err(), "{stores}");
                if all_done {
                    break;
                }
            }
        }
        assert!(record.check(&former).is_err(), "the former layers are recorded still");
        record.note(&both);
        assert_eq!((record.check(&former), record.check(&next)), (Ok(()), Ok(())));
    }

    #[test]
    fn layers_are_noted_with_no_larger_size_than_the_disk_has() {
        let sized = |size| Backing { size, ..backing("a", None) };
        let fd = memfd(RECORD_BYTES);
        let memory = SharedMemory::map(fd.as_fd(), 0, RECORD_BYTES, Arc::default()).unwrap();
        let record = RegionBacking::find(&Arc::new(memory)).unwrap();
        record.begin(&sized(8));
        record.note_layers(&sized(16));
        assert_eq!(record.check(&sized(8)), Ok(()));
        record.note_layers(&sized(4));
        assert_eq!(record.check(&sized(4)), Ok(()));
    }

    #[test]
    fn a_kill_while_a_size_is_noted_refuses_no_guest() {
        let sized = |size| Backing { size, ..backing("a", None) };
        for stores in 0..4 {
            let fd = memfd(RECORD_BYTES);
            let memory = SharedMemory::map(fd.as_fd(), 0, RECORD_BYTES, Arc::default()).unwrap();
            let record = RegionBacking::find(&Arc::new(memory)).unwrap();
            record.begin(&sized(8));
            crash::die_after(stores);
            record.note(&sized(16));
            crash::revive();
            assert_eq!(record.check(&sized(16)), Ok(()), "killed after {stores} stores");
        }
    }
}
