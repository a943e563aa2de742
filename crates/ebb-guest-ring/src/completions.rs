//! Completed requests of one ring, which are published to the guest in batches: one update of the shared index and one
//! notification at most, for all requests that completed together.
//!
//! What the ring's own loop completes is published after its batch of requests; what request tasks complete, after all
//! request tasks that were ready have run ([`Completions::ready`]).

use std::cell::RefCell;

use ebb_io::Signal;

/// See the module.
pub struct Completions<C> {
    list: RefCell<Vec<C>>,
    ready: Signal,
}

impl<C> Completions<C> {
    /// None yet; a ring with `slots` slots has no more than that, and the list does not grow.
    #[must_use]
    pub fn new(slots: usize) -> Completions<C> {
        Completions { list: RefCell::new(Vec::with_capacity(slots)), ready: Signal::default() }
    }

    /// Adds one, for the ring's own loop, which publishes it at the end of its batch.
    #[inline]
    pub fn push(&self, completion: C) {
        self.list.borrow_mut().push(completion);
    }

    /// Has the completions published soon: for request tasks.
    #[inline]
    pub fn publish_soon(&self) {
        self.ready.set();
    }

    /// Waits until there is something to publish from request tasks. For one task of the ring.
    pub async fn ready(&self) {
        self.ready.wait().await;
    }

    /// Publishes all with `publish`, if there are any, which takes them out of the list.
    #[inline]
    pub fn publish<R>(&self, publish: impl FnOnce(&mut Vec<C>) -> R) -> Option<R> {
        let mut list = self.list.borrow_mut();
        if list.is_empty() {
            return None;
        }
        let published = publish(&mut list);
        debug_assert!(list.is_empty(), "all are published");
        list.clear();
        Some(published)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn completions_are_published_together_and_without_growing_the_list() {
        let completions = Completions::new(4);
        let capacity = completions.list.borrow().capacity();
        for round in 0..10 {
            assert_eq!(completions.publish(|_| ()), None, "nothing to publish");
            (0..4).for_each(|number| completions.push(round * 4 + number));
            let mut batch = Vec::new();
            assert_eq!(completions.publish(|list| batch.append(list)), Some(()));
            assert_eq!(batch, (round * 4..round * 4 + 4).collect::<Vec<_>>());
        }
        assert_eq!(completions.list.borrow().capacity(), capacity);
    }

    #[test]
    fn only_completions_of_request_tasks_wake_the_publisher() {
        let completions = Completions::new(4);
        let mut cx = Context::from_waker(Waker::noop());
        let mut ready = pin!(completions.ready());
        completions.push(1);
        assert!(ready.as_mut().poll(&mut cx).is_pending());
        completions.push(2);
        completions.publish_soon();
        assert!(ready.as_mut().poll(&mut cx).is_ready());
    }
}
