//! Notifies the frontend through an eventfd.
//!
//! The eventfd is the frontend's, too: it can fill the counter and make the descriptor blocking, and a write would then hold
//! the thread of all disks on the worker. So the ring writes: at once, as a system call would, or later if the kernel has
//! to wait.
//!
//! Invariants: no thread waits for the counter. A descriptor has one operation that waits at most, for a limited time; after
//! it has ended, there is another one if a notification was due meanwhile.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use ebb_io::{Fd, Io};
use futures_lite::future::or;

/// How long a counter is waited for. If it is full, the frontend was notified and has not looked.
const PATIENCE: Duration = Duration::from_secs(1);

/// See the module. Cheap to clone; clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Notifier(Rc<NotifierState>);

#[derive(Default)]
struct NotifierState {
    /// Notified, if there is one.
    event: RefCell<Option<Fd>>,
    /// A task waits for the counter.
    waiting: Cell<bool>,
    /// A notification is due when it has ended.
    again: Cell<bool>,
}

impl Notifier {
    pub(crate) fn new(event: Option<Fd>) -> Notifier {
        let notifier = Notifier::default();
        notifier.set(event);
        notifier
    }

    /// Notifies through another eventfd from now on, or not at all.
    pub(crate) fn set(&self, event: Option<Fd>) {
        *self.0.event.borrow_mut() = event;
    }

    /// Notifies the frontend; false if there is no eventfd for it.
    #[inline]
    pub(crate) fn notify(&self, io: &Io) -> bool {
        let event = self.0.event.borrow();
        let Some(event) = &*event else { return false };
        if self.0.waiting.get() {
            self.0.again.set(true);
        } else if !is_ready(io, event) {
            self.wait(io);
        }
        true
    }

    #[cold]
    fn wait(&self, io: &Io) {
        self.0.waiting.set(true);
        io.spawn(wait_for_counter(io.clone(), self.clone())).detach();
    }
}

/// Notifies if that need not wait. Otherwise the operation is cancelled, and may be carried out all the same.
#[inline]
fn is_ready(io: &Io, event: &Fd) -> bool {
    // Ready with an error: the counter is full.
    pin!(io.signal_event(event)).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

async fn wait_for_counter(io: Io, notifier: Notifier) {
    let state = &*notifier.0;
    loop {
        state.again.set(false);
        let event = state.event.borrow().clone();
        let Some(event) = event else { break };
        let sent = async {
            let _ = io.signal_event(&event).await;
        };
        or(sent, io.sleep(PATIENCE)).await;
        if !state.again.get() {
            break;
        }
    }
    state.waiting.set(false);
}
