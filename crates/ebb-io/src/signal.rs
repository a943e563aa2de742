//! Synchronization between tasks of one worker: a signal for one waiter, and a budget that is granted in order.
//!
//! Both are for tasks of the same worker only (no atomics, no locks).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A flag that one task waits for and other tasks set. Setting it twice before the wait completes counts once.
#[derive(Default)]
pub struct Signal {
    set: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Signal {
    /// Sets the flag and wakes the waiter.
    #[inline]
    pub fn set(&self) {
        self.set.set(true);
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    /// Waits until the flag is set, and clears it.
    pub async fn wait(&self) {
        poll_fn(|cx| self.poll_wait(cx)).await;
    }

    /// Ready if the flag was set, which it clears; else the task is woken when it is set.
    pub fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.set.replace(false) {
            return Poll::Ready(());
        }
        let mut waker = self.waker.borrow_mut();
        match waker.as_mut() {
            Some(old) => old.clone_from(cx.waker()),
            None => *waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

/// A number of units (bytes, requests) that tasks acquire in the order in which they came.
///
/// A task that requests more than the total acquires all units as soon as all are free, so that no
/// request waits for ever.
pub struct Budget {
    total: usize,
    free: Cell<usize>,
    next_ticket: Cell<u64>,
    waiters: RefCell<VecDeque<(u64, Waker)>>,
}

/// An acquired part of a [`Budget`]; dropping it releases the part.
pub struct BudgetGuard {
    budget: Rc<Budget>,
    amount: usize,
}

impl Budget {
    /// A budget of `total` units.
    pub fn new(total: usize) -> Rc<Budget> {
        Rc::new(Budget {
            total,
            free: Cell::new(total),
            next_ticket: Cell::new(0),
            waiters: RefCell::default(),
        })
    }

    /// Free units.
    pub fn free(&self) -> usize {
        self.free.get()
    }

    /// Acquires `amount` units (capped at the total) if they are free and no task waits.
    #[inline]
    pub fn try_take(self: &Rc<Self>, amount: usize) -> Option<BudgetGuard> {
        if !self.waiters.borrow().is_empty() {
            return None;
        }
        self.take_now(amount)
    }

    #[inline]
    fn take_now(self: &Rc<Self>, amount: usize) -> Option<BudgetGuard> {
        let amount = amount.min(self.total);
        let free = self.free.get().checked_sub(amount)?;
        self.free.set(free);
        Some(BudgetGuard { budget: self.clone(), amount })
    }

    /// Acquires `amount` units (capped at the total), and waits for them in order of arrival.
    pub async fn take(self: &Rc<Self>, amount: usize) -> BudgetGuard {
        if let Some(guard) = self.try_take(amount) {
            return guard;
        }
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        let queued = Queued { budget: self, ticket };
        poll_fn(|cx| {
            let mut waiters = self.waiters.borrow_mut();
            let position = waiters.iter().position(|(t, _)| *t == ticket);
            let first = position.map_or(waiters.is_empty(), |p| p == 0);
            if first && let Some(guard) = self.take_now(amount) {
                return Poll::Ready(guard);
            }
            match position {
                Some(p) => waiters[p].1.clone_from(cx.waker()),
                None => waiters.push_back((ticket, cx.waker().clone())),
            }
            Poll::Pending
        })
        .await
        .also_drop(queued)
    }

    fn wake_first(&self) {
        if let Some((_, waker)) = self.waiters.borrow().front() {
            waker.wake_by_ref();
        }
    }
}

/// An entry in the queue of waiters: when it is dropped, served or cancelled, the next waiter is woken.
struct Queued<'a> {
    budget: &'a Budget,
    ticket: u64,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.budget.waiters.borrow_mut().retain(|(t, _)| *t != self.ticket);
        self.budget.wake_first();
    }
}

impl BudgetGuard {
    fn also_drop(self, _queued: Queued<'_>) -> BudgetGuard {
        self
    }

    /// Acquired units.
    pub fn amount(&self) -> usize {
        self.amount
    }
}

impl Drop for BudgetGuard {
    #[inline]
    fn drop(&mut self) {
        self.budget.free.set(self.budget.free.get() + self.amount);
        self.budget.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    fn poll<F: Future>(f: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        f.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_budget_is_granted_in_order_even_if_a_later_request_would_fit() {
        let budget = Budget::new(10);
        let held = budget.try_take(8).unwrap();
        let mut big = pin!(budget.take(6));
        assert!(poll(big.as_mut()).is_pending());
        let mut small = pin!(budget.take(1));
        assert!(poll(small.as_mut()).is_pending(), "small came later and must not pass");
        assert!(budget.try_take(1).is_none());
        drop(held);
        assert!(poll(small.as_mut()).is_pending());
        let Poll::Ready(first) = poll(big.as_mut()) else {
            panic!("the first in the queue is served")
        };
        let Poll::Ready(second) = poll(small.as_mut()) else { panic!("then the next") };
        assert_eq!((first.amount(), second.amount(), budget.free()), (6, 1, 3));
    }

    #[test]
    fn a_cancelled_waiter_leaves_the_queue_and_no_unit_is_lost() {
        let budget = Budget::new(4);
        let held = budget.try_take(4).unwrap();
        {
            let mut cancelled = pin!(budget.take(4));
            assert!(poll(cancelled.as_mut()).is_pending());
        }
        drop(held);
        assert_eq!(budget.free(), 4);
        assert!(budget.try_take(4).is_some());
    }

    #[test]
    fn more_than_the_total_is_capped() {
        let budget = Budget::new(4);
        assert_eq!(budget.try_take(100).map(|g| g.amount()), Some(4));
    }

    #[test]
    fn a_signal_set_early_is_not_lost() {
        let signal = Signal::default();
        signal.set();
        let mut wait = pin!(signal.wait());
        assert!(poll(wait.as_mut()).is_ready());
        let mut again = pin!(signal.wait());
        assert!(poll(again.as_mut()).is_pending());
    }
}
