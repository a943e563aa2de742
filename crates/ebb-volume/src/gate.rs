//! Counts what is inside, can be shut, and tells when it is empty.
//!
//! The hand-off between the workers that serve a volume and the one that closes or shrinks it. One atomic
//! word holds both the number inside and the shut bit, so that "shut and empty" is decided by whoever
//! makes it true: either the last one leaving or the one who shuts. Model-checked with shuttle
//! (`--features shuttle`).
//!
//! The number inside is kept in two counts, one of which is for those who enter now. [`Gate::turn`] has
//! newcomers counted in the other one, and waits until the first is zero: all who were inside have
//! left then, without anybody having been kept out. This is how Linux's SRCU waits for its readers.

use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};

#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};

const SHUT: u64 = 1 << 63;
/// Somebody waits for one of the counts.
const WAITED: u64 = 1 << 62;
/// The count of those who enter now: the second, if it is set.
const SECOND: u64 = 1 << 61;
/// Bits of each count.
const BITS: u32 = 30;
const COUNT: u64 = (1 << BITS) - 1;

/// See the module.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU64,
    waiting: Mutex<Vec<Waker>>,
}

/// Proof of being inside; dropping it leaves.
#[derive(Debug)]
pub struct Pass<'a> {
    gate: &'a Gate,
    /// One, in the count it is part of.
    unit: u64,
}

/// One in the count of those who enter at this state.
fn unit(state: u64) -> u64 {
    if state & SECOND == 0 { 1 } else { 1 << BITS }
}

/// All who are in the same count as this one.
fn fellows(state: u64, unit: u64) -> u64 {
    state & (COUNT * unit)
}

fn inside(state: u64) -> u64 {
    (state & COUNT) + ((state >> BITS) & COUNT)
}

impl Gate {
    /// Goes in, unless the gate is shut.
    pub fn enter(&self) -> Option<Pass<'_>> {
        // Counted first, then looked: whoever shuts meanwhile sees us and waits. A turn may come between
        // the two lines: then this is counted with those before it, and the next turn waits for both.
        let unit = unit(self.state.load(Ordering::SeqCst));
        let before = self.state.fetch_add(unit, Ordering::SeqCst);
        let pass = Pass { gate: self, unit };
        (before & SHUT == 0).then_some(pass)
    }

    /// How many are inside.
    pub fn inside(&self) -> u64 {
        inside(self.state.load(Ordering::SeqCst))
    }

    /// True once [`Gate::shut`] was called.
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Lets nobody in any more. Who waits for a turn gives up.
    pub fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until the gate is shut and everybody has left.
    pub async fn empty(&self) {
        self.wait(|state| (state & SHUT != 0 && inside(state) == 0).then_some(())).await;
    }

    /// Waits until all who are inside have left, while others come and go. What was stored before is
    /// seen by everybody who enters and is not waited for. One turn at a time. False if the gate is shut.
    pub async fn turn(&self) -> bool {
        // Those first who were counted with the ones before an earlier turn.
        let other = |state| unit(state ^ SECOND);
        let gone = |state, unit| match state & SHUT {
            0 => (fellows(state, unit) == 0).then_some(true),
            _ => Some(false),
        };
        if !self.wait(|state| gone(state, other(state))).await {
            return false;
        }
        let old = unit(self.state.fetch_xor(SECOND, Ordering::SeqCst));
        self.wait(|state| gone(state, old)).await
    }

    async fn wait<T>(&self, over: impl Fn(u64) -> Option<T>) -> T {
        poll_fn(|cx| {
            if let Some(result) = over(self.state.load(Ordering::SeqCst)) {
                return Poll::Ready(result);
            }
            {
                let mut waiting = self.lock();
                waiting.push(cx.waker().clone());
                self.state.fetch_or(WAITED, Ordering::SeqCst);
            }
            // Looked at again after the waker is in place: whoever leaves from now on sees it.
            match over(self.state.load(Ordering::SeqCst)) {
                Some(result) => Poll::Ready(result),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn wake(&self) {
        let waiting = {
            let mut waiting = self.lock();
            self.state.fetch_and(!WAITED, Ordering::SeqCst);
            std::mem::take(&mut *waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    fn leave(&self, unit: u64) {
        let after = self.state.fetch_sub(unit, Ordering::SeqCst) - unit;
        if after & WAITED != 0 && fellows(after, unit) == 0 {
            self.wake();
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
        self.gate.leave(self.unit);
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

    #[test]
    fn a_turn_waits_for_those_who_are_inside_and_for_nobody_else() {
        let gate = Gate::default();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            let before = gate.enter().unwrap();
            let mut turn = Box::pin(gate.turn());
            assert!(std::future::Future::poll(turn.as_mut(), &mut cx).is_pending());
            let after = gate.enter().unwrap();
            assert!(std::future::Future::poll(turn.as_mut(), &mut cx).is_pending());
            drop(before);
            assert!(std::future::Future::poll(turn.as_mut(), &mut cx) == Poll::Ready(true));
            assert_eq!(gate.inside(), 1);
            drop(after);
        }
        // One that is given up harms neither the next one nor the end.
        let pass = gate.enter().unwrap();
        let mut turn = Box::pin(gate.turn());
        assert!(std::future::Future::poll(turn.as_mut(), &mut cx).is_pending());
        drop(turn);
        let mut turn = Box::pin(gate.turn());
        assert!(std::future::Future::poll(turn.as_mut(), &mut cx).is_pending());
        gate.shut();
        assert!(std::future::Future::poll(turn.as_mut(), &mut cx) == Poll::Ready(false));
        let mut empty = pin!(gate.empty());
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

    /// Users look how far they may go when they are inside. Twice that is lowered, and after each turn
    /// nobody is inside who saw more.
    #[test]
    fn after_a_turn_nobody_is_inside_who_entered_before_it() {
        shuttle::check_random(
            || {
                let gate = Arc::new(Gate::default());
                let (limit, floor) = (Arc::new(AtomicU64::new(9)), Arc::new(AtomicU64::new(9)));
                let users: Vec<_> = (0..2)
                    .map(|_| {
                        let (gate, limit, floor) = (gate.clone(), limit.clone(), floor.clone());
                        thread::spawn(move || {
                            for _ in 0..2 {
                                if let Some(_pass) = gate.enter() {
                                    let seen = limit.load(Ordering::SeqCst);
                                    thread::yield_now();
                                    assert!(seen <= floor.load(Ordering::SeqCst));
                                }
                            }
                        })
                    })
                    .collect();
                for to in [5, 3] {
                    limit.store(to, Ordering::SeqCst);
                    assert!(shuttle::future::block_on(gate.turn()));
                    floor.store(to, Ordering::SeqCst);
                }
                users.into_iter().for_each(|u| u.join().unwrap());
            },
            20_000,
        );
    }
}
