//! The memory that a frontend shares: the guest's regions, the log of a migration, and the inflight region.
//!
//! A table of regions is replaced as a whole; queues follow by a command, and the former table is unmapped, on the control
//! thread, when the last request that uses it has completed.
//!
//! Invariant: what one frontend maps is bounded by [`REGIONS_MAX`], [`BYTES_MAX`], [`LOG_BYTES_MAX`] and
//! [`inflight_bytes_max`], and what all frontends of a volume map by the volume's budget. Both are checked before mapping.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_export::{Backing, BackingChange};
use ebb_guest_ring::SharedMemory;
use ebb_vhost_proto::{
    InflightArea, LogArea, MemoryRegion, MemoryTable, MessageHeader, OutgoingMessage,
    VirtioFeatures,
};

use super::{
    Answer, FOREIGN, FrontendContext, FrontendSession, MessageError, Outcome, Pending, SocketError,
};
use crate::commands::QueueCommand;
use crate::dirty_log::DirtyLog;
use crate::features::QUEUES_MAX;
use crate::inflight::bytes_for;
use crate::memory::{GuestMemory, GuestMemoryError, REGIONS_MAX, Region};
use crate::region_backing::{RECORD_BYTES, RegionBacking};
use crate::ring_setup::SIZE_MAX;

/// Most bytes of a guest's memory: the address space of this process is for all frontends.
const BYTES_MAX: u64 = 16 << 40;
/// Most bytes of a log: those of guest physical addresses of 47 bits. Memory can have gaps.
const LOG_BYTES_MAX: u64 = (1 << 47) / 4096 / 8;
/// Backends may make an inflight region of whole huge pages.
const HUGE_PAGE: u64 = 2 << 20;
const TOO_MUCH_MEMORY: &str = "the guest has more than 16 TiB of memory";

/// Most bytes of an inflight region: what the most and largest queues need.
fn inflight_bytes_max() -> u64 {
    ((bytes_for(true, QUEUES_MAX, SIZE_MAX) + RECORD_BYTES) as u64).next_multiple_of(HUGE_PAGE)
}

/// A guest that was refused counts as failing for this long: frontends connect again sooner.
const REFUSED: Duration = Duration::from_secs(60);

impl FrontendSession {
    /// Maps memory of the frontend, within the budget of its volume.
    fn map(&self, fd: &OwnedFd, offset: u64, bytes: usize) -> Result<SharedMemory, MessageError> {
        let lost = self.lost.clone();
        Ok(SharedMemory::map_within(&self.mappings, fd.as_fd(), offset, bytes, lost)?)
    }

    /// Checks how much memory a guest would have with these further regions.
    fn check_bytes(
        known: &[Arc<Region>],
        further: impl Iterator<Item = MemoryRegion>,
    ) -> Result<(), MessageError> {
        let known = known.iter().map(|region| region.memory.bytes() as u64);
        let bytes = known.chain(further.map(|region| region.bytes)).fold(0, u64::saturating_add);
        if bytes > BYTES_MAX {
            return Err(MessageError::Refused(TOO_MUCH_MEMORY));
        }
        Ok(())
    }

    pub(super) fn map_region(
        &self,
        region: MemoryRegion,
        fd: &OwnedFd,
    ) -> Result<Arc<Region>, MessageError> {
        let bytes = usize::try_from(region.bytes)
            .map_err(|_| MessageError::Refused("a region of memory is too large"))?;
        let memory = self.map(fd, region.mmap_offset, bytes)?;
        Ok(Arc::new(Region { guest: region.guest_address, user: region.user_address, memory }))
    }

    pub(super) fn set_memory_table(&mut self, table: MemoryTable<'_>, fds: &[OwnedFd]) -> Outcome {
        FrontendSession::check_bytes(&[], table.regions())?;
        let mapped = table.regions().zip(fds).map(|(region, fd)| self.map_region(region, fd));
        let regions = mapped.collect::<Result<Vec<_>, _>>()?;
        self.replace_regions(regions)
    }

    pub(super) fn add_region(&mut self, region: MemoryRegion, fd: &OwnedFd) -> Outcome {
        if self.regions.len() >= REGIONS_MAX {
            return Err(GuestMemoryError::TooMany.into());
        }
        FrontendSession::check_bytes(&self.regions, std::iter::once(region))?;
        let mut regions = self.regions.clone();
        regions.push(self.map_region(region, fd)?);
        self.replace_regions(regions)
    }

    pub(super) fn remove_region(&mut self, region: MemoryRegion) -> Outcome {
        let MemoryRegion { guest_address, bytes, user_address, .. } = region;
        let is_it = |known: &Arc<Region>| {
            known.guest == guest_address
                && known.user == user_address
                && known.memory.bytes() as u64 == bytes
        };
        let mut regions = self.regions.clone();
        let at = regions.iter().position(is_it).ok_or(GuestMemoryError::Unknown)?;
        regions.remove(at);
        self.replace_regions(regions)
    }

    pub(super) fn replace_regions(&mut self, regions: Vec<Arc<Region>>) -> Outcome {
        // Checked before anything changes.
        GuestMemory::new(regions.clone())?;
        self.regions = regions;
        self.update_memory();
        Ok(Answer::Later(Pending::Memory))
    }

    /// Makes the table anew and passes it to the queues.
    pub(super) fn update_memory(&mut self) {
        let log = self.log.clone().filter(|_| self.features.contains(VirtioFeatures::LOG_ALL));
        // They were checked when they were added.
        let table = GuestMemory::new(self.regions.clone()).unwrap_or_default();
        let table = Arc::new(table.with_log(log));
        self.replaced.push(std::mem::replace(&mut self.memory, table));
        for vring in &self.vrings {
            if let Some(commands) = &vring.running {
                commands.send(QueueCommand::SetMemory(self.memory.clone()));
            }
        }
        self.release_memory();
    }

    /// Drops former tables that no request uses any more; true if there are no others.
    pub(super) fn release_memory(&mut self) -> bool {
        self.replaced.retain(|table| Arc::strong_count(table) > 1);
        self.replaced.is_empty()
    }

    pub(super) fn set_log(&mut self, area: Option<LogArea>, fd: Option<OwnedFd>) -> Outcome {
        self.log = match (area, fd) {
            (Some(LogArea { size, offset }), Some(fd)) => {
                let bytes = usize::try_from(size).ok().filter(|_| size <= LOG_BYTES_MAX);
                let bytes = bytes.ok_or(MessageError::Refused("the log is too large"))?;
                Some(Arc::new(DirtyLog::new(self.map(&fd, offset, bytes)?)))
            }
            _ => None,
        };
        if self.features.contains(VirtioFeatures::LOG_ALL) {
            self.update_memory();
        }
        Ok(Answer::Later(Pending::Log))
    }

    pub(super) fn create_inflight(&mut self, header: MessageHeader, area: InflightArea) -> Outcome {
        let (queues, size) = (area.queues, area.queue_size);
        if queues == 0 || queues > QUEUES_MAX || size == 0 || size > SIZE_MAX {
            return Ok(Answer::Reply(OutgoingMessage::inflight_error(header)));
        }
        if !self.has_queues() {
            // The frontend had none, or dropped it because the guest was reset: QEMU before 8.2 tells a reset in no other way.
            self.disk.broken.store(false, Ordering::Relaxed);
        }
        let bytes = bytes_for(self.is_packed(), queues, size) + RECORD_BYTES;
        let fd = create_memory(bytes)?;
        let memory = Arc::new(self.map(&fd, 0, bytes)?);
        let backing = RegionBacking::find(&memory);
        backing.iter().for_each(|record| record.begin(&Backing::to_record(&self.disk.volume)));
        let area = InflightArea { mmap_size: bytes as u64, mmap_offset: 0, ..area };
        self.inflight = Some((memory, area));
        self.records_read = false;
        Ok(Answer::ReplyWith(OutgoingMessage::inflight(header, area), fd))
    }

    pub(super) fn set_inflight(
        &mut self,
        context: &FrontendContext,
        area: InflightArea,
        fd: &OwnedFd,
    ) -> Outcome {
        let bytes = usize::try_from(area.mmap_size).ok();
        let bytes = bytes.filter(|_| area.mmap_size <= inflight_bytes_max());
        let bytes = bytes.ok_or(MessageError::Refused("the inflight region is too large"))?;
        let memory = Arc::new(self.map(fd, area.mmap_offset, bytes)?);
        let backing = Backing::of(&self.disk.volume);
        if let Some(Err(change)) = RegionBacking::find(&memory).map(|record| record.check(&backing))
        {
            return Ok(self.refuse_store(context, &change));
        }
        self.inflight = Some((memory, area));
        self.records_read = false;
        Ok(Answer::Done)
    }

    /// Ends the connection of a guest that was attached to another store: it caches data of that,
    /// and its requests in flight are for it. Once it was reset, its frontend brings no region, or
    /// asks for a new one.
    fn refuse_store(&mut self, context: &FrontendContext, change: &BackingChange) -> Answer {
        let volume = self.disk.volume.name();
        // Its next connection has another number: one guest of the volume counts.
        context.served.forget_refused(|_, other| *other == **volume);
        context.served.note_refused(&self.id, volume, Some(ebb_mem::clock::now() + REFUSED));
        if let Some(suppressed) = FOREIGN.admit(ebb_mem::clock::now()) {
            let (volume, pid) = (&**self.disk.volume.name(), self.disk.peer.pid);
            tracing::error!(
                volume,
                connection = %self.id,
                pid,
                error = %change,
                remedy = %format_args!("{}, or reset the guest", change.remedy()),
                suppressed,
                "refused a guest whose disk is another one than before"
            );
        }
        self.close();
        Answer::Done
    }

    /// A former table of memory may have been released.
    pub(crate) fn note_released(&mut self, context: &FrontendContext) -> Result<(), SocketError> {
        self.release_memory();
        self.reply_pending(context)
    }
}

/// Memory of our own for the frontend to keep, which neither side can make smaller.
fn create_memory(bytes: usize) -> std::io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("ebbd-inflight", flags)?;
    ftruncate(&fd, bytes as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}
