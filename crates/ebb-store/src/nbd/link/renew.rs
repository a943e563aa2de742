//! Replacing a connection by one that knows a larger size of the export.
//!
//! A server checks requests against the size that it sent when the connection was made. After a resize the first
//! request beyond that size ends the connection of its worker in good order: no further request is sent, those in
//! flight complete, what is not flushed is flushed, and the client disconnects. Requests that were queued meanwhile
//! are sent on the next connection. Nothing is sent twice, so the caveat about lost connections (see the store) does
//! not apply here. A connection that ends before this is done is a lost one.
//!
//! While a server owes a reply for longer than the link holds requests back ([`FIRST_HOLD`] at first), the connection
//! continues to serve requests within its size, and only those beyond it wait. When the late replies have arrived, the
//! link tries again, for twice as long: so it succeeds also with a slow server that is never without requests. Nothing is
//! sent while the link's own flush is in flight: another flush could succeed although that one reports a loss.
//!
//! # Limits
//! - Requests beyond the former size wait for each reply that the server owes, without limit unless the connection
//!   ends: it may still execute what it has. `silence` ends it, also if other requests complete meanwhile.
//! - They have slots meanwhile: if they have all of them, requests within the former size wait, too.
//! - All requests wait for the link's own flush.

use std::time::Duration;

use ebb_io::{Gather, Io};
use ebb_nbd_proto::TransmissionFlags;
use ebb_tls::Transport;

use super::super::slots::RequestFailure;
use super::{AbandonOnDrop, Link, flush_request};

/// For how long requests that the connection could serve are held back at first.
pub(super) const FIRST_HOLD: Duration = Duration::from_secs(5);

impl Link {
    /// Whether the connection is to be replaced, and does not wait for late replies.
    pub(super) fn is_to_finish(&self) -> bool {
        self.outgrown.get() && !self.closing.get() && self.late_requests() == 0
    }

    /// Requests that were held up for longer than the link holds requests back, and still are.
    pub(super) fn late_requests(&self) -> usize {
        if self.outgrown.get() { self.slots.borrow().late() } else { 0 }
    }

    /// Requests beyond this end are not sent on the current connection, bytes.
    pub(super) fn end_of_requests(&self) -> u64 {
        if self.outgrown.get() { self.connection_size.get() } else { u64::MAX }
    }

    /// Waits for the replies to what was sent, and flushes. False if the connection ends before, or if requests are
    /// late, which are then marked.
    pub(super) async fn finish_requests(
        &self,
        io: &Io,
        transport: &Transport,
        hold: &mut Duration,
    ) -> bool {
        if !self.replied_in_time(io, hold).await {
            return false;
        }
        let shared = &self.remote.shared;
        if !shared.is_dirty() || !self.remote.export.offers(TransmissionFlags::SEND_FLUSH) {
            return true;
        }
        let mark = shared.mark();
        let cookie = self.slots.borrow_mut().push_first(flush_request());
        let mut pending = AbandonOnDrop { link: self, cookie: Some(cookie) };
        let mut message = Box::<Gather>::default();
        self.pack(&mut message, &mut Vec::new(), true);
        if transport.send(io, message).await.0.is_err() || !self.replied().await {
            return false;
        }
        pending.cookie = None;
        let result = self.wait(cookie).await.result;
        self.conclude_flush(result, mark, "the flush before connecting again");
        true
    }

    /// Waits until nothing that was sent lacks a reply; false as [`Link::finish_requests`].
    async fn replied_in_time(&self, io: &Io, hold: &mut Duration) -> bool {
        let replied = io.timeout(*hold, self.replied()).await;
        if replied.is_none() {
            self.slots.borrow_mut().mark_late();
            *hold = hold.saturating_mul(2);
        }
        replied == Some(true)
    }

    /// Waits until nothing that was sent lacks a reply; false if the connection ends before.
    async fn replied(&self) -> bool {
        while !self.closing.get() && self.slots.borrow().has_sent() {
            self.work.wait().await;
        }
        !self.closing.get()
    }

    /// Records what a flush that the link itself has sent covers or has lost.
    pub(super) fn conclude_flush(
        &self,
        result: Result<(), RequestFailure>,
        mark: u64,
        which: &str,
    ) {
        match result {
            Ok(()) => self.remote.shared.cover(mark),
            // The next connection begins with a flush if there is something to cover.
            Err(RequestFailure::Lost) => {}
            // A server may report a failed flush only once: the store reports it to its next flush.
            Err(failure) => {
                let what = format!(
                    "{which} failed ({failure:?}): changes acknowledged before may be lost"
                );
                self.remote.shared.lose(what, true);
            }
        }
    }
}
