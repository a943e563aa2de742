//! Replacing a connection by one that knows a larger size of the export.
//!
//! A server checks requests against the size that it sent when the connection was made. After a resize the first
//! request beyond that size ends the connection of its worker in good order: no further request is sent, those in
//! flight complete, what is not flushed is flushed, and the client disconnects. Requests that were queued meanwhile
//! are sent on the next connection. Nothing is sent twice, so the caveat about lost connections (see the store) does
//! not apply here.

use ebb_io::{Gather, Io};
use ebb_nbd_proto::TransmissionFlags;
use ebb_tls::Transport;

use super::super::slots::RequestFailure;
use super::{AbandonOnDrop, Link, flush_request};

impl Link {
    /// Waits for the replies to what was sent, and flushes; returns early if the connection ends. A server that is
    /// slow is waited for, without limit unless `silence` ends the connection: it may still execute what it has.
    pub(super) async fn finish_requests(&self, io: &Io, transport: &Transport) {
        if !self.replied().await {
            return;
        }
        let shared = &self.remote.shared;
        if !shared.is_dirty() || !self.remote.export.offers(TransmissionFlags::SEND_FLUSH) {
            return;
        }
        let mark = shared.mark();
        let cookie = self.slots.borrow_mut().push_first(flush_request());
        let mut pending = AbandonOnDrop { link: self, cookie: Some(cookie) };
        let mut message = Box::<Gather>::default();
        self.pack(&mut message, &mut Vec::new(), true);
        if transport.send(io, message).await.0.is_err() || !self.replied().await {
            return;
        }
        pending.cookie = None;
        let result = self.wait(cookie).await.result;
        self.conclude_flush(result, mark, "the flush before connecting again");
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
