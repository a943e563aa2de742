//! A broadcast that is sent once: "stop". Any thread sends it, any task on any worker waits for it. For exports,
//! whose connections and rings end with their volume or their server.

use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;

/// A stop, sent once and heard by all.
#[derive(Debug, Default)]
pub struct Stop {
    stopped: AtomicBool,
    event: Event,
}

impl Stop {
    /// Sends it; waiters of now and later all get it.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.event.notify(usize::MAX);
    }

    /// Whether it was sent.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Waits for it.
    pub async fn wait(&self) {
        while !self.is_stopped() {
            let listener = self.event.listen();
            // Looked at again after the listener is in place: a stop since then wakes it.
            if self.is_stopped() {
                return;
            }
            listener.await;
        }
    }
}
