//! A queue of tasks that wait for syncs to complete, ordered by the sync they wait for. Each is
//! woken once.

use std::collections::VecDeque;
use std::task::Waker;

/// Numbers of syncs, in ascending order.
#[derive(Debug, Default)]
pub(super) struct SyncNumbers(VecDeque<u64>);

impl SyncNumbers {
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
struct Waiter {
    until: u64,
    ticket: u64,
    /// `None`: cancelled.
    waker: Option<Waker>,
}

/// Identifies a waiting task.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitPosition {
    until: u64,
    ticket: u64,
}

/// Waiting tasks, the first to be woken in front. The queue keeps its memory, so that waiting
/// allocates nothing once warm.
#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    waiting: VecDeque<Waiter>,
    tickets: u64,
}

impl WaitQueue {
    /// Adds a task, or updates the waker of one that is in the queue.
    pub(super) fn wait(&mut self, position: &mut Option<WaitPosition>, until: u64, waker: &Waker) {
        if let Some(waiting) = position.and_then(|position| self.find(position)) {
            if !waiting.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
                waiting.waker = Some(waker.clone());
            }
            return;
        }
        let ticket = self.tickets;
        self.tickets += 1;
        let at = self.waiting.partition_point(|waiting| waiting.until <= until);
        self.waiting.insert(at, Waiter { until, ticket, waker: Some(waker.clone()) });
        *position = Some(WaitPosition { until, ticket });
    }

    fn find(&mut self, position: WaitPosition) -> Option<&mut Waiter> {
        let key = (position.until, position.ticket);
        let found = self.waiting.binary_search_by_key(&key, |w| (w.until, w.ticket));
        self.waiting.get_mut(found.ok()?)
    }

    /// Removes a task that no longer waits.
    pub(super) fn remove_waiter(&mut self, position: WaitPosition) {
        if let Some(waiting) = self.find(position) {
            waiting.waker = None;
        }
        self.drop_cancelled();
    }

    fn drop_cancelled(&mut self) {
        while self.waiting.front().is_some_and(|waiting| waiting.waker.is_none()) {
            self.waiting.pop_front();
        }
    }

    /// Removes the tasks that wait for syncs up to `until`, and adds their wakers to `woken`.
    pub(super) fn wake_until(&mut self, until: u64, woken: &mut Vec<Waker>) {
        while self.waiting.front().is_some_and(|waiting| waiting.until <= until) {
            woken.extend(self.waiting.pop_front().and_then(|waiting| waiting.waker));
        }
    }

    /// Adds the waker of the first task, which stays in the queue, to `woken`.
    pub(super) fn first(&self, woken: &mut Vec<Waker>) {
        woken.extend(self.waiting.front().and_then(|waiting| waiting.waker.clone()));
    }
}
