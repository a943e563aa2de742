//! What is under way in one shard: fills, writes, and who waits for fills.
//!
//! Pure bookkeeping under the shard's lock; wakers are handed out to be woken after it. Two rules keep
//! what is cached equal to what the store holds:
//!
//! - A page is filled by one at a time. Others wait for the end of that fill, whatever it comes to,
//!   and look again. Nobody waits while a fill of its own is open, so that waiting never goes in a circle.
//! - A fill that overlaps in time with a change of its pages is **poisoned**: its data may be read by
//!   who asked for it, but is not kept. Two changes that overlap in time and by a sector **clash**: which
//!   of them the store did last is not known, so neither is kept.
//!
//! A change whose future was dropped may still reach the store at any time. Its entry stays
//! (**abandoned**), and the pages are never cached again; that happens when a worker ends, no more
//! often than there are requests.

use std::ops::Range;
use std::task::Waker;

use crate::pages::{pages_of, within};

#[derive(Debug)]
struct Fill {
    id: u64,
    frame: u64,
    pages: u16,
    poisoned: bool,
}

#[derive(Debug)]
struct Change {
    id: u64,
    sectors: Range<u64>,
    clash: bool,
    /// Its future was dropped.
    abandoned: bool,
}

/// Dirty pages on their way to the store.
#[derive(Debug)]
struct Clean {
    id: u64,
    frame: u64,
    pages: u16,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    /// What it waits for: a fill, a clean or a change's end.
    fill: u64,
    waker: Waker,
}

/// Fills, changes and waiters of one shard.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    fills: Vec<Fill>,
    changes: Vec<Change>,
    cleans: Vec<Clean>,
    waiters: Vec<Waiter>,
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

impl Flights {
    /// Odd numbers; those of changes, which are given by the volume, are even.
    fn number(&mut self) -> u64 {
        self.next += 2;
        self.next | 1
    }

    /// Pages among `pages` that somebody fills, and the number of one such fill.
    pub(crate) fn filling(&self, frame: u64, pages: u16) -> (u16, Option<u64>) {
        let mut found = (0, None);
        for fill in &self.fills {
            if fill.frame == frame && fill.pages & pages != 0 {
                found = (found.0 | fill.pages & pages, Some(fill.id));
            }
        }
        found
    }

    /// Pages among `pages` that are being changed.
    pub(crate) fn changing(&self, frame: u64, pages: u16) -> u16 {
        self.changes.iter().fold(0, |all, change| all | within(frame, &pages_of(&change.sectors)))
            & pages
    }

    /// Opens a fill of pages that nobody fills or changes.
    pub(crate) fn begin_fill(&mut self, frame: u64, pages: u16) -> u64 {
        debug_assert!(self.filling(frame, pages).0 == 0 && self.changing(frame, pages) == 0);
        let id = self.number();
        self.fills.push(Fill { id, frame, pages, poisoned: false });
        id
    }

    /// Closes a fill. True if its data may be kept.
    pub(crate) fn end_fill(&mut self, id: u64, wakers: &mut Wakers) -> bool {
        let Some(at) = self.fills.iter().position(|fill| fill.id == id) else { return false };
        let fill = self.fills.swap_remove(at);
        self.wake(id, wakers);
        !fill.poisoned
    }

    /// Collects who waits for the end of `id`.
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

    /// Opens a clean of dirty pages, none of which is being cleaned.
    pub(crate) fn begin_clean(&mut self, frame: u64, pages: u16) -> u64 {
        debug_assert!(self.cleaning(frame, pages).0 == 0);
        let id = self.number();
        self.cleans.push(Clean { id, frame, pages });
        id
    }

    /// Closes a clean.
    pub(crate) fn end_clean(&mut self, id: u64, wakers: &mut Wakers) {
        self.cleans.retain(|clean| clean.id != id);
        self.wake(id, wakers);
    }

    /// Pages among `pages` that are being cleaned, and the number of one such clean.
    pub(crate) fn cleaning(&self, frame: u64, pages: u16) -> (u16, Option<u64>) {
        let mut found = (0, None);
        for clean in &self.cleans {
            if clean.frame == frame && clean.pages & pages != 0 {
                found = (found.0 | clean.pages & pages, Some(clean.id));
            }
        }
        found
    }

    /// The number of one clean that has any of `pages`.
    pub(crate) fn cleaned_in(&self, pages: &Range<u64>) -> Option<u64> {
        let meets = |clean: &&Clean| within(clean.frame, pages) & clean.pages != 0;
        self.cleans.iter().find(meets).map(|clean| clean.id)
    }

    /// Frames with pages that are being cleaned.
    pub(crate) fn cleaned_frames(&self) -> impl Iterator<Item = u64> + '_ {
        self.cleans.iter().map(|clean| clean.frame)
    }

    /// The number of a change of `pages` that will end, if there is one; and whether one never will.
    pub(crate) fn changed_by(&self, frame: u64, pages: u16) -> (Option<u64>, bool) {
        let meets = |change: &&Change| within(frame, &pages_of(&change.sectors)) & pages != 0;
        let open = self.changes.iter().filter(meets).find(|change| !change.abandoned);
        let stuck = self.changes.iter().filter(meets).any(|change| change.abandoned);
        (open.map(|change| change.id), stuck)
    }

    /// Nobody will end a change.
    pub(crate) fn abandon(&mut self, id: u64, wakers: &mut Wakers) {
        for change in self.changes.iter_mut().filter(|change| change.id == id) {
            change.abandoned = true;
        }
        self.wake(id, wakers);
    }

    /// What is being filled of `pages` will not be kept.
    pub(crate) fn poison(&mut self, pages: &Range<u64>) {
        for fill in &mut self.fills {
            fill.poisoned |= within(fill.frame, pages) & fill.pages != 0;
        }
    }

    /// What is being changed of `sectors` will not be kept.
    pub(crate) fn mark_clash(&mut self, sectors: &Range<u64>) -> bool {
        let mut any = false;
        for change in &mut self.changes {
            if change.sectors.start < sectors.end && sectors.start < change.sectors.end {
                change.clash = true;
                any = true;
            }
        }
        any
    }

    /// Opens a change of `sectors`, under a number of the caller's.
    pub(crate) fn begin_change(&mut self, id: u64, sectors: Range<u64>) {
        self.poison(&pages_of(&sectors));
        let clash = self.mark_clash(&sectors);
        self.changes.push(Change { id, sectors, clash, abandoned: false });
    }

    /// Whether another change has met this one so far.
    pub(crate) fn has_clash(&self, id: u64) -> bool {
        self.changes.iter().any(|change| change.id == id && change.clash)
    }

    /// Closes a change. True if another one has met it.
    pub(crate) fn end_change(&mut self, id: u64, wakers: &mut Wakers) -> bool {
        let Some(at) = self.changes.iter().position(|change| change.id == id) else { return true };
        self.wake(id, wakers);
        self.changes.swap_remove(at).clash
    }

    /// Waits for the end of a fill, clean or change under the caller's number; false if it is over.
    pub(crate) fn wait(&mut self, waiter: u64, fill: u64, waker: &Waker) -> bool {
        let open = self.fills.iter().any(|open| open.id == fill)
            || self.cleans.iter().any(|open| open.id == fill)
            || self.changes.iter().any(|open| open.id == fill && !open.abandoned);
        if !open {
            self.forget(waiter);
            return false;
        }
        match self.waiters.iter_mut().find(|known| known.id == waiter) {
            Some(known) => known.waker.clone_from(waker),
            None => self.waiters.push(Waiter { id: waiter, fill, waker: waker.clone() }),
        }
        true
    }

    /// A number for a waiter.
    pub(crate) fn new_waiter(&mut self) -> u64 {
        self.number()
    }

    /// Somebody waits no more.
    pub(crate) fn forget(&mut self, waiter: u64) {
        self.waiters.retain(|known| known.id != waiter);
    }
}
