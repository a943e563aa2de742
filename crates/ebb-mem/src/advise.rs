//! The advisor: the one thread that makes advisory calls, so that no I/O thread ever does.
//!
//! It takes batches of offered pages from the arena's books (up to 64 spans), advises them with one
//! vectored call while the lock is free, and enters the outcome. A page it has claimed is in state
//! *advising*: nobody takes it until the call is back; a page only offered can be taken at any moment,
//! which cancels the offer.
//!
//! It is idle (no wake-up at all) unless there is something to do; while freed runs are cooling it
//! looks every [`SWEEP`].

use std::time::Duration;

use crate::arena::Arena;
use crate::sync::{Condvar, Mutex, MutexGuard, wait};
use crate::sys::{Advice, BATCH, Reservation, Span};

/// How long a freed run stays wired in case it is wanted again. Measured: lending a page and
/// taking it back costs about 0.6 µs of CPU, so with this interval even memory that is wanted again
/// just after costs under 1 % of a CPU per 16,000 pages.
pub(crate) const SWEEP: Duration = Duration::from_millis(100);
/// How long a small offer may wait for company: one call for 64 pages costs a tenth of 64 calls.
const COALESCE: Duration = Duration::from_millis(2);

/// The arena with its lock and the conditions around it.
pub(crate) struct Books {
    arena: Mutex<Arena>,
    work: Condvar,
    settled: Condvar,
}

/// What carries advice out: the kernel, or a model of it.
pub(crate) trait Kernel {
    /// Advises `spans`; calls `failed` for each the kernel refused.
    fn advise(&mut self, spans: &[Span], advice: Advice, failed: &mut dyn FnMut(Span));
}

/// The real one.
pub(crate) struct Real<'a> {
    pub(crate) reservation: &'a Reservation,
    pub(crate) vectored: bool,
}

impl Kernel for Real<'_> {
    fn advise(&mut self, spans: &[Span], advice: Advice, failed: &mut dyn FnMut(Span)) {
        self.reservation.advise(spans, advice, &mut self.vectored, failed);
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
        let wake = self.work() > self.had_work;
        self.arena = None;
        if wake {
            self.books.work.notify_one();
        }
    }
}

impl Locked<'_> {
    /// What waits for the advisor: nothing, something to do in a while, something to do now.
    fn work(&self) -> u8 {
        match (self.urgent(), self.counts().offered > 0, self.cooling()) {
            (true, ..) => 3,
            (_, true, _) => 2,
            (.., true) => 1,
            _ => 0,
        }
    }
}

/// State of the advisor's thread.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) stop: crate::sync::AtomicBool,
}

impl Books {
    pub(crate) fn new(arena: Arena) -> Books {
        Books { arena: Mutex::new(arena), work: Condvar::new(), settled: Condvar::new() }
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
        let mut arena = self.arena.lock();
        for (&span, failed) in spans.iter().zip(failed) {
            arena.complete(span, advice, !failed);
        }
        true
    }

    /// The advisor's life.
    pub(crate) fn run(&self, kernel: &mut impl Kernel, orders: &Orders) {
        let mut hasty = false;
        loop {
            let mut arena = self.arena.lock();
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
            if arena.counts().offered > 0 {
                let (guard, waited) = timed_wait(&self.work, arena, COALESCE);
                drop(guard);
                hasty = waited;
            } else if arena.cooling() {
                let (mut guard, waited) = timed_wait(&self.work, arena, SWEEP);
                if waited {
                    guard.sweep();
                }
            } else {
                arena = wait(&self.work, arena);
                drop(arena);
            }
        }
    }

    /// Ends [`Books::run`].
    pub(crate) fn stop(&self, orders: &Orders) {
        orders.stop.store(true, crate::sync::Ordering::Release);
        drop(self.arena.lock());
        self.work.notify_one();
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
