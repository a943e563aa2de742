//! Timers of one worker: a sorted list of deadlines, which bound the ring's wait.
//!
//! Not for the data path: a timer costs a tree node. There is no timer per request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::worker::Io;

/// A year.
const MAX_SLEEP: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Default)]
pub(crate) struct Timers {
    list: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next: Cell<u64>,
}

impl Timers {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.list.borrow().keys().next().map(|(at, _)| *at)
    }

    /// Wakes all timers that are due.
    pub(crate) fn fire(&self, now: Instant) {
        loop {
            let due = {
                let mut list = self.list.borrow_mut();
                match list.first_entry() {
                    Some(entry) if entry.key().0 <= now => entry.remove(),
                    _ => return,
                }
            };
            due.wake();
        }
    }

    /// Removes all timers; used when the worker ends.
    pub(crate) fn clear(&self) {
        drop(std::mem::take(&mut *self.list.borrow_mut()));
    }
}

/// Completes at a point in time.
pub struct Sleep<'a> {
    io: &'a Io,
    at: Instant,
    id: Option<u64>,
}

impl Io {
    /// Waits for `duration`.
    pub fn sleep(&self, duration: Duration) -> Sleep<'_> {
        let now = ebb_mem::clock::now();
        // The sum may exceed the range of the clock.
        let at = now.checked_add(duration).unwrap_or(now + MAX_SLEEP);
        Sleep { io: self, at, id: None }
    }

    /// Runs `future` for at most `duration`; `None` after a timeout (the future is dropped).
    pub async fn timeout<F: Future>(&self, duration: Duration, future: F) -> Option<F::Output> {
        let mut sleep = std::pin::pin!(self.sleep(duration));
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Some(output));
            }
            sleep.as_mut().poll(cx).map(|()| None)
        })
        .await
    }
}

impl Future for Sleep<'_> {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if ebb_mem::clock::now() >= self.at {
            return Poll::Ready(());
        }
        let timers = self.io.timers();
        let id = self.id.unwrap_or_else(|| {
            let id = timers.next.get();
            timers.next.set(id + 1);
            id
        });
        timers.list.borrow_mut().insert((self.at, id), cx.waker().clone());
        self.id = Some(id);
        Poll::Pending
    }
}

impl Drop for Sleep<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.io.timers().list.borrow_mut().remove(&(self.at, id));
        }
    }
}
