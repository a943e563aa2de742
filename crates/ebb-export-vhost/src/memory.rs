//! A guest's memory: the regions that its VMM shares, and the translation of addresses.
//!
//! Descriptors name guest physical addresses; the addresses of rings are addresses in the VMM's process.
//!
//! Invariants: regions do not overlap, in either address space, and no sum of an address and a length overflows. A
//! table does not change: another one replaces it, and a region is unmapped when the last table and the last request
//! that use it have ended. The mappings of one VMM share a flag, which says that it truncated one of them: then all its
//! memory counts as lost.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_guest_ring::{SharedMemory, read_barrier};

use crate::dirty_log::DirtyLog;

/// Most regions of a guest: what is offered to VMMs that add memory while the guest runs.
pub(crate) const REGIONS_MAX: usize = 509;

/// Why a table of regions is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GuestMemoryError {
    #[error("more than {REGIONS_MAX} regions of memory")]
    TooMany,
    #[error("a region of memory is empty, or ends beyond the address space")]
    BadRange,
    #[error("regions of memory overlap")]
    Overlap,
    #[error("there is no such region of memory")]
    Unknown,
}

/// One region.
#[derive(Debug)]
pub(crate) struct Region {
    /// Its guest physical address.
    pub(crate) guest: u64,
    /// Its address in the VMM's process.
    pub(crate) user: u64,
    pub(crate) memory: SharedMemory,
}

impl Region {
    fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }
}

/// Bytes of a guest's memory: within one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestSpan {
    /// The region's index in its table.
    pub(crate) region: u32,
    /// Bytes from the region's start on.
    pub(crate) offset: usize,
    pub(crate) len: u32,
}

/// The regions of a guest, sorted by guest address. Cheap to share; see the module.
#[derive(Debug, Default)]
pub(crate) struct GuestMemory {
    regions: Vec<Arc<Region>>,
    /// The flag of the regions.
    lost: Arc<AtomicBool>,
    log: Option<Arc<DirtyLog>>,
}

impl GuestMemory {
    /// A table of these regions, whose mappings share one flag (see the module). It has no log.
    pub(crate) fn new(mut regions: Vec<Arc<Region>>) -> Result<GuestMemory, GuestMemoryError> {
        if regions.len() > REGIONS_MAX {
            return Err(GuestMemoryError::TooMany);
        }
        let fits = |region: &Arc<Region>| {
            let bytes = region.bytes();
            bytes > 0
                && region.guest.checked_add(bytes).is_some()
                && region.user.checked_add(bytes).is_some()
        };
        if !regions.iter().all(fits) {
            return Err(GuestMemoryError::BadRange);
        }
        regions.sort_by_key(|region| region.user);
        let apart = |start: fn(&Region) -> u64, regions: &[Arc<Region>]| {
            regions.windows(2).all(|pair| start(&pair[0]) + pair[0].bytes() <= start(&pair[1]))
        };
        if !apart(|region| region.user, &regions) {
            return Err(GuestMemoryError::Overlap);
        }
        regions.sort_by_key(|region| region.guest);
        if !apart(|region| region.guest, &regions) {
            return Err(GuestMemoryError::Overlap);
        }
        let flag = |region: &Arc<Region>| Arc::clone(region.memory.lost_flag());
        let lost = regions.first().map(flag).unwrap_or_default();
        debug_assert!(
            regions.iter().all(|region| Arc::ptr_eq(region.memory.lost_flag(), &lost)),
            "regions of one VMM share a flag"
        );
        Ok(GuestMemory { regions, lost, log: None })
    }

    /// The same table with another log, or without one.
    pub(crate) fn with_log(&self, log: Option<Arc<DirtyLog>>) -> GuestMemory {
        GuestMemory { regions: self.regions.clone(), lost: Arc::clone(&self.lost), log }
    }

    /// The log: used rings are in it at addresses of their own.
    pub(crate) fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// Whether the VMM has truncated its memory. What was read before is then not to be trusted, and the connection is
    /// to be closed.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Notes that the VMM has truncated its memory: the kernel could not access it.
    pub(crate) fn note_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// The regions, sorted by guest address.
    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// The region of a span that this table returned.
    #[inline]
    pub(crate) fn region(&self, index: u32) -> Option<&Arc<Region>> {
        self.regions.get(usize::try_from(index).ok()?)
    }

    /// Finds `len` bytes at a guest physical address, if one region has them all. `last` is the index of the region
    /// found last: the next is usually the same.
    #[inline]
    pub(crate) fn find(&self, last: &Cell<u32>, address: u64, len: u32) -> Option<GuestSpan> {
        let within = |index: u32| {
            let region = self.region(index)?;
            let offset = address.checked_sub(region.guest)?;
            let end = offset.checked_add(len.into())?;
            let offset = usize::try_from(offset).ok()?;
            (end <= region.bytes()).then_some(GuestSpan { region: index, offset, len })
        };
        if let Some(span) = within(last.get()) {
            return Some(span);
        }
        let after = self.regions.partition_point(|region| region.guest <= address);
        let index = u32::try_from(after.checked_sub(1)?).ok()?;
        let span = within(index)?;
        last.set(index);
        Some(span)
    }

    /// Finds `len` bytes at an address of the VMM's process, if one region has them all.
    pub(crate) fn find_user(&self, address: u64, len: u32) -> Option<GuestSpan> {
        let contains = |(index, region): (usize, &Arc<Region>)| {
            let offset = address.checked_sub(region.user)?;
            let end = offset.checked_add(len.into())?;
            let (index, offset) = (u32::try_from(index).ok()?, usize::try_from(offset).ok()?);
            (end <= region.bytes()).then_some(GuestSpan { region: index, offset, len })
        };
        self.regions.iter().enumerate().find_map(contains)
    }

    /// Notes in the log that a span of this table was written to, after the write.
    #[inline]
    pub(crate) fn mark_dirty(&self, span: GuestSpan) {
        let Some(log) = &self.log else { return };
        if let Some(region) = self.region(span.region) {
            log.mark(region.guest.saturating_add(span.offset as u64), span.len);
        }
    }

    /// Copies out of spans of this table, from their `skip`th byte on. False if the spans have less, or if the memory
    /// is lost; `to` is not to be used then.
    #[must_use]
    #[inline]
    pub(crate) fn copy_out(&self, spans: &[GuestSpan], skip: usize, to: &mut [u8]) -> bool {
        self.for_each_piece(spans, skip, to.len(), |region, piece, range| {
            to.get_mut(range).is_some_and(|to| region.memory.read(piece.offset, to))
        })
    }

    /// Copies into spans of this table, from their `skip`th byte on, and notes it in the log. False if the spans have
    /// less, or if the memory is lost; part may have been copied then.
    #[must_use]
    #[inline]
    pub(crate) fn copy_in(&self, spans: &[GuestSpan], skip: usize, from: &[u8]) -> bool {
        self.for_each_piece(spans, skip, from.len(), |region, piece, range| {
            let written =
                from.get(range).is_some_and(|from| region.memory.write(piece.offset, from));
            self.mark_dirty(piece);
            written
        })
    }

    /// Calls `copy` for each part of the `len` bytes behind the `skip`th, in order: with its region, the part of the
    /// span, and the part of the `len` bytes. Whether there were as many and all were copied.
    #[inline]
    fn for_each_piece(
        &self,
        spans: &[GuestSpan],
        mut skip: usize,
        len: usize,
        mut copy: impl FnMut(&Region, GuestSpan, Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        for span in spans {
            if done == len {
                break;
            }
            let Ok(bytes) = usize::try_from(span.len) else { return false };
            let now = bytes.saturating_sub(skip).min(len - done);
            if now == 0 {
                skip -= bytes;
                continue;
            }
            let Some(region) = self.region(span.region) else { return false };
            let Ok(piece_len) = u32::try_from(now) else { return false };
            let offset = span.offset.saturating_add(skip);
            let piece = GuestSpan { region: span.region, offset, len: piece_len };
            let end = done + now;
            if !copy(region, piece, done..end) {
                return false;
            }
            (done, skip) = (end, 0);
        }
        // The flag is read after the data: zeroes of memory that replaced the guest's are found out.
        read_barrier();
        done == len && !self.is_lost()
    }
}

/// Guest memory for tests.
#[cfg(test)]
pub(crate) mod testing {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use ebb_guest_ring::SharedMemory;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::{GuestMemory, Region};

    /// A file in memory, as a VMM shares it.
    pub(crate) fn memfd(bytes: usize) -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes as u64).unwrap();
        fd
    }

    /// A region in the first bytes of a file.
    pub(crate) fn region_of(
        fd: &OwnedFd,
        (guest, user, bytes): (u64, u64, usize),
        lost: &Arc<AtomicBool>,
    ) -> Arc<Region> {
        let memory = SharedMemory::map(fd.as_fd(), 0, bytes, Arc::clone(lost)).unwrap();
        Arc::new(Region { guest, user, memory })
    }

    /// A guest with these regions (guest address, address in its VMM, bytes), each in a file of its own.
    pub(crate) fn guest_memory(regions: &[(u64, u64, usize)]) -> GuestMemory {
        let lost = Arc::default();
        let region = |place: &(u64, u64, usize)| region_of(&memfd(place.2), *place, &lost);
        GuestMemory::new(regions.iter().map(region).collect()).unwrap()
    }
}

#[cfg(test)]
mod tests;
