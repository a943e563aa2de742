//! Memory that another process shares by a descriptor: a guest's memory, or a region of its VMM.
//!
//! Invariants: only files whose pages are in memory (memfd, tmpfs, hugetlbfs) are mapped, so that no access waits for
//! a file system, or for a peer that serves one. A peer that truncates the file does not end this process: the memory
//! is *lost* then, reads as zeroes or as what was written to it since, and its owner's flag is set (`fault_guard.rs`).
//!
//! Source: fcntl(2) on `F_GET_SEALS`, which succeeds for these files only and calls no file system.

use std::ffi::c_void;
use std::io;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fault_guard::GuardedRange;
use crate::mapping_budget::{MappingShare, VolumeMappings};
use crate::memory::{Mapping, Unmap};

/// The type of file system that hugetlbfs reports.
const HUGETLBFS_MAGIC: u32 = 0x958458f6;

/// A shared mapping of a file in memory. Dropping it unmaps it.
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Mapping,
    lost: Arc<AtomicBool>,
    sealed: bool,
    start: MemoryPlace,
}

/// The place of a byte in its file: the same for all who have mapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryPlace {
    device: u64,
    inode: u64,
    offset: u64,
}

/// What was mapped: whole pages, of which a [`Mapping`] is a part.
struct Unmapper {
    start: usize,
    bytes: usize,
    guard: GuardedRange,
    /// Counts until after the unmapping.
    _share: Option<MappingShare>,
}

impl Unmap for Unmapper {
    fn unmap(&self, _base: NonNull<u8>, _bytes: usize, _cookie: u64) {
        self.guard.withdraw();
        unmap(self.start, self.bytes);
    }
}

fn unmap(start: usize, bytes: usize) {
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(start);
    // SAFETY: mapped by `SharedMemory::map` with this address and length; accesses are made by copies only, and the
    // mapping that makes them is being dropped, or was not made.
    let _ = unsafe { munmap(start, bytes) };
}

fn refused(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl SharedMemory {
    /// Maps `bytes` bytes (more than 0) from `offset` on (a multiple of 8, not necessarily of a page), readable and
    /// writable. The descriptor may be closed afterwards. `lost` is set when the peer has truncated the file and an
    /// access met it; all mappings of a peer may share it.
    ///
    /// # Errors
    /// The file is not in memory, or too short; too many mappings; of the system calls.
    pub fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        lost: Arc<AtomicBool>,
    ) -> io::Result<SharedMemory> {
        SharedMemory::map_counted(fd, offset, bytes, lost, None)
    }

    /// As [`SharedMemory::map`], within the budget of a volume.
    ///
    /// # Errors
    /// Also if the budget has no room for it.
    pub fn map_within(
        budget: &Arc<VolumeMappings>,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        lost: Arc<AtomicBool>,
    ) -> io::Result<SharedMemory> {
        SharedMemory::map_counted(fd, offset, bytes, lost, Some(budget))
    }

    fn map_counted(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        lost: Arc<AtomicBool>,
        budget: Option<&Arc<VolumeMappings>>,
    ) -> io::Result<SharedMemory> {
        let seals = fcntl_get_seals(fd)
            .map_err(|_| refused("not a file in memory (memfd, tmpfs, hugetlbfs)"))?;
        let end =
            offset.checked_add(bytes as u64).filter(|_| bytes > 0 && offset.is_multiple_of(8));
        let end = end.ok_or_else(|| refused("bad offset or length of shared memory"))?;
        let file = fstat(fd)?;
        if u64::try_from(file.st_size).is_ok_and(|size| size < end) {
            return Err(refused("the file of shared memory is too short"));
        }
        // The kernel maps whole pages only, and QEMU's offsets need not be multiples of huge pages.
        let page = page_bytes(fd)?;
        let before = offset % page;
        let whole = end.checked_next_multiple_of(page).map(|end| end - (offset - before));
        let whole = whole.and_then(|whole| usize::try_from(whole).ok());
        let whole = whole.ok_or_else(|| refused("bad offset or length of shared memory"))?;
        let share = budget.map(|budget| budget.reserve(whole)).transpose()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Without a reserve, as the VMM's own: a guest's huge pages need not all exist yet.
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { mmap(std::ptr::null_mut(), whole, protection, flags, fd, offset - before)? };
        // SAFETY: the whole new mapping. What a guest has in memory is not for our core dumps; advice only.
        let _ = unsafe { madvise(start, whole, Advice::LinuxDontDump) };
        let before = usize::try_from(before).unwrap_or(0);
        let base = NonNull::new(start.cast::<u8>().wrapping_add(before));
        let base = base.ok_or_else(|| refused("the kernel mapped the address 0"))?;
        let at = start.expose_provenance();
        let guard = GuardedRange::new(at..at + whole, Arc::clone(&lost))
            .inspect_err(|_| unmap(at, whole))?;
        let owner = Arc::new(Unmapper { start: at, bytes: whole, guard, _share: share });
        // SAFETY: `before + bytes` bytes are mapped, readable and writable until `Unmapper` unmaps them; `before` is a
        // multiple of 8; they are only copied. When the file is truncated, the guard puts other memory in their place.
        let mapping = unsafe { Mapping::new(base, bytes, 0, owner) };
        let start = MemoryPlace { device: file.st_dev, inode: file.st_ino, offset };
        Ok(SharedMemory { mapping, lost, sealed: seals.contains(SealFlags::SHRINK), start })
    }

    /// The place of the byte at `offset` in its file.
    pub fn place(&self, offset: usize) -> MemoryPlace {
        MemoryPlace { offset: self.start.offset.saturating_add(offset as u64), ..self.start }
    }

    /// Whether the peer cannot truncate the file (`F_SEAL_SHRINK`).
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Whether the flag given to [`SharedMemory::map`] is set: this memory is lost, or other memory of its peer.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// The flag given to [`SharedMemory::map`].
    pub fn lost_flag(&self) -> &Arc<AtomicBool> {
        &self.lost
    }
}

impl Deref for SharedMemory {
    type Target = Mapping;

    #[inline]
    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

/// The size of the pages of a file in memory.
fn page_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let system = fstatfs(fd)?;
    // The type is as wide as a register, and signed, on some platforms.
    let huge = u32::try_from(system.f_type).is_ok_and(|kind| kind == HUGETLBFS_MAGIC);
    let page = if huge { u64::try_from(system.f_bsize).unwrap_or(0) } else { 0 };
    Ok(page.max(rustix::param::page_size() as u64))
}

#[cfg(test)]
mod tests;
