//! A connection that is kept open for the daemon's successor, which continues it at the next request.
//!
//! # Invariants
//! - Every byte of the client is in one place: requests that were begun are carried out here and replied to; what was
//!   received after them is passed on; the socket has the remainder.
//! - A request that waits for memory or for limits was not begun. One whose data is being received was.
//! - A client that sends less than [`PROGRESS`] within [`SILENCE`], receives nothing for that long, or is not ready within
//!   [`KEEP_LIMIT`], is closed, so that it delays no other.

use std::sync::Arc;
use std::time::Duration;

use ebb_io::Task;
use futures_lite::future::or;

use super::{Connection, ConnectionEnd};
use crate::kept::{KeptConnection, KeptConnections};
use crate::receiver::Receiver;

/// How long a client may send nearly nothing within a request that was begun, or receive nothing while replies are sent to it.
const SILENCE: Duration = Duration::from_secs(1);
/// The bytes that a client has to send meanwhile, unless they are the last of the request.
const PROGRESS: usize = 64 << 10;
/// How long a client may take to send the data of a request that was begun, and how long to receive its replies.
const KEEP_LIMIT: Duration = Duration::from_secs(3);
/// How often both are checked.
const CHECK: Duration = Duration::from_millis(20);

impl Connection {
    /// Whether a successor can continue the connection: the state of TLS cannot be passed on.
    pub(super) fn can_be_kept(&self) -> bool {
        !self.transport.is_encrypted() && !self.client.stop.is_stopped() && !self.stalled.get()
    }

    /// Ends the reading of requests after the one that is being received; returns if that does not end in time.
    pub(super) async fn begin_to_keep(&self) {
        self.keeping.set(true);
        self.halt.set();
        let (mut received, mut silent, mut left) =
            (self.received.get(), Duration::ZERO, KEEP_LIMIT);
        while silent < SILENCE && !left.is_zero() {
            // A receive may begin after a cancellation.
            self.io.cancel_receives(self.transport.socket());
            self.io.sleep(CHECK).await;
            silent += CHECK;
            if self.received.get().wrapping_sub(received) >= PROGRESS {
                (received, silent) = (self.received.get(), Duration::ZERO);
            }
            left = left.saturating_sub(CHECK);
        }
    }

    /// Completes the requests in flight, sends their replies, and keeps the connection.
    pub(super) async fn keep(
        self: &std::rc::Rc<Self>,
        receiver: Receiver,
        sending: Task<std::io::Result<()>>,
        kept: &Arc<KeptConnections>,
    ) -> ConnectionEnd {
        let rest = receiver.bytes().into();
        drop(receiver);
        self.tasks.retire_idle();
        let completing = async {
            self.tasks.drain().await;
            self.tasks.retire_idle();
            self.sender.finish();
            Some(sending.await)
        };
        let silent = async {
            self.client_is_silent().await;
            None
        };
        let end = match or(completing, silent).await {
            Some(Ok(())) => {
                let (socket, session) = (self.transport.socket().clone(), self.session.clone());
                let store = String::new();
                kept.add(KeptConnection { socket, session, rest, store });
                ConnectionEnd::Kept
            }
            Some(Err(error)) => ConnectionEnd::Broken(error),
            None => {
                self.sender.give_up();
                self.transport.shut();
                self.tasks.drain().await;
                ConnectionEnd::Stopped
            }
        };
        self.sender.clear();
        end
    }

    /// Returns when the client has received nothing for a while, although there are replies to be sent.
    async fn client_is_silent(&self) {
        let (mut sent, mut silent) = (self.transport.sent_bytes(), Duration::ZERO);
        let mut left = KEEP_LIMIT;
        while silent < SILENCE && !left.is_zero() {
            self.io.sleep(CHECK).await;
            let before = std::mem::replace(&mut sent, self.transport.sent_bytes());
            let has_replies = self.sender.has_replies();
            silent = if before == sent && has_replies { silent + CHECK } else { Duration::ZERO };
            if silent == SILENCE / 2 {
                // A large reply may be on its way, of which the kernel counts no part until it has sent all.
                self.io.cancel_sends(self.transport.socket());
            }
            if has_replies {
                left = left.saturating_sub(CHECK);
            }
        }
    }
}
