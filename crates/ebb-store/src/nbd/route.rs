//! From a worker to a connection: its own, or the one that another worker owns.
//!
//! With `NBD_FLAG_CAN_MULTI_CONN` each worker has a connection, established when the worker first
//! needs it. Without, a flush covers only its own connection, and so there is one: the first worker
//! that needs it owns it, and other workers forward requests with a copy of the data, since buffers
//! stay with their worker. Routes are stored per thread: a lookup takes no lock.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use async_channel::{Receiver, Sender};
use ebb_io::{Budget, Buf, Io};
use ebb_nbd_proto::{Command, TransmissionFlags};

use super::link::{IN_FLIGHT, Link, Remote};
use super::slots::{Failure, Outcome, Request};
use super::state::Shared;
use crate::Extent;

/// Forwarded requests that wait in the queue.
const IN_LINE: usize = 64;

/// A request forwarded to the worker that owns the connection.
struct Job {
    request: Request,
    data: Vec<u8>,
    answer: Sender<Answer>,
}

struct Answer {
    result: Result<(), Failure>,
    data: Vec<u8>,
    extents: Vec<Extent>,
}

#[derive(Clone)]
enum Route {
    Own(Rc<Link>),
    Other(Sender<Job>),
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
    owner: Mutex<Option<Sender<Job>>>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("request", &self.request).finish_non_exhaustive()
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
        request: Request,
        buf: Option<Buf>,
    ) -> Outcome<Buf> {
        if self.remote.shared.is_closed() {
            return lost(buf);
        }
        match self.route(io) {
            Route::Own(link) => link.request(request, buf).await,
            Route::Other(jobs) => hand_over(&self.remote.shared, &jobs, request, buf).await,
        }
    }

    fn route(&self, io: &Io) -> Route {
        let known = ROUTES.with_borrow(|routes| routes.get(&self.id).cloned());
        match known {
            Some(Route::Other(jobs)) if jobs.is_closed() => {}
            Some(route) => return route,
            None => {}
        }
        let route = self.make_route(io);
        ROUTES.with_borrow_mut(|routes| routes.insert(self.id, route.clone()));
        route
    }

    fn make_route(&self, io: &Io) -> Route {
        if self.remote.export.offers(TransmissionFlags::CAN_MULTI_CONN) {
            return Route::Own(self.start(io));
        }
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(jobs) = owner.as_ref().filter(|jobs| !jobs.is_closed()) {
            return Route::Other(jobs.clone());
        }
        let (sender, receiver) = async_channel::bounded(IN_LINE);
        *owner = Some(sender);
        let link = self.start(io);
        io.spawn(serve_others(io.clone(), link.clone(), receiver)).detach();
        Route::Own(link)
    }

    fn start(&self, io: &Io) -> Rc<Link> {
        let id = self.id;
        Link::start(io, self.remote.clone(), move || {
            // The thread itself may be ending.
            let _ = ROUTES.try_with(|routes| {
                let gone = routes.try_borrow_mut().ok().and_then(|mut r| r.remove(&id));
                drop(gone);
            });
        })
    }
}

fn lost(buf: Option<Buf>) -> Outcome<Buf> {
    Outcome { result: Err(Failure::Lost), buf, extents: Vec::new() }
}

async fn hand_over(
    shared: &Shared,
    jobs: &Sender<Job>,
    request: Request,
    mut buf: Option<Buf>,
) -> Outcome<Buf> {
    let (answer, answered) = async_channel::bounded(1);
    let length = usize::try_from(request.length).unwrap_or(0);
    let range = request.at..request.at + length;
    let data = match (&buf, request.command) {
        (Some(buf), Command::Write) => buf[range.clone()].to_vec(),
        _ => Vec::new(),
    };
    let job = Job { request: Request { at: 0, ..request }, data, answer };
    // The owner has a copy of the data: if the store is closed, nothing of this worker is needed
    // there.
    let asked = async {
        jobs.send(job).await.ok()?;
        answered.recv().await.ok()
    };
    let Some(Some(answer)) = shared.unless_closed(asked).await else { return lost(buf) };
    let mut result = answer.result;
    if let Some(buf) = &mut buf
        && request.command == Command::Read
        && result.is_ok()
    {
        if answer.data.len() == length {
            buf[range].copy_from_slice(&answer.data);
        } else {
            result = Err(Failure::Lost);
        }
    }
    Outcome { result, buf, extents: answer.extents }
}

/// On the owner's worker: submits forwarded requests, as many at a time as a worker's own.
async fn serve_others(io: Io, link: Rc<Link>, jobs: Receiver<Job>) {
    let room = Budget::new(IN_FLIGHT);
    while let Ok(job) = jobs.recv().await {
        let turn = room.take(1).await;
        let (own_io, link) = (io.clone(), link.clone());
        io.spawn(async move {
            serve_other(&own_io, &link, job).await;
            drop(turn);
        })
        .detach();
    }
}

async fn serve_other(io: &Io, link: &Link, job: Job) {
    let length = usize::try_from(job.request.length).unwrap_or(0);
    let mut buf = None;
    if matches!(job.request.command, Command::Read | Command::Write) && !job.request.zeroes {
        let mut own = io.pool().take(length).await;
        if job.request.command == Command::Write {
            own.copy_from_slice(&job.data);
        }
        buf = Some(own);
    }
    let outcome = link.request(job.request, buf).await;
    let data = match (&outcome.buf, job.request.command) {
        (Some(buf), Command::Read) if outcome.result.is_ok() => buf.to_vec(),
        _ => Vec::new(),
    };
    let answer = Answer { result: outcome.result, data, extents: outcome.extents };
    // The worker that forwarded it may have ended.
    let _ = job.answer.send(answer).await;
}
