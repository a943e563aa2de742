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
//! - A write with FUA that fails since the store is full is no loss if that is all there is to it: the same write
//!   without FUA finds no room either, and a second open file description, to which the system tells all
//!   errors once more, knows of none. Where there is no such witness (a remote server) it counts as a loss.
//! - A sync that went well is believed when all that ran beside it have ended, and none has failed: the
//!   error of its own range may have been told to one of those.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use crate::{BlockError, Buf, BufResult, ErrorKind, Io, Operation, Store};

/// Changes that may be on no disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// When the flush, or the write with FUA, failed.
    pub since: Instant,
    /// How.
    pub error: String,
}

impl Loss {
    /// What an operator is to do.
    pub const REMEDY: &'static str = "mend the device, take the volume out of the configuration and in again, or \
                                      restart ebbd, and check the guest's file systems";
}

#[derive(Debug, Default)]
struct State {
    /// The number of the next sync, and those under way.
    next: u64,
    open: Vec<u64>,
    /// Of those under way the ones that have failed, and of which it is being found out whether that is a loss.
    doubtful: Vec<u64>,
    waiting: Vec<Waker>,
    losses: u64,
    /// The last loss that a plain flush is refused for, and the last one that was made good.
    refused: u64,
    repaired: u64,
    /// The first of the losses that were not made good.
    first: Option<Loss>,
}

impl State {
    fn close(&mut self, number: u64) -> Vec<Waker> {
        self.open.retain(|open| *open != number);
        self.doubtful.retain(|doubtful| *doubtful != number);
        std::mem::take(&mut self.waiting)
    }

    fn lose(&mut self, once: bool, error: impl FnOnce() -> String) {
        // One that was told once, and to which nothing was added, is of no interest.
        if self.first.is_none() || self.refused <= self.repaired {
            self.first = Some(Loss { since: ebb_io::clock::now(), error: error() });
        }
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
pub(crate) struct Sync<'a> {
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
    fn fail(mut self, once: bool, error: &BlockError) {
        self.open = false;
        let wakers = {
            let mut state = self.syncs.state();
            state.lose(once, || error.full_text());
            state.close(self.number)
        };
        self.syncs.wake(wakers);
    }

    /// It has failed, perhaps with a loss: those beside it wait for what [`Sync::fail`] or [`Sync::end`] will say.
    fn doubt(&self) {
        self.syncs.state().doubtful.push(self.number);
    }

    /// It has failed, and nothing that was there before is lost.
    fn end(mut self) {
        self.open = false;
        let wakers = self.syncs.state().close(self.number);
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
            let others = if beside { &state.open } else { &state.doubtful };
            if others.iter().any(|other| *other < until) {
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
                state.lose(false, || "a flush was given up before its end".to_owned());
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

    /// The first of the losses that were not made good by writing all again.
    pub fn loss(&self) -> Option<Loss> {
        self.syncs().and_then(|syncs| syncs.state().first.clone())
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
        if state.losses <= state.repaired {
            state.first = None;
        }
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
                sync.fail(self.tells_once(&error), &error);
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

    /// Begins the sync that a write with FUA is, if this is one and the store has any.
    pub(crate) fn begin_stable(&self, fua: bool) -> Option<Sync<'_>> {
        if fua { self.syncs().map(Syncs::begin) } else { None }
    }

    /// Sees to the outcome of a write with FUA.
    pub(crate) async fn end_stable(
        &self,
        io: &Io,
        sync: Sync<'_>,
        offset: u64,
        (result, buf): BufResult,
    ) -> BufResult {
        let length = buf.len() as u64;
        match result {
            Err(error) if error.kind == ErrorKind::NoSpace => {
                sync.doubt();
                let (only_full, buf) = Box::pin(self.is_only_full(io, buf, offset)).await;
                match only_full {
                    true => sync.end(),
                    false => sync.fail(self.tells_once(&error), &error),
                }
                (Err(error), buf)
            }
            Err(error) => {
                sync.fail(self.tells_once(&error), &error);
                (Err(error), buf)
            }
            // Errors of direct I/O are told to the request they belong to.
            Ok(()) => match sync.succeed(!self.capabilities().direct).await {
                true => (Ok(()), buf),
                false => (Err(lost(Operation::Write, offset, length)), buf),
            },
        }
    }

    /// Whether a write with FUA, which was told that the store is full, was told so for want of room for itself: its
    /// sync may have been told of older data that found none.
    async fn is_only_full(&self, io: &Io, buf: Buf, offset: u64) -> (bool, Buf) {
        let (again, buf) = self.write_to(io, buf, offset, false).await;
        let full = again.is_err_and(|error| error.kind == ErrorKind::NoSpace);
        let lossless = full
            && match self {
                Store::File(s) => s.knows_of_no_loss(io).await,
                #[cfg(feature = "test-store")]
                Store::Test(s) => s.knows_of_no_loss(),
                Store::Nbd(_) | Store::Memory(_) | Store::Null(_) => false,
            };
        (lossless, buf)
    }
}
