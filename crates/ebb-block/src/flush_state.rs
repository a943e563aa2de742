//! The outcome of a store's syncs: flushes, and writes with FUA.
//!
//! After a failed `fdatasync` Linux marks the pages that it could not write as clean, and the next
//! `fdatasync` succeeds although the data is on no disk. The kernel reports the error once per open
//! file description, to whichever sync comes first: a write with FUA, which syncs only its own
//! range, may receive the error of another range. Therefore:
//!
//! # Invariants
//! - A sync that fails, or whose future is dropped so that its outcome is unknown, counts as a
//!   **loss**: any change since the last successful flush may be lost.
//! - After a loss every flush fails with [`ErrorKind::Lost`](crate::ErrorKind::Lost), until all
//!   data that may be lost has been written again and a flush after that succeeds
//!   ([`tracked::flush_rewritten`](crate::tracked::flush_rewritten)).
//! - A write with FUA that fails because the store is full is no loss if nothing else failed: the
//!   same write without FUA finds no space either, and a second open file description, to which the
//!   kernel reports all errors separately, has none. Where there is no such description it counts
//!   as a loss.
//! - A store may carry out a write with FUA as a write and then a flush (remote servers, Ceph).
//!   Only the flush is a sync then.
//! - A store may report a loss to one flush, while later ones succeed. Its owner takes the report
//!   ([`Tracking::take_reports`](crate::Tracking::take_reports)) before it believes such a flush.
//! - Flushes that arrive while one is in flight are merged into the next one, which covers what was
//!   acknowledged before any of them. If it fails, or a sync has failed since one of them arrived,
//!   that flush fails, too.
//! - A sync that succeeded is reported as successful when all syncs that overlap with it have
//!   completed and none has failed: one of those may have received the error of its range.

mod wait_queue;

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use self::wait_queue::{SyncNumbers, WaitPosition, WaitQueue};
use crate::error::{BlockError, ErrorKind, Operation};

/// Acknowledged changes that may be on no disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// When the flush, or the write with FUA, failed.
    pub since: Instant,
    /// Its error.
    pub error: String,
}

impl Loss {
    /// The remedy for an operator, wherever the volume is defined.
    pub const REMEDY: &'static str = "repair the device, remove the volume and add it again, and \
                                      check the guest's file systems";
}

/// The outcome of flushes after a failed sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterFlushes {
    /// They fail until the data was written again: changes may be lost.
    Fail,
    /// They succeed: the failure lost nothing.
    Succeed,
    /// They succeed although changes may be lost: this failure is the only report.
    Hide,
}

#[derive(Debug, Default)]
struct FlushStateInner {
    /// The number of the next sync, and the syncs in flight.
    next: u64,
    open: SyncNumbers,
    /// Syncs in flight that have failed, while it is being determined whether that is a loss.
    doubtful: SyncNumbers,
    /// Tasks that wait for syncs in flight, and for doubtful ones.
    for_open: WaitQueue,
    for_doubtful: WaitQueue,
    flushes: MergedFlushes,
    /// An empty list that is kept for its memory.
    spare: Vec<Waker>,
    losses: u64,
    /// The value of `losses` for which waiting flushes were last woken.
    reported: u64,
    /// The error of the last loss.
    failure: Option<(ErrorKind, Option<i32>)>,
    /// The last loss that makes flushes fail, and the last one that was repaired.
    refused: u64,
    repaired: u64,
    /// The first loss that was not repaired.
    first: Option<Loss>,
    /// A loss that later flushes hide has not been taken.
    has_report: bool,
}

/// Flushes: one is in flight, and those that arrived since wait for the next.
#[derive(Debug, Default)]
struct MergedFlushes {
    leading: bool,
    /// The number of the last flush that began, and of the last that succeeded.
    begun: u64,
    ended: u64,
    queue: WaitQueue,
}

impl FlushStateInner {
    /// Removes a sync; returns the tasks to wake.
    fn close(&mut self, number: u64) -> Vec<Waker> {
        self.open.remove(number);
        self.doubtful.remove(number);
        let mut woken = std::mem::take(&mut self.spare);
        self.for_open.wake_until(self.open.first(), &mut woken);
        self.for_doubtful.wake_until(self.doubtful.first(), &mut woken);
        if self.losses != self.reported {
            self.reported = self.losses;
            self.flushes.queue.wake_until(u64::MAX, &mut woken);
        }
        woken
    }

    fn lose(&mut self, later: LaterFlushes, error: impl FnOnce() -> String) {
        // An earlier loss that was reported once and not followed by another is no longer relevant.
        if self.first.is_none() || self.refused <= self.repaired {
            self.first = Some(Loss { since: ebb_io::clock::now(), error: error() });
        }
        self.losses += 1;
        match later {
            LaterFlushes::Fail => self.refused = self.losses,
            LaterFlushes::Succeed => {}
            LaterFlushes::Hide => self.has_report = true,
        }
    }
}

/// The state of one store's syncs.
#[derive(Debug, Default)]
pub(crate) struct FlushState(Mutex<FlushStateInner>);

/// A sync in flight. Dropped before it completes, it counts as failed.
pub(crate) struct PendingSync<'a> {
    flush_state: &'a FlushState,
    number: u64,
    losses: u64,
    open: bool,
}

impl FlushState {
    fn lock(&self) -> MutexGuard<'_, FlushStateInner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of losses.
    pub(crate) fn losses(&self) -> u64 {
        self.lock().losses
    }

    /// The first loss that was not repaired.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.lock().first.clone()
    }

    /// Notes that a flush has succeeded after everything was written again that the losses `seen` had put in doubt.
    pub(crate) fn note_repaired(&self, seen: u64) {
        let mut state = self.lock();
        state.repaired = state.repaired.max(seen);
        if state.losses <= state.repaired {
            state.first = None;
        }
    }

    /// Takes the losses that later flushes hide; true if there were any.
    pub(crate) fn take_reports(&self) -> bool {
        std::mem::take(&mut self.lock().has_report)
    }

    /// Whether a flush would fail.
    pub(crate) fn is_lost(&self) -> bool {
        let state = self.lock();
        state.refused > state.repaired
    }

    /// Wakes tasks outside the lock, and keeps the list's memory.
    fn wake(&self, mut woken: Vec<Waker>) {
        woken.drain(..).for_each(Waker::wake);
        let mut state = self.lock();
        if state.spare.capacity() < woken.capacity() {
            state.spare = woken;
        }
    }

    pub(crate) fn begin(&self) -> PendingSync<'_> {
        self.begin_locked(&mut self.lock())
    }

    fn begin_locked(&self, state: &mut FlushStateInner) -> PendingSync<'_> {
        let number = state.next;
        state.next += 1;
        state.open.insert(number);
        PendingSync { flush_state: self, number, losses: state.losses, open: true }
    }

    /// Registers a flush that has arrived. `None` if it would fail.
    pub(crate) fn join(&self) -> Option<JoinedFlush<'_>> {
        let state = self.lock();
        let (losses, wanted) = (state.losses, state.flushes.begun + 1);
        (state.refused <= state.repaired).then_some(JoinedFlush {
            flush_state: self,
            losses,
            wanted,
            position: None,
            leads: false,
        })
    }

    /// The error of a flush that was merged into another one.
    pub(crate) fn failure(&self, size: u64) -> BlockError {
        let (kind, number) = self.lock().failure.unwrap_or((ErrorKind::Lost, None));
        let source = number.map(std::io::Error::from_raw_os_error);
        BlockError::new(kind, Operation::Flush, 0, size).caused_by(source)
    }

    /// `None` if there were other losses than those `seen`.
    pub(crate) fn begin_rewritten(&self, seen: u64) -> Option<PendingSync<'_>> {
        let mut state = self.lock();
        (state.losses == seen).then(|| self.begin_locked(&mut state))
    }
}

impl PendingSync<'_> {
    /// The sync has failed.
    pub(crate) fn fail(mut self, later: LaterFlushes, error: &BlockError) {
        self.open = false;
        let wakers = {
            let mut state = self.flush_state.lock();
            state.lose(later, || error.full_text());
            let number = error.source.as_ref().and_then(std::io::Error::raw_os_error);
            state.failure = Some((error.kind, number));
            state.close(self.number)
        };
        self.flush_state.wake(wakers);
    }

    /// The sync has failed, perhaps with a loss: overlapping syncs wait for [`PendingSync::fail`]
    /// or [`PendingSync::end`].
    pub(crate) fn mark_doubtful(&self) {
        self.flush_state.lock().doubtful.insert(self.number);
    }

    /// The sync has failed without a loss.
    pub(crate) fn end(mut self) {
        self.open = false;
        let wakers = self.flush_state.lock().close(self.number);
        self.flush_state.wake(wakers);
    }

    /// The sync has succeeded. With `overlapping` it waits until all syncs that overlap with it
    /// have completed. False if a sync has failed since it began.
    pub(crate) async fn succeed(mut self, overlapping: bool) -> bool {
        self.open = false;
        let (wakers, until) = {
            let mut state = self.flush_state.lock();
            (state.close(self.number), state.next)
        };
        self.flush_state.wake(wakers);
        let mut waits = OverlapWait { flush_state: self.flush_state, overlapping, position: None };
        poll_fn(|cx| {
            let mut state = self.flush_state.lock();
            let first = if overlapping { state.open.first() } else { state.doubtful.first() };
            if first < until {
                queue_of(overlapping, &mut state).wait(&mut waits.position, until, cx.waker());
                return Poll::Pending;
            }
            waits.position = None;
            Poll::Ready(state.losses == self.losses)
        })
        .await
    }
}

/// A sync that waits for the syncs that overlap with it.
struct OverlapWait<'a> {
    flush_state: &'a FlushState,
    overlapping: bool,
    position: Option<WaitPosition>,
}

impl Drop for OverlapWait<'_> {
    fn drop(&mut self) {
        if let Some(position) = self.position {
            queue_of(self.overlapping, &mut self.flush_state.lock()).remove_waiter(position);
        }
    }
}

fn queue_of(overlapping: bool, state: &mut FlushStateInner) -> &mut WaitQueue {
    if overlapping { &mut state.for_open } else { &mut state.for_doubtful }
}

/// What a flush that has arrived does.
pub(crate) enum FlushRole<'a> {
    /// It has completed: the flush that covers it began after it arrived.
    Covered,
    Failed,
    /// It carries out the next flush, for all that have arrived so far.
    Lead(PendingSync<'a>, u64),
}

/// A flush that has arrived.
pub(crate) struct JoinedFlush<'a> {
    flush_state: &'a FlushState,
    losses: u64,
    /// The number of the flush that covers it.
    wanted: u64,
    position: Option<WaitPosition>,
    leads: bool,
}

impl<'a> JoinedFlush<'a> {
    pub(crate) async fn role(&mut self) -> FlushRole<'a> {
        poll_fn(|cx| {
            let mut state = self.flush_state.lock();
            let state = &mut *state;
            let role = if state.losses != self.losses {
                FlushRole::Failed
            } else if state.flushes.ended >= self.wanted {
                FlushRole::Covered
            } else if !state.flushes.leading {
                self.leads = true;
                state.flushes.leading = true;
                state.flushes.begun += 1;
                FlushRole::Lead(self.flush_state.begin_locked(state), state.flushes.begun)
            } else {
                state.flushes.queue.wait(&mut self.position, self.wanted, cx.waker());
                return Poll::Pending;
            };
            if let Some(position) = self.position.take() {
                state.flushes.queue.remove_waiter(position);
            }
            Poll::Ready(role)
        })
        .await
    }

    /// The flush that it carried out has succeeded.
    pub(crate) fn covers(&self, number: u64) {
        let woken = {
            let mut state = self.flush_state.lock();
            let mut woken = std::mem::take(&mut state.spare);
            let flushes = &mut state.flushes;
            flushes.ended = flushes.ended.max(number);
            flushes.queue.wake_until(flushes.ended, &mut woken);
            woken
        };
        self.flush_state.wake(woken);
    }
}

impl Drop for JoinedFlush<'_> {
    /// However it ends, another one carries out the next flush.
    fn drop(&mut self) {
        if !self.leads && self.position.is_none() {
            return;
        }
        let woken = {
            let mut state = self.flush_state.lock();
            let mut woken = std::mem::take(&mut state.spare);
            let flushes = &mut state.flushes;
            if let Some(position) = self.position {
                flushes.queue.remove_waiter(position);
            }
            if self.leads {
                flushes.leading = false;
            }
            if !flushes.leading {
                flushes.queue.first(&mut woken);
            }
            woken
        };
        self.flush_state.wake(woken);
    }
}

impl Drop for PendingSync<'_> {
    fn drop(&mut self) {
        if self.open {
            let wakers = {
                let mut state = self.flush_state.lock();
                state.lose(LaterFlushes::Fail, || {
                    "a flush was cancelled before it completed".to_owned()
                });
                state.failure = None;
                state.close(self.number)
            };
            self.flush_state.wake(wakers);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>, bell: &Arc<Bell>) -> Poll<T> {
        future.poll(&mut Context::from_waker(&Waker::from(bell.clone())))
    }

    #[test]
    fn syncs_that_wait_for_overlapping_syncs_are_woken_once() {
        const MANY: usize = 1000;
        let flush_state = FlushState::default();
        let bell = Arc::new(Bell::default());
        let mut begun: Vec<_> = (0..MANY).map(|_| flush_state.begin()).collect();
        let first = begun.remove(0);
        let mut waiting: Vec<_> =
            begun.into_iter().rev().map(|sync| Box::pin(sync.succeed(true))).collect();
        for future in &mut waiting {
            assert!(poll(future.as_mut(), &bell).is_pending());
        }
        // One that is polled without having been woken, and one that is cancelled.
        assert!(poll(waiting[7].as_mut(), &bell).is_pending());
        drop(waiting.remove(100));
        let late = flush_state.begin();
        let mut first = pin!(first.succeed(true));
        assert_eq!(bell.0.load(Ordering::Relaxed), 0, "the sync that they wait for is in flight");
        assert!(poll(first.as_mut(), &bell).is_pending(), "an overlapping sync has not completed");
        assert_eq!(bell.0.load(Ordering::Relaxed), MANY - 2);
        for mut future in waiting {
            assert_eq!(poll(future.as_mut(), &bell), Poll::Ready(true));
        }
        drop(late);
        assert_eq!(bell.0.load(Ordering::Relaxed), MANY - 1);
        assert_eq!(poll(first.as_mut(), &bell), Poll::Ready(false), "that was a loss");
    }
}
