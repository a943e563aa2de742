//! [`WriteGate`]: the writes of an overlay that are in flight, which every exchange of layers waits for.
//!
//! # Invariants
//! - While the gate is paused no write passes it; when the pause has begun, none that passed before is in flight.
//! - A pause that is dropped, also before it has begun, ends.

use std::future::poll_fn;
use std::task::{Poll, Waker};

use crate::sync::Mutex;

#[derive(Default)]
struct GateState {
    inside: usize,
    paused: bool,
    /// Writes that wait for the end of the pause.
    waiting: Vec<Waker>,
    /// The pause, which waits for the writes inside.
    drained: Option<Waker>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct WriteGate(Mutex<GateState>);

/// A write in flight.
pub(crate) struct WritePass<'a>(&'a WriteGate);

/// A pause; it ends when this is dropped.
pub(crate) struct WritePause<'a>(&'a WriteGate);

impl WriteGate {
    /// Passes the gate; `None` while it is paused.
    #[inline]
    pub(crate) fn try_pass(&self) -> Option<WritePass<'_>> {
        let mut state = self.0.lock();
        if state.paused {
            return None;
        }
        state.inside += 1;
        Some(WritePass(self))
    }

    /// Passes the gate, after the pause if there is one.
    pub(crate) async fn pass(&self) -> WritePass<'_> {
        poll_fn(|cx| {
            let mut state = self.0.lock();
            if !state.paused {
                state.inside += 1;
                return Poll::Ready(WritePass(self));
            }
            if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                state.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Pauses the gate, and waits until no write is in flight; `None` if there is a pause already.
    pub(crate) async fn pause(&self) -> Option<WritePause<'_>> {
        {
            let mut state = self.0.lock();
            if state.paused {
                return None;
            }
            state.paused = true;
        }
        let pause = WritePause(self);
        poll_fn(|cx| {
            let mut state = self.0.lock();
            if state.inside == 0 {
                return Poll::Ready(());
            }
            state.drained = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        Some(pause)
    }
}

impl Drop for WritePass<'_> {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.0.lock();
            state.inside -= 1;
            if state.inside == 0 { state.drained.take() } else { None }
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Drop for WritePause<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.0.lock();
            state.paused = false;
            state.drained = None;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    #[test]
    fn a_pause_waits_for_writes_and_writes_wait_for_a_pause() {
        let gate = WriteGate::default();
        let mut cx = Context::from_waker(Waker::noop());
        let first = gate.try_pass().unwrap_or_else(|| panic!("it is open"));
        {
            let mut pause = pin!(gate.pause());
            assert!(pause.as_mut().poll(&mut cx).is_pending());
            assert!(gate.try_pass().is_none());
            assert!(pin!(gate.pass()).poll(&mut cx).is_pending());
            assert!(matches!(pin!(gate.pause()).poll(&mut cx), Poll::Ready(None)));
            drop(first);
            let Poll::Ready(Some(held)) = pause.as_mut().poll(&mut cx) else { panic!("drained") };
            assert!(gate.try_pass().is_none());
            drop(held);
        }
        let second = gate.try_pass();
        assert!(second.is_some());
        // One that is given up while it waits.
        assert!(pin!(gate.pause()).poll(&mut cx).is_pending());
        assert!(gate.try_pass().is_some());
    }
}
