//! The connection on which a store was opened, until the first worker needs one.
//!
//! Closing it would end servers that end with their last client, such as `qemu-nbd` without
//! `--persistent`. Such a server does not offer several connections; the connection to one that
//! does is closed at once. Until a worker takes it, a thread watches all such connections. It
//! closes one when the server does: a server that shuts down must not wait for it.
//!
//! # Invariants
//! - A connection is kept only while a thread watches it: one that ends closes all that it watches,
//!   and the next connection starts another one.
//! - The lock of a connection is taken before the lock of the watched connections.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fd::OwnedFd;

use super::census::Counted;
use super::connect::Connected;

/// Where a connection is, as long as no worker has it.
type Place = Mutex<Option<UnusedConnection>>;

/// A connection that no worker has used.
#[derive(Debug)]
struct UnusedConnection {
    connected: Connected,
    number: u64,
    watch: Arc<Watch>,
    _counted: Counted,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct FirstConnection(Arc<Place>);

/// The thread that notices closed connections.
#[derive(Debug)]
struct Watch {
    epoll: OwnedFd,
    watched: Mutex<Watched>,
}

/// The connections that the thread looks at.
#[derive(Debug, Default)]
struct Watched {
    last: u64,
    by_number: BTreeMap<u64, Weak<Place>>,
    /// The thread has ended.
    ended: bool,
}

/// The thread for all connections of the process.
static WATCH: Mutex<Option<Arc<Watch>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FirstConnection {
    /// Keeps a connection. Where closed ones cannot be noticed, it is closed at once.
    pub(crate) fn keep(&self, connected: Connected) {
        // A simulation has no such thread.
        #[cfg(feature = "sim")]
        if ebb_io::clock::is_virtual() {
            let _ = connected.disconnect();
            return;
        }
        match watch_in(&WATCH, new_epoll) {
            Some(watch) => self.keep_watched(connected, watch),
            None => {
                let _ = connected.disconnect();
            }
        }
    }

    fn keep_watched(&self, connected: Connected, watch: Arc<Watch>) {
        let mut own = lock(&self.0);
        let Some(number) = watch.register(&self.0) else {
            let _ = connected.disconnect();
            return;
        };
        let (data, flags) = (epoll::EventData::new_u64(number), epoll::EventFlags::RDHUP);
        if epoll::add(&watch.epoll, &connected.fd, data, flags).is_ok() {
            let _counted = Counted::connection();
            *own = Some(UnusedConnection { connected, number, watch, _counted });
        } else {
            lock(&watch.watched).by_number.remove(&number);
            let _ = connected.disconnect();
        }
    }

    /// The connection, which the caller uses from now on. System calls that a worker may not make.
    pub(crate) fn take(&self) -> Option<Connected> {
        let unused = lock(&self.0).take()?;
        let _ = epoll::delete(&unused.watch.epoll, unused.connected.fd.as_fd());
        lock(&unused.watch.watched).by_number.remove(&unused.number);
        Some(unused.connected)
    }

    /// Keeps `connected` in place of the connection, unless a worker has taken that.
    pub(crate) fn exchange(&self, connected: Connected) {
        let closed = match self.take() {
            Some(former) => {
                self.keep(connected);
                former
            }
            None => connected,
        };
        let _ = closed.disconnect();
    }

    /// Returns true if no worker has taken the connection.
    pub(crate) fn is_kept(&self) -> bool {
        lock(&self.0).is_some()
    }

    /// Closes the connection if no worker has taken it.
    pub(crate) fn close(&self) {
        if self.is_kept() {
            let first = FirstConnection(self.0.clone());
            // Not by a worker itself, which may not.
            let _ = ebb_sandbox::threads::call(move || first.take().map(Connected::disconnect));
        }
    }
}

fn new_epoll() -> rustix::io::Result<OwnedFd> {
    epoll::create(epoll::CreateFlags::CLOEXEC)
}

/// The thread at this place, which is started if there is none. The next call tries again.
fn watch_in(
    place: &'static Mutex<Option<Arc<Watch>>>,
    new_epoll: impl FnOnce() -> rustix::io::Result<OwnedFd>,
) -> Option<Arc<Watch>> {
    let mut running = lock(place);
    if running.is_none() {
        let watch = Arc::new(Watch { epoll: new_epoll().ok()?, watched: Mutex::default() });
        let own = watch.clone();
        let thread = std::thread::Builder::new().name("ebbd-nbd-unused".to_owned());
        let run = move || {
            let error = own.run();
            *lock(place) = None;
            tracing::error!(%error, "cannot watch unused connections to NBD servers: closing them");
            own.close_all();
        };
        ebb_sandbox::threads::spawn(thread.stack_size(64 << 10), run).ok()?;
        *running = Some(watch);
    }
    running.clone()
}

impl Watch {
    /// The number of another connection; `None` if the thread has ended.
    fn register(&self, place: &Arc<Place>) -> Option<u64> {
        let mut watched = lock(&self.watched);
        if watched.ended {
            return None;
        }
        watched.last += 1;
        let number = watched.last;
        watched.by_number.insert(number, Arc::downgrade(place));
        Some(number)
    }

    /// Returns only when it fails.
    fn run(&self) -> rustix::io::Errno {
        let mut events = Vec::with_capacity(16);
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return error,
            }
            for event in events.drain(..) {
                let gone = lock(&self.watched).by_number.remove(&event.data.u64());
                // Closed here, unless a worker has taken it meanwhile.
                drop(gone.and_then(|gone| gone.upgrade()).and_then(|gone| lock(&gone).take()));
            }
        }
    }

    /// Closes the connections that a thread has stopped watching.
    fn close_all(&self) {
        let left = {
            let mut watched = lock(&self.watched);
            watched.ended = true;
            std::mem::take(&mut watched.by_number)
        };
        for place in left.into_values().filter_map(|place| place.upgrade()) {
            let unused = lock(&place).take();
            let _ = unused.map(|unused| unused.connected.disconnect());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::super::export::RemoteExport;
    use super::*;

    fn connection() -> (UnixStream, Connected) {
        let (server, client) = UnixStream::pair().unwrap();
        (server, Connected { fd: client.into(), tls: None, export: RemoteExport::new(512, 0) })
    }

    #[test]
    fn a_watch_that_could_not_be_started_is_started_later() {
        static PLACE: Mutex<Option<Arc<Watch>>> = Mutex::new(None);
        assert!(watch_in(&PLACE, || Err(rustix::io::Errno::MFILE)).is_none());
        let watch = watch_in(&PLACE, new_epoll).unwrap();
        let same = watch_in(&PLACE, || Err(rustix::io::Errno::MFILE)).unwrap();
        assert!(Arc::ptr_eq(&watch, &same), "one for all");
        let (server, connected) = connection();
        let first = FirstConnection::default();
        first.keep_watched(connected, watch);
        assert!(first.is_kept());
        drop(server);
        while first.is_kept() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn connections_are_closed_when_their_watch_ends() {
        static PLACE: Mutex<Option<Arc<Watch>>> = Mutex::new(None);
        let (mut server, connected) = connection();
        let watch = Arc::new(Watch { epoll: new_epoll().unwrap(), watched: Mutex::default() });
        let first = FirstConnection::default();
        first.keep_watched(connected, watch.clone());
        assert!(first.is_kept());
        watch.close_all();
        assert!(!first.is_kept());
        let mut received = Vec::new();
        server.read_to_end(&mut received).unwrap();
        assert_eq!(received.len(), ebb_nbd_proto::REQUEST_LEN, "it is told, and closed");
        let (_server, connected) = connection();
        first.keep_watched(connected, watch);
        assert!(!first.is_kept(), "no thread watches it");
        // Waiting fails on a file that is no epoll; then the next thread can take the place.
        let file = || Ok(std::fs::File::open("/dev/null").unwrap().into());
        let ended = watch_in(&PLACE, file).unwrap();
        while lock(&PLACE).is_some() || !lock(&ended.watched).ended {
            std::thread::yield_now();
        }
    }
}
