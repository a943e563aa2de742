//! Those who wait: writers in line for reservation to make data dirty, and the flusher for work.
//!
//! # Invariants
//! - Of a volume's writers that must wait only the first asks again; the others follow in their order.
//! - Who is dropped while it waits leaves its place to the next. Wakers are woken outside locks.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ebb_store::Io;

use crate::sync::Mutex;

/// One that waits for some time, and can be poked before that is over.
#[derive(Default)]
pub(crate) struct Poke(Mutex<(bool, Option<Waker>)>);

impl Poke {
    /// Ends the wait, or the next one.
    pub(crate) fn poke(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.0 = true;
            state.1.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Waits for so long, or until poked.
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
struct State {
    taken: bool,
    tickets: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// A line of writers, whose first one asks.
#[derive(Default)]
pub(crate) struct Line {
    state: Mutex<State>,
    /// What the first one waits by.
    pub(crate) first: Poke,
}

/// The first place; dropping it lets the next one have it.
pub(crate) struct Place<'a>(&'a Line);

/// Waits for the first place.
pub(crate) struct Turn<'a> {
    line: &'a Line,
    ticket: Option<u64>,
}

impl Line {
    /// Whether nobody waits.
    pub(crate) fn is_free(&self) -> bool {
        let state = self.state.lock();
        !state.taken && state.waiting.is_empty()
    }

    /// Waits until all who came before have left.
    pub(crate) fn enter(&self) -> Turn<'_> {
        Turn { line: self, ticket: None }
    }

    fn wake_next(&self) {
        let next = {
            let state = self.state.lock();
            if state.taken { None } else { state.waiting.front().map(|(_, waker)| waker.clone()) }
        };
        next.into_iter().for_each(Waker::wake);
    }
}

impl<'a> Future for Turn<'a> {
    type Output = Place<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Place<'a>> {
        let line = self.line;
        let mut state = line.state.lock();
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
            return Poll::Ready(Place(line));
        }
        if let Some(own) = state.waiting.iter_mut().find(|(other, _)| *other == ticket) {
            own.1.clone_from(cx.waker());
        }
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.line.state.lock().waiting.retain(|(other, _)| *other != ticket);
            self.line.wake_next();
        }
    }
}

impl Drop for Place<'_> {
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
    fn they_go_in_order_and_one_that_gives_up_holds_nobody() {
        let line = Line::default();
        assert!(line.is_free());
        let Poll::Ready(first) = poll(pin!(line.enter())) else { panic!("nobody is before it") };
        let mut second = Box::pin(line.enter());
        let mut third = Box::pin(line.enter());
        assert!(poll(second.as_mut()).is_pending() && poll(third.as_mut()).is_pending());
        assert!(!line.is_free());
        drop(first);
        assert!(poll(third.as_mut()).is_pending(), "the second is before it");
        drop(second);
        let Poll::Ready(place) = poll(third.as_mut()) else { panic!("it is its turn") };
        drop(place);
        assert!(line.is_free());
    }
}
