//! A broadcast that is sent once: "stop". Any thread sends it, any task on any worker waits for it.

use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    stopped: AtomicBool,
    event: Event,
}

impl Stop {
    /// Sends it; waiters of now and later all get it.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.event.notify(usize::MAX);
    }

    /// Waits for it.
    pub(crate) async fn wait(&self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let listener = self.event.listen();
            // Looked at again after the listener is in place: a stop since then wakes it.
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            listener.await;
        }
    }
}
