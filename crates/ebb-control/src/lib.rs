//! The control socket: HTTP with JSON on a unix socket, for the commands of `ebbd` and for scripts; and the same over TCP,
//! for browsers, Prometheus and clients with tokens (`page`).
//!
//! It runs in a thread of its own and reads what the workers share: atomics, and data behind short locks that no I/O
//! request takes.
//!
//! [`ebb_api`] describes the interface. Its routes are in `routes/`, the page in `page.rs`. The figures are collected in
//! [`figures`], kept for a day in [`history`], judged in `health.rs`, and written for Prometheus in `metrics.rs`;
//! [`EventLog`] keeps the last lines of the log. What only the daemon knows, the states of its volumes and of its backing
//! devices, it passes as functions ([`ControlContext`]). It carries out changes of volumes ([`VolumeManager`]), and opens
//! the sockets.
//!
//! # Invariants
//! - Every request is checked against the role of its caller ([`access`]): of a token over TCP, of the peer's
//!   credentials on the control socket.
//! - Connections, their duration, and the sizes of headers and bodies are bounded.
//! - No peer can keep other peers from the page by holding its connections: a new connection replaces another one. The
//!   control socket has no such protection: a client that holds all its connections keeps other clients waiting for up
//!   to 60 s, when these connections end. Only root, the daemon's user and members of its group can connect to it, and
//!   the latter have at most half of the connections.
//! - Event streams and turns for long answers are shared by callers, and health waits for no list
//!   (`shares.rs`).
//! - The control socket replies, to one request at a time, when the process has no descriptors left.

mod access;
mod answer;
mod events;
pub mod figures;
mod health;
pub mod history;
mod manager;
mod metrics;
mod page;
mod page_connections;
mod peer;
mod resize;
mod routes;
mod shares;
#[cfg(test)]
mod tests;
mod ticks;
mod tls_stream;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderValue, header};
use ebb_api::LimitGroupStat;
use ebb_api::stat::VolumeStat;
use ebb_config::params::Parameters;
use ebb_export_nbd::Server;
use ebb_export_vhost::VhostFigures;
use ebb_export_xen::Figures;
use ebb_io::WorkerHandle;
use futures_lite::future::or;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::error::Elapsed;

use self::access::{Arrival, Caller, PageGate};
pub use self::access::{NewToken, PageAccess, Role, TokenError, TokenTable, token_name};
pub use self::events::EventLog;
use self::figures::{StatSources, VolumeBrief};
pub use self::manager::{BegunOperation, ConfigSource, Refused, VolumeChange, VolumeManager};
use self::page_connections::{PageConnection, PageConnections};
pub use self::peer::SocketPeers;
pub use self::resize::refusal as resize_refusal;
use self::routes::App;
use self::ticks::ClockFd;
use self::tls_stream::{PageStream, TlsStream};

/// The longest body of a request, bytes.
const MAX_BODY_BYTES: usize = 16 << 10;

/// Connections at a time of each socket; a further one waits to be accepted, or replaces another one
/// (`page_connections`).
const MAX_CONNECTIONS: usize = 32;
/// The longest head of a request, bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// How long a head may take to arrive.
const HEAD: Duration = Duration::from_secs(10);
/// How long a connection may last.
const CONNECTION: Duration = Duration::from_secs(60);
/// How often the history is sampled.
const SAMPLE: Duration = Duration::from_secs(1);
/// The pause after accepting failed because the process has no descriptors left.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// The parts of the daemon that the control socket shows and changes.
pub struct ControlContext {
    /// The NBD server with its volumes.
    pub server: Server,
    /// The figures of all volumes, served or not.
    pub volumes: Box<dyn Fn() -> Vec<VolumeStat> + Send + Sync>,
    /// All volumes, served or not, without their figures.
    pub briefs: Box<dyn Fn() -> Vec<VolumeBrief> + Send + Sync>,
    /// The run-time parameters.
    pub parameters: Parameters,
    /// The groups of limits.
    pub limit_groups: Box<dyn Fn() -> Vec<LimitGroupStat> + Send + Sync>,
    /// The sources of statistics about memory, cache, backing devices and pressure.
    pub sources: StatSources,
    /// The source of statistics about Xen guests' disks; absent as long as none are served.
    pub xen: Arc<OnceLock<Figures>>,
    /// The source of statistics about frontends of vhost-user; absent as long as none are served.
    pub vhost: Arc<OnceLock<VhostFigures>>,
    /// Begins to disconnect the frontend of vhost-user with this number; false if there is none.
    pub disconnect_frontend: Box<dyn Fn(u64) -> bool + Send + Sync>,
    /// Changes volumes.
    pub manager: Arc<dyn VolumeManager>,
    /// The configuration.
    pub config: Arc<dyn ConfigSource>,
    /// The workers in order.
    pub workers: Vec<WorkerHandle>,
    /// The addresses that NBD clients connect to.
    pub listen: Vec<String>,
    /// The last events.
    pub events: EventLog,
    /// Who may use the control socket.
    pub peers: SocketPeers,
    /// When the daemon started.
    pub started: Instant,
}

impl ControlContext {
    /// The number of disks of guests on each volume that has any.
    pub(crate) fn guests(&self) -> BTreeMap<String, u64> {
        let mut guests = BTreeMap::new();
        let mut count = |volume: &str| *guests.entry(volume.to_owned()).or_default() += 1;
        let xen = self.xen.get().into_iter().flat_map(Figures::read);
        xen.for_each(|disk| count(&disk.volume));
        let vhost = self.vhost.get().into_iter().flat_map(VhostFigures::read);
        vhost.for_each(|disk| count(&disk.volume));
        guests
    }

    /// The number of disks of guests on a volume.
    pub(crate) fn guests_of(&self, volume: &str) -> u64 {
        self.guests().get(volume).copied().unwrap_or_default()
    }
}

/// The control socket cannot be started: the system is out of descriptors or tasks.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the thread of the control socket: raise the limits of open files and tasks")]
pub struct ControlError(#[source] io::Error);

/// A socket that listens already. Its descriptor is duplicated.
#[derive(Clone, Copy, Debug)]
pub struct ControlSocket<'a> {
    /// The socket.
    pub fd: BorrowedFd<'a>,
    /// Its name in the log.
    pub name: &'a str,
}

/// The sockets of the page, its host names, and who may use it.
#[derive(Debug)]
pub struct PageSocket<'a> {
    /// The sockets, one for each address of the host.
    pub sockets: Vec<ControlSocket<'a>>,
    /// Its address in the configuration, `HOST:PORT`.
    pub address: &'a str,
    /// Additional host names, besides that of the address and those of this machine.
    pub names: &'a [String],
    /// The tokens and the certificate.
    pub access: PageAccess,
}

/// A running control socket, a page, or both. Dropping it ends them.
#[derive(Debug)]
pub struct ControlServer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    gate: Arc<PageGate>,
}

impl ControlServer {
    /// Serves the control socket and the page, in one thread.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn start(
        control: Option<ControlSocket<'_>>,
        page: Option<PageSocket<'_>>,
        shared: Arc<ControlContext>,
    ) -> Result<Self, ControlError> {
        let names =
            page.as_ref().map(|page| page::names(page.address, page.names)).unwrap_or_default();
        let web = page.as_ref().map(|page| page.sockets.clone()).unwrap_or_default();
        let gate = Arc::new(PageGate::new(page.map(|page| page.access).unwrap_or_default()));
        let access = gate.clone();
        let control_fd = control.map(duplicate).transpose()?;
        // Before clients can use up all descriptors.
        let spare = control_fd.as_ref().and_then(|_| spare_descriptor());
        let web_fds = web.iter().copied().map(duplicate).collect::<Result<Vec<_>, _>>()?;
        let clock = ClockFd::new(SAMPLE).map_err(ControlError)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ControlError)?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            let app = Arc::new(App::new(shared));
            runtime.block_on(async {
                let report = |result: io::Result<()>| {
                    if let Err(error) = result {
                        tracing::error!(%error, "the control socket or the page has failed");
                    }
                };
                let sampled = app.clone();
                let mut tasks = vec![tokio::spawn(async move {
                    report(clock.run(|| sampled.sample()).await);
                })];
                if let Some(fd) = control_fd {
                    let (router, peers) = (routes::router(app.clone()), app.shared.peers);
                    tasks.push(tokio::spawn(async move {
                        report(serve_unix(fd, router, spare, peers).await);
                    }));
                }
                // The limits apply to all of these sockets together.
                let router = page::router(app, names, access.clone());
                let connections = PageConnections::new(MAX_CONNECTIONS);
                for fd in web_fds {
                    let (router, access) = (router.clone(), access.clone());
                    let connections = connections.clone();
                    tasks.push(tokio::spawn(async move {
                        report(serve_tcp(fd, router, access, connections).await);
                    }));
                }
                // Dropping the sender stops it, too.
                let _ = stopped.await;
                tasks.iter().for_each(tokio::task::JoinHandle::abort);
            });
        };
        let thread = std::thread::Builder::new()
            .name("ebbd-control".to_owned())
            .stack_size(512 << 10)
            .spawn(serve)
            .map_err(ControlError)?;
        if let Some(socket) = control {
            tracing::info!(address = socket.name, "serving the control socket");
        }
        for socket in web {
            tracing::info!(address = socket.name, "serving the page and the metrics");
        }
        Ok(Self { stop: Some(stop), thread: Some(thread), gate })
    }

    /// Replaces the tokens and the certificate of the page: requests and connections from now on use them.
    pub fn set_page_access(&self, access: PageAccess) {
        self.gate.set(access);
    }
}

fn duplicate(socket: ControlSocket<'_>) -> Result<OwnedFd, ControlError> {
    socket.fd.try_clone_to_owned().map_err(ControlError)
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported already.
            let _ = thread.join();
        }
    }
}

async fn serve_unix(
    fd: OwnedFd,
    router: Router,
    mut spare: Option<OwnedFd>,
    peers: SocketPeers,
) -> io::Result<()> {
    let socket = std::os::unix::net::UnixListener::from(fd);
    socket.set_nonblocking(true)?;
    // Must be called within the runtime.
    let socket = UnixListener::from_std(socket)?;
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let viewers = Arc::new(Semaphore::new(MAX_CONNECTIONS / 2));
    while let Ok(permit) = room.clone().acquire_owned().await {
        match socket.accept().await {
            Ok((stream, _)) => {
                let Some(caller) = peers.caller(&stream) else { continue };
                let viewer =
                    (caller.role < Role::Operate).then(|| viewers.clone().try_acquire_owned());
                // Too many of them: this one is closed.
                let Ok(viewer) = viewer.transpose() else { continue };
                let (router, arrival) = (router.clone(), arrival(None, caller));
                tokio::spawn(async move {
                    serve_connection(stream, router, arrival, None).await;
                    drop((permit, viewer));
                });
            }
            // `accept` returns this error also if no connection waits.
            Err(error)
                if spare.is_some() && is_out_of_descriptors(&error) && has_pending(&socket) =>
            {
                drop(spare.take());
                // Another thread may get the freed descriptor: then this fails again.
                let accepted = tokio::time::timeout(OUT_OF_DESCRIPTORS, socket.accept()).await;
                if let Ok(Ok((mut stream, _))) = accepted {
                    if let Some(caller) = peers.caller(&stream) {
                        let arrival = arrival(None, caller);
                        serve_one_request(&mut stream, router.clone(), arrival).await;
                    }
                    spare = kept(stream);
                }
            }
            Err(error) => wait_after(&error).await,
        }
        spare = spare.or_else(spare_descriptor);
    }
    Ok(())
}

/// What a connection that begins now tells about its requests.
fn arrival(peer: Option<IpAddr>, caller: Caller) -> Arrival {
    Arrival { peer, caller: Arc::new(caller), ends: tokio::time::Instant::now() + CONNECTION }
}

/// A reserved descriptor, to accept a connection when the process has no other left: statistics are needed most then.
fn spare_descriptor() -> Option<OwnedFd> {
    Some(std::fs::File::open("/dev/null").ok()?.into())
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Whether a connection waits to be accepted.
fn has_pending(socket: &UnixListener) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Ends a connection and keeps its descriptor: after a close another thread could get it.
fn kept(stream: UnixStream) -> Option<OwnedFd> {
    let stream = stream.into_std().ok()?;
    // This fails if the client has closed the connection.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    Some(stream.into())
}

async fn serve_tcp(
    fd: OwnedFd,
    router: Router,
    gate: Arc<PageGate>,
    connections: Arc<PageConnections>,
) -> io::Result<()> {
    let socket = std::net::TcpListener::from(fd);
    socket.set_nonblocking(true)?;
    let socket = TcpListener::from_std(socket)?;
    loop {
        match socket.accept().await {
            Ok((stream, peer)) => {
                let Some(connection) =
                    connections.enter(page_connections::address(peer.ip())).await
                else {
                    return Ok(());
                };
                let (router, access) = (router.clone(), gate.access());
                tokio::spawn(async move {
                    let arrival = arrival(Some(peer.ip()), Caller::default());
                    let connection = Some(Arc::new(connection));
                    if let Some(stream) = page_stream(stream, &access, &arrival, &connection).await
                    {
                        serve_connection(stream, router, arrival, connection).await;
                    }
                });
            }
            Err(error) => wait_after(&error).await,
        }
    }
}

/// The stream of a connection of the page, after its handshake if it is encrypted.
async fn page_stream(
    tcp: TcpStream,
    access: &PageAccess,
    arrival: &Arrival,
    connection: &Option<Arc<PageConnection>>,
) -> Option<PageStream> {
    let Some(tls) = &access.tls else { return Some(PageStream::Plain(tcp)) };
    let peer = arrival.peer.map(page_connections::address).unwrap_or_default();
    let accept = tokio::time::timeout(HEAD, TlsStream::accept(tcp, tls, peer));
    match or(async { Some(accept.await) }, async {
        replaced(connection).await;
        None
    })
    .await?
    {
        Ok(Ok(stream)) => Some(PageStream::Encrypted(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(client = ?arrival.peer, %error, "a TLS handshake of the page failed");
            None
        }
        Err(_) => None,
    }
}

/// Waits until a newer connection replaces this one.
async fn replaced(connection: &Option<Arc<PageConnection>>) {
    match connection {
        Some(connection) => connection.close().wait().await,
        None => std::future::pending().await,
    }
}

async fn wait_after(error: &io::Error) {
    tracing::debug!(%error, "cannot accept a control connection");
    tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
}

fn http() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD_BYTES);
    // A client may shut down its sending side and wait for the reply.
    builder.half_close(true);
    builder
}

/// Serves one request.
async fn serve_one_request(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    arrival: Arrival,
) {
    let answers = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(arrival.clone());
        answers.call(request)
    });
    let serve = http().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    log_end(tokio::time::timeout(CONNECTION, serve).await);
}

/// Serves requests until the client has no more, the time of the connection is over, or a newer one replaces it.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    arrival: Arrival,
    connection: Option<Arc<PageConnection>>,
) {
    let answers = TowerToHyperService::new(router);
    let counted = connection.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(arrival.clone());
        let (connection, answer) = (counted.clone(), answers.call(request));
        async move {
            let Some(connection) = connection else { return answer.await };
            connection.set_busy(true);
            let mut answer = answer.await;
            connection.set_busy(false);
            if let (true, Ok(answer)) = (connection.is_full(), &mut answer) {
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            answer
        }
    });
    let serve = http().serve_connection(TokioIo::new(stream), service);
    let serve = tokio::time::timeout(CONNECTION, serve);
    let replaced = async {
        replaced(&connection).await;
        tracing::debug!("closed a connection of the page for a newer one");
    };
    or(async { log_end(serve.await) }, replaced).await;
}

fn log_end(outcome: Result<hyper::Result<()>, Elapsed>) {
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a control connection broke"),
        Err(_) => tracing::debug!("closed a control connection that lasted too long"),
    }
}
