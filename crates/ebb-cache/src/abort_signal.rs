//! [`AbortSignal`]: ends the waits of one volume for a layer that other volumes go on using.
//!
//! A store can only be aborted for all of its users. So a request that waits for a layer that volumes share is dropped
//! when its own volume is aborted, which a store allows at any await ([`ebb_block::BlockStore`]).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use crate::sync::Mutex;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct AbortSignal {
    raised: AtomicBool,
    waiting: Mutex<AbortWaiters>,
}

/// Tasks to be woken. A place is used again, so that waiting allocates nothing once there are as many places as
/// requests in flight.
#[derive(Debug, Default)]
struct AbortWaiters {
    wakers: Vec<Option<Waker>>,
    free: Vec<usize>,
}

/// A place among the waiters, which is left when it is dropped.
struct AbortWaiter<'a> {
    signal: &'a AbortSignal,
    place: Option<usize>,
}

impl AbortWaiter<'_> {
    fn register(&mut self, waker: &Waker) {
        let mut waiting = self.signal.waiting.lock();
        let waiters = &mut *waiting;
        let place = *self.place.get_or_insert_with(|| {
            waiters.free.pop().unwrap_or_else(|| {
                waiters.wakers.push(None);
                waiters.wakers.len() - 1
            })
        });
        match &mut waiters.wakers[place] {
            Some(known) => known.clone_from(waker),
            empty => *empty = Some(waker.clone()),
        }
    }
}

impl Drop for AbortWaiter<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let mut waiting = self.signal.waiting.lock();
        let waker = waiting.wakers[place].take();
        waiting.free.push(place);
        drop(waiting);
        drop(waker);
    }
}

impl AbortSignal {
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Ends all waits, those that begin later too. From any thread.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        let wakers: Vec<Waker> =
            self.waiting.lock().wakers.iter_mut().filter_map(Option::take).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The output of `wait`; `None` once the signal is raised. The caller then drops `wait`.
    pub(crate) async fn race<F: Future>(&self, mut wait: Pin<&mut F>) -> Option<F::Output> {
        if self.is_raised() {
            return None;
        }
        let mut waiter = AbortWaiter { signal: self, place: None };
        poll_fn(|cx| {
            if let Poll::Ready(output) = wait.as_mut().poll(cx) {
                return Poll::Ready(Some(output));
            }
            // Checked after the waker is there: a signal that is raised meanwhile is seen here or wakes the task.
            waiter.register(cx.waker());
            if self.is_raised() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::future::pending;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_raised_signal_wakes_each_waiter_and_places_are_used_again() {
        let signal = AbortSignal::default();
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        for _ in 0..3 {
            let (one, two) = (pin!(pending::<()>()), pin!(pending::<()>()));
            let (mut one, mut two) = (pin!(signal.race(one)), pin!(signal.race(two)));
            for _ in 0..2 {
                assert!(one.as_mut().poll(&mut cx).is_pending());
                assert!(two.as_mut().poll(&mut cx).is_pending());
            }
        }
        assert_eq!(signal.waiting.lock().wakers.len(), 2);
        let wait = pin!(pending::<()>());
        let mut wait = pin!(signal.race(wait));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        signal.raise();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(wait.poll(&mut cx), Poll::Ready(None));
        let later = pin!(std::future::ready(()));
        assert_eq!(pin!(signal.race(later)).poll(&mut cx), Poll::Ready(None));
    }
}
