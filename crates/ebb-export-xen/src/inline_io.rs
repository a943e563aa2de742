//! Requests that are carried out at once, between two polls of the ring: the volume's data is in this
//! process, and the guest's pages are mapped, or the hypervisor copies them in one call for all requests
//! that were consumed together.
//!
//! Such a request needs no task, no wait, and, if its pages are mapped, no buffer: the data is copied
//! once between the store's memory and the guest's page. All other requests are left to request tasks:
//! other operations, volumes with a cache, stores that need I/O, requests that have to wait for memory.
//!
//! Invariants: a request is fully checked and all its pages are found before the first byte is copied;
//! requests in flight here have completed when [`Queue::finish_copies`] returns, in the same iteration
//! of the worker.

use std::cell::RefCell;

use ebb_export::REQUEST_BYTES;
use ebb_io::{BudgetGuard, Buf, BufPool};
use ebb_volume::DirectAccess;

use crate::abi::{
    Abi, Head, MAX_DIRECT_SEGMENTS, Response, SECTOR_BYTES, SEGMENTS_PER_PAGE, Segment, Slot,
    Status, op,
};
use crate::copier::operation_on;
use crate::device_shared::{MAX_SEGMENTS, add};
use crate::persistent::GrantTable;
use crate::platform::CopyOp;
use crate::queue::Queue;
use ebb_guest_ring::Mapping;

/// About this many segments are copied per hypercall.
const COPIES_PER_CALL: usize = 32;
/// Bytes of a sector.
const SECTOR: u16 = 512;
/// Segments of the largest supported request.
const MOST: usize = MAX_SEGMENTS as usize;

/// Scratch memory for batches of requests; kept, so that a warm ring allocates nothing.
#[derive(Default)]
pub(crate) struct InlineIo(RefCell<InlineScratch>);

#[derive(Default)]
struct InlineScratch {
    /// The segments of the current request.
    segments: Vec<Segment>,
    /// Their mapped pages.
    spans: Vec<PageSpan>,
    /// Requests whose data is to be copied by the hypervisor.
    copying: Vec<PendingCopy>,
    operations: Vec<CopyOp>,
}

/// A segment whose page is mapped: the page's index in the table of grants, and the bytes in it.
#[derive(Clone, Copy)]
struct PageSpan {
    place: u32,
    offset: u16,
    bytes: u16,
}

/// A request whose data is to be copied by the hypervisor.
struct PendingCopy {
    entry: u32,
    id: u64,
    operation: u8,
    offset: u64,
    /// How many of the queued copy operations are this request's.
    segments: usize,
    buf: Buf,
    _held: BudgetGuard,
}

/// The outcome of trying a request.
enum InlineOutcome {
    Done(Result<(), Status>),
    /// It completes with the queued copies.
    Copied,
    /// A request task has to carry it out.
    NeedsTask,
}

/// The cost of a request's pages, in units of one copy of a mapped page: `direct_access` such pages, pages
/// `copied` by the hypervisor, and pages newly `mapped`, which are unmapped again later. Round figures: the
/// second from instruction counts on Xen, the third from those over shared memory (ADR 6).
pub(crate) fn cost(direct_access: usize, copied: usize, mapped: usize) -> usize {
    direct_access + 3 * copied + 16 * mapped
}

impl Queue {
    /// Carries out a request, or queues its copies, and returns the cost, see [`cost`]. `None` if a
    /// request task has to carry it out.
    pub(crate) fn try_inline(
        &self,
        data: &DirectAccess<'_>,
        abi: Abi,
        entry: u32,
        slot: &Slot,
    ) -> Option<usize> {
        let head = abi.head(slot);
        let scratch = &mut *self.inline_io.0.borrow_mut();
        let operation = match head.code() {
            code @ (op::READ | op::WRITE) => {
                let count = usize::from(head.count());
                if count > MAX_DIRECT_SEGMENTS {
                    return None;
                }
                scratch.segments.clear();
                (0..count).for_each(|number| scratch.segments.push(head.segment(number)));
                code
            }
            op::INDIRECT => self.read_descriptors(scratch, head)?,
            _ => return None,
        };
        if scratch.segments.is_empty() {
            return None;
        }
        let (id, sector) = (head.id(), head.sector());
        let (pages, before) = (scratch.segments.len(), self.mapped.get());
        let outcome = self.carry_inline(data, scratch, entry, id, operation, sector);
        let mapped = self.mapped.get() - before;
        let status = match outcome {
            InlineOutcome::Done(Ok(())) => Status::Okay,
            InlineOutcome::Done(Err(status)) => status,
            InlineOutcome::Copied => return Some(cost(0, pages, mapped)),
            InlineOutcome::NeedsTask => return None,
        };
        self.complete(entry, Response { id, operation, status: status.code() });
        Some(cost(pages, 0, mapped))
    }

    fn carry_inline(
        &self,
        data: &DirectAccess<'_>,
        scratch: &mut InlineScratch,
        entry: u32,
        id: u64,
        operation: u8,
        sector: u64,
    ) -> InlineOutcome {
        let (offset, bytes) = match self.check(&scratch.segments, operation, sector) {
            Ok(verdict) => verdict,
            Err(status) => return InlineOutcome::Done(Err(status)),
        };
        if operation == op::WRITE && self.disk.is_broken() {
            return InlineOutcome::Done(Err(Status::Error));
        }
        match self.find_pages(scratch) {
            Some(true) => {}
            Some(false) => return InlineOutcome::Done(Err(Status::Error)),
            None => return self.begin_copy(data, scratch, entry, id, operation, offset, bytes),
        }
        self.count(operation, bytes);
        let Some(table) = &self.table else { return InlineOutcome::NeedsTask };
        let table = table.borrow();
        let mut cursor = Cursor::new(&table, scratch);
        let length = bytes as u64;
        let moved = match operation {
            op::READ => data.read(offset, length, |piece| cursor.put(piece)),
            _ => data.write(offset, length, |piece| cursor.get(piece)),
        };
        InlineOutcome::Done(match moved {
            Ok(()) if !cursor.failed => Ok(()),
            Ok(()) => Err(Status::Error),
            Err(_) => self.status_of(moved),
        })
    }

    /// Finds the mappings of the segments' pages, and maps missing ones if there is room. `None` if a page
    /// is not mapped and has no room; `Some(false)` if a page cannot be mapped.
    fn find_pages(&self, scratch: &mut InlineScratch) -> Option<bool> {
        let mut table = self.table.as_ref()?.borrow_mut();
        let now = self.now.get();
        scratch.spans.clear();
        for segment in &scratch.segments {
            let place = match table.touch(segment.gref, now) {
                Some(place) => place,
                None => match self.map_page(&mut table, segment.gref)? {
                    Some(place) => place,
                    None => return Some(false),
                },
            };
            scratch.spans.push(PageSpan::new(*segment, place));
        }
        Some(true)
    }

    /// Copies the descriptors of an indirect read or write, once, if their page is mapped. Returns the
    /// inner operation.
    #[inline(never)]
    fn read_descriptors(&self, scratch: &mut InlineScratch, head: Head<'_>) -> Option<u8> {
        const { assert!(MOST <= SEGMENTS_PER_PAGE) };
        let (inner, count, gref) = head.indirect();
        if !matches!(inner, op::READ | op::WRITE) {
            return None;
        }
        let mut words = [0; MOST];
        let words = words.get_mut(..count.into())?;
        let mut table = self.table.as_ref()?.borrow_mut();
        let page = table.get(gref, self.now.get())?;
        if !page.read_words(0, words) {
            return None;
        }
        scratch.segments.clear();
        scratch.segments.extend(words.iter().map(|word| Segment::from_word(*word)));
        Some(inner)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    fn begin_copy(
        &self,
        data: &DirectAccess<'_>,
        scratch: &mut InlineScratch,
        entry: u32,
        id: u64,
        operation: u8,
        offset: u64,
        bytes: usize,
    ) -> InlineOutcome {
        let footprint = BufPool::footprint(bytes) + REQUEST_BYTES;
        let Some(held) = self.memory.try_take(footprint) else { return InlineOutcome::NeedsTask };
        // From the worker's pool, not the queue's: it is free again within this iteration, and the next
        // ring then finds it in the processor's cache.
        let Some(mut buf) = self.io.pool().try_take(bytes) else { return InlineOutcome::NeedsTask };
        self.count(operation, bytes);
        let to_guest = operation == op::READ;
        if to_guest {
            let mut rest = &mut buf[..];
            let shown = data.read(offset, bytes as u64, |piece| {
                let (here, after) = std::mem::take(&mut rest).split_at_mut(piece.len());
                here.copy_from_slice(piece);
                rest = after;
            });
            if let Err(status) = self.status_of(shown) {
                return InlineOutcome::Done(Err(status));
            }
        }
        let mut rest = &mut buf[..];
        for segment in &scratch.segments {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(segment.bytes());
            scratch.operations.push(operation_on(self.guest, *segment, part, to_guest));
            rest = after;
        }
        let segments = scratch.segments.len();
        scratch.copying.push(PendingCopy {
            entry,
            id,
            operation,
            offset,
            segments,
            buf,
            _held: held,
        });
        if scratch.operations.len() >= COPIES_PER_CALL {
            self.copy_all(data, scratch);
        }
        InlineOutcome::Copied
    }

    /// Carries out the queued copies and completes their requests.
    pub(crate) fn finish_copies(&self, data: &DirectAccess<'_>) {
        let scratch = &mut *self.inline_io.0.borrow_mut();
        if !scratch.copying.is_empty() {
            self.copy_all(data, scratch);
        }
    }

    fn copy_all(&self, data: &DirectAccess<'_>, scratch: &mut InlineScratch) {
        // SAFETY: the operations point into buffers that `scratch` owns, each within its own range;
        // nothing else uses the buffers until the call returns.
        let outcome = unsafe { self.grants.copy(&mut scratch.operations) };
        add(&self.disk.counters.copies, scratch.operations.len() as u64);
        add(&self.disk.counters.copy_calls, 1);
        let mut results = scratch.operations.iter();
        for request in scratch.copying.drain(..) {
            let done = results.by_ref().take(request.segments).filter(|copy| copy.is_done());
            let whole = done.count() == request.segments && outcome.is_ok();
            let mut result = if whole { Ok(()) } else { Err(Status::Error) };
            if whole && request.operation == op::WRITE {
                let mut rest = &request.buf[..];
                let length = rest.len() as u64;
                let written = data.write(request.offset, length, |piece| {
                    let (here, after) = rest.split_at(piece.len());
                    piece.copy_from_slice(here);
                    rest = after;
                });
                result = self.status_of(written);
            }
            let status = result.err().unwrap_or(Status::Okay).code();
            let PendingCopy { entry, id, operation, .. } = request;
            self.complete(entry, Response { id, operation, status });
        }
        scratch.operations.clear();
    }

    fn count(&self, operation: u8, bytes: usize) {
        let counters = &self.disk.counters;
        let (requests, sectors) = match operation {
            op::READ => (&counters.rd_req, &counters.rd_sect),
            _ => (&counters.wr_req, &counters.wr_sect),
        };
        add(requests, 1);
        add(sectors, bytes as u64 / SECTOR_BYTES);
    }
}

impl PageSpan {
    #[inline]
    fn new(segment: Segment, place: u32) -> PageSpan {
        // A valid segment is within a page, so the sums fit.
        let [first, last] = [u16::from(segment.first), u16::from(segment.last)];
        let sectors = last.saturating_sub(first) + 1;
        PageSpan { place, offset: first * SECTOR, bytes: sectors * SECTOR }
    }
}

/// The position in the guest's pages of the next bytes.
struct Cursor<'a> {
    table: &'a GrantTable,
    spans: &'a [PageSpan],
    /// Bytes of the first span that were copied.
    done: usize,
    failed: bool,
}

impl<'a> Cursor<'a> {
    fn new(table: &'a GrantTable, scratch: &'a InlineScratch) -> Cursor<'a> {
        Cursor { table, spans: &scratch.spans, done: 0, failed: false }
    }

    /// The next bytes within one page, at most `most`: the mapping, the offset, the length.
    #[inline]
    fn next(&mut self, most: usize) -> Option<(&'a Mapping, usize, usize)> {
        let (span, rest) = self.spans.split_first()?;
        let (page, bytes) = (self.table.page(span.place)?, usize::from(span.bytes));
        let offset = usize::from(span.offset) + self.done;
        if self.done == 0 && bytes == most {
            // The usual case: whole segments.
            self.spans = rest;
            return Some((page, offset, bytes));
        }
        let here = most.min(bytes - self.done);
        self.done += here;
        if self.done == bytes {
            self.done = 0;
            self.spans = rest;
        }
        Some((page, offset, here))
    }

    #[inline]
    fn put(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let Some((page, offset, here)) = self.next(piece.len()) else { return self.fail() };
            let (part, rest) = piece.split_at(here);
            self.failed |= !page.write(offset, part);
            piece = rest;
        }
    }

    #[inline]
    fn get(&mut self, mut piece: &mut [u8]) {
        while !piece.is_empty() {
            let Some((page, offset, here)) = self.next(piece.len()) else { return self.fail() };
            let (part, rest) = piece.split_at_mut(here);
            self.failed |= !page.read(offset, part);
            piece = rest;
        }
    }

    fn fail(&mut self) {
        self.failed = true;
    }
}
