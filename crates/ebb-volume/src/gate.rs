//! Counts what is inside, can be shut, and tells when it is empty.
//!
//! The hand-off between the workers that serve a volume and the one that closes it. One atomic word
//! holds both the number inside and the shut bit, so that "shut and empty" is decided by whoever
//! makes it true: either the last one leaving or the one who shuts. Model-checked with shuttle
//! (`--features shuttle`).

use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};

#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};

const SHUT: u64 = 1 << 63;

/// See the module.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU64,
    waiting: Mutex<Vec<Waker>>,
}

/// Proof of being inside; dropping it leaves.
#[derive(Debug)]
pub struct Pass<'a>(&'a Gate);

impl Gate {
    /// Goes in, unless the gate is shut.
    pub fn enter(&self) -> Option<Pass<'_>> {
        // Counted first, then looked: whoever shuts meanwhile sees us and waits.
        let before = self.state.fetch_add(1, Ordering::SeqCst);
        let pass = Pass(self);
        (before & SHUT == 0).then_some(pass)
    }

    /// How many are inside.
    pub fn inside(&self) -> u64 {
        self.state.load(Ordering::SeqCst) & !SHUT
    }

    /// True once [`Gate::shut`] was called.
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Lets nobody in any more.
    pub fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
    }

    /// Waits until the gate is shut and everybody has left.
    pub async fn empty(&self) {
        poll_fn(|cx| {
            if self.state.load(Ordering::SeqCst) == SHUT {
                return Poll::Ready(());
            }
            self.lock().push(cx.waker().clone());
            // Looked at again after the waker is in place: whoever leaves from now on sees it.
            if self.state.load(Ordering::SeqCst) == SHUT { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::SeqCst) == SHUT + 1 {
            let waiting = std::mem::take(&mut *self.lock());
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    #[cfg(not(feature = "shuttle"))]
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "shuttle")]
    fn lock(&self) -> shuttle::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn a_shut_gate_refuses_and_empties() {
        let gate = Gate::default();
        let pass = gate.enter().unwrap();
        gate.shut();
        assert!(gate.enter().is_none());
        assert_eq!(gate.inside(), 1, "a refused one does not stay counted");
        let mut empty = pin!(gate.empty());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(std::future::Future::poll(empty.as_mut(), &mut cx).is_pending());
        drop(pass);
        assert!(std::future::Future::poll(empty.as_mut(), &mut cx).is_ready());
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod models {
    use super::*;
    use shuttle::sync::Arc;
    use shuttle::thread;

    /// Two enter and leave while a third shuts and waits: the wait always ends, and nobody is
    /// inside after it.
    #[test]
    fn the_closer_is_always_woken_and_nobody_is_left_inside() {
        shuttle::check_random(
            || {
                let gate = Arc::new(Gate::default());
                let inside = Arc::new(AtomicU64::new(0));
                let users: Vec<_> = (0..2)
                    .map(|_| {
                        let (gate, inside) = (gate.clone(), inside.clone());
                        thread::spawn(move || {
                            for _ in 0..2 {
                                if let Some(_pass) = gate.enter() {
                                    inside.fetch_add(1, Ordering::SeqCst);
                                    thread::yield_now();
                                    inside.fetch_sub(1, Ordering::SeqCst);
                                }
                            }
                        })
                    })
                    .collect();
                gate.shut();
                shuttle::future::block_on(gate.empty());
                assert_eq!(inside.load(Ordering::SeqCst), 0);
                users.into_iter().for_each(|u| u.join().unwrap());
            },
            20_000,
        );
    }
}
