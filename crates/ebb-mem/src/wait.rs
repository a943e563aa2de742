//! Allocations that wait for memory: first-in, first-out queues whose nodes are fields of the waiting
//! futures.
//!
//! Waiting allocates nothing: the node is a field of the future, which is pinned while it is in a queue
//! and removes itself when it is dropped. There is one queue for the ceiling and one per zone limit.
//! Within a queue allocations complete in order: only the first one may allocate, and when it has
//! completed (or is cancelled) the next one is woken.

use std::cell::UnsafeCell;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr;
use std::task::Waker;

use crate::class::CLASSES;
use crate::sync::Mutex;

/// The queue for the ceiling; queue `1 + class` is for the limit of a zone.
pub(crate) const BUDGET: usize = 0;
const QUEUES: usize = CLASSES + 1;

/// A node of a queue, embedded in the future that waits.
#[derive(Default)]
pub(crate) struct Waiter {
    links: UnsafeCell<Links>,
    _pin: PhantomPinned,
}

struct Links {
    prev: *const Waiter,
    next: *const Waiter,
    queue: Option<usize>,
    waker: Option<Waker>,
}

impl Default for Links {
    fn default() -> Links {
        Links { prev: ptr::null(), next: ptr::null(), queue: None, waker: None }
    }
}

// SAFETY: `links` is only reached under the list's mutex (all functions below take it first).
unsafe impl Send for Waiter {}
// SAFETY: as above.
unsafe impl Sync for Waiter {}

#[derive(Clone, Copy)]
struct WaitQueue {
    first: *const Waiter,
    last: *const Waiter,
}

struct WaitQueues {
    queues: [WaitQueue; QUEUES],
    waiting: usize,
}

// SAFETY: the pointers lead to pinned waiters, which leave their queue before they are dropped, and are
// followed only under the mutex around this.
unsafe impl Send for WaitQueues {}

/// The queues.
pub(crate) struct WaitList(Mutex<WaitQueues>);

impl Default for WaitList {
    fn default() -> WaitList {
        let empty = WaitQueue { first: ptr::null(), last: ptr::null() };
        WaitList(Mutex::new(WaitQueues { queues: [empty; QUEUES], waiting: 0 }))
    }
}

/// The links of a waiter.
///
/// # Safety
/// `waiter` is null or a waiter that is alive, and the caller holds the list's mutex and no other
/// reference from this function to the same waiter.
#[allow(clippy::mut_from_ref)]
unsafe fn links(waiter: *const Waiter, _locked: &WaitQueues) -> Option<&mut Links> {
    // SAFETY: the caller's promise: null or alive.
    let waiter = unsafe { waiter.as_ref() }?;
    // SAFETY: the caller's promise: under the mutex, and the only reference.
    Some(unsafe { &mut *waiter.links.get() })
}

impl WaitList {
    /// Appends the waiter to `queue`, or only replaces its waker if it is in that queue already. A waiter
    /// in another queue is moved, and the next one there is woken.
    pub(crate) fn enqueue(&self, waiter: Pin<&Waiter>, queue: usize, waker: &Waker) {
        let next = self.enqueue_locked(waiter, queue, waker);
        if let Some(next) = next {
            next.wake();
        }
    }

    /// Returns the waker of the first waiter in the queue that this one has left.
    fn enqueue_locked(&self, waiter: Pin<&Waiter>, queue: usize, waker: &Waker) -> Option<Waker> {
        let mut queues = self.0.lock();
        let this = ptr::from_ref(waiter.get_ref());
        // SAFETY: alive (borrowed), the lock is held, and no other reference exists here.
        let own = unsafe { links(this, &queues) }?;
        if !own.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
            own.waker = Some(waker.clone());
        }
        if own.queue == Some(queue) {
            return None;
        }
        let left = own.queue;
        unlink(&mut queues, this);
        let last = queues.queues[queue].last;
        // SAFETY: as above; the reference taken before is not used any more.
        if let Some(own) = unsafe { links(this, &queues) } {
            own.queue = Some(queue);
            own.prev = last;
            own.next = ptr::null();
        }
        // SAFETY: the last waiter of a queue is alive, and is not this one (unlinked above).
        match unsafe { links(last, &queues) } {
            Some(last) => last.next = this,
            None => queues.queues[queue].first = this,
        }
        queues.queues[queue].last = this;
        queues.waiting += 1;
        let first = queues.queues[left?].first;
        // SAFETY: the first waiter of a queue is alive, and the lock is held.
        unsafe { links(first, &queues) }.and_then(|links| links.waker.clone())
    }

    /// Removes the waiter. True if it was in a queue.
    pub(crate) fn remove(&self, waiter: Pin<&Waiter>) -> bool {
        unlink(&mut self.0.lock(), waiter.get_ref())
    }

    /// Whether this waiter is the first of its queue, so that it may allocate.
    pub(crate) fn is_first(&self, waiter: Pin<&Waiter>) -> bool {
        let queues = self.0.lock();
        queues.queues.iter().any(|queue| ptr::eq(queue.first, waiter.get_ref()))
    }

    /// Wakes the first waiter of each queue.
    pub(crate) fn wake(&self) {
        for queue in 0..QUEUES {
            let waker = {
                let queues = self.0.lock();
                // SAFETY: the first waiter of a queue is alive; the lock is held.
                unsafe { links(queues.queues[queue].first, &queues) }.and_then(|l| l.waker.clone())
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Number of waiters in all queues.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().waiting
    }

    /// Whether `queue` has a waiter.
    pub(crate) fn has(&self, queue: usize) -> bool {
        !self.0.lock().queues[queue].first.is_null()
    }
}

fn unlink(queues: &mut WaitQueues, waiter: *const Waiter) -> bool {
    // SAFETY: callers pass a waiter that is borrowed, under the lock.
    let Some(own) = (unsafe { links(waiter, queues) }) else { return false };
    let Some(queue) = own.queue.take() else { return false };
    let (prev, next) = (own.prev, own.next);
    own.prev = ptr::null();
    own.next = ptr::null();
    // SAFETY: neighbours in the list are alive and are other waiters than this one.
    match unsafe { links(prev, queues) } {
        Some(prev) => prev.next = next,
        None => queues.queues[queue].first = next,
    }
    // SAFETY: as above.
    match unsafe { links(next, queues) } {
        Some(next) => next.prev = prev,
        None => queues.queues[queue].last = prev,
    }
    queues.waiting -= 1;
    true
}
