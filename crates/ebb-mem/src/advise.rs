//! The advisor: the thread that makes advisory calls, so that no I/O thread ever does, and its
//! helper, a second one for when there is much to do.
//!
//! It takes batches of offered pages from the arena's books (up to 64 spans), advises them with one
//! vectored call while the lock is free, and enters the outcome. A page it has claimed is in state
//! *advising*: nobody takes it until the call is back; a page only offered can be taken at any moment,
//! which cancels the offer.
//!
//! The advisor is idle (no wake-up at all) unless there is something to do; while freed memory
//! is cooling it looks every [`SWEEP`]. The helper sleeps until [`HELP_PAGES`] wait, as they do after a
//! low-memory event, and takes batches off the same books: the kernel's part of returning pages is
//! bound by the CPU and runs in parallel (1 GiB of small pages, two CPUs: 54 ms by one thread, 29 by
//! two).

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::arena::{Arena, Closed};
use crate::class::EXTENT_PAGES;
use crate::space::Core;
use crate::sync::{Condvar, Mutex, MutexGuard, wait};
use crate::sys::{Advice, BATCH, Span};

/// How long freed memory that cools stays wired in case it is wanted again. Measured: lending a page and
/// taking it back costs about 0.6 µs of CPU, so with this interval even memory that is wanted again
/// just after costs under 1 % of a CPU per 16,000 pages.
pub(crate) const SWEEP: Duration = Duration::from_millis(100);
/// The same while pressure goes on. What a busy worker frees it wants again within milliseconds, so
/// this keeps what is in turnover; and what is not is returned before 100 ms have passed.
pub(crate) const SWEEP_PRESSED: Duration = Duration::from_millis(50);
/// How long a small offer may wait for company: one call for 64 pages costs a tenth of 64 calls.
const COALESCE: Duration = Duration::from_millis(2);
/// Offered pages (64 MiB of them) that are worth waking the helper for: several milliseconds of the
/// advisor's time. Fewer where schedules are explored.
pub(crate) const HELP_PAGES: usize = if cfg!(feature = "shuttle") { 2 } else { 32 * EXTENT_PAGES };

/// The arena with its lock and the conditions around it.
pub(crate) struct Books {
    arena: Mutex<Arena>,
    work: Condvar,
    help: Condvar,
    settled: Condvar,
}

/// What carries advice out: the kernel, or a model of it.
pub(crate) trait Kernel {
    /// Advises `spans`; calls `failed` for each the kernel refused.
    fn advise(&mut self, spans: &[Span], advice: Advice, failed: &mut dyn FnMut(Span));

    /// Takes the access to a chunk away.
    fn close(&mut self, _: Span) -> Closed {
        Closed::Yes
    }
}

/// The real one.
pub(crate) struct Real<'a> {
    core: &'a Core,
    vectored: bool,
}

impl Real<'_> {
    pub(crate) fn new(core: &Core) -> Real<'_> {
        Real { core, vectored: true }
    }
}

impl Kernel for Real<'_> {
    fn advise(&mut self, spans: &[Span], advice: Advice, failed: &mut dyn FnMut(Span)) {
        self.core.reservation.advise(spans, advice, &mut self.vectored, failed);
    }

    fn close(&mut self, span: Span) -> Closed {
        self.core.close(span)
    }
}

/// A lock on the books that wakes the advisor when it is let go with new offers in it.
pub(crate) struct Locked<'a> {
    arena: Option<MutexGuard<'a, Arena>>,
    books: &'a Books,
    had_work: u8,
}

impl std::ops::Deref for Locked<'_> {
    type Target = Arena;
    fn deref(&self) -> &Arena {
        match &self.arena {
            Some(arena) => arena,
            None => unreachable!("held until dropped"),
        }
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Arena {
        match &mut self.arena {
            Some(arena) => arena,
            None => unreachable!("held until dropped"),
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let work = self.work();
        self.arena = None;
        if work > self.had_work {
            self.books.work.notify_one();
            if work == MUCH {
                self.books.help.notify_one();
            }
        }
    }
}

impl Locked<'_> {
    /// What waits for the advisor: nothing, something to do in a while, something to do now, more
    /// than one thread should do.
    fn work(&self) -> u8 {
        match (self.counts().offered, self.urgent(), self.cooling() || self.may_close()) {
            (HELP_PAGES.., ..) => MUCH,
            (_, true, _) => 3,
            (1.., ..) => 2,
            (.., true) => 1,
            _ => 0,
        }
    }
}

/// See [`Locked::work`].
const MUCH: u8 = 4;

/// State of the advisor's thread.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) stop: crate::sync::AtomicBool,
}

impl Books {
    pub(crate) fn new(arena: Arena) -> Books {
        Books {
            arena: Mutex::new(arena),
            work: Condvar::new(),
            help: Condvar::new(),
            settled: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let arena = self.arena.lock();
        let mut locked = Locked { arena: Some(arena), books: self, had_work: 0 };
        locked.had_work = locked.work();
        locked
    }

    /// One batch: claim, advise with the lock free, enter the outcome. False if there was none.
    pub(crate) fn step(&self, kernel: &mut impl Kernel) -> bool {
        let mut spans = [Span::default(); BATCH];
        let (count, advice) = self.arena.lock().claim(&mut spans);
        if count == 0 {
            return false;
        }
        let spans = &spans[..count];
        let mut failed = [false; BATCH];
        kernel.advise(spans, advice, &mut |bad| {
            for (span, failed) in spans.iter().zip(&mut failed) {
                *failed |= *span == bad;
            }
        });
        // What was lent may have to be returned after all, which is new work for the other one.
        let mut arena = self.lock();
        for (&span, failed) in spans.iter().zip(failed) {
            arena.complete(span, advice, !failed);
        }
        if arena.settled() {
            self.settled.notify_all();
        }
        true
    }

    /// Closes one chunk in which nothing is left.
    fn close(&self, kernel: &mut impl Kernel) {
        // A statement of its own: the lock must have ended when the kernel is called.
        let closing = self.arena.lock().close_begin();
        if let Some(closing) = closing {
            let closed = kernel.close(closing.span);
            self.lock().close_end(closing, closed);
        }
    }

    /// The advisor's life.
    pub(crate) fn run(&self, kernel: &mut impl Kernel, orders: &Orders) {
        let (mut hasty, mut due) = (false, None);
        loop {
            let mut arena = self.arena.lock();
            let rest = sweep(&mut arena, &mut due, crate::clock::now());
            if arena.urgent() || hasty {
                drop(arena);
                hasty = false;
                while self.step(kernel) {}
                continue;
            }
            if orders.stop.load(crate::sync::Ordering::Acquire) {
                return;
            }
            if arena.settled() {
                self.settled.notify_all();
            }
            if arena.may_close() && arena.counts().offered == 0 {
                drop(arena);
                self.close(kernel);
                continue;
            }
            if arena.counts().offered > 0 {
                let (guard, waited) = timed_wait(&self.work, arena, COALESCE);
                drop(guard);
                hasty = waited;
            } else if let Some(rest) = rest {
                drop(timed_wait(&self.work, arena, rest));
            } else {
                arena = wait(&self.work, arena);
                drop(arena);
            }
        }
    }

    /// What the advisor does of its own accord now; how long until it must look again.
    #[cfg(feature = "sim")]
    pub(crate) fn turn(
        &self,
        kernel: &mut impl Kernel,
        due: &mut Option<Instant>,
        now: Instant,
    ) -> Option<Duration> {
        let rest = sweep(&mut self.arena.lock(), due, now);
        while self.step(kernel) {}
        while self.arena.lock().may_close() {
            self.close(kernel);
        }
        rest
    }

    /// The helper's life.
    pub(crate) fn run_helper(&self, kernel: &mut impl Kernel, orders: &Orders) {
        loop {
            let arena = self.arena.lock();
            if orders.stop.load(crate::sync::Ordering::Acquire) {
                return;
            }
            if arena.counts().offered < HELP_PAGES {
                drop(wait(&self.help, arena));
                continue;
            }
            drop(arena);
            while self.step(kernel) {}
        }
    }

    /// Ends [`Books::run`] and [`Books::run_helper`].
    pub(crate) fn stop(&self, orders: &Orders) {
        orders.stop.store(true, crate::sync::Ordering::Release);
        drop(self.arena.lock());
        self.work.notify_one();
        self.help.notify_one();
    }

    /// Blocks until the advisor has nothing to do. For tests, benches and shutdown.
    pub(crate) fn settle(&self) {
        let mut arena = self.arena.lock();
        while !arena.settled() {
            self.work.notify_one();
            arena = wait(&self.settled, arena);
        }
    }
}

/// Sweeps when it is time; how long until the next sweep, if anything cools. `due` is kept between
/// calls: offers that come in meanwhile do not put a sweep off.
fn sweep(arena: &mut Arena, due: &mut Option<Instant>, now: Instant) -> Option<Duration> {
    if !arena.cooling() {
        *due = None;
        return None;
    }
    let pause = if arena.prefer_return() { SWEEP_PRESSED } else { SWEEP };
    // Pressure may have come since it was reckoned.
    let at = due.map_or(now + pause, |at| at.min(now + pause));
    if now < at {
        *due = Some(at);
        return Some(at - now);
    }
    *due = arena.sweep().then_some(now + pause);
    due.map(|_| pause)
}

/// Starts the advisor and its helper.
pub(crate) fn start(core: &Arc<Core>) -> std::io::Result<Vec<JoinHandle<()>>> {
    let start = |name: &str, run: fn(&Books, &mut Real<'_>, &Orders)| {
        let core = core.clone();
        std::thread::Builder::new().name(name.to_owned()).stack_size(128 << 10).spawn(move || {
            let mut real = Real::new(&core);
            run(&core.books, &mut real, &core.orders);
        })
    };
    let advisor = start("ebb-advisor", |books, kernel, orders| books.run(kernel, orders))?;
    let helper = start("ebb-advisor-2", |books, kernel, orders| books.run_helper(kernel, orders));
    // Without it returning takes longer, and nothing else.
    Ok(std::iter::once(advisor).chain(helper).collect())
}

/// Waits at most `time`; true if it passed.
fn timed_wait<'a>(
    condvar: &Condvar,
    guard: MutexGuard<'a, Arena>,
    time: Duration,
) -> (MutexGuard<'a, Arena>, bool) {
    match condvar.wait_timeout(guard, time) {
        Ok((guard, result)) => (guard, result.timed_out()),
        Err(poisoned) => {
            let (guard, result) = poisoned.into_inner();
            (guard, result.timed_out())
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::arena::Give;

    /// Counts pages, and does nothing else.
    struct Counting<'a>(&'a crate::sync::AtomicUsize);

    impl Kernel for Counting<'_> {
        fn advise(&mut self, spans: &[Span], _: Advice, _: &mut dyn FnMut(Span)) {
            let pages = spans.iter().map(|span| span.pages).sum();
            self.0.fetch_add(pages, crate::sync::Ordering::Relaxed);
        }
    }

    #[test]
    fn what_cools_goes_after_two_sweeps_whatever_comes_in_between() {
        let mut arena = Arena::new(4, 0, 4 * EXTENT_PAGES, true);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut due = None;
        assert_eq!(sweep(&mut arena, &mut due, start), None, "nothing to look at");
        let pages: Vec<usize> = (0..8).map(|_| arena.take(5).unwrap()).collect();
        arena.give(pages[0], 5, Give::Cool);
        for ms in (0..100).step_by(10) {
            let rest = sweep(&mut arena, &mut due, at(ms));
            assert_eq!(rest, Some(Duration::from_millis(100 - ms)), "woken early, no later for it");
        }
        assert_eq!(sweep(&mut arena, &mut due, at(100)), Some(SWEEP));
        assert_eq!(arena.counts().offered, 0, "it may have been freed just now");
        // Pressure: what is left of the pause is cut short.
        arena.set_prefer_return(true);
        assert_eq!(sweep(&mut arena, &mut due, at(110)), Some(SWEEP_PRESSED));
        assert_eq!(sweep(&mut arena, &mut due, at(160)), None);
        assert_eq!(arena.counts().offered, 32);
        assert_eq!(arena.claim(&mut [Span::default(); BATCH]), (1, Advice::Return));
    }

    #[test]
    fn the_helper_wakes_for_much_and_sleeps_through_little() {
        let extents = 40;
        let books = Books::new(Arena::new(extents, 0, extents * EXTENT_PAGES, true));
        let (orders, advised) = (Orders::default(), crate::sync::AtomicUsize::new(0));
        let pages: Vec<usize> = (0..extents * 2).map(|_| books.lock().take(8).unwrap()).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| books.run_helper(&mut Counting(&advised), &orders));
            let (few, many) = pages.split_at(10);
            few.iter().for_each(|&page| books.lock().give(page, 8, Give::Return));
            assert_eq!(books.lock().counts().offered, 10 * 256, "left to the advisor");
            many.iter().for_each(|&page| books.lock().give(page, 8, Give::Return));
            // Nobody else is there to do it.
            let mut arena = books.arena.lock();
            while !arena.settled() {
                arena = wait(&books.settled, arena);
            }
            drop(arena);
            books.stop(&orders);
        });
        assert_eq!(advised.load(crate::sync::Ordering::Relaxed), extents * EXTENT_PAGES);
    }
}
