//! Waiters on exhaustion: a first-in, first-out list whose nodes live in the waiting futures.
//!
//! Waiting allocates nothing: the node is a field of the future, which is pinned while it is in
//! the list and takes itself out when it is dropped. There is a lane for the common ceiling and one
//! per zone limit; within a lane memory is served in order: only the first may take, and when it has
//! taken (or gives up) the next is woken.

use std::cell::UnsafeCell;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::ptr;
use std::task::Waker;

use crate::class::CLASSES;
use crate::sync::Mutex;

/// Lane of those who wait for the ceiling; lane `1 + class` waits for a zone's limit.
pub(crate) const BUDGET: usize = 0;
const LANES: usize = CLASSES + 1;

/// A place in the list, embedded in the future that waits.
#[derive(Default)]
pub(crate) struct Waiter {
    links: UnsafeCell<Links>,
    _pin: PhantomPinned,
}

struct Links {
    prev: *const Waiter,
    next: *const Waiter,
    lane: Option<usize>,
    waker: Option<Waker>,
}

impl Default for Links {
    fn default() -> Links {
        Links { prev: ptr::null(), next: ptr::null(), lane: None, waker: None }
    }
}

// SAFETY: `links` is only reached under the list's mutex (all functions below take it first).
unsafe impl Send for Waiter {}
// SAFETY: as above.
unsafe impl Sync for Waiter {}

#[derive(Clone, Copy)]
struct Lane {
    first: *const Waiter,
    last: *const Waiter,
}

struct Lanes {
    lanes: [Lane; LANES],
    waiting: usize,
}

// SAFETY: the pointers lead to pinned waiters, which leave the list before they go away, and are
// followed only under the mutex around this.
unsafe impl Send for Lanes {}

/// The list.
pub(crate) struct WaitList(Mutex<Lanes>);

impl Default for WaitList {
    fn default() -> WaitList {
        let empty = Lane { first: ptr::null(), last: ptr::null() };
        WaitList(Mutex::new(Lanes { lanes: [empty; LANES], waiting: 0 }))
    }
}

/// The links of a waiter.
///
/// # Safety
/// `waiter` is null or a waiter that is alive, and the caller holds the list's mutex and no other
/// reference from this function to the same waiter.
#[allow(clippy::mut_from_ref)]
unsafe fn links(waiter: *const Waiter, _locked: &Lanes) -> Option<&mut Links> {
    // SAFETY: the caller's promise: null or alive.
    let waiter = unsafe { waiter.as_ref() }?;
    // SAFETY: the caller's promise: under the mutex, and the only reference.
    Some(unsafe { &mut *waiter.links.get() })
}

impl WaitList {
    /// Puts the waiter at the end of `lane`, or (if it is in that lane already) only renews its
    /// waker. A waiter in another lane changes over.
    pub(crate) fn enqueue(&self, waiter: Pin<&Waiter>, lane: usize, waker: &Waker) {
        let mut lanes = self.0.lock();
        let this = ptr::from_ref(waiter.get_ref());
        // SAFETY: alive (borrowed), the lock is held, and no other reference exists here.
        let Some(own) = (unsafe { links(this, &lanes) }) else { return };
        if !own.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
            own.waker = Some(waker.clone());
        }
        if own.lane == Some(lane) {
            return;
        }
        unlink(&mut lanes, this);
        let last = lanes.lanes[lane].last;
        // SAFETY: as above; the reference taken before is not used any more.
        if let Some(own) = unsafe { links(this, &lanes) } {
            own.lane = Some(lane);
            own.prev = last;
            own.next = ptr::null();
        }
        // SAFETY: the last in a lane is alive, and is not this one (unlinked above).
        match unsafe { links(last, &lanes) } {
            Some(last) => last.next = this,
            None => lanes.lanes[lane].first = this,
        }
        lanes.lanes[lane].last = this;
        lanes.waiting += 1;
    }

    /// Takes the waiter out. True if it was in the list.
    pub(crate) fn remove(&self, waiter: Pin<&Waiter>) -> bool {
        unlink(&mut self.0.lock(), waiter.get_ref())
    }

    /// Whether this waiter is the first of its lane, so that it may take.
    pub(crate) fn is_first(&self, waiter: Pin<&Waiter>) -> bool {
        let lanes = self.0.lock();
        lanes.lanes.iter().any(|lane| ptr::eq(lane.first, waiter.get_ref()))
    }

    /// Wakes the first of each lane.
    pub(crate) fn wake(&self) {
        for lane in 0..LANES {
            let waker = {
                let lanes = self.0.lock();
                // SAFETY: the first in a lane is alive; the lock is held.
                unsafe { links(lanes.lanes[lane].first, &lanes) }.and_then(|l| l.waker.clone())
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Waiters in all lanes.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().waiting
    }

    /// Whether somebody waits in `lane`.
    pub(crate) fn has(&self, lane: usize) -> bool {
        !self.0.lock().lanes[lane].first.is_null()
    }
}

fn unlink(lanes: &mut Lanes, waiter: *const Waiter) -> bool {
    // SAFETY: callers pass a waiter that is borrowed, under the lock.
    let Some(own) = (unsafe { links(waiter, lanes) }) else { return false };
    let Some(lane) = own.lane.take() else { return false };
    let (prev, next) = (own.prev, own.next);
    own.prev = ptr::null();
    own.next = ptr::null();
    // SAFETY: neighbours in the list are alive and are other waiters than this one.
    match unsafe { links(prev, lanes) } {
        Some(prev) => prev.next = next,
        None => lanes.lanes[lane].first = next,
    }
    // SAFETY: as above.
    match unsafe { links(next, lanes) } {
        Some(next) => next.prev = prev,
        None => lanes.lanes[lane].last = prev,
    }
    lanes.waiting -= 1;
    true
}
