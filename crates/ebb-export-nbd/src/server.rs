//! The server: accepts connections, negotiates, and ends connections when a volume or the server stops.
//!
//! One client cannot use up the resources of another: handshakes have a deadline, connections have a
//! limit, and each connection has its own memory budget. Connections are assigned to the workers
//! round-robin.

mod keep;
mod who;

pub use self::keep::KeptWriters;

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ebb_access::ClientIdentity;
use ebb_io::{Fd, Gather, Io, WorkerHandle, fd_from};
use ebb_tls::{ServerTls, Transport};
use ebb_volume::{Gate, LogLimit, Stop, Volumes, Writer};

use crate::client_limit::{ClientCount, ClientLimitError, ServerLimits, ServerParameters};
use crate::clients::{ConnectedClient, Connections, NbdClient, NbdConnectionId};
use crate::connection::{Connection, ConnectionEnd};
use crate::exports::{ExportTable, ExportsView, MissedExport};
use crate::handshake::{
    Handshake, HandshakeError, HandshakePolicy, HandshakeStep, Session, TlsMode,
};
use crate::kept::{KeptConnection, KeptConnections};
use crate::pending_handshakes::{HandshakeStage, Peer, PendingHandshake, PendingHandshakes};
use crate::refusal_log::RefusalLog;

/// Connections beyond the limits of descriptors and memory, each in place of an evicted handshake.
const BEING_CLOSED: usize = 4;
/// How long a client may take from its connection to the transmission phase.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait before the next accept when the process has no free descriptor.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);
/// While the process has no free descriptor, each listener fails ten times a second.
static EXHAUSTED: LogLimit = LogLimit::new(1, Duration::from_secs(10));

/// An NBD server. Cheap to clone; all clones are handles of the same server.
#[derive(Clone, Debug)]
pub struct Server(Arc<ServerState>);

#[derive(Debug)]
struct ServerState {
    exports: ExportTable,
    limits: ServerParameters,
    tls: RwLock<Option<ServerTls>>,
    policy: TlsMode,
    clients: ClientCount,
    numbers: AtomicU64,
    stop: Arc<Stop>,
    /// Entered by every accepted connection, handshakes included.
    inside: Gate,
    /// Accepted connections, and their limit.
    accepted: AtomicUsize,
    accepted_most: AtomicUsize,
    /// The most connections for which there is memory, and the setting that allows more.
    memory_most: RwLock<(usize, &'static str)>,
    pending: PendingHandshakes,
    /// Limits the log lines about refused connections.
    refusal_log: RefusalLog,
    /// All accepted connections.
    connections: Connections,
    /// Connections for the daemon's successor.
    kept: Arc<KeptConnections>,
}

/// Why a connection ended before it served anything.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the connection failed during the handshake")]
    Io(#[from] std::io::Error),
    #[error("cannot start TLS: {0}")]
    Tls(std::io::Error),
    #[error("cannot start TLS: the server has no keys")]
    NoTlsKeys,
    #[error("too many handshakes in progress from this address: closed in favour of a newer one")]
    Evicted,
    #[error(
        "{0} connections reached, the most for which there are file descriptors, since some are kept for the \
         connections of remote volumes: raise LimitNOFILE"
    )]
    Descriptors(usize),
    #[error("{0} connections reached, the most for which the control group has memory: raise {1}")]
    Memory(usize, &'static str),
    #[error(transparent)]
    ClientLimitError(#[from] ClientLimitError),
    #[error("the client closed the connection during the handshake")]
    Disconnected,
    #[error("the handshake took longer than {} s", HANDSHAKE_TIMEOUT.as_secs())]
    TimedOut,
    #[error(
        "it may not open volume {volume}: no entry of the volume's `allow` matches {who}{hint}"
    )]
    NotAllowed { volume: Arc<str>, who: Box<ClientIdentity>, hint: &'static str },
    #[error("the export was removed during the handshake")]
    ExportRemoved,
    #[error(
        "volume {0} is not what this client was told by the daemon before, so it must connect again"
    )]
    Changed(String),
    #[error(
        "volume {0} is not served by this daemon, which has taken over: a client of it has to connect where it is"
    )]
    NotServed(String),
    #[error("this server requires TLS now, and the client of volume {0} is connected without it")]
    PlainText(String),
    #[error("the server is stopping")]
    Stopped,
}

impl Server {
    /// A server of the volumes in `volumes`. `tls` says whether TLS is offered or required; `context` holds the
    /// keys.
    pub fn new(
        volumes: Volumes,
        limits: impl Into<ServerParameters>,
        tls: TlsMode,
        context: Option<ServerTls>,
    ) -> Server {
        Server(Arc::new(ServerState {
            exports: ExportTable::new(volumes),
            limits: limits.into(),
            tls: RwLock::new(context),
            policy: tls,
            clients: ClientCount::default(),
            numbers: AtomicU64::new(1),
            stop: Arc::default(),
            inside: Gate::default(),
            accepted: AtomicUsize::new(0),
            accepted_most: AtomicUsize::new(usize::MAX),
            memory_most: RwLock::new((usize::MAX, "MemoryMax")),
            pending: PendingHandshakes::default(),
            refusal_log: RefusalLog::default(),
            connections: Connections::default(),
            kept: Arc::default(),
        }))
    }

    /// The registry of the volumes it exports.
    pub fn volumes(&self) -> &Volumes {
        &self.0.exports.volumes
    }

    /// Sets the default export, which clients request by the empty name.
    pub fn set_default(&self, name: Option<&str>) {
        self.0.exports.set_default(name);
    }

    /// Changes the keys for new connections.
    pub fn set_tls_context(&self, context: Option<ServerTls>) {
        *self.0.tls.write().unwrap_or_else(PoisonError::into_inner) = context;
    }

    /// The clients that selected an export.
    pub fn list_clients(&self) -> Vec<NbdClient> {
        self.0.connections.views()
    }

    /// The client of this connection.
    pub fn client(&self, number: u64) -> Option<NbdClient> {
        self.0.connections.view(number)
    }

    /// Lets the requests in flight of one client complete, and ends its connection; does not wait. False if there is no
    /// such client.
    pub fn end_client(&self, number: u64) -> bool {
        let Some(client) = self.0.connections.client(number) else { return false };
        client.stop.stop();
        true
    }

    /// Ends the connections of clients that may not open their volumes any more, when their requests in flight have
    /// completed; does not wait. To be called after [`Volumes::set_allowed`].
    pub fn end_disallowed(&self) {
        let volumes = self.volumes();
        self.0.connections.end_others(|client| volumes.admits(&client.volume, &client.who));
    }

    /// Shuts down the socket of one connection, also if it has requests in flight.
    pub fn cut_client(&self, number: u64) {
        if let Some(fd) = self.0.connections.socket(number) {
            // Fails if the client has disconnected already.
            let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
        }
    }

    /// Connections in the transmission phase.
    pub fn clients(&self) -> usize {
        self.0.clients.count()
    }

    /// Accepted connections, those in the handshake included; each has a descriptor.
    pub fn accepted_connections(&self) -> usize {
        self.0.accepted.load(Ordering::Relaxed)
    }

    /// Refuses new connections beyond this number, those in the handshake included, because the process needs its
    /// remaining descriptors.
    pub fn limit_accepted_connections(&self, most: usize) {
        self.0.accepted_most.store(most, Ordering::Relaxed);
    }

    /// Limits connections to the number for which the control group has memory; `setting` allows
    /// more. Connections above it stay.
    pub fn limit_connections_by_memory(&self, most: usize, setting: &'static str) {
        *self.0.memory_most.write().unwrap_or_else(PoisonError::into_inner) = (most, setting);
    }

    /// The number of connections to this volume.
    pub fn connections(&self, name: &str) -> u64 {
        self.0.exports.known(name).map_or(0, |export| export.connections.inside())
    }

    /// Stops exporting a volume that was removed from the registry: its connections complete their in-flight
    /// requests and end. Does not close the volume.
    pub async fn withdraw(&self, io: &Io, name: &str) {
        let Some(export) = self.0.exports.remove(name) else { return };
        export.stop.stop();
        export.connections.shut();
        export.connections.empty().await;
        export.release(io.pool().memory());
    }

    /// Stops accepting connections, and lets all connections complete their in-flight requests and end. Does not
    /// wait: see [`Server::wait_for_volume`] and [`Server::wait_until_empty`].
    pub fn begin_stop(&self) {
        self.0.stop.stop();
        self.0.inside.shut();
    }

    /// After [`Server::begin_stop`]: waits until the connections to this volume have ended.
    pub async fn wait_for_volume(&self, name: &str) {
        let Some(export) = self.0.exports.get(name) else { return };
        export.connections.shut();
        export.connections.empty().await;
    }

    /// After [`Server::begin_stop`]: waits until all connections have ended, those in the handshake included.
    pub async fn wait_until_empty(&self) {
        self.0.inside.empty().await;
    }

    /// Shuts down the sockets of all remaining connections, also those with requests in flight, and returns their
    /// number. The clients see the end of the stream at once, even if a device that hangs keeps the process from
    /// exiting, and so its descriptors open.
    pub fn disconnect_all(&self) -> usize {
        let open = self.0.connections.sockets();
        for fd in &open {
            // Fails if the client has disconnected already.
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        open.len()
    }

    /// Stops accepting connections and waits until all connections have ended.
    pub async fn stop(&self) {
        self.begin_stop();
        self.wait_until_empty().await;
    }

    /// Accepts connections on a listening socket until the server stops, and spreads them over
    /// `workers`. Runs on the worker it is called on.
    pub async fn listen(&self, io: Io, socket: Fd, workers: Vec<WorkerHandle>) {
        for count in 0usize.. {
            let accepted = {
                let accept = async { Some(io.accept(&socket).await) };
                let stop = async {
                    self.0.stop.wait().await;
                    None
                };
                futures_lite::future::or(accept, stop).await
            };
            match accepted {
                None => return,
                Some(Ok(client)) => self.accepted(client, &workers[count % workers.len()]),
                Some(Err(error)) => {
                    if is_exhausted(&error) {
                        if let Some(suppressed) = EXHAUSTED.admit(ebb_mem::clock::now()) {
                            tracing::warn!(%error, suppressed, "cannot accept a client: raise LimitNOFILE");
                        }
                        // Peers that never complete the handshake may hold them all.
                        self.0.pending.evict_one();
                        io.sleep(OUT_OF_DESCRIPTORS).await;
                    } else {
                        tracing::debug!(%error, "a client disconnected before its connection was accepted");
                    }
                }
            }
        }
    }

    fn accepted(&self, client: OwnedFd, worker: &WorkerHandle) {
        let shared = self.0.clone();
        let counted = AcceptedConnection::new(self.0.clone());
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let limits = shared.limits.now();
        if shared.clients.count() >= limits.max_clients {
            let full = ClientLimitError::Full(limits.max_clients).into();
            return shared.log_refusal(number, Peer::of(&client), &full);
        }
        let descriptors = shared.accepted_most.load(Ordering::Relaxed);
        let (memory, setting) = *shared.memory_most.read().unwrap_or_else(PoisonError::into_inner);
        let excess = self.accepted_connections().saturating_sub(descriptors.min(memory));
        if excess > 0 {
            let (peer, now) = (Peer::of(&client), ebb_mem::clock::now());
            // A handshake that is evicted ends soon: meanwhile there may be a few more.
            if !shared.pending.evict_for(peer.address(), now) || excess > BEING_CLOSED {
                let refused = match memory < descriptors {
                    true => Refused::Memory(memory, setting),
                    false => Refused::Descriptors(descriptors),
                };
                return shared.log_refusal(number, peer, &refused);
            }
        }
        worker.spawn(move |io| async move {
            if let Some(_inside) = shared.inside.enter(io.slot()) {
                // Not by the worker itself, which may not.
                let client = io.offload(move || with_options(client)).await;
                let new = NewConnection::Accepted(fd_from(client));
                shared.serve_client(io, number, new, limits).await;
            }
            // Its descriptor is closed.
            drop(counted);
        });
    }
}

/// A connection to be served.
enum NewConnection {
    /// Its client begins the handshake.
    Accepted(Fd),
    /// A predecessor has carried out the handshake.
    Kept(Box<KeptConnection>),
}

/// The result of a handshake, the client, and the bytes received after it.
type Negotiated = (Session, Transport, Box<ClientIdentity>, Box<[u8]>);

/// Sets a connection's options: no Nagle delay for small replies. Unix sockets do not have them.
fn with_options(client: OwnedFd) -> OwnedFd {
    let _ = rustix::net::sockopt::set_tcp_nodelay(&client, true);
    let _ = rustix::net::sockopt::set_socket_keepalive(&client, true);
    client
}

fn is_exhausted(error: &std::io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

impl ServerState {
    /// Serves one connection to its end.
    async fn serve_client(&self, io: Io, number: u64, new: NewConnection, limits: ServerLimits) {
        let peer = Peer::of(new.socket());
        let _listed = self.connections.add(number, new.socket());
        // Boxed: otherwise the handshake's state would remain part of the connection's task and double
        // the memory of an idle connection. The same holds for a variable with its result.
        let negotiation = Box::pin(self.begin(&io, (number, peer), new, limits));
        let (session, transport, who, rest) = match negotiation.await {
            Ok(Some(parts)) => parts,
            Ok(None) => return,
            Err(error) => return self.log_refusal(number, peer, &error),
        };
        let Some(export) = self.exports.get(&session.export.name) else {
            return self.log_refusal(number, peer, &Refused::ExportRemoved);
        };
        let request = export.admission(self.exports.is_alone(), limits.max_clients);
        let _counted = match self.clients.admit(request) {
            Ok(counted) => counted,
            Err(why) => return self.log_refusal(number, peer, &why.into()),
        };
        let Some(_pass) = export.connections.enter(io.slot()) else { return };
        let volume = export.volume.clone();
        // While the client is connected, no guest may write.
        let writes = !volume.read_only();
        let lease = writes.then(|| volume.claim_writer(Writer::nbd(), false)).transpose();
        let _lease = match lease {
            Ok(lease) => lease,
            Err(conflict) => {
                if let Some(suppressed) = export.log_limit.admit(ebb_mem::clock::now()) {
                    let (connection, volume) = (NbdConnectionId(number), &**volume.name());
                    tracing::warn!(%connection, volume, error = %conflict, suppressed, "refused");
                }
                return;
            }
        };
        let client = ConnectedClient::new(number, (peer, who), &transport, &volume);
        self.connections.note_client(&client);
        // The list may have changed since the handshake; from here on a change finds the client.
        if !self.exports.volumes.admits(&client.volume, &client.who) {
            let (volume, who) = (client.volume.clone(), client.who.clone());
            let hint = who::certificate_hint(transport.is_encrypted(), &who);
            let why = Refused::NotAllowed { volume, who, hint };
            return self.log_refusal(number, peer, &why);
        }
        let logged = export.log_limit.admit(ebb_mem::clock::now());
        log_connected(&client, logged);
        let logged = logged.is_some();
        let memory = limits.connection_memory;
        let buffers = export.queue(io.pool());
        let connection = Connection::new(io, volume, session, transport, buffers, memory, client);
        let stops = [self.stop.clone(), export.stop.clone()];
        let end = Rc::clone(&connection).serve(&rest, stops, &self.kept).await;
        self.log_closed(number, &end, logged);
    }

    /// Logs the end of a connection; at debug level if its beginning was not `logged`.
    fn log_closed(&self, number: u64, end: &ConnectionEnd, logged: bool) {
        let (connection, client) = (NbdConnectionId(number), self.connections.client(number));
        let peer = client.as_ref().map(|client| client.peer);
        let peer = peer.as_ref().map(tracing::field::display);
        let volume = client.as_ref().map(|client| &*client.volume);
        let identity = client.as_ref().and_then(|client| client.identity());
        match end {
            // Its "connected" line was suppressed.
            end if !logged => {
                tracing::debug!(%connection, volume, peer, identity, reason = %end, "closed");
            }
            ConnectionEnd::Protocol(error) => {
                tracing::warn!(%connection, volume, peer, identity, %error, "closed: the client violated the protocol");
            }
            ConnectionEnd::Broken(error) => {
                tracing::info!(%connection, volume, peer, identity, %error, "the connection failed");
            }
            end => tracing::info!(%connection, volume, peer, identity, reason = %end, "closed"),
        }
    }

    /// The handshake, within its deadline, unless it is evicted for a newer one or the server stops.
    async fn negotiate_in_time(
        &self,
        io: &Io,
        client_id: (u64, Peer),
        client: Fd,
        limits: ServerLimits,
    ) -> Result<Option<Negotiated>, Refused> {
        let entered = self.pending.enter(client_id.1.address(), ebb_mem::clock::now());
        let evicted = async {
            entered.evicted.wait().await;
            Err(Refused::Evicted)
        };
        let handshake = self.negotiate(io, client_id, (client, &entered), limits);
        let handshake = futures_lite::future::or(handshake, evicted);
        let in_time = async { io.timeout(HANDSHAKE_TIMEOUT, handshake).await };
        let stopped = async {
            self.stop.wait().await;
            Some(Err(Refused::Stopped))
        };
        futures_lite::future::or(in_time, stopped).await.unwrap_or(Err(Refused::TimedOut))
    }

    /// Logs a refused connection. Clients that only connect and disconnect are logged at debug level. The number of
    /// lines is limited, because any peer that can connect can cause them.
    fn log_refusal(&self, number: u64, peer: Peer, why: &Refused) {
        let connection = NbdConnectionId(number);
        if matches!(
            why,
            Refused::Io(_) | Refused::Disconnected | Refused::TimedOut | Refused::Stopped
        ) {
            tracing::debug!(%connection, %peer, error = %why, "refused");
        } else if let Some(suppressed) = self.refusal_log.admit(&peer, ebb_mem::clock::now()) {
            match why {
                // A client that was served until a takeover.
                Refused::NotServed(_) | Refused::PlainText(_) | Refused::Changed(_) => {
                    tracing::warn!(%connection, %peer, error = %why, suppressed, "not continued");
                }
                _ => tracing::info!(%connection, %peer, error = %why, suppressed, "refused"),
            }
        }
    }

    /// Option negotiation. `None` if the client aborted it.
    async fn negotiate(
        &self,
        io: &Io,
        (number, peer): (u64, Peer),
        (client, entered): (Fd, &PendingHandshake<'_>),
        limits: ServerLimits,
    ) -> Result<Option<Negotiated>, Refused> {
        let who = RefCell::new(who::identity(&client, peer));
        let mut transport = Transport::new(client, None);
        let mut handshake =
            Handshake::new(HandshakePolicy { tls: self.policy, ..HandshakePolicy::default() });
        let view = ExportsView {
            exports: &self.exports,
            limits,
            clients: &self.clients,
            who,
            missed: RefCell::default(),
            limit_error: RefCell::default(),
        };
        let (mut input, mut output) = (Vec::new(), Vec::new());
        handshake.greeting(&mut output);
        let mut step = HandshakeStep::NeedMore;
        loop {
            send(io, &transport, &mut output).await?;
            match step {
                HandshakeStep::NeedMore => receive(io, &transport, &mut input).await?,
                HandshakeStep::Again => {}
                HandshakeStep::Abort => {
                    transport.finish(io).await;
                    return Ok(None);
                }
                HandshakeStep::StartTls => {
                    let context = self.tls.read().unwrap_or_else(PoisonError::into_inner).clone();
                    let context = context.ok_or(Refused::NoTlsKeys)?;
                    let started = transport.start_tls(io, context.session()?, peer.address()).await;
                    started.map_err(Refused::Tls)?;
                    handshake.tls_established()?;
                    view.who.borrow_mut().tls = transport.peer_identity().map(Into::into);
                    entered.reached(HandshakeStage::Encrypted);
                }
                HandshakeStep::Transmission(session) => {
                    let who = Box::new(view.who.into_inner());
                    return Ok(Some((session, transport, who, input.into_boxed_slice())));
                }
            }
            let advanced = handshake.advance(&input, &view, &mut output);
            let mut not_allowed = None;
            match view.missed.take() {
                Some(MissedExport::NotAllowed(volume)) => {
                    let who = Box::new(view.who.borrow().clone());
                    let hint = who::certificate_hint(transport.is_encrypted(), &who);
                    not_allowed = Some(Refused::NotAllowed { volume, who, hint });
                }
                // An error is logged as the reason of the refusal.
                Some(MissedExport::Unknown(name)) if advanced.is_ok() => {
                    if let Some(suppressed) = self.refusal_log.admit(&peer, ebb_mem::clock::now()) {
                        let connection = NbdConnectionId(number);
                        tracing::info!(%connection, %peer, name, suppressed, "requested an unknown export");
                    }
                }
                Some(MissedExport::Unavailable(name)) => {
                    let connection = NbdConnectionId(number);
                    tracing::debug!(%connection, %peer, name, "requested an export that is not served now");
                }
                Some(MissedExport::Unknown(_)) | None => {}
            }
            let (consumed, next) = match advanced {
                Ok(ok) => ok,
                Err(error) => {
                    // Replies that were encoded before the error still reach the client.
                    send(io, &transport, &mut output).await?;
                    return Err(not_allowed.unwrap_or(error.into()));
                }
            };
            if let Some(why) = not_allowed {
                self.log_refusal(number, peer, &why);
            }
            if let Some(why) = view.limit_error.take() {
                self.log_refusal(number, peer, &why.into());
            }
            if consumed > 0 {
                entered.reached(HandshakeStage::Understood);
                // A list of many volumes takes time, and options may come without end: other tasks have their turn.
                io.yield_iteration().await;
            }
            input.drain(..consumed);
            step = next;
        }
    }
}

/// Logs a client that selected an export; at debug level if there were too many lines, else with their number.
fn log_connected(client: &ConnectedClient, logged: Option<u64>) {
    let ConnectedClient { number, volume, peer, tls, .. } = client;
    let (connection, volume, identity) = (NbdConnectionId(*number), &**volume, client.identity());
    match logged {
        Some(0) => tracing::info!(%connection, volume, tls, %peer, identity, "connected"),
        Some(suppressed) => {
            tracing::info!(%connection, volume, tls, %peer, identity, suppressed, "connected");
        }
        None => tracing::debug!(%connection, volume, tls, %peer, identity, "connected"),
    }
}

/// Counts an accepted connection until it is dropped.
struct AcceptedConnection(Arc<ServerState>);

impl AcceptedConnection {
    fn new(server: Arc<ServerState>) -> AcceptedConnection {
        server.accepted.fetch_add(1, Ordering::Relaxed);
        AcceptedConnection(server)
    }
}

impl Drop for AcceptedConnection {
    fn drop(&mut self) {
        self.0.accepted.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn send(io: &Io, transport: &Transport, output: &mut Vec<u8>) -> std::io::Result<()> {
    // A list of many exports does not fit into one message.
    for chunk in output.chunks(8 << 10) {
        let mut message = Box::<Gather>::default();
        message.push_bytes(chunk);
        transport.send(io, message).await.0?;
    }
    output.clear();
    transport.send_pending(io).await
}

async fn receive(io: &Io, transport: &Transport, input: &mut Vec<u8>) -> Result<(), Refused> {
    let buf = io.pool().take(4096).await;
    let (result, buf) = transport.recv(io, buf, 0..4096).await;
    match result? {
        0 => Err(Refused::Disconnected),
        // Bounded: the handshake consumes or refuses an option before it requests more input.
        count => {
            input.extend_from_slice(&buf[..count]);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_task_of_a_connection_is_small() {
        type Client = (&'static ServerState, Io, u64, NewConnection, ServerLimits);
        let bytes = size_of_future(|(shared, io, number, client, limits): Client| {
            shared.serve_client(io, number, client, limits)
        });
        assert!(bytes <= 2688, "{bytes} bytes for each idle connection");
    }
}
