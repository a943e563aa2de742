//! Orders to all users of the daemon, each in its own thread, and their reports.
//!
//! An order is in force until the next one. The daemon is killed during [`Phase::Load`] only; then
//! [`Phase::Down`] makes everyone note acknowledged writes before the daemon starts again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use testbed::harness::process::PATIENCE;
use testbed::{Error, Result, check};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Connect, and send requests.
    Load,
    /// Complete all requests.
    Settle,
    /// Read everything.
    Verify,
    /// The daemon has ended: note its acknowledged writes.
    Down,
    /// Stores were exchanged: a guest connects, and must be refused.
    Foreign,
    End,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) number: u64,
    pub(crate) phase: Phase,
}

struct State {
    order: Order,
    arrived: usize,
    failure: Option<String>,
}

pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
    members: usize,
    /// The broker was killed in this life of the daemon.
    pub(crate) broker_killed: AtomicBool,
    /// The daemon is about to end: connections may end.
    pub(crate) ending: AtomicBool,
    /// The daemon has ended by a signal that it obeys: nothing is lost.
    pub(crate) stopped: AtomicBool,
    pub(crate) counts: Counts,
}

/// What was done, for the summary.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) requests: AtomicU64,
    pub(crate) sectors: AtomicU64,
    /// Requests of guests that a kill found in flight.
    pub(crate) requests_cut: AtomicU64,
    /// Commands of operations that were sent, and operations that were carried out.
    pub(crate) begun: AtomicU64,
    pub(crate) operations: AtomicU64,
    pub(crate) operations_cut: AtomicU64,
    /// Guests that were told of a loss, and resets of them.
    pub(crate) losses: AtomicU64,
    pub(crate) resets: AtomicU64,
    /// Flushes of guests that succeeded after a kill.
    pub(crate) flushes_after_kills: AtomicU64,
    /// Guests that were refused on a foreign store.
    pub(crate) refused: AtomicU64,
}

pub(crate) fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}

pub(crate) fn count(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

impl Control {
    pub(crate) fn new(members: usize) -> Control {
        let order = Order { number: 0, phase: Phase::Down };
        Control {
            state: Mutex::new(State { order, arrived: 0, failure: None }),
            changed: Condvar::new(),
            members,
            broker_killed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an order.
    pub(crate) fn order(&self, phase: Phase) {
        let mut state = self.state();
        state.order = Order { number: state.order.number + 1, phase };
        state.arrived = 0;
        self.changed.notify_all();
    }

    /// Gives an order, and waits until everyone has carried it out.
    pub(crate) fn carry_out(&self, phase: Phase) -> Result {
        self.order(phase);
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state();
        while state.arrived < self.members && state.failure.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            check(!left.is_zero(), || {
                format!("{phase:?}: {} of {} are done", state.arrived, self.members)
            })?;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.failure.clone().map_or(Ok(()), |text| Err(Error::unexpected(text)))
    }

    /// Waits a while, or until someone has failed.
    pub(crate) fn pause(&self, time: Duration) -> Result {
        let deadline = Instant::now() + time;
        let mut state = self.state();
        while state.failure.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Err(Error::unexpected(state.failure.clone().unwrap_or_default()))
    }

    pub(crate) fn fail(&self, text: String) {
        self.state().failure.get_or_insert(text);
        self.changed.notify_all();
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state().failure.is_some()
    }

    pub(crate) fn arrive(&self) {
        self.state().arrived += 1;
        self.changed.notify_all();
    }

    /// Whether another order is in force.
    pub(crate) fn is_over(&self, order: Order) -> bool {
        self.state().order.number != order.number
    }

    /// Waits for an order after this one.
    pub(crate) fn next(&self, last: u64) -> Order {
        let mut state = self.state();
        while state.order.number == last {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.order
    }

    /// A connection has ended, which only the end of the daemon may do.
    pub(crate) fn note_closed(&self) -> Result {
        check(self.is_ending(), || "the daemon has closed a connection".into())
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    pub(crate) fn is_broker_killed(&self) -> bool {
        self.broker_killed.load(Ordering::SeqCst)
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}

/// One that uses the daemon.
pub(crate) trait Member {
    /// Its name in failures.
    fn name(&self) -> String;
    /// Connects if it is not connected, and sends requests until the order is over or the
    /// connection ends.
    fn load(&mut self, order: Order) -> Result;
    fn settle(&mut self) -> Result;
    fn verify(&mut self) -> Result;
    fn down(&mut self) -> Result;
    fn foreign(&mut self) -> Result {
        Ok(())
    }
}

/// Carries out orders until the last one.
pub(crate) fn obey(mut member: impl Member, control: &Control) {
    let mut last = 0;
    loop {
        let order = control.next(last);
        last = order.number;
        let attempt = std::panic::AssertUnwindSafe(|| match order.phase {
            Phase::Load => member.load(order),
            Phase::Settle => member.settle(),
            Phase::Verify => member.verify(),
            Phase::Down => member.down(),
            Phase::Foreign => member.foreign(),
            Phase::End => Ok(()),
        });
        let done = std::panic::catch_unwind(attempt)
            .unwrap_or_else(|panic| Err(Error::unexpected(panic_text(&*panic))));
        if let Err(error) = done {
            control.fail(format!("{}, {:?}: {error}", member.name(), order.phase));
            return;
        }
        match order.phase {
            Phase::End => return,
            Phase::Load => {}
            _ => control.arrive(),
        }
    }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
