//! A gate counts the requests inside, can be shut, and reports when it is empty.
//!
//! It synchronises the workers that serve a volume with the one that closes or shrinks it. One atomic word
//! holds both the number of requests inside and the shut bit, so "shut and empty" becomes true in one
//! atomic operation: when the last request leaves or when the gate is shut. Model-checked with shuttle
//! (`--features shuttle`).
//!
//! The number inside is kept in two counts, one of which counts new requests. [`Gate::synchronize`] makes new
//! requests use the other count and waits until the first one is zero: then all requests that were inside
//! have left, and no new request was refused. Linux's SRCU waits for its readers in this way
//! (`kernel/rcu/srcutree.c`).

use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};

#[cfg(feature = "shuttle")]
use shuttle::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};
#[cfg(not(feature = "shuttle"))]
use std::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};

const SHUT: u64 = 1 << 63;
/// A task waits for one of the counts.
const WAITED: u64 = 1 << 62;
/// New requests use the second count, if it is set; otherwise the first.
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
    /// One, in the count that the request is in.
    unit: u64,
}

/// One in the count that new requests use in this state.
fn unit(state: u64) -> u64 {
    if state & SECOND == 0 { 1 } else { 1 << BITS }
}

/// The count that `unit` is in.
fn same_count(state: u64, unit: u64) -> u64 {
    state & (COUNT * unit)
}

fn inside(state: u64) -> u64 {
    (state & COUNT) + ((state >> BITS) & COUNT)
}

impl Gate {
    /// Enters, unless the gate is shut.
    #[inline]
    pub fn enter(&self) -> Option<Pass<'_>> {
        // Counted before the bit is checked: a task that shuts the gate meanwhile waits for this. If
        // `synchronize` switches the counts between the two lines, this request is in the count of the earlier
        // ones, and the next call waits for both.
        let unit = unit(self.state.load(Ordering::SeqCst));
        let before = self.state.fetch_add(unit, Ordering::SeqCst);
        let pass = Pass { gate: self, unit };
        (before & SHUT == 0).then_some(pass)
    }

    /// The number of requests inside.
    pub fn inside(&self) -> u64 {
        inside(self.state.load(Ordering::SeqCst))
    }

    /// True once [`Gate::shut`] was called.
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SHUT != 0
    }

    /// Refuses new requests from now on. Calls of [`Gate::synchronize`] that are waiting return false.
    pub fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until the gate is shut and no request is inside.
    pub async fn empty(&self) {
        self.wait(|state| (state & SHUT != 0 && inside(state) == 0).then_some(())).await;
    }

    /// Waits until all requests that are inside have left; new ones enter and leave meanwhile. Values stored
    /// before the call are seen by all requests that it does not wait for. One call at a time. False if the
    /// gate is shut.
    pub async fn synchronize(&self) -> bool {
        // Requests that are in the other count since an earlier call have to leave first.
        let other = |state| unit(state ^ SECOND);
        let drained = |state, unit| match state & SHUT {
            0 => (same_count(state, unit) == 0).then_some(true),
            _ => Some(false),
        };
        if !self.wait(|state| drained(state, other(state))).await {
            return false;
        }
        let old = unit(self.state.fetch_xor(SECOND, Ordering::SeqCst));
        self.wait(|state| drained(state, old)).await
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
            // Checked again after the waker is in place: a request that leaves after that sees it.
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

    #[inline]
    fn leave(&self, unit: u64) {
        let after = self.state.fetch_sub(unit, Ordering::SeqCst) - unit;
        if after & WAITED != 0 && same_count(after, unit) == 0 {
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
    #[inline]
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
        assert_eq!(gate.inside(), 1, "a refused request does not stay counted");
        let mut empty = pin!(gate.empty());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(std::future::Future::poll(empty.as_mut(), &mut cx).is_pending());
        drop(pass);
        assert!(std::future::Future::poll(empty.as_mut(), &mut cx).is_ready());
    }

    #[test]
    fn synchronize_waits_only_for_requests_that_were_inside() {
        let gate = Gate::default();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            let before = gate.enter().unwrap();
            let mut sync = Box::pin(gate.synchronize());
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
            let after = gate.enter().unwrap();
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
            drop(before);
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx) == Poll::Ready(true));
            assert_eq!(gate.inside(), 1);
            drop(after);
        }
        // Dropping the future affects neither the next call nor the shutting.
        let pass = gate.enter().unwrap();
        let mut sync = Box::pin(gate.synchronize());
        assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
        drop(sync);
        let mut sync = Box::pin(gate.synchronize());
        assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
        gate.shut();
        assert!(std::future::Future::poll(sync.as_mut(), &mut cx) == Poll::Ready(false));
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

    /// Two threads enter and leave while a third shuts and waits: the wait always ends, and no request is
    /// inside after it.
    #[test]
    fn the_closing_task_is_always_woken_and_no_request_remains_inside() {
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

    /// Users read the limit when they are inside. It is lowered twice, and after each `synchronize` no user
    /// is inside that read the earlier value.
    #[test]
    fn after_synchronize_no_request_is_inside_that_entered_before() {
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
                    assert!(shuttle::future::block_on(gate.synchronize()));
                    floor.store(to, Ordering::SeqCst);
                }
                users.into_iter().for_each(|u| u.join().unwrap());
            },
            20_000,
        );
    }
}
