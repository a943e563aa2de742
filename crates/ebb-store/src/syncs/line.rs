//! Waiters for the end of syncs, ordered by the sync they wait for: each is woken once.

use std::collections::VecDeque;
use std::task::Waker;

/// Numbers of syncs, in order.
#[derive(Debug, Default)]
pub(super) struct Numbers(VecDeque<u64>);

impl Numbers {
    pub(super) fn insert(&mut self, number: u64) {
        if let Err(at) = self.0.binary_search(&number) {
            self.0.insert(at, number);
        }
    }

    pub(super) fn remove(&mut self, number: u64) {
        if let Ok(at) = self.0.binary_search(&number) {
            self.0.remove(at);
        }
    }

    /// The lowest; beyond all if there is none.
    pub(super) fn first(&self) -> u64 {
        self.0.front().copied().unwrap_or(u64::MAX)
    }
}

/// A waiter for the end of all syncs below `until`.
#[derive(Debug)]
struct Waiting {
    until: u64,
    ticket: u64,
    /// `None`: given up.
    waker: Option<Waker>,
}

/// A place in a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    until: u64,
    ticket: u64,
}

/// Those who wait, the first to be served in front. Memory is kept, so that waiting allocates nothing once warm.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiting: VecDeque<Waiting>,
    tickets: u64,
}

impl Line {
    /// Adds a waiter, or renews the waker of one that has a place.
    pub(super) fn wait(&mut self, place: &mut Option<Place>, until: u64, waker: &Waker) {
        if let Some(waiting) = place.and_then(|place| self.find(place)) {
            if !waiting.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
                waiting.waker = Some(waker.clone());
            }
            return;
        }
        let ticket = self.tickets;
        self.tickets += 1;
        let at = self.waiting.partition_point(|waiting| waiting.until <= until);
        self.waiting.insert(at, Waiting { until, ticket, waker: Some(waker.clone()) });
        *place = Some(Place { until, ticket });
    }

    fn find(&mut self, place: Place) -> Option<&mut Waiting> {
        let key = (place.until, place.ticket);
        let found = self.waiting.binary_search_by_key(&key, |w| (w.until, w.ticket));
        self.waiting.get_mut(found.ok()?)
    }

    /// It waits no more.
    pub(super) fn leave(&mut self, place: Place) {
        if let Some(waiting) = self.find(place) {
            waiting.waker = None;
        }
        self.skip();
    }

    fn skip(&mut self) {
        while self.waiting.front().is_some_and(|waiting| waiting.waker.is_none()) {
            self.waiting.pop_front();
        }
    }

    /// Takes out those whose time has come, and only these.
    pub(super) fn serve(&mut self, until: u64, woken: &mut Vec<Waker>) {
        while self.waiting.front().is_some_and(|waiting| waiting.until <= until) {
            woken.extend(self.waiting.pop_front().and_then(|waiting| waiting.waker));
        }
    }

    /// The first, who keeps its place.
    pub(super) fn first(&self, woken: &mut Vec<Waker>) {
        woken.extend(self.waiting.front().and_then(|waiting| waiting.waker.clone()));
    }
}
