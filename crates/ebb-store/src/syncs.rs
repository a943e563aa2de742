//! What the syncs of a store have come to: flushes, and writes with FUA.
//!
//! After a failed `fdatasync` Linux takes the pages it could not write for clean, and the next
//! `fdatasync` says OK over data that is on no disk. The error is told once per open file description, to
//! whichever sync comes first: a write with FUA, which syncs its own range, may be told of the loss of
//! another range. So:
//!
//! # Invariants
//! - A sync that fails, or of which nothing is known since its future was dropped, counts as a **loss**:
//!   any change since the last flush that went well may be lost.
//! - After a loss every flush fails with [`ErrorKind::Lost`](crate::ErrorKind::Lost), until one that
//!   follows on writing again all that may be lost ([`Store::flush_rewritten`]) goes well.
//! - A sync that went well is believed when all that ran beside it have ended, and none has failed: the
//!   error of its own range may have been told to one of those.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::{BlockError, BufResult, ErrorKind, Io, Operation, Store};

#[derive(Debug, Default)]
struct State {
    /// The number of the next sync, and those under way.
    next: u64,
    open: Vec<u64>,
    waiting: Vec<Waker>,
    losses: u64,
    /// The last loss that a plain flush is refused for, and the last one that was made good.
    refused: u64,
    repaired: u64,
}

impl State {
    fn close(&mut self, number: u64) -> Vec<Waker> {
        self.open.retain(|open| *open != number);
        std::mem::take(&mut self.waiting)
    }

    fn lose(&mut self, once: bool) {
        self.losses += 1;
        if !once {
            self.refused = self.losses;
        }
    }
}

/// The syncs of one store.
#[derive(Debug, Default)]
pub(crate) struct Syncs(Mutex<State>);

/// One under way. Dropped before its end it counts as failed.
struct Sync<'a> {
    syncs: &'a Syncs,
    number: u64,
    losses: u64,
    open: bool,
}

impl Syncs {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Losses so far.
    pub(crate) fn losses(&self) -> u64 {
        self.state().losses
    }

    /// Whether a flush would be refused.
    pub(crate) fn is_lost(&self) -> bool {
        let state = self.state();
        state.refused > state.repaired
    }

    /// Wakes who waits, outside the lock, and keeps the list's memory.
    fn wake(&self, mut wakers: Vec<Waker>) {
        wakers.drain(..).for_each(Waker::wake);
        let mut state = self.state();
        if state.waiting.capacity() == 0 {
            state.waiting = wakers;
        }
    }

    fn begin(&self) -> Sync<'_> {
        self.begin_if(&mut self.state())
    }

    fn begin_if(&self, state: &mut State) -> Sync<'_> {
        let number = state.next;
        state.next += 1;
        state.open.push(number);
        Sync { syncs: self, number, losses: state.losses, open: true }
    }

    /// None if it would be refused.
    fn begin_flush(&self) -> Option<Sync<'_>> {
        let mut state = self.state();
        (state.refused <= state.repaired).then(|| self.begin_if(&mut state))
    }

    /// None if there were other losses than those `seen`.
    fn begin_rewritten(&self, seen: u64) -> Option<Sync<'_>> {
        let mut state = self.state();
        (state.losses == seen).then(|| self.begin_if(&mut state))
    }
}

impl Sync<'_> {
    /// It has failed; with `once` the next flush is not refused for that.
    fn fail(mut self, once: bool) {
        self.open = false;
        let wakers = {
            let mut state = self.syncs.state();
            state.lose(once);
            state.close(self.number)
        };
        self.syncs.wake(wakers);
    }

    /// It went well; with `beside` that is believed when all that ran beside it have ended. False if a sync
    /// has failed since it began.
    async fn succeed(mut self, beside: bool) -> bool {
        self.open = false;
        let (wakers, until) = {
            let mut state = self.syncs.state();
            (state.close(self.number), state.next)
        };
        self.syncs.wake(wakers);
        poll_fn(|cx| {
            let mut state = self.syncs.state();
            if beside && state.open.iter().any(|open| *open < until) {
                if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                    state.waiting.push(cx.waker().clone());
                }
                return Poll::Pending;
            }
            Poll::Ready(state.losses == self.losses)
        })
        .await
    }
}

impl Drop for Sync<'_> {
    fn drop(&mut self) {
        if self.open {
            let wakers = {
                let mut state = self.syncs.state();
                state.lose(false);
                state.close(self.number)
            };
            self.syncs.wake(wakers);
        }
    }
}

fn lost(operation: Operation, offset: u64, length: u64) -> BlockError {
    BlockError::new(ErrorKind::Lost, operation, offset, length)
}

impl Store {
    fn syncs(&self) -> Option<&Syncs> {
        match self {
            Store::File(s) => Some(s.syncs()),
            Store::Nbd(s) => Some(s.syncs()),
            #[cfg(feature = "test-store")]
            Store::Test(s) => Some(s.syncs()),
            Store::Memory(_) | Store::Null(_) => None,
        }
    }

    /// Times that changes may have been lost so far: syncs that failed. See [`Store::flush_rewritten`].
    pub fn losses(&self) -> u64 {
        self.syncs().map_or(0, Syncs::losses)
    }

    /// True while every flush is refused, since changes may be lost.
    pub fn is_lost(&self) -> bool {
        self.syncs().is_some_and(Syncs::is_lost)
    }

    /// Makes all acknowledged writes stable.
    ///
    /// # Errors
    /// The store's. From then on [`ErrorKind::Lost`]: changes since the last flush that went well may be
    /// on no disk, and no later flush can say that they are. Ends with
    /// [`Store::flush_rewritten`], or when the store is opened anew.
    pub async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        let Some(syncs) = self.syncs() else { return Ok(()) };
        self.sync(io, syncs.begin_flush()).await
    }

    /// As [`Store::flush`], by a caller who, since [`Store::losses`] was `seen`, has written all again that
    /// may be lost: every change since the last flush that went well. If it goes well, and no
    /// sync has failed since, flushes are true again.
    ///
    /// # Errors
    /// As [`Store::flush`].
    pub async fn flush_rewritten(&self, io: &Io, seen: u64) -> Result<(), BlockError> {
        let Some(syncs) = self.syncs() else { return Ok(()) };
        self.sync(io, syncs.begin_rewritten(seen)).await?;
        let mut state = syncs.state();
        state.repaired = state.repaired.max(seen);
        Ok(())
    }

    async fn sync(&self, io: &Io, sync: Option<Sync<'_>>) -> Result<(), BlockError> {
        let Some(sync) = sync else { return Err(lost(Operation::Flush, 0, self.size())) };
        let watch = self.begin();
        let result = match self {
            Store::File(s) => s.flush(io).await,
            Store::Nbd(s) => s.flush(io).await,
            #[cfg(feature = "test-store")]
            Store::Test(s) => s.flush(io).await,
            Store::Memory(_) | Store::Null(_) => Ok(()),
        };
        match watch.ended(result) {
            Err(error) => {
                sync.fail(self.tells_once(&error));
                Err(error)
            }
            Ok(()) if sync.succeed(true).await => Ok(()),
            Ok(()) => Err(lost(Operation::Flush, 0, self.size())),
        }
    }

    /// A server that did not answer, or of which the operator said that it may forget, see
    /// [`LostWrites`](crate::LostWrites): that is told by one flush.
    fn tells_once(&self, error: &BlockError) -> bool {
        let answered = error.source.as_ref().is_some_and(|e| e.raw_os_error().is_some());
        matches!(self, Store::Nbd(_)) && !answered
    }

    /// Sees to the outcome of a write with FUA.
    pub(crate) async fn write_stable(
        &self,
        syncs: &Syncs,
        (offset, length): (u64, u64),
        write: impl Future<Output = BufResult>,
    ) -> BufResult {
        let sync = syncs.begin();
        let (result, buf) = write.await;
        match result {
            Err(error) => {
                sync.fail(self.tells_once(&error));
                (Err(error), buf)
            }
            // Errors of direct I/O are told to the request they belong to.
            Ok(()) => match sync.succeed(!self.capabilities().direct).await {
                true => (Ok(()), buf),
                false => (Err(lost(Operation::Write, offset, length)), buf),
            },
        }
    }

    pub(crate) fn syncs_of_fua(&self, fua: bool) -> Option<&Syncs> {
        if fua { self.syncs() } else { None }
    }
}
