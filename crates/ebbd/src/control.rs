//! The control socket: HTTP with JSON on a unix socket, for `ebbd get`, `set`, `stat`, `pressure` and
//! scripts; and what of it is for everybody to see, over TCP, for browsers and Prometheus (`page`).
//!
//! It runs beside the workers in a thread of its own and only looks at what they share: atomics,
//! and short locks that no request for data takes.
//!
//! # Interface, version 1
//! | request | answer |
//! |---|---|
//! | `GET /v1/version` | the program and its version |
//! | `GET /v1/parameters`, `GET /v1/parameters/NAME` | parameters with value, range, origin |
//! | `PUT /v1/parameters/NAME` with `{"value": ...}` | sets it |
//! | `DELETE /v1/parameters/NAME` | back to the configuration |
//! | the same below `/v1/volumes/VOLUME/parameters` | those of a volume |
//! | `GET /v1/volumes` | the volumes with their counters |
//! | `POST /v1/volumes/VOLUME/resize` with `{"size": BYTES}` | resizes it; `{}` follows its file or device; `"shrink": true` may lose data |
//! | `GET /v1/stat` | everything: [`crate::stat::Stat`] |
//! | `POST /v1/pressure` with `{"level": "L1", "seconds": 5}` | publishes a level of memory pressure |
//! | `GET /metrics` | OpenMetrics text |
//! | `GET /` | the page; over TCP only, and beside it only what tells figures |
//!
//! A failure is `{"error": KIND, "message": ..., "remedy": ...}` with a status of the 400s for what
//! the client can mend and of the 500s for what it cannot. Names in paths are percent-encoded.
//! Fields may be added; those there keep their meaning.
//!
//! # Invariants
//! - Only the daemon's user opens the control socket: mode 0600 from its first moment.
//! - Nothing can be changed over TCP.
//! - Bounded: connections, the time each may last, the size of headers and bodies.
//! - No peer keeps others from the page by holding its connections.
//! - The control socket answers, one request at a time, when the process has no descriptors left.

mod answer;
mod page;
mod resize;
mod routes;
mod seats;
#[cfg(test)]
mod tests;

pub use self::answer::Failure;
pub use self::resize::ResizeView;
pub(crate) use self::routes::MAX_HOLD_SECONDS;
pub use self::routes::{ChangeView, ParameterView};

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderValue, header};
use ebb_export_nbd::Server;
use ebb_export_xen::Figures;
use ebb_io::WorkerHandle;
use futures_lite::future::or;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::error::Elapsed;

use self::routes::App;
use self::seats::{Seat, Seats};
use crate::config::Listen;
use crate::engine::Engine;
use crate::listener::{self, ListenError, Listener};
use crate::params::Parameters;
use crate::stat::Memory;

/// Where the socket is if nobody says otherwise.
pub const DEFAULT_PATH: &str = "/run/ebbd/control.sock";

/// The longest body of a request, bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;

/// Connections at a time of each socket; one more waits to be accepted, or takes the place of another (`seats`).
const MAX_CONNECTIONS: usize = 32;
/// The longest head of a request, bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// How long a head may take to arrive.
const HEAD: Duration = Duration::from_secs(10);
/// How long a connection may last.
const CONNECTION: Duration = Duration::from_secs(60);
/// How long to wait when the process is out of descriptors.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// What the control socket shows and changes.
pub struct Shared {
    /// The NBD server with its volumes.
    pub server: Server,
    /// The volumes' lives; without it those of the server are shown.
    pub engine: Option<Arc<Engine>>,
    /// The run-time parameters.
    pub parameters: Parameters,
    /// Where figures of memory and pressure come from.
    pub memory: Memory,
    /// Where figures of Xen guests' disks come from; absent if none are served.
    pub xen: Option<Figures>,
    /// The workers in order.
    pub workers: Vec<WorkerHandle>,
    /// When the daemon started.
    pub started: Instant,
}

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No thread, or nothing to wait with: the system is out of descriptors or tasks.
    #[error("cannot start the control thread (raise the limits of open files and tasks?)")]
    Start(#[source] io::Error),
}

/// Where the page is.
#[derive(Clone, Copy, Debug)]
pub struct Web<'a> {
    /// `HOST:PORT`.
    pub address: &'a str,
    /// Names it answers to besides those of this machine.
    pub names: &'a [String],
}

/// A running control socket, a page, or both. Dropping it closes them and removes the socket's file.
#[derive(Debug)]
pub struct Control {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    listeners: Vec<Listener>,
}

impl Control {
    /// Listens at the unix socket `control` and shows the page at `web`, from one thread; `end` ends waiting for
    /// another server to leave the socket.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn start(
        control: Option<&Path>,
        web: Option<Web<'_>>,
        shared: Arc<Shared>,
        end: &AtomicBool,
    ) -> Result<Self, ControlError> {
        let control = control.map(|path| listener::open_private(path, end)).transpose()?;
        let names = web.map(|web| page::names(web.address, web.names)).unwrap_or_default();
        let open = |web: Web<'_>| listener::open(&Listen::Tcp(web.address.to_owned()), end);
        let web = web.map(open).transpose()?;
        let control_fd = control.as_ref().map(duplicate).transpose()?;
        // Before clients can take all there are.
        let spare = control_fd.as_ref().and_then(|_| spare_descriptor());
        let web_fd = web.as_ref().map(duplicate).transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ControlError::Start)?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            let app = Arc::new(App::new(shared));
            runtime.block_on(async {
                let answers = |result: io::Result<()>| {
                    if let Err(error) = result {
                        tracing::error!(%error, "the control socket or the page does not answer");
                    }
                };
                let mut tasks = Vec::new();
                if let Some(fd) = control_fd {
                    let router = routes::router(app.clone());
                    tasks.push(tokio::spawn(async move {
                        answers(serve_unix(fd, router, spare).await);
                    }));
                }
                if let Some(fd) = web_fd {
                    tasks.push(tokio::spawn(
                        async move { answers(serve_tcp(fd, app, names).await) },
                    ));
                }
                // An error means that the sender is gone: to be stopped as well.
                let _ = stopped.await;
                tasks.iter().for_each(tokio::task::JoinHandle::abort);
            });
        };
        let thread = std::thread::Builder::new()
            .name("ebbd-control".to_owned())
            .stack_size(512 << 10)
            .spawn(serve)
            .map_err(ControlError::Start)?;
        let listeners = control.into_iter().chain(web).collect();
        let started = Self { stop: Some(stop), thread: Some(thread), listeners };
        started.addresses().for_each(|address| tracing::info!(address, "control"));
        Ok(started)
    }

    /// Where it listens, as in the log.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.listeners.iter().map(|listener| listener.name.as_str())
    }
}

fn duplicate(listener: &Listener) -> Result<OwnedFd, ControlError> {
    listener.fd.try_clone().map_err(ControlError::Start)
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was reported there.
            let _ = thread.join();
        }
    }
}

async fn serve_unix(fd: OwnedFd, router: Router, mut spare: Option<OwnedFd>) -> io::Result<()> {
    let socket = std::os::unix::net::UnixListener::from(fd);
    socket.set_nonblocking(true)?;
    // Registers with the runtime, so it has to happen inside.
    let socket = UnixListener::from_std(socket)?;
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(permit) = room.clone().acquire_owned().await {
        match socket.accept().await {
            Ok((stream, _)) => {
                let router = router.clone();
                tokio::spawn(async move {
                    attend(stream, router, None).await;
                    drop(permit);
                });
            }
            // Without a descriptor the system says so, whether a connection waits or not.
            Err(error)
                if spare.is_some() && is_out_of_descriptors(&error) && is_waited_for(&socket) =>
            {
                drop(spare.take());
                // It may be taken by another part of the daemon: then there is nothing to accept with.
                let accepted = tokio::time::timeout(OUT_OF_DESCRIPTORS, socket.accept()).await;
                if let Ok(Ok((mut stream, _))) = accepted {
                    attend_once(&mut stream, router.clone()).await;
                    spare = kept(stream);
                }
            }
            Err(error) => wait_after(&error).await,
        }
        spare = spare.or_else(spare_descriptor);
    }
    Ok(())
}

/// A descriptor to accept a connection with when the process has no other left: that is when figures are wanted.
fn spare_descriptor() -> Option<OwnedFd> {
    Some(std::fs::File::open("/dev/null").ok()?.into())
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Whether a connection is there to be accepted.
fn is_waited_for(socket: &UnixListener) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut looked_at = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut looked_at, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Ends a connection and keeps its descriptor, which a close would leave to any part of the daemon.
fn kept(stream: UnixStream) -> Option<OwnedFd> {
    let stream = stream.into_std().ok()?;
    // Where the client has ended it there is nothing to do.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    Some(stream.into())
}

async fn serve_tcp(fd: OwnedFd, app: Arc<App>, names: Vec<String>) -> io::Result<()> {
    let socket = std::net::TcpListener::from(fd);
    socket.set_nonblocking(true)?;
    let router = page::router(app, names);
    let socket = TcpListener::from_std(socket)?;
    let seats = Seats::new(MAX_CONNECTIONS);
    loop {
        match socket.accept().await {
            Ok((stream, peer)) => {
                let Some(seat) = seats.enter(seats::address(peer.ip())).await else {
                    return Ok(());
                };
                tokio::spawn(attend(stream, router.clone(), Some(Arc::new(seat))));
            }
            Err(error) => wait_after(&error).await,
        }
    }
}

async fn wait_after(error: &io::Error) {
    tracing::debug!(%error, "cannot accept a control connection");
    tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
}

fn http() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD_BYTES);
    // A client that has said all it wants to say still waits for the answer.
    builder.half_close(true);
    builder
}

/// Answers one request.
async fn attend_once(stream: impl AsyncRead + AsyncWrite + Unpin, router: Router) {
    let service = TowerToHyperService::new(router);
    let serve = http().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    tell(tokio::time::timeout(CONNECTION, serve).await);
}

/// Answers requests until the client has no more, its time is over, or its seat is wanted.
async fn attend(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    seat: Option<Arc<Seat>>,
) {
    let answers = TowerToHyperService::new(router);
    let seated = seat.clone();
    let service = service_fn(move |request| {
        let (seat, answer) = (seated.clone(), answers.call(request));
        async move {
            let Some(seat) = seat else { return answer.await };
            seat.set_busy(true);
            let mut answer = answer.await;
            seat.set_busy(false);
            if let (true, Ok(answer)) = (seat.is_full(), &mut answer) {
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            answer
        }
    });
    let serve = http().serve_connection(TokioIo::new(stream), service);
    let serve = tokio::time::timeout(CONNECTION, serve);
    let wanted = async {
        match &seat {
            Some(seat) => seat.leave().wait().await,
            None => std::future::pending().await,
        }
    };
    let leave = async {
        wanted.await;
        tracing::debug!("closed a connection of the page for a newer one");
    };
    or(async { tell(serve.await) }, leave).await;
}

fn tell(outcome: Result<hyper::Result<()>, Elapsed>) {
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a control connection broke"),
        Err(_) => tracing::debug!("closed a control connection that lasted too long"),
    }
}
