//! A queue of tasks that wait for syncs to complete, ordered by the sync they wait for. Each is
//! woken once.

use std::collections::VecDeque;
use std::task::Waker;

/// Numbers of syncs, in ascending order.
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

    /// The lowest; `u64::MAX` if there is none.
    pub(super) fn first(&self) -> u64 {
        self.0.front().copied().unwrap_or(u64::MAX)
    }
}

/// A task that waits until all syncs below `until` have completed.
#[derive(Debug)]
struct Waiting {
    until: u64,
    ticket: u64,
    /// `None`: cancelled.
    waker: Option<Waker>,
}

/// The position of a waiting task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    until: u64,
    ticket: u64,
}

/// Waiting tasks, the first to be woken in front. The queue keeps its memory, so that waiting
/// allocates nothing once warm.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiting: VecDeque<Waiting>,
    tickets: u64,
}

impl Line {
    /// Adds a task, or updates the waker of one that is in the queue.
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

    /// Removes a task that no longer waits.
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

    /// Removes the tasks that wait for syncs up to `until`, and returns their wakers.
    pub(super) fn serve(&mut self, until: u64, woken: &mut Vec<Waker>) {
        while self.waiting.front().is_some_and(|waiting| waiting.until <= until) {
            woken.extend(self.waiting.pop_front().and_then(|waiting| waiting.waker));
        }
    }

    /// The waker of the first task, which stays in the queue.
    pub(super) fn first(&self, woken: &mut Vec<Waker>) {
        woken.extend(self.waiting.front().and_then(|waiting| waiting.waker.clone()));
    }
}
