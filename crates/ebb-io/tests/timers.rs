//! Timers fire in the order of their deadlines; a dropped one does not.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use common::{Random, on_worker, until};
use ebb_io::Io;

const TIMERS: u64 = 60;

/// The order in which timers fired, and the order of their deadlines; `None` if the machine was so
/// slow that one was over before it was waited for.
async fn round(io: &Io, random: &mut Random) -> Option<(Vec<u64>, Vec<u64>)> {
    let fired = Rc::new(RefCell::new(Vec::new()));
    let late = Rc::new(std::cell::Cell::new(false));
    let mut deadlines = Vec::new();
    let mut tasks = Vec::new();
    for number in 0..TIMERS {
        // Some at the same time, nearly.
        let after = Duration::from_millis(30 + random.below(20));
        let at = std::time::Instant::now() + after;
        deadlines.push((at, number));
        let (io2, fired, late) = (io.clone(), fired.clone(), late.clone());
        tasks.push(io.spawn(async move {
            let left = at.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                late.set(true);
            }
            // The deadline may move by what it takes to get here; the spacing below allows for it.
            io2.sleep(left).await;
            fired.borrow_mut().push((std::time::Instant::now(), number));
        }));
    }
    for task in tasks {
        task.await;
    }
    if late.get() {
        return None;
    }
    deadlines.sort();
    let fired = fired.borrow();
    assert!(
        fired
            .iter()
            .all(|(when, number)| { deadlines.iter().any(|(at, n)| n == number && when >= at) })
    );
    Some((
        fired.iter().map(|(_, number)| *number).collect(),
        deadlines.iter().map(|(_, number)| *number).collect(),
    ))
}

#[test]
fn timers_fire_in_the_order_of_their_deadlines() {
    on_worker(|io| async move {
        let mut random = Random::new(11);
        for _ in 0..50 {
            if let Some((fired, expected)) = round(&io, &mut random).await {
                assert_eq!(fired.len(), expected.len());
                // Deadlines closer than the time between reading the clock twice may swap:
                // nobody may be more than a few places from where it belongs.
                for (place, number) in fired.iter().enumerate() {
                    let belongs = expected.iter().position(|n| n == number).unwrap();
                    assert!(place.abs_diff(belongs) <= 3, "{fired:?}\n{expected:?}");
                }
                return;
            }
        }
        panic!("this machine is too slow to tell");
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
fn a_dropped_timer_wakes_nobody() {
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
        assert_eq!(Arc::strong_count(&count), 2, "nobody keeps the waker");
    });
}

#[test]
fn no_time_at_all_is_over_at_once() {
    on_worker(|io| async move {
        io.sleep(Duration::ZERO).await;
        assert!(io.timeout(Duration::ZERO, std::future::pending::<()>()).await.is_none());
    });
}
