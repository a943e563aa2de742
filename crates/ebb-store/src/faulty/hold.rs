//! Requests that hang until a test releases them, or until they are dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use ebb_block::Operation;

#[derive(Debug, Default)]
struct HoldState {
    /// Kinds of operations that hang now, as bits.
    kinds: u32,
    /// How often requests were released.
    released: u64,
    next: u64,
    held: Vec<(u64, Operation, Waker)>,
}

/// The requests that hang.
#[derive(Debug, Default)]
pub(super) struct RequestHold(Mutex<HoldState>);

pub(super) const ALL: u32 = u32::MAX;

pub(super) fn bit(operation: Operation) -> u32 {
    match operation {
        Operation::Read => 1,
        Operation::Write => 2,
        Operation::Flush => 4,
        Operation::Discard => 8,
        Operation::WriteZeroes => 16,
        Operation::Extents => 32,
        Operation::Prefetch => 64,
    }
}

impl RequestHold {
    fn state(&self) -> MutexGuard<'_, HoldState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn shut(&self, kinds: u32) {
        self.state().kinds |= kinds;
    }

    pub(super) fn release(&self) {
        let held = {
            let mut state = self.state();
            state.kinds = 0;
            state.released += 1;
            std::mem::take(&mut state.held)
        };
        held.into_iter().for_each(|(_, _, waker)| waker.wake());
    }

    pub(super) fn count(&self, kinds: u32) -> usize {
        self.state().held.iter().filter(|(_, operation, _)| bit(*operation) & kinds != 0).count()
    }

    /// Waits for a release if this kind hangs now, or if `anyway`.
    pub(super) fn pass(&self, operation: Operation, anyway: bool) -> HeldRequest<'_> {
        let state = self.state();
        let hangs = anyway || state.kinds & bit(operation) != 0;
        HeldRequest { hold: self, operation, since: hangs.then_some(state.released), id: None }
    }
}

pub(super) struct HeldRequest<'a> {
    hold: &'a RequestHold,
    operation: Operation,
    since: Option<u64>,
    id: Option<u64>,
}

impl Future for HeldRequest<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(since) = self.since else { return Poll::Ready(()) };
        let hold = self.hold;
        let mut state = hold.state();
        if state.released != since {
            self.since = None;
            return Poll::Ready(());
        }
        let id = self.id.unwrap_or_else(|| {
            state.next += 1;
            state.next
        });
        match state.held.iter_mut().find(|(held, ..)| *held == id) {
            Some(held) => held.2.clone_from(cx.waker()),
            None => state.held.push((id, self.operation, cx.waker().clone())),
        }
        drop(state);
        self.id = Some(id);
        Poll::Pending
    }
}

impl Drop for HeldRequest<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.hold.state().held.retain(|(held, ..)| *held != id);
        }
    }
}
