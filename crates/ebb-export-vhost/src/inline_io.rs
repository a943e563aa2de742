//! Requests that are carried out at once, between two polls of the ring: reads and writes of volumes whose data is in this
//! process, reads of what is in a volume's cache, and requests that need no volume.
//!
//! Such a request needs no task and no buffer: its data is copied once, between the memory of the store or the cache and
//! the guest's. All other requests are left to request tasks.
//!
//! Invariant: a request's chain is resolved and checked before the first byte is copied.

use ebb_io::Io;
use ebb_vhost_proto::{BlkStatus, ID_BYTES};
use ebb_volume::{CachedAccess, DirectAccess, Volume};

use crate::chain::Chain;
use crate::cursor::GuestCursor;
use crate::disk_shared::add;
use crate::memory::GuestMemory;
use crate::queue::DiskQueue;
use crate::request::{BlkAction, BlkRequest, HEADER_BYTES};

/// Bytes of a page, the unit of a time slice.
const PAGE: u64 = 4096;
/// The longest transfer that is carried out at once, bytes: a longer one is left to a task, which yields in between.
const INLINE_MAX: u64 = 1 << 20;

/// The longest read from the cache that is carried out at once, bytes: its pieces are found one by one.
const CACHED_MAX: u64 = 256 << 10;

/// What is in memory of a volume, for the requests of one batch.
pub(crate) enum InlineData<'a> {
    /// Everything.
    All(DirectAccess<'a>),
    /// What its cache holds.
    Cached(CachedAccess<'a>),
    None,
}

impl<'a> InlineData<'a> {
    #[inline]
    pub(crate) fn of(volume: &'a Volume, io: &'a Io) -> InlineData<'a> {
        match volume.direct_access(io) {
            Some(data) => InlineData::All(data),
            None => volume.cached_access(io).map_or(InlineData::None, InlineData::Cached),
        }
    }
}

/// How a request ended that was carried out at once.
pub(crate) struct InlineOutcome {
    pub(crate) result: Result<(), BlkStatus>,
    /// Bytes written to the guest.
    pub(crate) written: u64,
    /// In copies of a page.
    pub(crate) cost: usize,
}

impl DiskQueue {
    /// Carries out a request; `None` if a request task has to do it.
    #[inline]
    pub(crate) fn try_inline(
        &self,
        data: &InlineData<'_>,
        memory: &GuestMemory,
        chain: &Chain,
        request: &BlkRequest,
    ) -> Option<InlineOutcome> {
        let (result, written, pages) = match (request.action, data) {
            (BlkAction::Read { offset, bytes }, InlineData::All(data)) if bytes <= INLINE_MAX => {
                let result = self.read_inline(data, memory, chain, offset, bytes);
                (result, bytes, bytes / PAGE)
            }
            (BlkAction::Read { offset, bytes }, InlineData::Cached(data))
                if bytes <= CACHED_MAX =>
            {
                let result = self.read_cached(data, memory, chain, offset, bytes)?;
                (result, bytes, bytes / PAGE)
            }
            (BlkAction::Write { offset, bytes }, InlineData::All(data))
                if bytes <= INLINE_MAX && !self.disk.writes_through() =>
            {
                (self.write_inline(data, memory, chain, offset, bytes), 0, bytes / PAGE)
            }
            (BlkAction::GetId, _) => {
                let result = self.name_disk(memory, chain);
                (result, ID_BYTES as u64, 0)
            }
            (BlkAction::Unsupported, _) => (Err(BlkStatus::Unsupported), 0, 0),
            (BlkAction::Invalid, _) => (Err(BlkStatus::IoError), 0, 0),
            _ => return None,
        };
        Some(InlineOutcome {
            result,
            written,
            cost: 1 + usize::try_from(pages).unwrap_or(usize::MAX),
        })
    }

    fn read_inline(
        &self,
        data: &DirectAccess<'_>,
        memory: &GuestMemory,
        chain: &Chain,
        offset: u64,
        bytes: u64,
    ) -> Result<(), BlkStatus> {
        add(&self.disk.counters.reads, 1);
        let mut cursor = GuestCursor::new(memory, &chain.writable, 0);
        let read = data.read(offset, bytes, |piece| cursor.put(piece));
        self.status_of(read)?;
        add(&self.disk.counters.read_bytes, bytes);
        cursor.end()
    }

    /// Reads from the cache; `None` if it does not hold all of it: then the guest's memory has part of it, and the request
    /// goes on.
    fn read_cached(
        &self,
        data: &CachedAccess<'_>,
        memory: &GuestMemory,
        chain: &Chain,
        offset: u64,
        bytes: u64,
    ) -> Option<Result<(), BlkStatus>> {
        let length = usize::try_from(bytes).ok()?;
        let mut copied = true;
        let put = |at: usize, piece: &[u8]| copied &= memory.copy_in(&chain.writable, at, piece);
        if !data.read(offset, length, put) {
            return None;
        }
        add(&self.disk.counters.reads, 1);
        add(&self.disk.counters.read_bytes, bytes);
        Some(if copied { Ok(()) } else { Err(BlkStatus::IoError) })
    }

    fn write_inline(
        &self,
        data: &DirectAccess<'_>,
        memory: &GuestMemory,
        chain: &Chain,
        offset: u64,
        bytes: u64,
    ) -> Result<(), BlkStatus> {
        add(&self.disk.counters.writes, 1);
        if self.disk.is_broken() {
            return Err(BlkStatus::IoError);
        }
        let mut cursor = GuestCursor::new(memory, &chain.readable, HEADER_BYTES as u64);
        let written = data.write(offset, bytes, |piece| cursor.get(piece));
        self.status_of(written)?;
        add(&self.disk.counters.written_bytes, bytes);
        cursor.end()
    }

    /// Gives the guest the name of its volume as the serial number of the disk.
    fn name_disk(&self, memory: &GuestMemory, chain: &Chain) -> Result<(), BlkStatus> {
        let mut id = [0; ID_BYTES];
        let name = self.disk.volume.name().as_bytes();
        let length = name.len().min(ID_BYTES);
        id[..length].copy_from_slice(&name[..length]);
        let room = usize::try_from(chain.writable_bytes().saturating_sub(1)).unwrap_or(usize::MAX);
        let written = memory.copy_in(&chain.writable, 0, &id[..room.min(ID_BYTES)]);
        if written { Ok(()) } else { Err(BlkStatus::IoError) }
    }
}
