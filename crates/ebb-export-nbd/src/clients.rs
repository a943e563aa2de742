//! The connected clients: who they are and what they use, for an operator.
//!
//! # Invariants
//! - The counters of a connection are written by its worker only, with plain stores: no request pays for a shared cache
//!   line. Other threads read them from time to time.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ebb_access::ClientIdentity;
use ebb_io::Fd;
use ebb_tls::Transport;
use ebb_volume::{Stop, Volume};

use crate::pending_handshakes::Peer;

/// A connection by its number, as the list of clients and the log name it: `nbd-17`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdConnectionId(pub u64);

impl NbdConnectionId {
    /// The connection that `text` names.
    pub fn parse(text: &str) -> Option<NbdConnectionId> {
        let number = text.strip_prefix("nbd-")?.parse().ok().map(NbdConnectionId)?;
        // Not `nbd-+7`.
        (number.to_string() == text).then_some(number)
    }
}

impl fmt::Display for NbdConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nbd-{}", self.0)
    }
}

/// Counters of one connection.
#[derive(Debug, Default)]
pub(crate) struct ClientCounters {
    pub(crate) begun: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
}

/// Adds to a counter that only this thread writes.
#[inline]
pub(crate) fn count(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// A client that selected an export.
#[derive(Debug)]
pub(crate) struct ConnectedClient {
    /// The number of its connection.
    pub(crate) number: u64,
    pub(crate) volume: Arc<str>,
    pub(crate) peer: Peer,
    pub(crate) who: Box<ClientIdentity>,
    pub(crate) tls: bool,
    pub(crate) read_only: bool,
    pub(crate) since: Instant,
    pub(crate) counters: Arc<ClientCounters>,
    /// Ends the connection when its requests in flight have completed.
    pub(crate) stop: Stop,
    /// It is ended because the client may not open the volume any more.
    pub(crate) not_allowed: AtomicBool,
}

/// A connected client, for statistics.
#[derive(Clone, Debug)]
pub struct NbdClient {
    /// The number of its connection.
    pub number: u64,
    /// Its volume.
    pub volume: Arc<str>,
    /// Its address; `unix` on a unix socket.
    pub address: String,
    /// Who it is: `psk:NAME`, `cn:NAME` or `uid:NUMBER`.
    pub identity: Option<String>,
    /// The number of its process, on a unix socket.
    pub pid: Option<u32>,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Whether it may only read.
    pub read_only: bool,
    /// When it selected the export.
    pub since: Instant,
    /// Requests in flight.
    pub in_flight: u64,
    /// Completed requests.
    pub requests: u64,
    /// Bytes of its reads.
    pub read_bytes: u64,
    /// Bytes of its writes.
    pub written_bytes: u64,
}

impl ConnectedClient {
    /// A client of `volume`, from now on.
    pub(crate) fn new(
        number: u64,
        (peer, who): (Peer, Box<ClientIdentity>),
        transport: &Transport,
        volume: &Volume,
    ) -> Arc<ConnectedClient> {
        Arc::new(ConnectedClient {
            number,
            volume: volume.name().clone(),
            peer,
            who,
            tls: transport.is_encrypted(),
            read_only: volume.read_only(),
            since: ebb_mem::clock::now(),
            counters: Arc::default(),
            stop: Stop::default(),
            not_allowed: AtomicBool::new(false),
        })
    }

    /// Who it is: `psk:NAME`, `cn:NAME` or `uid:NUMBER`.
    pub(crate) fn identity(&self) -> Option<String> {
        let by_socket = || match self.peer {
            Peer::Unix { uid, .. } => Some(format!("uid:{uid}")),
            Peer::Tcp(_) | Peer::Unknown => None,
        };
        self.who.tls.as_deref().map(str::to_owned).or_else(by_socket)
    }

    fn view(&self) -> NbdClient {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        // Read first, so that the difference is not negative.
        let requests = load(&counters.completed);
        let (address, pid) = match self.peer {
            Peer::Tcp(address) => (address.to_string(), None),
            Peer::Unix { pid, .. } => ("unix".to_owned(), Some(pid)),
            Peer::Unknown => ("unknown".to_owned(), None),
        };
        NbdClient {
            number: self.number,
            volume: self.volume.clone(),
            address,
            identity: self.identity(),
            pid,
            tls: self.tls,
            read_only: self.read_only,
            since: self.since,
            in_flight: load(&counters.begun).saturating_sub(requests),
            requests,
            read_bytes: load(&counters.read_bytes),
            written_bytes: load(&counters.written_bytes),
        }
    }
}

/// A connection: its socket, and its client once that has selected an export.
#[derive(Debug)]
struct AcceptedSocket {
    socket: Weak<OwnedFd>,
    client: Option<Arc<ConnectedClient>>,
}

/// The connections by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<BTreeMap<u64, AcceptedSocket>>);

impl Connections {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, AcceptedSocket>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a connection until the result is dropped.
    pub(crate) fn add(&self, number: u64, fd: &Fd) -> ListedConnection<'_> {
        let accepted = AcceptedSocket { socket: Arc::downgrade(fd), client: None };
        self.lock().insert(number, accepted);
        ListedConnection(self, number)
    }

    /// The client of a connection has selected an export.
    pub(crate) fn note_client(&self, client: &Arc<ConnectedClient>) {
        if let Some(accepted) = self.lock().get_mut(&client.number) {
            accepted.client = Some(client.clone());
        }
    }

    pub(crate) fn views(&self) -> Vec<NbdClient> {
        let clients = self.lock();
        clients.values().filter_map(|accepted| accepted.client.as_ref()).map(|c| c.view()).collect()
    }

    pub(crate) fn view(&self, number: u64) -> Option<NbdClient> {
        self.client(number).map(|client| client.view())
    }

    pub(crate) fn client(&self, number: u64) -> Option<Arc<ConnectedClient>> {
        self.lock().get(&number)?.client.clone()
    }

    /// Ends the connections of clients that `admits` refuses, when their requests in flight have completed.
    pub(crate) fn end_others(&self, admits: impl Fn(&ConnectedClient) -> bool) {
        let clients = self.lock();
        let clients = clients.values().filter_map(|accepted| accepted.client.as_ref());
        for client in clients.filter(|client| !admits(client)) {
            client.not_allowed.store(true, Ordering::Relaxed);
            client.stop.stop();
        }
    }

    /// The socket of a connection.
    pub(crate) fn socket(&self, number: u64) -> Option<Fd> {
        self.lock().get(&number)?.socket.upgrade()
    }

    /// All sockets.
    pub(crate) fn sockets(&self) -> Vec<Fd> {
        self.lock().values().filter_map(|accepted| accepted.socket.upgrade()).collect()
    }
}

/// See [`Connections::add`].
pub(crate) struct ListedConnection<'a>(&'a Connections, u64);

impl Drop for ListedConnection<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_named_in_one_way() {
        assert_eq!(NbdConnectionId(17).to_string(), "nbd-17");
        assert_eq!(NbdConnectionId::parse("nbd-17"), Some(NbdConnectionId(17)));
        for other in ["nbd-", "nbd-+7", "nbd-07", "xen-1-2", "17", "nbd-x"] {
            assert_eq!(NbdConnectionId::parse(other), None, "{other}");
        }
    }
}
