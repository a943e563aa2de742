//! Requests that need not wait: the volume's bytes lie in this process, and the guest's pages are
//! mapped, or copied by the hypervisor in one call for all requests that were found at once.
//!
//! Such a request is carried out between two looks at the ring, without a lane, a buffer (if its
//! pages are mapped) or a wait: bytes move once, from where the store has them to the guest's page or
//! back. Whatever is out of the ordinary is left to the lanes: other operations, volumes with a
//! cache, stores that are journeys away, memory that must be waited for.
//!
//! Invariants: a request is checked whole, and all its pages are at hand, before the first byte
//! moves; what is under way here is over when [`Queue::finish_copies`] returns, within the same turn
//! of the worker.

use std::cell::RefCell;

use ebb_io::{BudgetGuard, Buf, BufPool};
use ebb_volume::AtHand;

use crate::abi::{
    Abi, Head, MAX_DIRECT_SEGMENTS, Response, SECTOR_BYTES, SEGMENTS_PER_PAGE, Segment, Slot,
    Status, op,
};
use crate::copier::operation_on;
use crate::device_shared::{MAX_SEGMENTS, Transient, add};
use crate::guest_memory::Mapping;
use crate::persistent::Table;
use crate::platform::CopyOp;
use crate::queue::Queue;
use crate::request_task::REQUEST_BYTES;

/// Segments the hypervisor copies in one call, more or less.
const COPIES_TURN: usize = 32;
/// Bytes of a sector.
const SECTOR: u16 = 512;
/// Segments of the largest request that is served.
const MOST: usize = MAX_SEGMENTS as usize;

/// What batches of requests are carried out with; kept, so that a warm ring allocates nothing.
#[derive(Default)]
pub(crate) struct Express(RefCell<Work>);

#[derive(Default)]
struct Work {
    /// The segments of the request at hand.
    segments: Vec<Segment>,
    /// Where these are.
    spans: Vec<Span>,
    /// Requests whose data the hypervisor is to copy.
    copying: Vec<Copying>,
    operations: Vec<CopyOp>,
}

/// A segment whose page is mapped: where that is in the table of grants, and which of its bytes.
#[derive(Clone, Copy)]
struct Span {
    place: u32,
    offset: u16,
    bytes: u16,
}

/// A request whose data the hypervisor is to copy.
struct Copying {
    entry: u32,
    id: u64,
    operation: u8,
    offset: u64,
    /// Its operations: so many of the list.
    segments: usize,
    buf: Buf,
    _held: BudgetGuard,
}

/// What became of a request.
enum Outcome {
    Over(Result<(), Status>),
    /// It is answered when the copies are done.
    Copied,
    /// A lane must do it.
    Lane,
}

/// What pages cost, in copies of a page that stays mapped: so many of those, so many that the hypervisor
/// copied, and so many newly mapped, which are unmapped again one day. Round figures: the second from
/// instructions on real Xen, the third from those over shared memory (ADR 6).
pub(crate) fn cost(direct_access: usize, copied: usize, mapped: usize) -> usize {
    direct_access + 3 * copied + 16 * mapped
}

impl Queue {
    /// Carries a request out at once, or has it copied with others: what that costs, see [`cost`].
    /// `None` if a lane must do it.
    pub(crate) fn at_once(
        &self,
        data: &AtHand<'_>,
        abi: Abi,
        entry: u32,
        slot: &Slot,
    ) -> Option<usize> {
        let head = abi.head(slot);
        let work = &mut *self.express.0.borrow_mut();
        let operation = match head.code() {
            code @ (op::READ | op::WRITE) => {
                let count = usize::from(head.count());
                if count > MAX_DIRECT_SEGMENTS {
                    return None;
                }
                work.segments.clear();
                (0..count).for_each(|number| work.segments.push(head.segment(number)));
                code
            }
            op::INDIRECT => self.read_descriptors(work, head)?,
            _ => return None,
        };
        if work.segments.is_empty() {
            return None;
        }
        let (id, sector) = (head.id(), head.sector());
        let (pages, before) = (work.segments.len(), self.mapped.get());
        let outcome = self.carry(data, work, entry, id, operation, sector);
        let mapped = self.mapped.get() - before;
        let status = match outcome {
            Outcome::Over(Ok(())) => Status::Okay,
            Outcome::Over(Err(status)) => status,
            Outcome::Copied => return Some(cost(0, pages, mapped)),
            Outcome::Lane => return None,
        };
        self.settle(entry, Response { id, operation, status: status.code() });
        Some(cost(pages, 0, mapped))
    }

    fn carry(
        &self,
        data: &AtHand<'_>,
        work: &mut Work,
        entry: u32,
        id: u64,
        operation: u8,
        sector: u64,
    ) -> Outcome {
        let (offset, bytes) = match self.check(&work.segments, operation, sector) {
            Ok(verdict) => verdict,
            Err(status) => return Outcome::Over(Err(status)),
        };
        if operation == op::WRITE && self.disk.is_broken() {
            return Outcome::Over(Err(Status::Error));
        }
        match self.find_pages(work) {
            Some(true) => {}
            Some(false) => return Outcome::Over(Err(Status::Error)),
            None if self.disk.transient == Transient::Map => return Outcome::Lane,
            None => return self.begin_copy(data, work, entry, id, operation, offset, bytes),
        }
        self.count(operation, bytes);
        let Some(table) = &self.table else { return Outcome::Lane };
        let table = table.borrow();
        let mut cursor = Cursor::new(&table, work);
        let length = bytes as u64;
        let moved = match operation {
            op::READ => data.read(offset, length, |piece| cursor.put(piece)),
            _ => data.write(offset, length, |piece| cursor.get(piece)),
        };
        Outcome::Over(match moved {
            Ok(()) if !cursor.failed => Ok(()),
            Ok(()) => Err(Status::Error),
            Err(_) => self.validate(moved),
        })
    }

    /// Finds the mappings of the segments' pages, and makes those that are missing and have room.
    /// `None` if one has none; `Some(false)` if one cannot be mapped.
    fn find_pages(&self, work: &mut Work) -> Option<bool> {
        let mut table = self.table.as_ref()?.borrow_mut();
        let now = self.now.get();
        work.spans.clear();
        for segment in &work.segments {
            let place = match table.touch(segment.gref, now) {
                Some(place) => place,
                None => match self.map_page(&mut table, segment.gref)? {
                    Some(place) => place,
                    None => return Some(false),
                },
            };
            work.spans.push(Span::new(*segment, place));
        }
        Some(true)
    }

    /// Copies the descriptors of an indirect read or write out of their page, once, if that is mapped:
    /// the inner operation.
    #[inline(never)]
    fn read_descriptors(&self, work: &mut Work, head: Head<'_>) -> Option<u8> {
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
        work.segments.clear();
        work.segments.extend(words.iter().map(|word| Segment::from_word(*word)));
        Some(inner)
    }

    #[expect(clippy::too_many_arguments, reason = "a request in parts")]
    fn begin_copy(
        &self,
        data: &AtHand<'_>,
        work: &mut Work,
        entry: u32,
        id: u64,
        operation: u8,
        offset: u64,
        bytes: usize,
    ) -> Outcome {
        let footprint = BufPool::footprint(bytes) + REQUEST_BYTES;
        let Some(held) = self.memory.try_take(footprint) else { return Outcome::Lane };
        // Of the worker's own, not of the queue's pool: it is free again within the turn, and the next
        // ring then finds it in the processor's cache.
        let Some(mut buf) = self.io.pool().try_take(bytes) else { return Outcome::Lane };
        self.count(operation, bytes);
        let to_guest = operation == op::READ;
        if to_guest {
            let mut rest = &mut buf[..];
            let shown = data.read(offset, bytes as u64, |piece| {
                let (here, after) = std::mem::take(&mut rest).split_at_mut(piece.len());
                here.copy_from_slice(piece);
                rest = after;
            });
            if let Err(status) = self.validate(shown) {
                return Outcome::Over(Err(status));
            }
        }
        let mut rest = &mut buf[..];
        for segment in &work.segments {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(segment.bytes());
            work.operations.push(operation_on(self.guest, *segment, part, to_guest));
            rest = after;
        }
        let segments = work.segments.len();
        work.copying.push(Copying { entry, id, operation, offset, segments, buf, _held: held });
        if work.operations.len() >= COPIES_TURN {
            self.copy_all(data, work);
        }
        Outcome::Copied
    }

    /// Has the hypervisor copy what has gathered, and answers the requests it was for.
    pub(crate) fn finish_copies(&self, data: &AtHand<'_>) {
        let work = &mut *self.express.0.borrow_mut();
        if !work.copying.is_empty() {
            self.copy_all(data, work);
        }
    }

    fn copy_all(&self, data: &AtHand<'_>, work: &mut Work) {
        // SAFETY: the operations point into buffers that `work` owns, each within its own part;
        // nobody else has them until the call is over.
        let outcome = unsafe { self.grants.copy(&mut work.operations) };
        add(&self.disk.counters.copies, work.operations.len() as u64);
        add(&self.disk.counters.copy_calls, 1);
        let mut results = work.operations.iter();
        for request in work.copying.drain(..) {
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
                result = self.validate(written);
            }
            let status = result.err().unwrap_or(Status::Okay).code();
            let Copying { entry, id, operation, .. } = request;
            self.settle(entry, Response { id, operation, status });
        }
        work.operations.clear();
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

impl Span {
    #[inline]
    fn new(segment: Segment, place: u32) -> Span {
        // A valid segment lies within a page.
        let [first, last] = [u16::from(segment.first), u16::from(segment.last)];
        let sectors = last.saturating_sub(first) + 1;
        Span { place, offset: first * SECTOR, bytes: sectors * SECTOR }
    }
}

/// Where in the guest's pages the next bytes go, or come from.
struct Cursor<'a> {
    table: &'a Table,
    spans: &'a [Span],
    /// Bytes of the first span that are done.
    done: usize,
    failed: bool,
}

impl<'a> Cursor<'a> {
    fn new(table: &'a Table, work: &'a Work) -> Cursor<'a> {
        Cursor { table, spans: &work.spans, done: 0, failed: false }
    }

    /// The next at most `most` bytes that lie in one page: the mapping, the offset, how many.
    #[inline]
    fn next(&mut self, most: usize) -> Option<(&'a Mapping, usize, usize)> {
        let (span, rest) = self.spans.split_first()?;
        let (page, bytes) = (self.table.page(span.place)?, usize::from(span.bytes));
        let offset = usize::from(span.offset) + self.done;
        if self.done == 0 && bytes == most {
            // Most: a page here, a page there.
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
