//! Connections that survive a restart: a server keeps them for its successor, which continues them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebb_export::Backing;
use ebb_io::{Fd, Io, WorkerHandle};
use ebb_tls::Transport;
use ebb_volume::{Identity, Lease, Writer};

use super::{AcceptedConnection, Negotiated, NewConnection, Refused, Server, ServerState, who};
use crate::client_limit::ServerLimits;
use crate::exports::{ExportsView, MissedExport};
use crate::handshake::{Exports, TlsMode};
use crate::kept::{KeptConnection, still_has};
use crate::pending_handshakes::Peer;

impl Server {
    /// From now on a stop does not close the connections of clients in the transmission phase: their requests in flight
    /// complete, and [`Server::take_kept`] has them after [`Server::wait_until_empty`]. Connections under TLS, and clients
    /// that send less than 64 KiB or receive no reply in a second within a request, or take more than 3 s for it, are closed
    /// nevertheless.
    pub fn keep_connections(&self) {
        self.0.kept.want();
    }

    /// The connections that were kept. Blocks for a moment.
    pub fn take_kept(&self) -> Vec<KeptConnection> {
        let mut kept = self.0.kept.take();
        let mut stores = Stores::new(&self.0);
        kept.retain_mut(|connection| match stores.of(&connection.session.export.name) {
            Some(backing) => {
                backing.store.key.clone_into(&mut connection.store);
                true
            }
            None => false,
        });
        kept
    }

    /// Keeps guests from becoming the writer of a volume that these connections write to. To be called before guests are
    /// served; for [`Server::adopt`].
    pub fn claim_writers(&self, connections: &[KeptConnection]) -> KeptWriters {
        let mut writers = BTreeMap::new();
        for name in connections.iter().map(|kept| &kept.session.export.name) {
            let export = if writers.contains_key(name) { None } else { self.0.exports.get(name) };
            if let Some(export) = export.filter(|export| !export.volume.read_only())
                // One that another writer has refuses the connections, which log that.
                && let Ok(lease) = export.volume.claim_writer(Writer::nbd(), false)
            {
                writers.insert(name.clone(), Arc::new(lease));
            }
        }
        KeptWriters(writers)
    }

    /// Continues connections that a predecessor has kept, spread over `workers`. One is closed if its volume, as it is now, is
    /// not what the client was told, or has another store, or if the client may not open it. Blocks for a moment.
    pub fn adopt(
        &self,
        connections: Vec<KeptConnection>,
        writers: &KeptWriters,
        workers: &[WorkerHandle],
    ) {
        let mut stores = Stores::new(&self.0);
        for (connection, worker) in connections.into_iter().zip(workers.iter().cycle()) {
            let volume = &connection.session.export.name;
            let (store, size) = (connection.store.clone(), connection.session.export.size);
            let store = Identity::of_key(store);
            let before = Backing { volume: volume.clone(), store, size, ..Backing::default() };
            let now = stores.of(volume);
            if now.is_some_and(|now| now.continues(&before.recorded()).is_err()) {
                let why = Refused::Changed(volume.clone());
                let number = self.0.numbers.fetch_add(1, Ordering::Relaxed);
                self.0.log_refusal(number, Peer::of(&connection.socket), &why);
                continue;
            }
            let writer = writers.0.get(volume).cloned();
            self.continue_on(connection, writer, worker);
        }
    }

    fn continue_on(
        &self,
        connection: KeptConnection,
        writer: Option<Arc<Lease>>,
        worker: &WorkerHandle,
    ) {
        let shared = self.0.clone();
        let counted = AcceptedConnection::new(self.0.clone());
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let limits = shared.limits.now();
        let new = NewConnection::Kept(Box::new(connection));
        worker.spawn(move |io| async move {
            if let Some(_inside) = shared.inside.enter(io.slot()) {
                shared.serve_client(io, number, new, limits).await;
            }
            // Its descriptor is closed.
            drop((counted, writer));
        });
    }
}

/// The right to write to the volumes of kept connections, until those have it themselves.
#[derive(Debug, Default)]
pub struct KeptWriters(BTreeMap<String, Arc<Lease>>);

/// The identities of volumes' stores, each looked up once.
struct Stores<'a> {
    server: &'a ServerState,
    known: BTreeMap<String, Option<Backing>>,
}

impl Stores<'_> {
    fn new(server: &ServerState) -> Stores<'_> {
        Stores { server, known: BTreeMap::new() }
    }

    fn of(&mut self, volume: &str) -> Option<&Backing> {
        let look_up = || {
            let export = self.server.exports.get(volume)?;
            Some(Backing::of(&export.volume))
        };
        if !self.known.contains_key(volume) {
            self.known.insert(volume.to_owned(), look_up());
        }
        self.known.get(volume)?.as_ref()
    }
}

impl NewConnection {
    pub(super) fn socket(&self) -> &Fd {
        match self {
            NewConnection::Accepted(socket) => socket,
            NewConnection::Kept(kept) => &kept.socket,
        }
    }
}

impl ServerState {
    /// What a client has agreed on in the handshake. `None` if it has aborted that.
    pub(super) async fn begin(
        &self,
        io: &Io,
        (number, peer): (u64, Peer),
        new: NewConnection,
        limits: ServerLimits,
    ) -> Result<Option<Negotiated>, Refused> {
        match new {
            NewConnection::Accepted(client) => {
                self.negotiate_in_time(io, (number, peer), client, limits).await
            }
            NewConnection::Kept(kept) => self.restore(*kept, peer, limits).map(Some),
        }
    }

    /// The result of a handshake that a predecessor has carried out, if it would be the same now.
    fn restore(
        &self,
        kept: KeptConnection,
        peer: Peer,
        limits: ServerLimits,
    ) -> Result<Negotiated, Refused> {
        let KeptConnection { socket, session, rest, store: _ } = kept;
        if self.policy == TlsMode::Require {
            return Err(Refused::PlainText(session.export.name));
        }
        let who = who::identity(&socket, peer);
        let view = ExportsView {
            exports: &self.exports,
            limits,
            clients: &self.clients,
            who: RefCell::new(who),
            missed: RefCell::default(),
            limit_error: RefCell::default(),
        };
        let found = view.lookup(&session.export.name);
        let who = Box::new(view.who.take());
        match found {
            Some(now) if still_has(&now, &session) => {
                Ok((session, Transport::new(socket, None), who, rest))
            }
            Some(now) => Err(Refused::Changed(now.name)),
            None => match view.missed.take() {
                Some(MissedExport::NotAllowed(volume)) => {
                    Err(Refused::NotAllowed { volume, who, hint: "" })
                }
                _ => Err(Refused::NotServed(session.export.name)),
            },
        }
    }
}
