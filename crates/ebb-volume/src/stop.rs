//! A stop signal, sent once by any thread and awaited by any number of tasks on any worker: the connections
//! and rings of an export end with their volume or their server.

use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;

/// A stop signal that is sent once.
#[derive(Debug, Default)]
pub struct Stop {
    stopped: AtomicBool,
    event: Event,
}

impl Stop {
    /// Sends it: all present and later waiters are woken.
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
            // Checked again after the listener is registered: a stop after that wakes it.
            if self.is_stopped() {
                return;
            }
            listener.await;
        }
    }
}
