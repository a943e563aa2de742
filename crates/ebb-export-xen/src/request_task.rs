//! Executes one request in a request task, which keeps its memory for the segments, so that a warm ring allocates nothing.

use std::cell::{Cell, Ref, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ebb_export::{REQUEST_BYTES, RequestTask, longest_piece, piece_bytes};
use ebb_io::{Buf, BufPool, Charge, Signal};
use ebb_volume::{BlockError, ErrorKind, Operation};

use crate::abi::{
    Abi, Body, MAX_DIRECT_SEGMENTS, PAGE_BYTES, Request, Response, SECTOR_BYTES, SEGMENT_BYTES,
    SEGMENTS_PER_PAGE, Segment, Slot, Status, op,
};
use crate::device_shared::{MAX_SEGMENTS, add};
use crate::persistent::GrantTable;
use crate::queue::{MAP_BATCH, Queue};
use ebb_guest_ring::Mapping;

/// A request task of a ring; its job is an entry of the journal.
pub(crate) type SegmentTask = RequestTask<u32, TaskSegments>;

/// What a request task keeps between two requests.
#[derive(Default)]
pub(crate) struct TaskSegments {
    /// When the current request was consumed from the ring, until the volume gets it.
    arrived: Cell<Option<Instant>>,
    /// The segments of the current request.
    segments: RefCell<Vec<Segment>>,
    /// The range of segments that is transferred now: all, or a piece.
    first: Cell<usize>,
    end: Cell<usize>,
    /// Those that the hypervisor has to copy, each with its offset in the buffer.
    uncopied: RefCell<Vec<(Segment, usize)>>,
    copied: Cell<Option<(Buf, bool)>>,
    copied_signal: Signal,
}

impl TaskSegments {
    /// Notes when the next request was consumed from the ring.
    pub(crate) fn note_arrival(&self, at: Instant) {
        self.arrived.set(Some(at));
    }

    fn set_segments(&self, segments: impl Iterator<Item = Segment>) {
        let mut list = self.segments.borrow_mut();
        list.clear();
        list.extend(segments);
        self.first.set(0);
        self.end.set(list.len());
    }

    /// Selects the next piece: as many segments after the last piece as have at most `most` bytes, but at least one.
    /// Returns their length in bytes; `None` if there are no more.
    fn next_piece(&self, most: usize) -> Option<usize> {
        let (list, first) = (self.segments.borrow(), self.end.get());
        let rest = list.get(first..).filter(|rest| !rest.is_empty())?;
        let (mut count, mut bytes) = (0, 0);
        for segment in rest {
            if count > 0 && bytes + segment.bytes() > most {
                break;
            }
            (count, bytes) = (count + 1, bytes + segment.bytes());
        }
        self.first.set(first);
        self.end.set(first + count);
        Some(bytes)
    }

    fn piece(&self) -> Range<usize> {
        self.first.get()..self.end.get()
    }

    pub(crate) fn uncopied(&self) -> Ref<'_, Vec<(Segment, usize)>> {
        self.uncopied.borrow()
    }

    pub(crate) fn put_copied(&self, buf: Buf, done: bool) {
        self.copied.set(Some((buf, done)));
        self.copied_signal.set();
    }

    pub(crate) async fn copied(&self) -> (Buf, bool) {
        loop {
            if let Some(result) = self.copied.take() {
                return result;
            }
            self.copied_signal.wait().await;
        }
    }
}

impl Queue {
    /// Carries out the request in a slot's private copy, and returns its response.
    pub(crate) async fn respond_to(
        &self,
        task: &Rc<SegmentTask>,
        abi: Abi,
        slot: &Slot,
    ) -> Response {
        let request = Request::from_words(abi, slot);
        let status = match self.carry_out(task, &request).await {
            Ok(()) => Status::Okay,
            Err(status) => status,
        };
        Response { id: request.id, operation: request.operation, status: status.code() }
    }

    async fn carry_out(&self, task: &Rc<SegmentTask>, request: &Request) -> Result<(), Status> {
        match request.body {
            Body::Direct { sector, count, segments } => {
                let given = segments.get(..count.into()).ok_or(Status::Error)?;
                task.scratch().set_segments(given.iter().copied());
                self.transfer(task, request.operation, sector).await
            }
            Body::Indirect { sector, count, grefs } => {
                let inner = matches!(request.operation, op::READ | op::WRITE);
                if !inner || count == 0 || count > MAX_SEGMENTS {
                    return Err(Status::Error);
                }
                self.fetch_segments(task, count.into(), &grefs).await?;
                self.transfer(task, request.operation, sector).await
            }
            Body::Discard { sector, sectors, secure } => {
                self.discard(sector, sectors, secure).await
            }
            Body::Unknown => Err(Status::NotSupported),
        }
    }

    /// Copies the descriptors of an indirect request, once.
    async fn fetch_segments(
        &self,
        task: &Rc<SegmentTask>,
        count: usize,
        grefs: &[u32],
    ) -> Result<(), Status> {
        let bytes = (count * SEGMENT_BYTES).next_multiple_of(512);
        let _held = self.memory.take(BufPool::footprint(bytes)).await;
        // Released before the data's charge is acquired: a request that waits for memory holds none of the volume's.
        let _share = self.queue_share.take(BufPool::footprint(bytes)).await;
        let pages = grefs.iter().zip((0..bytes).step_by(PAGE_BYTES));
        task.scratch().set_segments(pages.map(|(gref, from)| {
            let sectors = (bytes - from).min(PAGE_BYTES) / 512;
            Segment { gref: *gref, first: 0, last: u8::try_from(sectors - 1).unwrap_or(7) }
        }));
        let buf = self.buffers.take(bytes).await;
        let (buf, copied) = self.copy(task, buf, false).await;
        if !copied {
            return Err(Status::Error);
        }
        let descriptors = buf.as_chunks::<SEGMENT_BYTES>().0;
        task.scratch().set_segments(descriptors.iter().take(count).map(Segment::parse));
        Ok(())
    }

    /// Checks a read or write: returns its offset and length, bytes.
    pub(crate) fn check(
        &self,
        segments: &[Segment],
        operation: u8,
        sector: u64,
    ) -> Result<(u64, usize), Status> {
        let empty_is_fine = matches!(operation, op::WRITE_BARRIER | op::FLUSH_DISKCACHE);
        if segments.is_empty() && !empty_is_fine {
            return Err(Status::Error);
        }
        if operation != op::READ && self.disk.read_only {
            return Err(Status::Error);
        }
        let mut bytes = 0;
        for segment in segments {
            if !segment.is_valid() {
                return Err(Status::Error);
            }
            bytes += segment.bytes();
        }
        if bytes == 0 {
            return Ok((0, 0));
        }
        // The volume checks that this is within its size before any data is transferred.
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Status::Error)?;
        Ok((offset, bytes))
    }

    async fn transfer(
        &self,
        task: &Rc<SegmentTask>,
        operation: u8,
        sector: u64,
    ) -> Result<(), Status> {
        let (offset, bytes) = self.check(&task.scratch().segments.borrow(), operation, sector)?;
        let counters = &self.disk.counters;
        let _admitted = self.buffers.admit(BufPool::footprint(bytes.max(1))).await;
        let bounce = self.disk.volume.bounce_footprint(offset, bytes);
        let wanted = BufPool::footprint(bytes.max(1)) + bounce + REQUEST_BYTES;
        let _held = self.memory.take(wanted).await;
        let reserve = self.queue_share.share().reserve();
        let whole = match self.queue_share.try_take(wanted) {
            None if wanted <= reserve => Some(self.queue_share.take(wanted).await),
            granted => granted,
        };
        match operation {
            op::READ => {
                add(&counters.rd_req, 1);
                add(&counters.rd_sect, bytes as u64 / SECTOR_BYTES);
            }
            op::WRITE => add(&counters.wr_req, 1),
            // The queue has drained all other requests before a barrier.
            _ => {
                add(&counters.f_req, 1);
                self.make_stable().await?;
                if bytes == 0 {
                    return Ok(());
                }
            }
        }
        match whole {
            Some(share) => self.move_piece(task, operation, (offset, bytes), share).await,
            None => self.transfer_in_pieces(task, operation, offset).await,
        }
    }

    /// Transfers a request in pieces if memory is short: each piece needs no more than the volume's reserve, and is
    /// acquired while the request holds no other memory of it.
    async fn transfer_in_pieces(
        &self,
        task: &Rc<SegmentTask>,
        operation: u8,
        mut offset: u64,
    ) -> Result<(), Status> {
        let most = longest_piece(&self.queue_share);
        task.scratch().end.set(0);
        while let Some(bytes) = task.scratch().next_piece(most) {
            let bounce = self.disk.volume.bounce_footprint(offset, bytes);
            let share = self.queue_share.take(piece_bytes(&self.queue_share, bytes, bounce)).await;
            self.move_piece(task, operation, (offset, bytes), share).await?;
            offset += bytes as u64;
        }
        Ok(())
    }

    /// Transfers the task's current piece, for which `_share` is held.
    async fn move_piece(
        &self,
        task: &Rc<SegmentTask>,
        operation: u8,
        (offset, bytes): (u64, usize),
        _share: Charge,
    ) -> Result<(), Status> {
        if operation != op::READ {
            return self.write(task, offset, bytes).await;
        }
        let buf = self.buffers.take(bytes).await;
        self.note_queued(task, Operation::Read);
        let (result, buf) = self.disk.volume.read(&self.io, buf, offset).await;
        self.status_of(result)?;
        let (_, copied) = self.copy(task, buf, true).await;
        if copied { Ok(()) } else { Err(Status::Error) }
    }

    async fn write(&self, task: &Rc<SegmentTask>, offset: u64, bytes: usize) -> Result<(), Status> {
        if self.disk.is_broken() {
            return Err(Status::Error);
        }
        add(&self.disk.counters.wr_sect, bytes as u64 / SECTOR_BYTES);
        let buf = self.buffers.take(bytes).await;
        let (buf, copied) = self.copy(task, buf, false).await;
        if !copied {
            return Err(Status::Error);
        }
        self.note_queued(task, Operation::Write);
        let (result, _) = self.disk.volume.write(&self.io, buf, offset, false).await;
        if result.is_ok() && self.disk.volume.may_hide_loss() {
            self.disk.unstable.note(&self.journal);
        }
        self.status_of(result)
    }

    fn note_queued(&self, task: &SegmentTask, operation: Operation) {
        if let Some(arrived) = task.scratch().arrived.take() {
            self.disk.volume.stats().note_queued(&self.io, operation, arrived);
        }
    }

    async fn make_stable(&self) -> Result<(), Status> {
        let mark = self.disk.unstable.mark();
        let result = match self.disk.is_broken() {
            true => return Err(Status::Error),
            false => self.disk.volume.flush_for(&self.io, &self.disk.told).await,
        };
        if result.is_ok() {
            self.disk.unstable.cover(mark);
        }
        let unsupported = matches!(&result, Err(e) if e.kind == ErrorKind::Unsupported);
        // Also while the volume is being closed: what the store lost stays lost. Only one that was given up is not.
        let given_up = matches!(&result, Err(e) if e.kind == ErrorKind::Closing);
        if result.is_err() && !unsupported && !given_up {
            self.disk.broken.store(true, Ordering::Relaxed);
            self.journal.note_broken();
        }
        self.status_of(result)
    }

    async fn discard(&self, sector: u64, sectors: u64, secure: bool) -> Result<(), Status> {
        add(&self.disk.counters.ds_req, 1);
        if self.disk.read_only {
            return Err(Status::Error);
        }
        if !self.disk.discard || secure {
            // Secure discard is not offered: stores cannot guarantee it.
            return Err(Status::NotSupported);
        }
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Status::Error)?;
        let bytes = sectors.checked_mul(SECTOR_BYTES).ok_or(Status::Error)?;
        self.status_of(self.disk.volume.discard(&self.io, offset, bytes, false).await)
    }

    /// The status with which the guest receives the result of a request. Logs an error of the store.
    pub(crate) fn status_of(&self, result: Result<(), BlockError>) -> Result<(), Status> {
        let Err(error) = result else { return Ok(()) };
        let refused = matches!(error.kind, ErrorKind::OutOfRange | ErrorKind::Invalid);
        if !refused && self.may_log() {
            let cause = error.source.as_ref().map(ToString::to_string).unwrap_or_default();
            tracing::warn!(queue = self.name(), %error, cause, "a request failed");
        }
        match error.kind {
            ErrorKind::Unsupported => Err(Status::NotSupported),
            _ => Err(Status::Error),
        }
    }

    /// Copies between a buffer and the pages of the task's segments, whose lengths add up to the buffer's:
    /// directly for pages that are or can be mapped, otherwise by the hypervisor. Returns the buffer, and
    /// whether everything was copied.
    async fn copy(&self, task: &Rc<SegmentTask>, mut buf: Buf, to_guest: bool) -> (Buf, bool) {
        if !self.copy_mapped(task.scratch(), &mut buf, to_guest) {
            return (buf, false);
        }
        if task.scratch().uncopied().is_empty() {
            return (buf, true);
        }
        self.copier.copy(task, buf, to_guest).await
    }

    /// Copies what needs no hypercall; false if a page cannot be accessed.
    fn copy_mapped(&self, task: &TaskSegments, buf: &mut [u8], to_guest: bool) -> bool {
        let mut uncopied = task.uncopied.borrow_mut();
        uncopied.clear();
        let mut at = 0;
        for segment in task.segments.borrow().get(task.piece()).unwrap_or_default() {
            let range = at..at + segment.bytes();
            at = range.end;
            let Some(part) = buf.get_mut(range.clone()) else { return false };
            match self.copy_persistent(*segment, part, to_guest) {
                Some(true) => {}
                Some(false) => return false,
                None => uncopied.push((*segment, range.start)),
            }
        }
        true
    }

    /// Copies a segment through a persistent mapping; `None` if there is none and no room for one.
    fn copy_persistent(&self, segment: Segment, part: &mut [u8], to_guest: bool) -> Option<bool> {
        let mut table = self.table.as_ref()?.borrow_mut();
        let Some(place) = self.find_page(&mut table, segment.gref)? else { return Some(false) };
        Some(table.page(place).is_some_and(|page| move_bytes(page, segment, part, to_guest)))
    }

    /// The index of the mapping of a grant, which is mapped if it is not yet. `None` if there is no room for
    /// it, `Some(None)` if it cannot be mapped.
    fn find_page(&self, table: &mut GrantTable, gref: u32) -> Option<Option<u32>> {
        match table.touch(gref, self.now.get()) {
            Some(place) => Some(Some(place)),
            None => self.map_page(table, gref),
        }
    }

    /// Maps a page that the table does not have; as [`Queue::find_page`].
    #[cold]
    pub(crate) fn map_page(&self, table: &mut GrantTable, gref: u32) -> Option<Option<u32>> {
        if self.starved.get() {
            return None;
        }
        let (mapped, cap) = (self.mapped.get(), self.disk.parameters.ring_cap());
        // Near the cap only pages that are used repeatedly are mapped, a few at a time.
        let crowded = table.len() * 16 >= usize::try_from(cap).unwrap_or(usize::MAX) * 15;
        if crowded {
            let worth_it = table.seen_recently(gref);
            if mapped >= MAP_BATCH || !worth_it {
                return None;
            }
        }
        let idle = table.is_empty() || !table.overflowed();
        if !table.has_room(cap) {
            if idle {
                self.purge_needed.set();
            }
            return None;
        }
        // Always mapped writable, since the guest uses the page for reads and for writes.
        if !self.disk.parameters.acquire_mapping() {
            self.starve();
            return None;
        }
        let page = match self.grants.map(&[gref], true) {
            Ok(page) => page,
            Err(error) => {
                self.disk.parameters.release_mappings(1);
                // An invalid grant fails in the copy as well. Other errors mean that this process has too
                // many mappings or the host too little memory: the request must not fail because of that.
                if error.kind() != std::io::ErrorKind::InvalidInput {
                    self.starve();
                }
                return None;
            }
        };
        if table.is_empty() {
            self.purge_needed.set();
        }
        self.mapped.set(mapped.saturating_add(1));
        add(&self.disk.counters.maps, 1);
        self.disk.counters.note_mapped(1);
        Some(Some(table.insert(gref, page, self.now.get())))
    }
}

impl Queue {
    /// Maps nothing more until the next purge.
    fn starve(&self) {
        self.starved.set(true);
        self.purge_needed.set();
    }
}

/// Copies between a mapped page and `part`, which has the segment's length.
fn move_bytes(page: &Mapping, segment: Segment, part: &mut [u8], to_guest: bool) -> bool {
    match to_guest {
        true => page.write(segment.offset(), part),
        false => page.read(segment.offset(), part),
    }
}

/// The limits of a slot and of the pages of descriptors.
const _: () = assert!(MAX_DIRECT_SEGMENTS == 11 && MAX_SEGMENTS as usize <= SEGMENTS_PER_PAGE * 8);
