//! Monitoring of an established connection: whether a server replies to requests in flight, and
//! whether an idle connection is still of use.
//!
//! A server that shuts down may wait for its clients to disconnect, and replies `NBD_ESHUTDOWN` to
//! their requests (nbdkit does). An idle connection never receives that, and keeps the old server
//! alive while other connections wait for its successor. So a connection that receives it, and one
//! that cannot be established, requests a probe ([`RemoteState::request_probe`]), and idle
//! connections then send a flush: its reply shows whether the server is shutting down.

use std::rc::Rc;
use std::time::Duration;

use ebb_io::Io;
use ebb_nbd_proto::TransmissionFlags;
use ebb_tls::Transport;

use super::{Link, flush_request};

/// How often a link checks whether a server replies to requests in flight.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Link {
    /// Reports a server that does not reply to requests in flight, and closes its connection if
    /// there is a limit. While idle it sends a probe when one is requested.
    pub(super) async fn watch(self: &Rc<Self>, io: &Io, transport: &Transport, id: u64) {
        let remote = self.remote.clone();
        let (shared, limit) = (&remote.shared, remote.options.silence);
        let mut reported = 0;
        let mut seen = shared.probes_requested();
        // Kept, so that being idle allocates nothing.
        let mut probe = Box::pin(shared.probe_requested(seen));
        self.last_reply.set(ebb_io::clock::now());
        loop {
            if !self.is_busy() {
                if std::mem::take(&mut reported) != 0 {
                    shared.silent(id, 0);
                }
                self.idle.set(true);
                futures_lite::future::or(self.busy.wait(), probe.as_mut()).await;
            }
            if shared.probes_requested() != seen && !self.is_busy() {
                seen = shared.probes_requested();
                probe.set(shared.probe_requested(seen));
                if !self.send_probe(io) {
                    transport.shut();
                    return;
                }
            }
            io.sleep(CHECK_INTERVAL).await;
            let silence = ebb_io::clock::since(self.last_reply.get());
            let owes = self.slots.borrow().has_sent();
            // A short time without a reply is no silence.
            let seconds = if owes && silence >= CHECK_INTERVAL * 2 { silence.as_secs() } else { 0 };
            if seconds != reported {
                reported = seconds;
                shared.silent(id, seconds);
            }
            if owes && limit.is_some_and(|limit| silence >= limit) {
                self.silence_limit_reached.set(Some(silence));
                // Both directions receive the end of the stream.
                transport.shut();
                return;
            }
        }
    }

    /// Whether a request was sent, or is about to be.
    fn is_busy(&self) -> bool {
        let slots = self.slots.borrow();
        slots.has_sent() || slots.has_queued()
    }

    /// Sends a flush, whose reply shows whether the server is shutting down. False if the server
    /// does not support flush: the connection, which is idle, can be established again instead.
    fn send_probe(self: &Rc<Self>, io: &Io) -> bool {
        if !self.remote.export.offers(TransmissionFlags::SEND_FLUSH) {
            return false;
        }
        let own = self.clone();
        let probe_server = async move {
            let mark = own.remote.shared.mark();
            let result = own.request(flush_request(), None).await.result;
            own.conclude_flush(result, mark, "a flush on an idle connection");
        };
        io.spawn(probe_server).detach();
        true
    }
}
