//! The arena's functions for the advisor: when pages are offered, claiming batches, recording results.

use super::{Arena, ExtentUse};
use crate::bits::Pages;
use crate::class::EXTENT_PAGES;
use crate::sys::{BATCH, PageAdvice, Span};

/// Largest number of pages in one `madvise` call (32 MiB, about 2 ms): bounds how long the kernel holds
/// `mmap_lock`, and lets the advisor and its helper finish at about the same time.
const BATCH_PAGES: usize = 16 * EXTENT_PAGES;

impl Arena {
    /// Offers pages freed with [`super::Give::Cool`] that have not been allocated since the last call: to
    /// be lent, or under pressure returned. Memory that is being reused stays wired. True if pages wait for
    /// the next call.
    pub(crate) fn sweep(&mut self) -> bool {
        let advice = if self.prefer_return { PageAdvice::Return } else { PageAdvice::Lend };
        let mut from = 0;
        while let Some(extent) = self.cooling.first_from(from) {
            let x = self.extent(extent);
            let idle = x.idle;
            x.idle = x.free.and(&x.wired).without(&idle);
            if x.idle.is_empty() {
                self.cooling.remove(extent);
            }
            self.offer_pages(extent, &idle, advice);
            from = extent + 1;
        }
        self.cooling()
    }

    /// Whether freed pages wait to be swept.
    pub(crate) fn cooling(&self) -> bool {
        !self.cooling.is_empty()
    }

    /// Offers every free page at once: to be lent, or to be returned (then the lent ones, too).
    pub(crate) fn offer_free(&mut self, advice: PageAdvice) {
        for extent in 0..self.extents.len() {
            if let Some(x) = &self.extents[extent] {
                let free = x.free;
                self.offer_pages(extent, &free, advice);
            }
        }
        self.cooling.clear();
    }

    /// Under pressure lending is not enough: free pages are to be returned.
    pub(crate) fn set_prefer_return(&mut self, on: bool) {
        self.prefer_return = on;
    }

    pub(crate) fn prefer_return(&self) -> bool {
        self.prefer_return
    }

    /// Whether the advisor has work that should not wait for a larger batch.
    pub(crate) fn urgent(&self) -> bool {
        self.urgent || self.counts.offered >= BATCH
    }

    /// Claims the advisor's next batch: up to [`BATCH`] spans of offered pages, which become *advising*.
    pub(crate) fn claim(&mut self, spans: &mut [Span; BATCH]) -> (usize, PageAdvice) {
        let mut chosen: Option<PageAdvice> = None;
        let (mut count, mut total) = (0, 0);
        let mut next = self.queue.first_from(self.cursor).or_else(|| self.queue.first_from(0));
        while let Some(extent) = next {
            let x = self.extent(extent);
            let advice = *chosen.get_or_insert(if x.offered.meets(&x.returning) {
                PageAdvice::Return
            } else {
                PageAdvice::Lend
            });
            let mut wanted = match advice {
                PageAdvice::Return => x.offered.and(&x.returning),
                PageAdvice::Lend => x.offered.without(&x.returning),
            };
            let base = extent * EXTENT_PAGES;
            let mut claimed = Pages::EMPTY;
            while let Some((start, pages)) = wanted.first_run(0) {
                let page = base + start;
                let joins = count > 0 && spans[count - 1].page + spans[count - 1].pages == page;
                if !joins && count == BATCH {
                    break;
                }
                let run = Pages::range(start, pages);
                claimed = claimed.or(&run);
                wanted = wanted.without(&run);
                if joins {
                    spans[count - 1].pages += pages;
                } else {
                    spans[count] = Span { page, pages };
                    count += 1;
                }
            }
            let x = self.extent(extent);
            x.offered = x.offered.without(&claimed);
            x.returning = x.returning.without(&claimed);
            x.advising = x.advising.or(&claimed);
            let left = !x.offered.is_empty();
            total += claimed.count();
            if !left {
                self.queue.remove(extent);
            }
            self.cursor = extent + 1;
            if total >= BATCH_PAGES || count == BATCH {
                break;
            }
            next = self.queue.first_from(extent + 1);
        }
        self.counts.offered -= total;
        self.counts.advising += total;
        self.urgent &= !self.queue.is_empty();
        (count, chosen.unwrap_or(PageAdvice::Lend))
    }

    /// Records the result of the advisor's call for `span`.
    pub(crate) fn complete(&mut self, span: Span, advice: PageAdvice, done: bool) {
        for (extent, pages) in Arena::by_extent(span) {
            let x = self.extent(extent);
            debug_assert!(pages.without(&x.advising).is_empty(), "completed what was claimed");
            x.advising = x.advising.without(&pages);
            let count = pages.count();
            let free = x.free.and(&pages);
            let kind = x.kind;
            match (done, advice) {
                (true, PageAdvice::Lend) => x.lent = x.lent.or(&pages),
                (true, PageAdvice::Return) => {}
                (false, _) => x.wired = x.wired.or(&pages),
            }
            self.counts.advising -= count;
            match (done, advice) {
                (true, PageAdvice::Lend) => {
                    if self.prefer_return && !free.is_empty() {
                        self.offer_pages(extent, &free, PageAdvice::Return);
                    }
                }
                (true, PageAdvice::Return) => {
                    self.counts.unwired -= count;
                    self.emptied(extent);
                }
                (false, _) => {
                    self.counts.unwired -= count;
                    self.counts.wired += count;
                }
            }
            if let ExtentUse::Class(class) = kind
                && !free.is_empty()
                && !(done && advice == PageAdvice::Return)
            {
                self.warm[usize::from(class)].insert(extent);
            }
        }
    }

    /// Whether the advisor has nothing to do.
    pub(crate) fn settled(&self) -> bool {
        let advised = self.queue.is_empty() && self.counts.advising == 0;
        advised && !self.may_close() && !self.closing()
    }
}
