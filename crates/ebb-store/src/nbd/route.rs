//! From a worker to a connection: its own, or the one that another worker owns.
//!
//! With `NBD_FLAG_CAN_MULTI_CONN` (and [`LostWrites::Flush`]) each worker has a connection, established when the worker first
//! needs it. Without, a flush covers only its own connection, and so there is one: the first worker
//! that needs it owns it, and other workers forward requests with a copy of the data, since buffers
//! stay with their worker. Routes are stored per thread: a lookup takes no lock.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use async_channel::{Receiver, Sender};
use ebb_io::{Budget, Buf, Io};
use ebb_nbd_proto::Command;

use super::link::{IN_FLIGHT, Link, Remote};
#[cfg(doc)]
use super::options::LostWrites;
use super::slots::{RemoteRequest, RequestFailure, RequestOutcome};
use super::state::RemoteState;
use ebb_block::Extent;

/// Forwarded requests that wait in the queue.
const FORWARDED_MAX: usize = 64;

/// A request forwarded to the worker that owns the connection.
struct ForwardedRequest {
    request: RemoteRequest,
    data: Vec<u8>,
    reply: Sender<ForwardedReply>,
}

struct ForwardedReply {
    result: Result<(), RequestFailure>,
    data: Vec<u8>,
    extents: Vec<Extent>,
}

#[derive(Clone)]
enum Route {
    Own(Rc<Link>),
    Other(Sender<ForwardedRequest>),
}

thread_local! {
    static ROUTES: RefCell<HashMap<u64, Route>> = RefCell::new(HashMap::new());
}

/// The routes to one store.
#[derive(Debug)]
pub(crate) struct Routes {
    id: u64,
    remote: Arc<Remote>,
    /// The queue of the worker that owns the connection, where only one is allowed.
    owner: Mutex<Option<Sender<ForwardedRequest>>>,
}

impl std::fmt::Debug for ForwardedRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForwardedRequest").field("request", &self.request).finish_non_exhaustive()
    }
}

impl Routes {
    pub(crate) fn new(id: u64, remote: Arc<Remote>) -> Routes {
        Routes { id, remote, owner: Mutex::default() }
    }

    /// Submits a request on this worker's connection, or forwards it.
    pub(crate) async fn request(
        &self,
        io: &Io,
        request: RemoteRequest,
        buf: Option<Buf>,
    ) -> RequestOutcome<Buf> {
        if self.remote.shared.is_closed() {
            return lost(buf);
        }
        match self.route(io) {
            Route::Own(link) => link.request(request, buf).await,
            Route::Other(forward_queue) => {
                // Boxed: forwarding allocates in any case, and the size of a task is that of its largest future.
                Box::pin(forward(&self.remote.shared, &forward_queue, request, buf)).await
            }
        }
    }

    fn route(&self, io: &Io) -> Route {
        let known = ROUTES.with_borrow(|routes| routes.get(&self.id).cloned());
        match known {
            Some(Route::Other(forward_queue)) if forward_queue.is_closed() => {}
            Some(route) => return route,
            None => {}
        }
        let route = self.make_route(io);
        ROUTES.with_borrow_mut(|routes| routes.insert(self.id, route.clone()));
        route
    }

    fn make_route(&self, io: &Io) -> Route {
        if self.remote.has_several_connections() {
            return Route::Own(self.start(io));
        }
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(forward_queue) =
            owner.as_ref().filter(|forward_queue| !forward_queue.is_closed())
        {
            return Route::Other(forward_queue.clone());
        }
        let (sender, receiver) = async_channel::bounded(FORWARDED_MAX);
        *owner = Some(sender);
        let link = self.start(io);
        io.spawn(serve_forwarded(io.clone(), link.clone(), receiver)).detach();
        Route::Own(link)
    }

    fn start(&self, io: &Io) -> Rc<Link> {
        let id = self.id;
        Link::start(io, self.remote.clone(), move || {
            // The thread itself may be ending.
            let _ = ROUTES.try_with(|routes| {
                let removed = routes.try_borrow_mut().ok().and_then(|mut r| r.remove(&id));
                drop(removed);
            });
        })
    }
}

fn lost(buf: Option<Buf>) -> RequestOutcome<Buf> {
    RequestOutcome { result: Err(RequestFailure::Lost), buf, extents: Vec::new() }
}

async fn forward(
    shared: &RemoteState,
    forward_queue: &Sender<ForwardedRequest>,
    request: RemoteRequest,
    mut buf: Option<Buf>,
) -> RequestOutcome<Buf> {
    let (reply, replied) = async_channel::bounded(1);
    let length = usize::try_from(request.length).unwrap_or(0);
    let range = request.at..request.at + length;
    let data = match (&buf, request.command) {
        (Some(buf), Command::Write) => buf[range.clone()].to_vec(),
        _ => Vec::new(),
    };
    let forwarded_request =
        ForwardedRequest { request: RemoteRequest { at: 0, ..request }, data, reply };
    // The owner has a copy of the data: if the store is closed, nothing of this worker is needed
    // there.
    let forwarded = async {
        forward_queue.send(forwarded_request).await.ok()?;
        replied.recv().await.ok()
    };
    let Some(Some(reply)) = shared.unless_closed(forwarded).await else { return lost(buf) };
    let mut result = reply.result;
    if let Some(buf) = &mut buf
        && request.command == Command::Read
        && result.is_ok()
    {
        if reply.data.len() == length {
            buf[range].copy_from_slice(&reply.data);
        } else {
            result = Err(RequestFailure::Lost);
        }
    }
    RequestOutcome { result, buf, extents: reply.extents }
}

/// On the owner's worker: submits forwarded requests, as many at a time as a worker's own.
async fn serve_forwarded(io: Io, link: Rc<Link>, forward_queue: Receiver<ForwardedRequest>) {
    let room = Budget::new(IN_FLIGHT);
    while let Ok(forwarded_request) = forward_queue.recv().await {
        let permit = room.take(1).await;
        let (own_io, link) = (io.clone(), link.clone());
        io.spawn(async move {
            serve_forwarded_request(&own_io, &link, forwarded_request).await;
            drop(permit);
        })
        .detach();
    }
}

async fn serve_forwarded_request(io: &Io, link: &Link, forwarded_request: ForwardedRequest) {
    let length = usize::try_from(forwarded_request.request.length).unwrap_or(0);
    let mut buf = None;
    if matches!(forwarded_request.request.command, Command::Read | Command::Write)
        && !forwarded_request.request.zeroes
    {
        let mut own = io.pool().take(length).await;
        if forwarded_request.request.command == Command::Write {
            own.copy_from_slice(&forwarded_request.data);
        }
        buf = Some(own);
    }
    let outcome = link.request(forwarded_request.request, buf).await;
    let data = match (&outcome.buf, forwarded_request.request.command) {
        (Some(buf), Command::Read) if outcome.result.is_ok() => buf.to_vec(),
        _ => Vec::new(),
    };
    let reply = ForwardedReply { result: outcome.result, data, extents: outcome.extents };
    // The worker that forwarded it may have ended.
    let _ = forwarded_request.reply.send(reply).await;
}
