//! Publishing, reading and subscribing at the same time.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_mem::pressure::{Cause, Level, Pressure, PressureState};

const ROUNDS: u64 = 100_000;

/// Level and cause of publication number `n`: readers detect any mixture of two publications.
fn said(n: u64) -> (Level, Cause) {
    let level = Level::ALL[usize::try_from(n % 4).unwrap()];
    let causes =
        [Cause::Stall, Cause::Notice, Cause::CgroupNearLimit, Cause::Easing, Cause::Injected];
    (level, causes[usize::try_from(n % 5).unwrap()])
}

fn check(state: &PressureState, start: Instant) {
    if state.sequence > 0 {
        assert_eq!((state.level, state.cause), said(state.sequence));
        // Times count publications, in microseconds: they are never older than the publication read.
        let entered = state.since.duration_since(start).as_micros();
        assert!(entered >= u128::from(state.sequence), "{state:?}");
    }
}

/// Ends the other threads, also when the test fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_never_see_a_mixture_and_never_go_back() {
    let start = Instant::now();
    let (mut publisher, pressure) = Pressure::new(start);
    let done = AtomicBool::new(false);
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = 0;
                loop {
                    let state = pressure.state();
                    check(&state, start);
                    assert!(state.sequence >= last);
                    assert!(pressure.sequence() >= state.sequence);
                    last = state.sequence;
                    seen.fetch_add(1, Ordering::Relaxed);
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        // Subscribers subscribe and unsubscribe; each sees consecutive publications in order.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let last = Arc::new(AtomicU64::new(0));
                let kept = Arc::clone(&last);
                let subscription = pressure.subscribe(move |state| {
                    check(&state, start);
                    let before = kept.swap(state.sequence, Ordering::Relaxed);
                    assert!(before == 0 || state.sequence == before + 1);
                });
                for _ in 0..100 {
                    std::thread::yield_now();
                }
                drop(subscription);
            }
        });
        let _done = Done(&done);
        for n in 1..=ROUNDS {
            let (level, cause) = said(n);
            let state = publisher.publish(level, cause, start + Duration::from_micros(n));
            assert_eq!(state.sequence, n);
        }
    });
    assert_eq!(pressure.state().sequence, ROUNDS);
    assert!(seen.load(Ordering::Relaxed) >= 3);
}
