//! The helper threads of a simulation (feature `sim`): it makes their calls on its own thread, when it wants to, so that a
//! daemon that is killed has calls that were never made.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::Call;

thread_local! {
    static CALLS: RefCell<Option<VecDeque<Call>>> = const { RefCell::new(None) };
}

/// Keeps the calls of this thread from now on, or no longer. Drops those that were not made.
pub fn keep_calls(keep: bool) {
    // A call that is dropped may drop what makes another call.
    let dropped = CALLS.replace(keep.then(VecDeque::new));
    drop(dropped);
}

/// Makes the oldest call; false if there is none.
pub fn make_call() -> bool {
    let call = CALLS.with_borrow_mut(|calls| calls.as_mut().and_then(VecDeque::pop_front));
    call.map(|call| call()).is_some()
}

/// Keeps a call, or returns it if this thread has no simulation.
pub(super) fn keep<T: FnOnce() + Send + 'static>(call: T) -> Option<T> {
    CALLS.with_borrow_mut(|calls| match calls {
        Some(calls) => {
            calls.push_back(Box::new(call));
            None
        }
        None => Some(call),
    })
}
