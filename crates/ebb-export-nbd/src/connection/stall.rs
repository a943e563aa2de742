//! Whether a connection holds memory and makes no progress.

use super::{Connection, PROGRESS, STALLED};

/// How long a connection has made no progress while other requests of its volume waited for memory.
#[derive(Default)]
pub(super) struct StallDetector {
    received: usize,
    sent: usize,
    idle_checks: u32,
}

impl StallDetector {
    /// Whether the connection has stalled; to be called once per `IDLE_AFTER`.
    pub(super) fn has_stalled(&mut self, connection: &Connection) -> bool {
        let (received, sent) = (connection.received.get(), connection.transport.sent_bytes());
        let moved = received.wrapping_sub(self.received).max(sent.wrapping_sub(self.sent));
        (self.received, self.sent) = (received, sent);
        let holds = connection.receiving.get() || connection.sender.holds_data();
        let blocks = holds && moved < PROGRESS && connection.queue_share.share().has_waiters();
        self.idle_checks = if blocks { self.idle_checks + 1 } else { 0 };
        self.idle_checks >= STALLED
    }
}
