//! What is in flight in one shard: fills, writes, writebacks, and the tasks that wait for them.
//!
//! Pure bookkeeping under the shard's lock; wakers are collected and woken after it is released. A *write*
//! here is a write, discard or write-zeroes request. Two rules keep cached data equal to the store's:
//!
//! - One request fills a page at a time. Other requests wait for the end of that fill, whatever its result,
//!   and check again. No request waits while a fill of its own is open, so waits cannot form a cycle.
//! - A fill that overlaps in time with a write to its pages is **poisoned**: the request may return its data,
//!   but the cache does not keep it. Two writes that overlap in time and in a sector **clash**: the order in
//!   which the store did them is unknown, so neither is kept.
//!
//! A write whose future was dropped may still reach the store at any time. Its entry stays (**abandoned**),
//! and its pages are never cached again. That happens when a worker ends, so there are at most as many
//! entries as requests were in flight.

use std::ops::Range;
use std::task::Waker;

use crate::pages::{pages_of, within};

#[derive(Debug)]
struct FillEntry {
    id: u64,
    frame: u64,
    pages: u16,
    poisoned: bool,
}

#[derive(Debug)]
struct WriteEntry {
    id: u64,
    sectors: Range<u64>,
    clash: bool,
    /// Its future was dropped.
    abandoned: bool,
}

/// Dirty pages under writeback.
#[derive(Debug)]
struct WritebackEntry {
    id: u64,
    frame: u64,
    pages: u16,
}

#[derive(Debug)]
struct WaiterEntry {
    id: u64,
    /// The entry it waits for: a fill, a writeback or a write.
    fill: u64,
    waker: Waker,
}

/// Fills, writes, writebacks and waiters of one shard.
#[derive(Debug, Default)]
pub(crate) struct InflightTable {
    fills: Vec<FillEntry>,
    writes: Vec<WriteEntry>,
    cleans: Vec<WritebackEntry>,
    waiters: Vec<WaiterEntry>,
    next: u64,
}

/// Wakers to be woken when no lock is held: dropping it wakes them.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    few: [Option<Waker>; 4],
    many: Vec<Waker>,
}

impl Wakers {
    fn push(&mut self, waker: Waker) {
        match self.few.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(waker),
            None => self.many.push(waker),
        }
    }
}

impl Drop for Wakers {
    fn drop(&mut self) {
        self.few.iter_mut().filter_map(Option::take).for_each(Waker::wake);
        self.many.drain(..).for_each(Waker::wake);
    }
}

impl InflightTable {
    /// Odd numbers; those of writes, which the volume assigns, are even.
    fn number(&mut self) -> u64 {
        self.next += 2;
        self.next | 1
    }

    /// Pages among `pages` that are being filled, and the number of one such fill.
    pub(crate) fn filling(&self, frame: u64, pages: u16) -> (u16, Option<u64>) {
        let mut found = (0, None);
        for fill in &self.fills {
            if fill.frame == frame && fill.pages & pages != 0 {
                found = (found.0 | fill.pages & pages, Some(fill.id));
            }
        }
        found
    }

    /// Pages among `pages` that a write in flight touches.
    pub(crate) fn writing(&self, frame: u64, pages: u16) -> u16 {
        self.writes.iter().fold(0, |all, write| all | within(frame, &pages_of(&write.sectors)))
            & pages
    }

    /// Opens a fill of pages that have neither a fill nor a write in flight.
    pub(crate) fn begin_fill(&mut self, frame: u64, pages: u16) -> u64 {
        debug_assert!(self.filling(frame, pages).0 == 0 && self.writing(frame, pages) == 0);
        let id = self.number();
        self.fills.push(FillEntry { id, frame, pages, poisoned: false });
        id
    }

    /// Closes a fill. True if its data may be kept.
    pub(crate) fn end_fill(&mut self, id: u64, wakers: &mut Wakers) -> bool {
        let Some(at) = self.fills.iter().position(|fill| fill.id == id) else { return false };
        let fill = self.fills.swap_remove(at);
        self.wake(id, wakers);
        !fill.poisoned
    }

    /// Collects the wakers of tasks that wait for the end of `id`.
    fn wake(&mut self, id: u64, wakers: &mut Wakers) {
        let mut at = 0;
        while at < self.waiters.len() {
            if self.waiters[at].fill == id {
                wakers.push(self.waiters.swap_remove(at).waker);
            } else {
                at += 1;
            }
        }
    }

    /// Opens a writeback of dirty pages, none of which is under writeback.
    pub(crate) fn begin_clean(&mut self, frame: u64, pages: u16) -> u64 {
        debug_assert!(self.cleaning(frame, pages).0 == 0);
        let id = self.number();
        self.cleans.push(WritebackEntry { id, frame, pages });
        id
    }

    /// Closes a writeback.
    pub(crate) fn end_clean(&mut self, id: u64, wakers: &mut Wakers) {
        self.cleans.retain(|clean| clean.id != id);
        self.wake(id, wakers);
    }

    /// Pages among `pages` that are under writeback, and the number of one such writeback.
    pub(crate) fn cleaning(&self, frame: u64, pages: u16) -> (u16, Option<u64>) {
        let mut found = (0, None);
        for clean in &self.cleans {
            if clean.frame == frame && clean.pages & pages != 0 {
                found = (found.0 | clean.pages & pages, Some(clean.id));
            }
        }
        found
    }

    /// The number of a writeback that has any of `pages`.
    pub(crate) fn cleaned_in(&self, pages: &Range<u64>) -> Option<u64> {
        let meets = |clean: &&WritebackEntry| within(clean.frame, pages) & clean.pages != 0;
        self.cleans.iter().find(meets).map(|clean| clean.id)
    }

    /// Frames with pages under writeback.
    pub(crate) fn cleaned_frames(&self) -> impl Iterator<Item = u64> + '_ {
        self.cleans.iter().map(|clean| clean.frame)
    }

    /// The number of a write to `pages` that will end, if there is one; and whether there is an abandoned
    /// one.
    pub(crate) fn write_in_flight(&self, frame: u64, pages: u16) -> (Option<u64>, bool) {
        let meets = |write: &&WriteEntry| within(frame, &pages_of(&write.sectors)) & pages != 0;
        let open = self.writes.iter().filter(meets).find(|write| !write.abandoned);
        let stuck = self.writes.iter().filter(meets).any(|write| write.abandoned);
        (open.map(|write| write.id), stuck)
    }

    /// A write's future was dropped: no task will end it.
    pub(crate) fn abandon(&mut self, id: u64, wakers: &mut Wakers) {
        for write in self.writes.iter_mut().filter(|write| write.id == id) {
            write.abandoned = true;
        }
        self.wake(id, wakers);
    }

    /// Fills in flight of `pages` will not be kept.
    pub(crate) fn poison(&mut self, pages: &Range<u64>) {
        for fill in &mut self.fills {
            fill.poisoned |= within(fill.frame, pages) & fill.pages != 0;
        }
    }

    /// Writes in flight to `sectors` will not be kept.
    pub(crate) fn mark_clash(&mut self, sectors: &Range<u64>) -> bool {
        let mut any = false;
        for write in &mut self.writes {
            if write.sectors.start < sectors.end && sectors.start < write.sectors.end {
                write.clash = true;
                any = true;
            }
        }
        any
    }

    /// Opens a write to `sectors`, under the caller's number.
    pub(crate) fn begin_write(&mut self, id: u64, sectors: Range<u64>) {
        self.poison(&pages_of(&sectors));
        let clash = self.mark_clash(&sectors);
        self.writes.push(WriteEntry { id, sectors, clash, abandoned: false });
    }

    /// Whether another write has overlapped this one so far.
    pub(crate) fn has_clash(&self, id: u64) -> bool {
        self.writes.iter().any(|write| write.id == id && write.clash)
    }

    /// Closes a write. True if another one overlapped it.
    pub(crate) fn end_write(&mut self, id: u64, wakers: &mut Wakers) -> bool {
        let Some(at) = self.writes.iter().position(|write| write.id == id) else { return true };
        self.wake(id, wakers);
        self.writes.swap_remove(at).clash
    }

    /// Waits under the caller's number for the end of a fill, writeback or write; false if it has ended.
    pub(crate) fn wait(&mut self, waiter: u64, fill: u64, waker: &Waker) -> bool {
        let open = self.fills.iter().any(|open| open.id == fill)
            || self.cleans.iter().any(|open| open.id == fill)
            || self.writes.iter().any(|open| open.id == fill && !open.abandoned);
        if !open {
            self.forget(waiter);
            return false;
        }
        match self.waiters.iter_mut().find(|known| known.id == waiter) {
            Some(known) => known.waker.clone_from(waker),
            None => self.waiters.push(WaiterEntry { id: waiter, fill, waker: waker.clone() }),
        }
        true
    }

    /// A number for a waiter.
    pub(crate) fn new_waiter(&mut self) -> u64 {
        self.number()
    }

    /// A waiter was dropped.
    pub(crate) fn forget(&mut self, waiter: u64) {
        self.waiters.retain(|known| known.id != waiter);
    }
}
