//! Waiting: writers queue for a reservation to make data dirty; the flusher sleeps until there is work.
//!
//! # Invariants
//! - Only the first waiting writer of a volume consults the control; the others follow in order of arrival.
//! - A writer whose future is dropped gives its queue position to the next one. Wakers are woken outside
//!   locks.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ebb_block::Io;

use crate::sync::Mutex;

/// A sleep of limited length that another task can end early.
#[derive(Default)]
pub(crate) struct InterruptibleSleep(Mutex<(bool, Option<Waker>)>);

impl InterruptibleSleep {
    /// Ends the current sleep, or the next one.
    pub(crate) fn interrupt(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.0 = true;
            state.1.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Sleeps for `time`, or until interrupted.
    pub(crate) async fn wait(&self, io: &Io, time: Duration) {
        let mut sleep = pin!(io.sleep(time));
        poll_fn(|cx| {
            {
                let mut state = self.0.lock();
                if std::mem::take(&mut state.0) {
                    state.1 = None;
                    return Poll::Ready(());
                }
                state.1 = Some(cx.waker().clone());
            }
            sleep.as_mut().poll(cx)
        })
        .await;
    }
}

#[derive(Default)]
struct FifoState {
    taken: bool,
    tickets: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// A fair lock: waiting tasks acquire it in order of arrival. Its holder may sleep on `first`.
#[derive(Default)]
pub(crate) struct FifoLock {
    state: Mutex<FifoState>,
    /// What the first writer sleeps on.
    pub(crate) first: InterruptibleSleep,
}

/// Holds the lock; dropping it gives it to the next waiting task.
pub(crate) struct FifoGuard<'a>(&'a FifoLock);

/// Acquires the lock.
pub(crate) struct FifoAcquire<'a> {
    fifo: &'a FifoLock,
    ticket: Option<u64>,
}

impl FifoLock {
    /// Whether the lock is free and no task waits.
    pub(crate) fn is_free(&self) -> bool {
        let state = self.state.lock();
        !state.taken && state.waiting.is_empty()
    }

    /// Waits until all earlier tasks have released the lock.
    pub(crate) fn enter(&self) -> FifoAcquire<'_> {
        FifoAcquire { fifo: self, ticket: None }
    }

    fn wake_next(&self) {
        let next = {
            let state = self.state.lock();
            if state.taken { None } else { state.waiting.front().map(|(_, waker)| waker.clone()) }
        };
        next.into_iter().for_each(Waker::wake);
    }
}

impl<'a> Future for FifoAcquire<'a> {
    type Output = FifoGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<FifoGuard<'a>> {
        let fifo = self.fifo;
        let mut state = fifo.state.lock();
        let ticket = match self.ticket {
            Some(ticket) => ticket,
            None => {
                state.tickets += 1;
                let ticket = state.tickets;
                state.waiting.push_back((ticket, cx.waker().clone()));
                self.ticket = Some(ticket);
                ticket
            }
        };
        if !state.taken && state.waiting.front().is_some_and(|(first, _)| *first == ticket) {
            state.taken = true;
            state.waiting.pop_front();
            self.ticket = None;
            return Poll::Ready(FifoGuard(fifo));
        }
        if let Some(own) = state.waiting.iter_mut().find(|(other, _)| *other == ticket) {
            own.1.clone_from(cx.waker());
        }
        Poll::Pending
    }
}

impl Drop for FifoAcquire<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.fifo.state.lock().waiting.retain(|(other, _)| *other != ticket);
            self.fifo.wake_next();
        }
    }
}

impl Drop for FifoGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().taken = false;
        self.0.wake_next();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn waiting_tasks_go_in_order_and_a_dropped_one_does_not_block_the_next() {
        let fifo = FifoLock::default();
        assert!(fifo.is_free());
        let Poll::Ready(first) = poll(pin!(fifo.enter())) else { panic!("it is the first") };
        let mut second = Box::pin(fifo.enter());
        let mut third = Box::pin(fifo.enter());
        assert!(poll(second.as_mut()).is_pending() && poll(third.as_mut()).is_pending());
        assert!(!fifo.is_free());
        drop(first);
        assert!(poll(third.as_mut()).is_pending(), "the second comes first");
        drop(second);
        let Poll::Ready(place) = poll(third.as_mut()) else { panic!("it is the head now") };
        drop(place);
        assert!(fifo.is_free());
    }
}
