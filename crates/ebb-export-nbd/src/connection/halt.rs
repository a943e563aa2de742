//! Waits of the reader, which end when the connection is to end or to be kept.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use super::{Connection, ConnectionEnd};

impl Connection {
    /// Waits for something that a request needs, or until the connection is to end; if it is to be kept, only as long as
    /// the successor can still begin the request.
    pub(super) fn unless_halted<T>(
        &self,
        waiting: Pin<&mut impl Future<Output = T>>,
    ) -> impl Future<Output = Result<T, ConnectionEnd>> {
        self.unless(waiting, true)
    }

    /// Receives, or waits until the connection is to end. Not when it is to be kept: received data would be lost.
    pub(super) fn unless_stopped<T>(
        &self,
        receiving: Pin<&mut impl Future<Output = T>>,
    ) -> impl Future<Output = Result<T, ConnectionEnd>> {
        self.unless(receiving, false)
    }

    /// The future is passed pinned: by value it would take up space in the connection's task several times.
    async fn unless<T>(
        &self,
        waiting: Pin<&mut impl Future<Output = T>>,
        may_be_kept: bool,
    ) -> Result<T, ConnectionEnd> {
        if let Some(end) = self.halted(may_be_kept) {
            return Err(end);
        }
        let halted = poll_fn(|cx| {
            while self.halt.poll_wait(cx).is_ready() {
                if let Some(end) = self.halted(may_be_kept) {
                    return Poll::Ready(Err(end));
                }
            }
            Poll::Pending
        });
        futures_lite::future::or(async { Ok(waiting.await) }, halted).await
    }

    /// Why a wait ends.
    fn halted(&self, may_be_kept: bool) -> Option<ConnectionEnd> {
        if self.stopping.get() {
            return Some(ConnectionEnd::Stopped);
        }
        let kept = may_be_kept && self.keeping.get() && !self.payload_begun.get();
        kept.then_some(ConnectionEnd::Kept)
    }
}
