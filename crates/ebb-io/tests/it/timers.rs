//! Timers fire in the order of their deadlines; a dropped one does not.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use common::{Random, on_worker, until};
use ebb_io::Io;

const TIMERS: u64 = 60;

/// The bounds of a timer's deadline: the time before and after it was set, since a busy machine may delay the
/// thread in between.
type Deadline = (Instant, Instant);

/// The deadlines of timers in the order in which they fired.
async fn round(io: &Io, random: &mut Random) -> Vec<Deadline> {
    let fired = Rc::new(RefCell::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..TIMERS {
        // Some deadlines are almost equal.
        let after = Duration::from_millis(100 + random.below(20));
        let (io2, fired) = (io.clone(), fired.clone());
        tasks.push(io.spawn(async move {
            let earliest = Instant::now() + after;
            let timer = io2.sleep(after);
            let latest = Instant::now() + after;
            timer.await;
            assert!(Instant::now() >= earliest, "a timer fired early");
            fired.borrow_mut().push((earliest, latest));
        }));
    }
    for task in tasks {
        task.await;
    }
    fired.take()
}

#[test]
fn timers_fire_in_the_order_of_their_deadlines() {
    on_worker(|io| async move {
        let mut random = Random::new(11);
        for _ in 0..4 {
            let fired = round(&io, &mut random).await;
            assert_eq!(fired.len() as u64, TIMERS);
            for (place, (_, latest)) in fired.iter().enumerate() {
                let before = fired[..place].iter().find(|(earliest, _)| earliest > latest);
                assert_eq!(before, None, "fired before {latest:?}");
            }
        }
    });
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_dropped_timer_wakes_no_task() {
    on_worker(|io| async move {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        let mut kept = pin!(io.sleep(Duration::from_millis(20)));
        assert!(kept.as_mut().poll(&mut cx).is_pending());
        {
            let mut dropped = pin!(io.sleep(Duration::from_millis(10)));
            assert!(dropped.as_mut().poll(&mut cx).is_pending());
        }
        until(&io, "the kept one has fired", || count.0.load(Ordering::SeqCst) > 0).await;
        assert!(kept.as_mut().poll(&mut cx).is_ready());
        assert_eq!(count.0.load(Ordering::SeqCst), 1, "and the dropped one has not");
        assert_eq!(Arc::strong_count(&count), 2, "the waker was dropped");
    });
}

#[test]
fn a_sleep_of_zero_completes_at_once() {
    on_worker(|io| async move {
        io.sleep(Duration::ZERO).await;
        assert!(io.timeout(Duration::ZERO, std::future::pending::<()>()).await.is_none());
    });
}
