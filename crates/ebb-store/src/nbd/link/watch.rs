//! Looking after a connection that is up: whether a server that owes answers gives any, and whether one that is
//! asked nothing is still of use.
//!
//! A server that is told to stop may wait for its clients before it ends, and answers `NBD_ESHUTDOWN` to what they
//! ask (nbdkit does). A connection that asks nothing never hears that, and keeps the server while the others
//! wait for its successor. So a connection that hears it, and one that cannot be made, raise a doubt
//! ([`Shared::doubt`]), and connections at rest then ask for a flush: the answer shows whether the server goes.

use std::rc::Rc;
use std::time::Duration;

use ebb_io::Io;
use ebb_nbd_proto::TransmissionFlags;
use ebb_tls::Transport;

use super::super::slots::Failure;
use super::{Link, flush_request};

/// How often a link looks whether a server that owes answers gives any.
const LOOK: Duration = Duration::from_secs(1);

impl Link {
    /// Tells of a server that owes answers and gives none, and gives up its connection if there is a limit.
    /// At rest it asks when there is a doubt.
    pub(super) async fn watch(self: &Rc<Self>, io: &Io, transport: &Transport, id: u64) {
        let remote = self.remote.clone();
        let (shared, limit) = (&remote.shared, remote.options.silence);
        let mut told = 0;
        let mut seen = shared.doubts();
        // Kept, so that a rest allocates nothing.
        let mut doubt = Box::pin(shared.doubted(seen));
        self.heard.set(ebb_io::clock::now());
        loop {
            if !self.is_busy() {
                if std::mem::take(&mut told) != 0 {
                    shared.silent(id, 0);
                }
                self.resting.set(true);
                futures_lite::future::or(self.asked.wait(), doubt.as_mut()).await;
            }
            if shared.doubts() != seen && !self.is_busy() {
                seen = shared.doubts();
                doubt.set(shared.doubted(seen));
                if !self.ask_whether_it_goes(io) {
                    transport.shut();
                    return;
                }
            }
            io.sleep(LOOK).await;
            let silence = ebb_io::clock::since(self.heard.get());
            let owes = self.slots.borrow().has_sent();
            // A moment without an answer is no silence.
            let seconds = if owes && silence >= LOOK * 2 { silence.as_secs() } else { 0 };
            if seconds != told {
                told = seconds;
                shared.silent(id, seconds);
            }
            if owes && limit.is_some_and(|limit| silence >= limit) {
                self.silenced.set(Some(silence));
                // Both directions hear the end of the stream.
                transport.shut();
                return;
            }
        }
    }

    /// Whether something was asked, or is about to be.
    fn is_busy(&self) -> bool {
        let slots = self.slots.borrow();
        slots.has_sent() || slots.has_queued()
    }

    /// Asks for a flush, whose answer shows whether the server goes. False if the server knows no flush: the
    /// connection, on which nothing is under way, may as well be made anew.
    fn ask_whether_it_goes(self: &Rc<Self>, io: &Io) -> bool {
        if !self.remote.export.offers(TransmissionFlags::SEND_FLUSH) {
            return false;
        }
        let own = self.clone();
        let ask = async move {
            let shared = &own.remote.shared;
            let mark = shared.mark();
            match own.request(flush_request(), None).await.result {
                Ok(()) => shared.cover(mark),
                // The next connection begins with a flush if there is something to cover.
                Err(Failure::Lost) => {}
                // A server may tell of a failed flush once: the next flush of the store passes it on.
                Err(failure) => shared.lose(format!(
                    "a flush of a connection at rest failed ({failure:?}): changes acknowledged \
                     before may be lost"
                )),
            }
        };
        io.spawn(ask).detach();
        true
    }
}
