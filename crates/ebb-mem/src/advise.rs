//! The advisor: the thread that makes the `madvise` calls, so that no I/O thread does, and its helper, a
//! second thread for large amounts.
//!
//! The advisor claims batches of offered pages from the arena (up to 64 spans), advises them with one
//! vectored call while the arena is unlocked, and records the result. A claimed page is *advising*: it
//! cannot be allocated until the call returns. A page that is only offered can be allocated at any time,
//! which cancels the offer.
//!
//! Without work the advisor does not wake up; while freed memory waits for a sweep it wakes every
//! [`SWEEP`]. The helper sleeps until [`HELP_PAGES`] are offered, as after a low-memory event, and claims
//! batches from the same arena: returning pages is bound by the CPU and runs in parallel in the kernel
//! (1 GiB of small pages on two CPUs: 54 ms with one thread, 29 ms with two).

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::arena::Arena;
use crate::class::EXTENT_PAGES;
use crate::space::Core;
use crate::sync::{Condvar, Mutex, MutexGuard, wait};
use crate::sys::{BATCH, Closed, PageAdvice, Span};

/// Time between two sweeps: how long freed memory ([`crate::arena::Give::Cool`]) stays wired in case it is
/// reused. Measured: lending a page and taking it back costs about 0.6 µs of CPU, so with this interval
/// even memory that is reused directly after the sweep costs under 1 % of a CPU per 16,000 pages.
pub(crate) const SWEEP: Duration = Duration::from_millis(100);
/// The same under pressure. A busy worker reuses freed memory within milliseconds, so this keeps the
/// memory that requests reuse; other memory is returned within 100 ms.
pub(crate) const SWEEP_PRESSED: Duration = Duration::from_millis(50);
/// How long a small offer waits for more pages: one call for 64 pages costs a tenth of 64 calls.
const COALESCE: Duration = Duration::from_millis(2);
/// Number of offered pages (64 MiB) that wakes the helper: several milliseconds of the advisor's time.
/// Fewer under model checking.
pub(crate) const HELP_PAGES: usize =
    if cfg!(all(test, feature = "shuttle")) { 2 } else { 32 * EXTENT_PAGES };

/// The arena with its lock and condition variables.
pub(crate) struct SharedArena {
    arena: Mutex<Arena>,
    work: Condvar,
    help: Condvar,
    settled: Condvar,
}

/// Carries out advice: the kernel, or a model of it.
pub(crate) trait Kernel {
    /// Advises `spans`; calls `failed` for each the kernel refused.
    fn advise(&mut self, spans: &[Span], advice: PageAdvice, failed: &mut dyn FnMut(Span));

    /// Closes a chunk.
    fn close(&mut self, _: Span) -> Closed {
        Closed::Yes
    }
}

/// The system's kernel.
pub(crate) struct SystemKernel<'a> {
    core: &'a Core,
    vectored: bool,
}

impl SystemKernel<'_> {
    pub(crate) fn new(core: &Core) -> SystemKernel<'_> {
        SystemKernel { core, vectored: true }
    }
}

impl Kernel for SystemKernel<'_> {
    fn advise(&mut self, spans: &[Span], advice: PageAdvice, failed: &mut dyn FnMut(Span)) {
        self.core.reservation.advise(spans, advice, &mut self.vectored, failed);
    }

    fn close(&mut self, span: Span) -> Closed {
        self.core.close(span)
    }
}

/// A lock on the arena. Dropping it wakes the advisor if there are new offers.
pub(crate) struct LockedArena<'a> {
    arena: Option<MutexGuard<'a, Arena>>,
    shared: &'a SharedArena,
    had_work: u8,
}

impl std::ops::Deref for LockedArena<'_> {
    type Target = Arena;
    fn deref(&self) -> &Arena {
        match &self.arena {
            Some(arena) => arena,
            None => unreachable!("held until dropped"),
        }
    }
}

impl std::ops::DerefMut for LockedArena<'_> {
    fn deref_mut(&mut self) -> &mut Arena {
        match &mut self.arena {
            Some(arena) => arena,
            None => unreachable!("held until dropped"),
        }
    }
}

impl Drop for LockedArena<'_> {
    fn drop(&mut self) {
        let work = self.work();
        self.arena = None;
        if work > self.had_work {
            self.shared.work.notify_one();
            if work == MUCH {
                self.shared.help.notify_one();
            }
        }
    }
}

impl LockedArena<'_> {
    /// How much work the advisor has: 0 none, 1 at the next sweep or a chunk to close, 2 a small offer,
    /// 3 urgent, [`MUCH`] enough for two threads.
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

/// See [`LockedArena::work`].
const MUCH: u8 = 4;

/// Stops the advisor's threads.
#[derive(Default)]
pub(crate) struct AdvisorControl {
    pub(crate) stop: crate::sync::AtomicBool,
}

impl SharedArena {
    pub(crate) fn new(arena: Arena) -> SharedArena {
        SharedArena {
            arena: Mutex::new(arena),
            work: Condvar::new(),
            help: Condvar::new(),
            settled: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> LockedArena<'_> {
        let arena = self.arena.lock();
        let mut locked = LockedArena { arena: Some(arena), shared: self, had_work: 0 };
        locked.had_work = locked.work();
        locked
    }

    /// One batch: claims it, advises it without the lock, records the result. False if there was none.
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
        // Under pressure, pages just lent are offered again to be returned: new work for the other thread.
        let mut arena = self.lock();
        for (&span, failed) in spans.iter().zip(failed) {
            arena.complete(span, advice, !failed);
        }
        if arena.settled() {
            self.settled.notify_all();
        }
        true
    }

    /// Closes one empty chunk.
    fn close(&self, kernel: &mut impl Kernel) {
        // A statement of its own, so that the lock is released before the kernel is called.
        let closing = self.arena.lock().close_begin();
        if let Some(closing) = closing {
            let closed = kernel.close(closing.span);
            self.lock().close_end(closing, closed);
        }
    }

    /// The advisor's loop.
    pub(crate) fn run(&self, kernel: &mut impl Kernel, control: &AdvisorControl) {
        let (mut batch_due, mut due) = (false, None);
        loop {
            let mut arena = self.arena.lock();
            let next_sweep = sweep(&mut arena, &mut due, crate::clock::now());
            if arena.urgent() || batch_due {
                drop(arena);
                batch_due = false;
                while self.step(kernel) {}
                continue;
            }
            if control.stop.load(crate::sync::Ordering::Acquire) {
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
                batch_due = waited;
            } else if let Some(pause) = next_sweep {
                drop(timed_wait(&self.work, arena, pause));
            } else {
                arena = wait(&self.work, arena);
                drop(arena);
            }
        }
    }

    /// Does all of the advisor's work now; returns the time until the next sweep.
    #[cfg(feature = "sim")]
    pub(crate) fn run_once(
        &self,
        kernel: &mut impl Kernel,
        due: &mut Option<Instant>,
        now: Instant,
    ) -> Option<Duration> {
        let next_sweep = sweep(&mut self.arena.lock(), due, now);
        while self.step(kernel) {}
        while self.arena.lock().may_close() {
            self.close(kernel);
        }
        next_sweep
    }

    /// The helper's loop.
    pub(crate) fn run_helper(&self, kernel: &mut impl Kernel, control: &AdvisorControl) {
        loop {
            let arena = self.arena.lock();
            if control.stop.load(crate::sync::Ordering::Acquire) {
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

    /// Ends [`SharedArena::run`] and [`SharedArena::run_helper`].
    pub(crate) fn stop(&self, control: &AdvisorControl) {
        control.stop.store(true, crate::sync::Ordering::Release);
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

/// Sweeps when it is due; returns the time until the next sweep, if pages wait for one. `due` is kept
/// between calls, so that offers in between do not delay a sweep.
fn sweep(arena: &mut Arena, due: &mut Option<Instant>, now: Instant) -> Option<Duration> {
    if !arena.cooling() {
        *due = None;
        return None;
    }
    let pause = if arena.prefer_return() { SWEEP_PRESSED } else { SWEEP };
    // Pressure may have begun since `due` was set, and shortens the pause.
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
    let start = |name: &str, run: fn(&SharedArena, &mut SystemKernel<'_>, &AdvisorControl)| {
        let core = core.clone();
        std::thread::Builder::new().name(name.to_owned()).stack_size(128 << 10).spawn(move || {
            let mut real = SystemKernel::new(&core);
            run(&core.arena, &mut real, &core.control);
        })
    };
    let advisor = start("ebb-advisor", |shared, kernel, control| shared.run(kernel, control))?;
    let helper =
        start("ebb-advisor-2", |shared, kernel, control| shared.run_helper(kernel, control));
    // Without the helper, returning memory takes longer.
    Ok(std::iter::once(advisor).chain(helper).collect())
}

/// Waits at most `time`; true if it timed out.
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

    /// Only counts pages.
    struct Counting<'a>(&'a crate::sync::AtomicUsize);

    impl Kernel for Counting<'_> {
        fn advise(&mut self, spans: &[Span], _: PageAdvice, _: &mut dyn FnMut(Span)) {
            let pages = spans.iter().map(|span| span.pages).sum();
            self.0.fetch_add(pages, crate::sync::Ordering::Relaxed);
        }
    }

    #[test]
    fn freed_memory_is_offered_after_two_sweeps_even_if_the_advisor_wakes_in_between() {
        let mut arena = Arena::new(4, 4 * EXTENT_PAGES, true);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut due = None;
        assert_eq!(sweep(&mut arena, &mut due, start), None, "nothing to sweep");
        let pages: Vec<usize> = (0..8).map(|_| arena.take(5).unwrap()).collect();
        arena.give(pages[0], 5, Give::Cool);
        for ms in (0..100).step_by(10) {
            let next = sweep(&mut arena, &mut due, at(ms));
            assert_eq!(
                next,
                Some(Duration::from_millis(100 - ms)),
                "an early wake-up does not delay the sweep"
            );
        }
        assert_eq!(sweep(&mut arena, &mut due, at(100)), Some(SWEEP));
        assert_eq!(arena.counts().offered, 0, "it may have been freed just now");
        // Pressure shortens the remaining pause.
        arena.set_prefer_return(true);
        assert_eq!(sweep(&mut arena, &mut due, at(110)), Some(SWEEP_PRESSED));
        assert_eq!(sweep(&mut arena, &mut due, at(160)), None);
        assert_eq!(arena.counts().offered, 32);
        assert_eq!(arena.claim(&mut [Span::default(); BATCH]), (1, PageAdvice::Return));
    }

    /// Takes no page, as of memory that is locked.
    struct Refusing;

    impl Kernel for Refusing {
        fn advise(&mut self, spans: &[Span], _: PageAdvice, failed: &mut dyn FnMut(Span)) {
            spans.iter().for_each(|span| failed(*span));
        }
    }

    #[test]
    fn pages_that_the_kernel_does_not_take_stay_wired() {
        let shared = SharedArena::new(Arena::new(4, 4 * EXTENT_PAGES, true));
        let page = shared.lock().take(5).unwrap();
        let wired = shared.lock().counts().wired;
        shared.lock().give(page, 5, Give::Return);
        assert_eq!(shared.lock().counts().offered, 32);
        assert!(shared.step(&mut Refusing));
        let counts = shared.lock().counts();
        assert_eq!((counts.wired, counts.unwired), (wired, 0));
    }

    #[test]
    fn the_helper_wakes_for_large_offers_only() {
        let extents = 40;
        let shared = SharedArena::new(Arena::new(extents, extents * EXTENT_PAGES, true));
        let (control, advised) = (AdvisorControl::default(), crate::sync::AtomicUsize::new(0));
        let pages: Vec<usize> = (0..extents * 2).map(|_| shared.lock().take(8).unwrap()).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| shared.run_helper(&mut Counting(&advised), &control));
            let (few, many) = pages.split_at(10);
            few.iter().for_each(|&page| shared.lock().give(page, 8, Give::Return));
            assert_eq!(shared.lock().counts().offered, 10 * 256, "left to the advisor");
            // At once: the helper leaves a rest that is smaller to the advisor.
            let mut arena = shared.lock();
            many.iter().for_each(|&page| arena.give(page, 8, Give::Return));
            drop(arena);
            // No advisor runs: the helper does all of it.
            let mut arena = shared.arena.lock();
            while !arena.settled() {
                arena = wait(&shared.settled, arena);
            }
            drop(arena);
            shared.stop(&control);
        });
        assert_eq!(advised.load(crate::sync::Ordering::Relaxed), extents * EXTENT_PAGES);
    }
}
