//! The server: listens, lets clients in, and sees them off.
//!
//! A client costs nothing of anybody else's: handshakes have a deadline, connections a limit, and
//! each connection its own memory budget. Connections are spread over the workers in turn.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use ebb_io::{Fd, Gather, Io, WorkerHandle, fd_from};
use ebb_mem::PoolParameters;
use ebb_tls::{ServerTls, Transport};
use ebb_volume::{Gate, LogLimit, Stop, Volume, Writer};

use crate::connection::{Connection, End};
use crate::door::{Door, Entered, Lines, Peer, Stage};
use crate::exports::{Registry, View};
use crate::handshake::{Handshake, HandshakeError, Policy, Session, Step, Tls};
use crate::seats::{NoSeat, Seats};

/// How long a client may take from its first byte to the transmission phase.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long to wait when the process is out of descriptors.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);
/// As long as descriptors are missing each listener finds that out ten times a second.
static EXHAUSTED: LogLimit = LogLimit::new(1, Duration::from_secs(10));

/// What clients may do to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time that have logged in; handshakes are counted apart. Where several volumes are served,
    /// those of one are at most four times as many as the places they leave free.
    pub max_clients: usize,
    /// The largest READ or WRITE, bytes: 4 KiB to 64 MiB.
    pub max_request: u32,
    /// Memory the requests of one connection may hold, bytes.
    pub connection_memory: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_clients: 256, max_request: 32 << 20, connection_memory: 64 << 20 }
    }
}

/// An NBD server. Cheap to clone; the clones are one server.
#[derive(Clone, Debug)]
pub struct Server(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    registry: Registry,
    limits: RwLock<Limits>,
    tls: RwLock<Option<ServerTls>>,
    policy: Tls,
    seats: Seats,
    numbers: AtomicU64,
    stop: Arc<Stop>,
    /// Everybody who was let in, handshakes included.
    inside: Gate,
    door: Door,
    /// Of the log, on refusals.
    lines: Lines,
    /// The sockets of all accepted clients, by connection number.
    sockets: Mutex<BTreeMap<u64, Weak<OwnedFd>>>,
}

/// Why a connection ended before it served anything.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the connection broke during the handshake")]
    Io(#[from] std::io::Error),
    #[error("no TLS: {0}")]
    Tls(std::io::Error),
    #[error("too many handshakes of its address at once: this one made room for a newer one")]
    Crowded,
    #[error(transparent)]
    NoSeat(#[from] NoSeat),
    #[error("the client closed the connection during the handshake")]
    Left,
    #[error("the handshake took longer than {} s", HANDSHAKE.as_secs())]
    Late,
    #[error("the export was removed during the handshake")]
    Gone,
    #[error("the server is stopping")]
    Stopped,
}

impl Server {
    /// A server without volumes. `tls` says whether TLS is offered or demanded, `context` with
    /// which keys.
    pub fn new(limits: Limits, tls: Tls, context: Option<ServerTls>) -> Server {
        Server(Arc::new(Shared {
            registry: Registry::default(),
            limits: RwLock::new(limits),
            tls: RwLock::new(context),
            policy: tls,
            seats: Seats::default(),
            numbers: AtomicU64::new(1),
            stop: Arc::default(),
            inside: Gate::default(),
            door: Door::default(),
            lines: Lines::default(),
            sockets: Mutex::default(),
        }))
    }

    /// Offers a volume under its name; `pool` limits the free pages each of its queues keeps.
    pub fn add(&self, volume: Arc<Volume>, pool: Arc<PoolParameters>) {
        self.0.registry.add(volume, pool);
    }

    /// Says which volume answers to the empty name.
    pub fn set_default(&self, name: Option<&str>) {
        self.0.registry.set_default(name);
    }

    /// Changes the limits for connections to come.
    pub fn set_limits(&self, limits: Limits) {
        *self.0.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// Changes the keys for connections to come.
    pub fn set_tls_context(&self, context: Option<ServerTls>) {
        *self.0.tls.write().unwrap_or_else(PoisonError::into_inner) = context;
    }

    /// Connections at the moment.
    pub fn clients(&self) -> usize {
        self.0.seats.taken()
    }

    /// The volumes on offer, in the order of their names, each with the number of connections that
    /// use it.
    pub fn volumes(&self) -> Vec<(Arc<Volume>, u64)> {
        let all = self.0.registry.all().into_iter();
        all.map(|export| (export.volume.clone(), export.connections.inside())).collect()
    }

    /// Withdraws a volume: its connections finish what is under way and end. It is not closed.
    pub async fn withdraw(&self, io: &Io, name: &str) {
        let Some(export) = self.0.registry.remove(name) else { return };
        export.stop.stop();
        export.connections.shut();
        export.connections.empty().await;
        export.release(io.pool().memory());
    }

    /// Refuses the clients of a volume that is not offered, with `why`; until it is added or withdrawn.
    pub fn refuse(&self, name: &str, why: &str) {
        self.0.registry.refuse(name, why);
    }

    /// The volume offered under this name.
    pub fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        if name.is_empty() {
            return None;
        }
        self.0.registry.get(name).map(|export| export.volume.clone())
    }

    /// Lets nobody in any more, and has all connections finish what is under way and end. Does not wait:
    /// see [`Server::seen_off`] and [`Server::empty`].
    pub fn begin_stop(&self) {
        self.0.stop.stop();
        self.0.inside.shut();
    }

    /// After [`Server::begin_stop`]: waits until the connections of this volume have ended.
    pub async fn seen_off(&self, name: &str) {
        let Some(export) = self.0.registry.get(name) else { return };
        export.connections.shut();
        export.connections.empty().await;
    }

    /// After [`Server::begin_stop`]: waits until all clients are gone, those in their handshake included.
    pub async fn empty(&self) {
        self.0.inside.empty().await;
    }

    /// Ends the connections that are left, whatever is under way on them: their clients hear of it at once, also where
    /// the kernel holds the process, and so the descriptors, for as long as a device hangs. How many there were.
    pub fn hang_up(&self) -> usize {
        let sockets = self.0.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        let open: Vec<_> = sockets.values().filter_map(Weak::upgrade).collect();
        for fd in &open {
            // One that is gone already is no loss.
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        open.len()
    }

    /// Lets nobody in any more and waits until everybody has been seen off.
    pub async fn stop(&self) {
        self.begin_stop();
        self.empty().await;
    }

    /// Accepts connections on a listening socket until the server stops, and spreads them over
    /// `workers`. Runs on the worker it is called on.
    pub async fn listen(&self, io: Io, socket: Fd, workers: Vec<WorkerHandle>) {
        for turn in 0usize.. {
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
                Some(Ok(client)) => self.welcome(client, &workers[turn % workers.len()]),
                Some(Err(error)) => {
                    if is_exhausted(&error) {
                        if let Some(suppressed) = EXHAUSTED.admit(ebb_mem::clock::now()) {
                            tracing::warn!(%error, suppressed, "cannot accept a client: raise LimitNOFILE");
                        }
                        io.sleep(OUT_OF_DESCRIPTORS).await;
                    } else {
                        tracing::debug!(%error, "a client left before it was accepted");
                    }
                }
            }
        }
    }

    fn welcome(&self, client: OwnedFd, worker: &WorkerHandle) {
        let shared = self.0.clone();
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let limits = *shared.limits.read().unwrap_or_else(PoisonError::into_inner);
        if shared.seats.taken() >= limits.max_clients {
            let full = NoSeat::Full(limits.max_clients).into();
            return shared.tell_refusal(number, Peer::of(&client), &full);
        }
        // Small replies must not wait for larger ones; unix sockets have no such option.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&client, true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&client, true);
        worker.spawn(move |io| async move {
            if let Some(_inside) = shared.inside.enter() {
                shared.attend(io, number, client, limits).await;
            }
        });
    }
}

/// What a handshake comes to, and what came behind it.
type Greeted = (Session, Transport, Vec<u8>);

fn is_exhausted(error: &std::io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))
}

impl Shared {
    /// One client from its first byte to its last.
    async fn attend(&self, io: Io, number: u64, client: OwnedFd, limits: Limits) {
        let peer = Peer::of(&client);
        let client = fd_from(client);
        let _listed = Listed::new(&self.sockets, number, &client);
        // A box of its own: what the handshake needs would else stay part of the connection's task,
        // and double what an idle connection weighs. So would its result, had it a name here.
        let greeting = Box::pin(self.greet(&io, (number, peer), client, limits));
        let (session, transport, rest) = match greeting.await {
            Ok(Some(parts)) => parts,
            Ok(None) => return,
            Err(error) => return self.tell_refusal(number, peer, &error),
        };
        let Some(export) = self.registry.get(&session.export.name) else {
            return self.tell_refusal(number, peer, &Refused::Gone);
        };
        let wanted = export.seat(self.registry.is_alone(), limits.max_clients);
        let _seat = match self.seats.take(wanted) {
            Ok(seat) => seat,
            Err(why) => return self.tell_refusal(number, peer, &why.into()),
        };
        let Some(_pass) = export.connections.enter() else { return };
        let (volume, tls) = (export.volume.clone(), session.tls);
        // As long as it is connected no guest may write.
        let writes = !volume.read_only();
        let lease = writes.then(|| volume.claim_writer(Writer::nbd(), false)).transpose();
        let _lease = match lease {
            Ok(lease) => lease,
            Err(conflict) => {
                if let Some(suppressed) = export.lines.admit(ebb_mem::clock::now()) {
                    tracing::warn!(connection = number, error = %conflict, suppressed, "refused");
                }
                return;
            }
        };
        let logged = export.lines.admit(ebb_mem::clock::now());
        match logged {
            Some(0) => {
                tracing::info!(connection = number, volume = %volume.name(), tls, %peer, "connected");
            }
            Some(suppressed) => {
                tracing::info!(connection = number, volume = %volume.name(), tls, %peer, suppressed, "connected");
            }
            None => {
                tracing::debug!(connection = number, volume = %volume.name(), tls, %peer, "connected");
            }
        }
        let memory = limits.connection_memory;
        let buffers = export.queue(io.pool());
        let connection = Connection::new(io, number, volume, session, transport, buffers, memory);
        let end =
            Rc::clone(&connection).serve(&rest, [self.stop.clone(), export.stop.clone()]).await;
        match end {
            // It had no line when it came.
            end if logged.is_none() => {
                tracing::debug!(connection = number, reason = %end, "closed");
            }
            End::Protocol(error) => {
                tracing::warn!(connection = number, %error, "closed: the client broke the protocol");
            }
            End::Broken(error) => tracing::info!(connection = number, %error, "connection broke"),
            end => tracing::info!(connection = number, reason = %end, "closed"),
        }
    }

    /// The handshake, within the time and the room there is for it.
    async fn greet(
        &self,
        io: &Io,
        who: (u64, Peer),
        client: Fd,
        limits: Limits,
    ) -> Result<Option<Greeted>, Refused> {
        let entered = self.door.enter(who.1.address());
        let crowded = async {
            entered.leave.wait().await;
            Err(Refused::Crowded)
        };
        let handshake = self.shake_hands(io, who, (client, &entered), limits);
        let handshake = futures_lite::future::or(handshake, crowded);
        let in_time = async { io.timeout(HANDSHAKE, handshake).await };
        let stopped = async {
            self.stop.wait().await;
            Some(Err(Refused::Stopped))
        };
        futures_lite::future::or(in_time, stopped).await.unwrap_or(Err(Refused::Late))
    }

    /// The operator wants to know who tries to log in and cannot, and who is turned away; not of those who
    /// only come and go. Anybody can cause such lines: there are a few at a time.
    fn tell_refusal(&self, number: u64, peer: Peer, why: &Refused) {
        if matches!(why, Refused::Io(_) | Refused::Left | Refused::Late | Refused::Stopped) {
            tracing::debug!(connection = number, %peer, error = %why, "refused");
        } else if let Some(others) = self.lines.may_write(ebb_mem::clock::now()) {
            tracing::info!(connection = number, %peer, error = %why, others, "refused");
        }
    }

    /// Option haggling. `None` when the client took its leave.
    async fn shake_hands(
        &self,
        io: &Io,
        (number, peer): (u64, Peer),
        (client, entered): (Fd, &Entered<'_>),
        limits: Limits,
    ) -> Result<Option<Greeted>, Refused> {
        let mut transport = Transport::new(client, None);
        let mut handshake = Handshake::new(Policy { tls: self.policy, ..Policy::default() });
        let view = View {
            registry: &self.registry,
            limits,
            seats: &self.seats,
            missed: RefCell::default(),
            no_seat: RefCell::default(),
        };
        let (mut input, mut output) = (Vec::new(), Vec::new());
        handshake.greeting(&mut output);
        let mut step = Step::NeedMore;
        loop {
            send(io, &transport, &mut output).await?;
            match step {
                Step::NeedMore => receive(io, &transport, &mut input).await?,
                Step::Again => {}
                Step::Abort => {
                    transport.finish(io).await;
                    return Ok(None);
                }
                Step::StartTls => {
                    let context = self.tls.read().unwrap_or_else(PoisonError::into_inner).clone();
                    let context = context.ok_or(Refused::Gone)?;
                    let started = transport.start_tls(io, context.session()?, peer.address()).await;
                    started.map_err(Refused::Tls)?;
                    handshake.tls_established()?;
                    entered.reached(Stage::Encrypted);
                }
                Step::Transmission(session) => return Ok(Some((session, transport, input))),
            }
            let advanced = handshake.advance(&input, &view, &mut output);
            if let Some(name) = view.missed.take()
                && let Some(others) = self.lines.may_write(ebb_mem::clock::now())
            {
                tracing::info!(connection = number, %peer, ?name, others, "asked for an unknown export");
            }
            let (consumed, next) = match advanced {
                Ok(ok) => ok,
                Err(error) => {
                    // What was said before still reaches the client.
                    send(io, &transport, &mut output).await?;
                    return Err(error.into());
                }
            };
            if let Some(why) = view.no_seat.take() {
                self.tell_refusal(number, peer, &why.into());
            }
            if consumed > 0 {
                entered.reached(Stage::Understood);
            }
            input.drain(..consumed);
            step = next;
        }
    }
}

/// A socket that is listed.
struct Listed<'a>(&'a Mutex<BTreeMap<u64, Weak<OwnedFd>>>, u64);

impl<'a> Listed<'a> {
    fn new(list: &'a Mutex<BTreeMap<u64, Weak<OwnedFd>>>, number: u64, fd: &Fd) -> Listed<'a> {
        let mut sockets = list.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.insert(number, Arc::downgrade(fd));
        Listed(list, number)
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

async fn send(io: &Io, transport: &Transport, output: &mut Vec<u8>) -> std::io::Result<()> {
    // A list of many exports does not fit one message.
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
        0 => Err(Refused::Left),
        // Bounded: the handshake consumes or refuses before it asks for more.
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
        type Client = (&'static Shared, Io, u64, OwnedFd, Limits);
        let bytes = size_of_future(|(shared, io, number, client, limits): Client| {
            shared.attend(io, number, client, limits)
        });
        assert!(bytes <= 2560, "{bytes} bytes for each connection, however idle");
    }
}
