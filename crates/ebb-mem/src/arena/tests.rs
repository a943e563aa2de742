//! The arena against a model: random operations, with a check of every invariant after each.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::class::MAX_BLOCK_BYTES;
use crate::sys::BATCH;

const EXTENTS: usize = 8;

#[derive(Clone, Debug)]
enum Step {
    Take(usize),
    TakeWarm(usize),
    TakeRun(usize),
    Give(usize, u8),
    /// Offer pages of a held block: which, from, how many.
    Offer(usize, usize, usize),
    Retake(usize),
    Claim,
    Complete(bool),
    OfferFree(bool),
    Sweep,
    Prefer(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..CLASSES).prop_map(Step::Take),
        2 => (0..CLASSES).prop_map(Step::TakeWarm),
        2 => (1..1500usize).prop_map(Step::TakeRun),
        6 => (any::<usize>(), 0..3u8).prop_map(|(which, how)| Step::Give(which, how)),
        4 => (any::<usize>(), any::<usize>(), 1..600usize)
            .prop_map(|(which, from, count)| Step::Offer(which, from, count)),
        4 => any::<usize>().prop_map(Step::Retake),
        6 => Just(Step::Claim),
        6 => any::<bool>().prop_map(Step::Complete),
        1 => any::<bool>().prop_map(Step::OfferFree),
        1 => Just(Step::Sweep),
        1 => any::<bool>().prop_map(Step::Prefer),
    ]
}

/// An allocated block.
#[derive(Clone, Debug)]
struct Held {
    pages: usize,
    class: Option<usize>,
    /// Pages that its user has offered and may not access.
    offered: Option<Span>,
}

#[derive(Default)]
struct Model {
    held: BTreeMap<usize, Held>,
    calls: Vec<(Vec<Span>, PageAdvice)>,
    refused: bool,
}

impl Model {
    fn pick(&self, which: usize) -> Option<usize> {
        let count = self.held.len();
        (count > 0).then(|| self.held.keys().nth(which % count).copied())?
    }

    fn hold(&mut self, page: usize, pages: usize, class: Option<usize>) {
        let before = self.held.range(..page + pages).next_back();
        if let Some((start, block)) = before {
            assert!(start + block.pages <= page, "allocated twice");
        }
        self.held.insert(page, Held { pages, class, offered: None });
    }

    /// Whether a user may access a page of the span.
    fn touches(&self, span: Span) -> bool {
        let in_use = |page: usize| {
            self.held.range(..=page).next_back().is_some_and(|(start, block)| {
                let offered =
                    block.offered.is_some_and(|o| (o.page..o.page + o.pages).contains(&page));
                page < start + block.pages && !offered
            })
        };
        (span.page..span.page + span.pages).any(in_use)
    }
}

fn run(arena: &mut Arena, model: &mut Model, step: &Step) {
    match *step {
        Step::Take(class) => {
            if let Ok(page) = arena.take(class) {
                model.hold(page, class_pages(class), Some(class));
            }
        }
        Step::TakeWarm(class) => {
            if let Some(page) = arena.take_warm(class) {
                model.hold(page, class_pages(class), Some(class));
            }
        }
        Step::TakeRun(pages) => {
            if let Ok(page) = arena.take_run(pages) {
                model.hold(page, pages, None);
            }
        }
        Step::Give(which, how) => {
            let Some(page) = model.pick(which) else { return };
            let Some(block) = model.held.remove(&page) else { return };
            let give = [Give::Cool, Give::Lend, Give::Return][usize::from(how)];
            match block.class {
                Some(class) => arena.give(page, class, give),
                None => arena.give_run(page, give),
            }
        }
        Step::Offer(which, from, count) => {
            let Some(page) = model.pick(which) else { return };
            let Some(block) = model.held.get_mut(&page) else { return };
            if block.offered.is_some() {
                return;
            }
            let from = from % block.pages;
            let span = Span { page: page + from, pages: count.min(block.pages - from) };
            block.offered = Some(span);
            arena.offer_allocated(span);
        }
        Step::Retake(which) => {
            let Some(page) = model.pick(which) else { return };
            let Some(block) = model.held.get_mut(&page) else { return };
            let Some(span) = block.offered else { return };
            match arena.retake(span) {
                Retake::Wired => block.offered = None,
                Retake::Busy => assert!(arena.is_busy(span)),
                Retake::Exhausted => assert!(!arena.has_room(span.pages)),
            }
        }
        Step::Claim => {
            // Only one advisor, so one call at a time.
            if model.calls.is_empty() {
                let mut spans = [Span::default(); BATCH];
                let (count, advice) = arena.claim(&mut spans);
                if count > 0 {
                    model.calls.push((spans[..count].to_vec(), advice));
                }
            }
        }
        Step::Complete(done) => {
            model.refused |= !done;
            for (spans, advice) in model.calls.drain(..) {
                for span in spans {
                    arena.complete(span, advice, done);
                }
            }
        }
        Step::OfferFree(back) => {
            arena.offer_free(if back { PageAdvice::Return } else { PageAdvice::Lend });
        }
        Step::Sweep => drop(arena.sweep()),
        Step::Prefer(on) => arena.set_prefer_return(on),
    }
}

fn check(arena: &mut Arena, model: &Model) {
    arena.check();
    // Pages whose advice the kernel refuses stay wired, even above the ceiling.
    assert!(model.refused || arena.counts().wired <= arena.ceiling(), "the ceiling holds");
    for (spans, _) in &model.calls {
        for &span in spans {
            assert!(!model.touches(span), "advised memory is not in use: {span:?}");
        }
    }
    for (&page, block) in &model.held {
        let whole = Span { page, pages: block.pages };
        if block.offered.is_none() {
            assert!(arena.in_use(whole), "allocated pages are wired");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// No page in use or in flight is advised; every gauge is exact; no page is
    /// allocated twice.
    #[test]
    fn no_advised_range_overlaps_one_in_use(
        steps in prop::collection::vec(step(), 1..200),
        ceiling in 600..6000usize,
        lending in any::<bool>(),
    ) {
        let mut arena = Arena::new(EXTENTS, ceiling, lending);
        let mut model = Model::default();
        for step in steps {
            run(&mut arena, &mut model, &step);
            check(&mut arena, &model);
        }
        // And everything can be freed.
        run(&mut arena, &mut model, &Step::Complete(true));
        for (page, block) in std::mem::take(&mut model.held) {
            match block.class {
                Some(class) => arena.give(page, class, Give::Return),
                None => arena.give_run(page, Give::Return),
            }
        }
        arena.offer_free(PageAdvice::Return);
        while !arena.settled() {
            run(&mut arena, &mut model, &Step::Claim);
            run(&mut arena, &mut model, &Step::Complete(true));
        }
        arena.check();
        prop_assert_eq!(arena.counts(), PageCounts::default());
    }
}

#[test]
fn an_offer_is_cancelled_by_taking_but_not_while_advised() {
    let mut arena = Arena::new(EXTENTS, 4096, true);
    let page = arena.take(0).unwrap();
    let span = Span { page, pages: 1 };
    arena.offer_allocated(span);
    assert_eq!(arena.retake(span), Retake::Wired);
    let mut spans = [Span::default(); BATCH];
    assert_eq!(arena.claim(&mut spans).0, 0, "nothing remains to be advised");
    arena.offer_allocated(span);
    assert_eq!(arena.claim(&mut spans).0, 1);
    assert_eq!(arena.retake(span), Retake::Busy);
    arena.complete(span, PageAdvice::Lend, true);
    assert_eq!(arena.retake(span), Retake::Wired);
}

#[test]
fn a_free_block_being_advised_is_skipped() {
    let mut arena = Arena::new(EXTENTS, 4096, true);
    let page = arena.take(4).unwrap();
    arena.give(page, 4, Give::Lend);
    let mut spans = [Span::default(); BATCH];
    assert_eq!(arena.claim(&mut spans).0, 1);
    let other = arena.take(4).unwrap();
    assert_ne!(other, page, "the allocation does not wait");
    arena.complete(spans[0], PageAdvice::Lend, true);
    assert_eq!(arena.take(4), Ok(page), "lent memory is allocated before new memory");
}

#[test]
fn a_batch_is_bounded_and_neighbours_are_joined() {
    let mut arena = Arena::new(64, usize::MAX / 2, true);
    let pages: Vec<usize> = (0..2048).map(|_| arena.take(0).unwrap()).collect();
    // Every other page: nothing to join.
    for page in pages.iter().filter(|page| *page % 2 == 0) {
        arena.give(*page, 0, Give::Lend);
    }
    let mut spans = [Span::default(); BATCH];
    let (count, advice) = arena.claim(&mut spans);
    assert_eq!((count, advice), (BATCH, PageAdvice::Lend));
    spans.iter().for_each(|&span| arena.complete(span, advice, true));
    for page in pages.iter().filter(|page| *page % 2 == 1) {
        arena.give(*page, 0, Give::Return);
    }
    arena.offer_free(PageAdvice::Return);
    let (count, advice) = arena.claim(&mut spans);
    assert_eq!((count, advice), (1, PageAdvice::Return));
    assert!(spans[0].pages > EXTENT_PAGES, "several extents in one span");
    assert_eq!(arena.counts().offered, 2048 - spans[0].pages, "the remainder is in the next batch");
}

#[test]
fn a_refused_advice_leaves_the_page_wired() {
    let mut arena = Arena::new(EXTENTS, 4096, true);
    let page = arena.take(0).unwrap();
    arena.give(page, 0, Give::Lend);
    let mut spans = [Span::default(); BATCH];
    let (_, advice) = arena.claim(&mut spans);
    arena.complete(spans[0], advice, false);
    arena.check();
    assert_eq!((arena.counts().wired, arena.counts().unwired), (1, 0));
}

#[test]
fn a_run_stays_warm_for_one_sweep_and_is_lent_at_the_next() {
    let mut arena = Arena::new(EXTENTS, 8192, true);
    let page = arena.take_run(700).unwrap();
    arena.give_run(page, Give::Cool);
    assert!(arena.sweep(), "just freed: it waits for the next sweep");
    assert_eq!(arena.counts().wired, 700);
    assert_eq!(arena.take_run(700), Ok(page));
    arena.give_run(page, Give::Cool);
    arena.sweep();
    assert!(!arena.sweep());
    assert_eq!((arena.counts().wired, arena.counts().offered), (0, 700));
}

#[test]
fn reused_blocks_stay_wired_and_unused_ones_are_released() {
    for (pressed, advice) in [(false, PageAdvice::Lend), (true, PageAdvice::Return)] {
        let mut arena = Arena::new(EXTENTS, 8192, true);
        arena.set_prefer_return(pressed);
        // 40 requests at once, then never more than eight.
        let peak: Vec<usize> = (0..40).map(|_| arena.take(5).unwrap()).collect();
        peak.into_iter().for_each(|page| arena.give(page, 5, Give::Cool));
        let mut offered = 0;
        for _ in 0..4 {
            let few: Vec<usize> = (0..8).map(|_| arena.take(5).unwrap()).collect();
            few.into_iter().for_each(|page| arena.give(page, 5, Give::Cool));
            assert!(arena.sweep());
            arena.check();
            let mut spans = [Span::default(); BATCH];
            let (count, given) = arena.claim(&mut spans);
            assert!(count == 0 || given == advice);
            for span in &spans[..count] {
                arena.complete(*span, given, true);
                offered += span.pages;
            }
        }
        assert_eq!(offered, 32 * 32, "the blocks that were not needed");
        assert_eq!(arena.counts().wired, 8 * 32, "the blocks that were reused");
        assert!(!arena.sweep());
        assert_eq!((arena.counts().wired, arena.counts().offered), (0, 8 * 32));
    }
}

#[test]
fn the_largest_block_fits_a_run() {
    let pages = MAX_BLOCK_BYTES / crate::class::PAGE_BYTES;
    let mut arena = Arena::new(64, pages, true);
    assert!(arena.take_run(pages).is_ok());
    assert_eq!(arena.take_run(pages), Err(Shortage::Budget));
}
