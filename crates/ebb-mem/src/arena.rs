//! The arena: the state of every page, and the allocation of blocks.
//!
//! A data structure only: no system call, no clock, no access to the pages. One mutex protects it. The
//! mutex is held for bit arithmetic only, never across a system call, so an I/O thread may lock it.
//!
//! Every page of the reservation is in one state:
//!
//! | state | meaning | gauge |
//! |---|---|---|
//! | absent | no memory behind it | – |
//! | wired | in use, or free and kept resident | wired |
//! | offered | the advisor will lend or return it; allocating it cancels that | unwired |
//! | advising | the advisor's `madvise` call is in flight; it cannot be allocated until the call returns | unwired |
//! | lent | marked `MADV_FREE`: the kernel may discard it at any time | unwired |
//!
//! Invariants: the states are disjoint; only an offered page is ever advised; a page in use is wired.
//!
//! The advisor's queue is one bit per extent (`advisory.rs` walks it): its size is fixed and it cannot
//! overflow, so an offer never fails, blocks or allocates.

use crate::bits::{Extents, Pages};
use crate::class::{CLASSES, EXTENT_PAGES, class_pages};
use crate::sys::{PageAdvice, Span};

mod advisory;
mod chunks;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

use chunks::ArenaChunks;

/// Why an allocation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// The ceiling over all wired memory, or the address space, is used up.
    Budget,
    /// The limit of this block's zone is reached.
    Zone,
    /// More address space must be opened first ([`Arena::open_begin`]).
    Closed,
}

/// What happens to the pages of a freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Give {
    /// They stay wired until the second [`Arena::sweep`], so that memory that is reused soon is not
    /// faulted in again.
    Cool,
    /// Lent to the kernel.
    Lend,
    /// Returned at once.
    Return,
}

/// The result of wiring an offered or lent block that the caller owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retake {
    /// It is wired again.
    Wired,
    /// The advisor's call is in flight: use another block, or try later.
    Busy,
    /// The ceiling does not allow it.
    Exhausted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExtentUse {
    Free,
    Class(u8),
    /// First extent of a run of this many pages.
    Run(usize),
    RunBody,
}

/// The pages of one extent, by state.
struct ExtentState {
    kind: ExtentUse,
    /// Pages of free blocks.
    free: Pages,
    wired: Pages,
    offered: Pages,
    /// Offered pages that are to be returned, not lent.
    returning: Pages,
    advising: Pages,
    lent: Pages,
    /// Free wired pages that have not been allocated since the last sweep.
    idle: Pages,
}

impl ExtentState {
    fn new() -> ExtentState {
        ExtentState {
            kind: ExtentUse::Free,
            free: Pages::range(0, EXTENT_PAGES),
            wired: Pages::EMPTY,
            offered: Pages::EMPTY,
            returning: Pages::EMPTY,
            advising: Pages::EMPTY,
            lent: Pages::EMPTY,
            idle: Pages::EMPTY,
        }
    }

    /// Pages that may be resident and may be allocated.
    fn warm(&self) -> Pages {
        self.wired.or(&self.offered).or(&self.lent)
    }
}

/// Pages by state, over the whole arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageCounts {
    pub(crate) wired: usize,
    /// Offered, advising or lent.
    pub(crate) unwired: usize,
    /// Of the unwired, offered and not yet claimed by the advisor.
    pub(crate) offered: usize,
    /// Of the unwired, in the advisor's call now.
    pub(crate) advising: usize,
}

pub(crate) struct Arena {
    extents: Vec<Option<Box<ExtentState>>>,
    free: Extents,
    chunks: ArenaChunks,
    /// Per class: extents with a free block, and (a hint) those with a resident free block.
    avail: [Extents; CLASSES],
    warm: [Extents; CLASSES],
    /// Extents with offered pages: the advisor's queue.
    queue: Extents,
    cursor: usize,
    /// Extents with pages that were freed with [`Give::Cool`].
    cooling: Extents,
    counts: PageCounts,
    /// Blocks out of the slabs (in use, in pools or in caches) per class, and the limit.
    out: [usize; CLASSES],
    limits: [usize; CLASSES],
    /// The ceiling in force, and the one it may be lowered from.
    ceiling: usize,
    most: usize,
    /// Lending does not work on this host: pages are returned instead.
    no_lending: bool,
    /// Freed pages stay wired unless they are to be returned; nothing is lent.
    keep_freed: bool,
    /// Under pressure: pages whose lending completes are returned as well.
    prefer_return: bool,
    urgent: bool,
}

impl Arena {
    /// `total` extents; at most `ceiling` pages wired.
    pub(crate) fn new(total: usize, ceiling: usize, lending: bool) -> Arena {
        let mut free = Extents::new(total);
        (0..total).for_each(|extent| free.insert(extent));
        Arena {
            extents: std::iter::repeat_with(|| None).take(total).collect(),
            free,
            chunks: ArenaChunks::none(),
            avail: std::array::from_fn(|_| Extents::new(total)),
            warm: std::array::from_fn(|_| Extents::new(total)),
            queue: Extents::new(total),
            cursor: 0,
            cooling: Extents::new(total),
            counts: PageCounts::default(),
            out: [0; CLASSES],
            limits: [usize::MAX; CLASSES],
            ceiling,
            most: ceiling,
            no_lending: !lending,
            keep_freed: false,
            prefer_return: false,
            urgent: false,
        }
    }

    pub(crate) fn counts(&self) -> PageCounts {
        self.counts
    }

    pub(crate) fn ceiling(&self) -> usize {
        self.ceiling
    }

    /// The ceiling in force is `pages`; blocks of more than half of it are compared with `most`.
    pub(crate) fn set_ceiling(&mut self, pages: usize, most: usize) {
        (self.ceiling, self.most) = (pages, most.max(pages));
    }

    /// The ceiling that the one in force may be lowered from.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    pub(crate) fn out(&self, class: usize) -> usize {
        self.out[class]
    }

    pub(crate) fn limit(&self, class: usize) -> usize {
        self.limits[class]
    }

    pub(crate) fn set_limit(&mut self, class: usize, blocks: usize) {
        self.limits[class] = blocks;
    }

    /// From now on freed pages stay wired, except those freed with [`Give::Return`] and those released to
    /// make room under the ceiling ([`Arena::offer_free`]).
    pub(crate) fn set_keep_freed(&mut self, on: bool) {
        self.keep_freed = on;
    }

    pub(crate) fn lending(&self) -> bool {
        !self.no_lending
    }

    /// Whether `pages` more may be wired.
    pub(crate) fn has_room(&self, pages: usize) -> bool {
        self.has_room_for(pages, pages)
    }

    /// Returns true if `new` more pages may be wired for a block of `pages`. A large block may have
    /// been granted before the ceiling was lowered, and might never fit under the lower one.
    fn has_room_for(&self, pages: usize, new: usize) -> bool {
        let ceiling = if pages > self.ceiling / 2 { self.most } else { self.ceiling };
        self.counts.wired + new <= ceiling
    }

    fn extent(&mut self, extent: usize) -> &mut ExtentState {
        self.extents[extent].get_or_insert_with(|| Box::new(ExtentState::new()))
    }

    /// Wires `pages` of an extent, none of which is advising. The caller has checked the budget.
    fn wire(&mut self, extent: usize, pages: &Pages) {
        let x = self.extents[extent].get_or_insert_with(|| Box::new(ExtentState::new()));
        debug_assert!(!x.advising.meets(pages), "a page is not wired while it is advised");
        let new = pages.without(&x.wired).count();
        let offered = x.offered.and(pages).count();
        let lent = x.lent.and(pages).count();
        x.wired = x.wired.or(pages);
        x.idle = x.idle.without(pages);
        x.offered = x.offered.without(pages);
        x.returning = x.returning.without(pages);
        x.lent = x.lent.without(pages);
        let drained = x.offered.is_empty();
        self.counts.wired += new;
        self.counts.unwired -= offered + lent;
        self.counts.offered -= offered;
        if drained {
            self.queue.remove(extent);
        }
    }

    /// Offers the wired pages among `pages` to the advisor; with `Return` also the lent ones.
    fn offer_pages(&mut self, extent: usize, pages: &Pages, advice: PageAdvice) {
        let returning = advice == PageAdvice::Return || self.no_lending;
        let x = self.extents[extent].get_or_insert_with(|| Box::new(ExtentState::new()));
        let wired = x.wired.and(pages);
        let lent = if returning { x.lent.and(pages) } else { Pages::EMPTY };
        let moved = wired.or(&lent);
        x.wired = x.wired.without(&wired);
        x.idle = x.idle.without(&wired);
        x.lent = x.lent.without(&lent);
        x.offered = x.offered.or(&moved);
        if returning {
            x.returning = x.returning.or(&x.offered.and(pages));
        }
        let queued = !x.offered.is_empty();
        self.counts.wired -= wired.count();
        self.counts.unwired += wired.count();
        self.counts.offered += moved.count();
        if queued {
            self.queue.insert(extent);
            self.urgent |= returning;
        }
    }

    fn give_pages(&mut self, extent: usize, pages: &Pages, give: Give) {
        match give {
            Give::Cool | Give::Lend if self.keep_freed => {}
            Give::Cool => self.cooling.insert(extent),
            Give::Lend => self.offer_pages(extent, pages, PageAdvice::Lend),
            Give::Return => self.offer_pages(extent, pages, PageAdvice::Return),
        }
    }

    /// A free block of the extent: resident ones only, or any; never one that is being advised.
    fn find(x: &ExtentState, class: usize, warm_only: bool) -> Option<usize> {
        let usable = x.free.without(&x.advising);
        let warm = x.warm();
        if class == 0 {
            return if warm_only { usable.and(&warm) } else { usable }.first_from(0);
        }
        let pages = class_pages(class);
        let mut from = 0;
        while let Some(page) = usable.first_from(from) {
            let head = page - page % pages;
            let block = Pages::range(head, pages);
            if !x.advising.meets(&block) && (!warm_only || warm.meets(&block)) {
                return Some(head);
            }
            from = head + pages;
        }
        None
    }

    fn take_at(&mut self, extent: usize, head: usize, class: usize) -> Result<usize, Shortage> {
        let block = Pages::range(head, class_pages(class));
        let x = self.extent(extent);
        let new = block.without(&x.wired).count();
        if !self.has_room_for(class_pages(class), new) {
            return Err(Shortage::Budget);
        }
        let x = self.extent(extent);
        x.free = x.free.without(&block);
        let full = x.free.is_empty();
        self.wire(extent, &block);
        if full {
            self.avail[class].remove(extent);
            self.warm[class].remove(extent);
        }
        self.out[class] += 1;
        Ok(extent * EXTENT_PAGES + head)
    }

    /// Allocates a resident free block of `class`, if there is one.
    pub(crate) fn take_warm(&mut self, class: usize) -> Option<usize> {
        if self.out[class] >= self.limits[class] {
            return None;
        }
        let mut from = 0;
        while let Some(extent) = self.warm[class].first_from(from) {
            let x = self.extent(extent);
            if let Some(head) = Arena::find(x, class, true) {
                return self.take_at(extent, head, class).ok();
            }
            if !x.advising.meets(&x.free) {
                self.warm[class].remove(extent);
            }
            from = extent + 1;
        }
        None
    }

    /// Allocates a block of `class`.
    pub(crate) fn take(&mut self, class: usize) -> Result<usize, Shortage> {
        if self.out[class] >= self.limits[class] {
            return Err(Shortage::Zone);
        }
        if let Some(page) = self.take_warm(class) {
            return Ok(page);
        }
        let mut from = 0;
        while let Some(extent) = self.avail[class].first_from(from) {
            if let Some(head) = Arena::find(self.extent(extent), class, false) {
                return self.take_at(extent, head, class);
            }
            from = extent + 1;
        }
        let mut from = 0;
        while let Some(extent) = self.free.first_from(from) {
            if let Some(head) = Arena::find(self.extent(extent), class, false) {
                if !self.has_room(class_pages(class)) {
                    return Err(Shortage::Budget);
                }
                self.assign(extent, class);
                return self.take_at(extent, head, class);
            }
            from = extent + 1;
        }
        Err(self.why_unavailable(class_pages(class), 1))
    }

    /// Why an allocation of `pages` pages in `need` extents fails: all is in use, or must be opened first.
    fn why_unavailable(&mut self, pages: usize, need: usize) -> Shortage {
        let opens = self.has_room(pages) && self.can_open(need);
        if opens { Shortage::Closed } else { Shortage::Budget }
    }

    fn assign(&mut self, extent: usize, class: usize) {
        self.free.remove(extent);
        let x = self.extent(extent);
        x.kind = ExtentUse::Class(u8::try_from(class).unwrap_or(u8::MAX));
        let warm = !x.warm().is_empty();
        self.avail[class].insert(extent);
        if warm {
            self.warm[class].insert(extent);
        }
    }

    /// Frees a block of `class`.
    pub(crate) fn give(&mut self, page: usize, class: usize, give: Give) {
        let (extent, head) = (page / EXTENT_PAGES, page % EXTENT_PAGES);
        let block = Pages::range(head, class_pages(class));
        let x = self.extent(extent);
        debug_assert!(x.kind == ExtentUse::Class(u8::try_from(class).unwrap_or(u8::MAX)));
        assert!(!x.free.meets(&block), "a block is freed once");
        x.free = x.free.or(&block);
        let whole = x.free.count() == EXTENT_PAGES;
        self.give_pages(extent, &block, give);
        self.out[class] -= 1;
        if whole {
            self.avail[class].remove(extent);
            self.warm[class].remove(extent);
            self.extent(extent).kind = ExtentUse::Free;
            self.free.insert(extent);
        } else {
            self.avail[class].insert(extent);
            self.warm[class].insert(extent);
        }
    }

    /// Allocates a run of `pages` pages (more than the largest class).
    pub(crate) fn take_run(&mut self, pages: usize) -> Result<usize, Shortage> {
        let need = pages.div_ceil(EXTENT_PAGES).max(1);
        let (mut from, end) = (0, self.extents.len());
        let start = loop {
            let first = self.free.first_from(from).filter(|&first| first + need <= end);
            let Some(first) = first else { return Err(self.why_unavailable(pages, need)) };
            let blocked = (first..first + need).rev().find(|&extent| {
                !self.free.contains(extent) || !self.extent(extent).advising.is_empty()
            });
            match blocked {
                Some(extent) => from = extent + 1,
                None => break first,
            }
        };
        let parts = (0..need)
            .map(|i| (start + i, Pages::range(0, (pages - i * EXTENT_PAGES).min(EXTENT_PAGES))));
        let new: usize = parts
            .clone()
            .map(|(extent, part)| part.without(&self.extent(extent).wired).count())
            .sum();
        if !self.has_room_for(pages, new) {
            return Err(Shortage::Budget);
        }
        for (extent, part) in parts {
            self.free.remove(extent);
            let x = self.extent(extent);
            x.kind = if extent == start { ExtentUse::Run(pages) } else { ExtentUse::RunBody };
            x.free = Pages::EMPTY;
            x.idle = Pages::EMPTY;
            self.wire(extent, &part);
        }
        Ok(start * EXTENT_PAGES)
    }

    /// Frees a run.
    pub(crate) fn give_run(&mut self, page: usize, give: Give) {
        let start = page / EXTENT_PAGES;
        let ExtentUse::Run(pages) = self.extent(start).kind else {
            unreachable!("a run is freed once, by its first page")
        };
        for extent in start..start + pages.div_ceil(EXTENT_PAGES).max(1) {
            let x = self.extent(extent);
            x.kind = ExtentUse::Free;
            x.free = Pages::range(0, EXTENT_PAGES);
            self.free.insert(extent);
            self.give_pages(extent, &Pages::range(0, EXTENT_PAGES), give);
        }
    }

    fn by_extent(span: Span) -> impl Iterator<Item = (usize, Pages)> {
        let mut page = span.page;
        let end = span.page + span.pages;
        std::iter::from_fn(move || {
            (page < end).then(|| {
                let (extent, head) = (page / EXTENT_PAGES, page % EXTENT_PAGES);
                let count = (end - page).min(EXTENT_PAGES - head);
                page += count;
                (extent, Pages::range(head, count))
            })
        })
    }

    /// Offers pages of a block that stays allocated (a pool's free block, a clean buffer).
    pub(crate) fn offer_allocated(&mut self, span: Span) {
        for (extent, pages) in Arena::by_extent(span) {
            debug_assert!(!self.extent(extent).free.meets(&pages), "held, so not free");
            self.offer_pages(extent, &pages, PageAdvice::Lend);
        }
    }

    /// Whether the advisor's call for a page of the span is in flight.
    pub(crate) fn is_busy(&mut self, span: Span) -> bool {
        Arena::by_extent(span).any(|(extent, pages)| self.extent(extent).advising.meets(&pages))
    }

    /// Wires pages that [`Arena::offer_allocated`] offered.
    pub(crate) fn retake(&mut self, span: Span) -> Retake {
        let mut new = 0;
        for (extent, pages) in Arena::by_extent(span) {
            let x = self.extent(extent);
            if x.advising.meets(&pages) {
                return Retake::Busy;
            }
            new += pages.without(&x.wired).count();
        }
        if !self.has_room_for(span.pages, new) {
            return Retake::Exhausted;
        }
        for (extent, pages) in Arena::by_extent(span) {
            self.wire(extent, &pages);
        }
        Retake::Wired
    }

    /// Whether every page of the span is wired and in no free block, so that a user may access it.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn in_use(&mut self, span: Span) -> bool {
        Arena::by_extent(span).all(|(extent, pages)| {
            let x = self.extent(extent);
            pages.without(&x.wired).is_empty() && !x.free.meets(&pages)
        })
    }

    /// Checks the invariants of the module documentation by recounting everything.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let mut counts = PageCounts::default();
        for (index, x) in self.extents.iter().enumerate() {
            let Some(x) = x else { continue };
            let states = [&x.wired, &x.offered, &x.advising, &x.lent];
            for (i, a) in states.iter().enumerate() {
                for b in &states[i + 1..] {
                    assert!(!a.meets(b), "states are disjoint");
                }
            }
            assert!(x.returning.without(&x.offered).is_empty());
            assert!(
                x.idle.without(&x.wired.and(&x.free)).is_empty(),
                "only free wired pages are idle"
            );
            assert_eq!(self.queue.contains(index), !x.offered.is_empty());
            let free = x.kind == ExtentUse::Free && !self.is_unavailable(index);
            assert_eq!(self.free.contains(index), free);
            counts.wired += x.wired.count();
            counts.offered += x.offered.count();
            counts.advising += x.advising.count();
            counts.unwired += x.offered.count() + x.advising.count() + x.lent.count();
        }
        assert_eq!(counts, self.counts, "gauges are exact");
    }
}
