//! A gate counts the requests inside, can be shut, and reports when it is empty.
//!
//! It synchronises the workers that serve a volume with the one that closes or shrinks it. Each worker counts its
//! requests in its own slot, which is one atomic word. It holds both the number of requests inside and the shut bit, so
//! that a slot becomes "shut and empty" in one atomic operation, when its last request leaves or when it is shut, and
//! admits no request from then on. The gate is empty when each slot was. Model-checked with shuttle
//! (`--features shuttle`).
//!
//! The number inside is kept in two counts, one of which counts new requests. [`Gate::synchronize`] makes new
//! requests use the other count and waits until the first one is zero, in each slot: then all requests that were inside
//! have left, and no new request was refused. Linux's SRCU waits for its readers in this way
//! (`kernel/rcu/srcutree.c`).

use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};

use ebb_io::{PerWorker, WorkerSlot};

#[cfg(all(test, feature = "shuttle"))]
use shuttle::sync::{Mutex, atomic::AtomicU64, atomic::Ordering};
#[cfg(not(all(test, feature = "shuttle")))]
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
    slots: PerWorker<AtomicU64>,
    waiting: Mutex<Vec<Waker>>,
}

/// Proof of being inside; dropping it leaves.
#[derive(Debug)]
pub struct Pass<'a> {
    gate: &'a Gate,
    slot: WorkerSlot,
    /// It is in the second count.
    second: bool,
}

/// One in the second count, or in the first.
#[inline]
fn one(second: bool) -> u64 {
    if second { 1 << BITS } else { 1 }
}

/// New requests use the second count in this state.
#[inline]
fn uses_second(state: u64) -> bool {
    state & SECOND != 0
}

/// The count that `unit` is in.
fn same_count(state: u64, unit: u64) -> u64 {
    state & (COUNT * unit)
}

fn inside(state: u64) -> u64 {
    (state & COUNT) + ((state >> BITS) & COUNT)
}

impl Gate {
    /// Enters, unless the gate is shut. Any slot will do; that of the worker is the fastest.
    #[inline]
    pub fn enter(&self, slot: WorkerSlot) -> Option<Pass<'_>> {
        // Counted before the bit is checked: a task that shuts the gate meanwhile waits for this. If
        // `synchronize` switches the counts between the two lines, this request is in the count of the earlier
        // ones, and the next call waits for both.
        let state = &self.slots[slot];
        let second = uses_second(state.load(Ordering::SeqCst));
        let before = state.fetch_add(one(second), Ordering::SeqCst);
        let pass = Pass { gate: self, slot, second };
        (before & SHUT == 0).then_some(pass)
    }

    /// The number of requests inside.
    pub fn inside(&self) -> u64 {
        self.states().map(inside).sum()
    }

    /// True once [`Gate::shut`] was called.
    pub fn is_shut(&self) -> bool {
        // The first slot that is shut: a request that was refused in any slot finds the gate shut.
        self.states().next().is_some_and(|state| state & SHUT != 0)
    }

    fn states(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().map(|state| state.load(Ordering::SeqCst))
    }

    /// Changes all slots, one after the other.
    fn change(&self, change: impl Fn(&AtomicU64) -> u64) {
        for state in self.slots.iter() {
            change(state);
        }
    }

    /// Refuses new requests from now on. Calls of [`Gate::synchronize`] that are waiting return false.
    pub fn shut(&self) {
        self.change(|state| state.fetch_or(SHUT, Ordering::SeqCst));
        self.wake();
    }

    /// Waits until the gate is shut and no request is inside.
    pub async fn empty(&self) {
        let empty = |state: u64| state & SHUT != 0 && inside(state) == 0;
        self.wait(|| self.states().all(empty).then_some(())).await;
    }

    /// Waits until all requests that are inside have left; new ones enter and leave meanwhile. Values stored
    /// before the call are seen by all requests that it does not wait for. One call at a time. False if the
    /// gate is shut.
    pub async fn synchronize(&self) -> bool {
        let drained = |state: u64| same_count(state, one(!uses_second(state))) == 0;
        let outcome = || match self.is_shut() {
            true => Some(false),
            false => self.states().all(drained).then_some(true),
        };
        // Requests that are in the other count since an earlier call have to leave first.
        if !self.wait(outcome).await {
            return false;
        }
        self.change(|state| state.fetch_xor(SECOND, Ordering::SeqCst));
        self.wait(outcome).await
    }

    async fn wait<T>(&self, over: impl Fn() -> Option<T>) -> T {
        poll_fn(|cx| {
            if let Some(result) = over() {
                return Poll::Ready(result);
            }
            {
                let mut waiting = self.lock();
                waiting.push(cx.waker().clone());
                self.change(|state| state.fetch_or(WAITED, Ordering::SeqCst));
            }
            // Checked again after the waker is in place: a request that leaves after that sees it.
            match over() {
                Some(result) => Poll::Ready(result),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn wake(&self) {
        let waiting = {
            let mut waiting = self.lock();
            self.change(|state| state.fetch_and(!WAITED, Ordering::SeqCst));
            std::mem::take(&mut *waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    #[inline]
    fn leave(&self, slot: WorkerSlot, second: bool) {
        let unit = one(second);
        let after = self.slots[slot].fetch_sub(unit, Ordering::SeqCst) - unit;
        if after & WAITED != 0 && same_count(after, unit) == 0 {
            self.wake();
        }
    }

    #[cfg(not(all(test, feature = "shuttle")))]
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(all(test, feature = "shuttle"))]
    fn lock(&self) -> shuttle::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        self.gate.leave(self.slot, self.second);
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
        let pass = gate.enter(WorkerSlot::of(1)).unwrap();
        gate.shut();
        assert!(gate.enter(WorkerSlot::of(2)).is_none());
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
            let before = gate.enter(WorkerSlot::of(0)).unwrap();
            let mut sync = Box::pin(gate.synchronize());
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
            let after = gate.enter(WorkerSlot::of(1)).unwrap();
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx).is_pending());
            drop(before);
            assert!(std::future::Future::poll(sync.as_mut(), &mut cx) == Poll::Ready(true));
            assert_eq!(gate.inside(), 1);
            drop(after);
        }
        // Dropping the future affects neither the next call nor the shutting.
        let pass = gate.enter(WorkerSlot::of(2)).unwrap();
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
                    .map(|user| {
                        let (gate, inside) = (gate.clone(), inside.clone());
                        thread::spawn(move || {
                            for _ in 0..2 {
                                match gate.enter(WorkerSlot::of(user)) {
                                    Some(_pass) => {
                                        inside.fetch_add(1, Ordering::SeqCst);
                                        thread::yield_now();
                                        inside.fetch_sub(1, Ordering::SeqCst);
                                    }
                                    None => assert!(gate.is_shut()),
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
                    .map(|user| {
                        let (gate, limit, floor) = (gate.clone(), limit.clone(), floor.clone());
                        thread::spawn(move || {
                            for _ in 0..2 {
                                if let Some(_pass) = gate.enter(WorkerSlot::of(user)) {
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
