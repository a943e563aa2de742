//! What the workers of one remote store share: counters, and what is not stable yet.
//!
//! Two counters say what a flush has to cover: `acknowledged` counts changes that the server has
//! acknowledged, `covered` is the value it had when the last successful flush was submitted. A
//! change is counted before its caller learns that it was acknowledged. When a connection is lost,
//! the changes between the two may be lost with a server that ended, too.

use std::collections::HashMap;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender};
use ebb_advice::Advised;
use ebb_block::BlockError;
use event_listener::Event;
use rustix::net::Shutdown;

use super::options::{LostWrites, NbdError};

/// The shortest time between two probes that failed attempts to connect request.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// The state of a remote store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreState {
    /// The server's address.
    pub address: String,
    /// Connections that are established.
    pub connections: u64,
    /// Connections that were lost.
    pub lost: u64,
    /// Connections that were lost and established again.
    pub reconnects: u64,
    /// Requests in flight, including those that wait for a connection.
    pub in_flight: u64,
    /// Requests that were submitted again on a new connection.
    pub replayed: u64,
    /// Changes that were acknowledged and not flushed.
    pub unflushed: u64,
    /// Why the last connection was lost or could not be established, if there was such an error.
    pub last_error: Option<String>,
    /// True if the last attempt to connect reached a server: it, or its export, cannot be used.
    pub is_reached: bool,
    /// Seconds since `connections` last changed; while it is 0 because of a lost connection or a
    /// failed attempt to connect, seconds since the first of these.
    pub since_seconds: u64,
    /// For how many seconds a connected server has not replied to a request in flight; 0 if it
    /// replies.
    pub silent_seconds: u64,
    /// It has lost its right to the data, and is not connected again until the volume is opened anew.
    pub offline: bool,
}

/// Changes that the server may have lost: the error of the next flush.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct LostChanges {
    what: String,
    /// The server reported it as the error of a flush, which it may do only once: then no later flush can show that
    /// the changes are stable.
    pub(crate) reported: bool,
}

/// Returns true if an error says only that the server did not reply, and not that it may have lost
/// changes.
pub(crate) fn is_silence(error: &BlockError) -> bool {
    error.source.as_ref().is_some_and(|source| {
        let names_loss = source.get_ref().is_some_and(|cause| cause.is::<LostChanges>());
        source.kind() == std::io::ErrorKind::TimedOut
            && source.raw_os_error().is_none()
            && !names_loss
    })
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RemoteState {
    lost_writes: LostWrites,
    closed: AtomicBool,
    /// Aborted: waiting requests fail.
    aborted: AtomicBool,
    /// A channel that carries nothing: closing it wakes all waiting tasks, on any thread.
    end: Sender<Infallible>,
    ended: Receiver<Infallible>,
    connections: AtomicU64,
    lost: AtomicU64,
    reconnects: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    replayed: AtomicU64,
    acknowledged: AtomicU64,
    covered: AtomicU64,
    history: Mutex<RemoteHistory>,
    /// How often idle connections were requested to probe the server, and the tasks that wait for the
    /// next time.
    probes_requested: AtomicU64,
    probe_requested: Event,
    /// Set with `RemoteHistory::lost`, so that a flush need not lock.
    has_lost: AtomicBool,
}

#[derive(Debug)]
struct RemoteHistory {
    last_error: Option<String>,
    /// See [`StoreState::is_reached`].
    is_reached: bool,
    since: Instant,
    /// The first lost connection or failed attempt to connect since the server was last connected.
    down_since: Option<Instant>,
    /// What the next flush must report.
    lost: Option<LostChanges>,
    /// The sockets, so that closing the store shuts them down.
    sockets: HashMap<u64, Weak<OwnedFd>>,
    /// For how many seconds each silent connection has been silent.
    silent: HashMap<u64, u64>,
    next: u64,
    /// When a failed attempt to connect last requested a probe.
    probe_requested_at: Option<Instant>,
}

impl RemoteState {
    pub(crate) fn new(lost_writes: LostWrites) -> RemoteState {
        let (end, ended) = async_channel::bounded(1);
        RemoteState {
            lost_writes,
            closed: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            end,
            ended,
            connections: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            replayed: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            covered: AtomicU64::new(0),
            history: Mutex::new(RemoteHistory {
                last_error: None,
                is_reached: false,
                since: ebb_io::clock::now(),
                down_since: None,
                lost: None,
                sockets: HashMap::new(),
                silent: HashMap::new(),
                next: 0,
                probe_requested_at: None,
            }),
            has_lost: AtomicBool::new(false),
            probes_requested: AtomicU64::new(0),
            probe_requested: Event::new(),
        }
    }

    fn history(&self) -> MutexGuard<'_, RemoteHistory> {
        // Texts and times: they are valid also after a panic of another thread.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// A connection was established, `again` if it takes the place of a lost one; the number is for [`RemoteState::disconnected`].
    pub(crate) fn connected(&self, fd: &Arc<OwnedFd>, again: bool) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed);
        self.reconnects.fetch_add(u64::from(again), Ordering::Relaxed);
        let mut history = self.history();
        history.since = ebb_io::clock::now();
        history.down_since = None;
        let id = history.next;
        history.next += 1;
        history.sockets.insert(id, Arc::downgrade(fd));
        id
    }

    /// A connection ended; `replaced`: the link itself closed it, to make another one.
    pub(crate) fn disconnected(&self, id: u64, replaced: bool) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
        if !replaced {
            self.count_lost();
        }
        let mut history = self.history();
        history.since = ebb_io::clock::now();
        if !replaced {
            self.note_down(&mut history);
        }
        history.sockets.remove(&id);
        history.silent.remove(&id);
        drop(history);
        let (acknowledged, covered) =
            (self.acknowledged.load(Ordering::SeqCst), self.covered.load(Ordering::SeqCst));
        let report = self.reports_lost_writes() && !self.is_aborted();
        if acknowledged > covered && report {
            let count = acknowledged - covered;
            let what = format!(
                "the connection was lost when {count} changes (numbers {} to {acknowledged} since \
                 the volume was opened) were acknowledged and not flushed: the server may have \
                 lost them",
                covered + 1
            );
            self.lose(what, false);
        }
    }

    #[inline]
    pub(crate) fn reports_lost_writes(&self) -> bool {
        self.lost_writes == LostWrites::Report
    }

    /// Counts a lost connection, unless the store is closed.
    pub(crate) fn count_lost(&self) {
        if !self.is_closed() {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Number of connections lost so far.
    pub(crate) fn lost_connections(&self) -> u64 {
        self.lost.load(Ordering::SeqCst)
    }

    /// Makes the next flush fail with `what`, for changes that the server may have lost; `reported`: by an error of
    /// the server.
    pub(crate) fn lose(&self, what: String, reported: bool) {
        let mut history = self.history();
        let reported = reported || history.lost.as_ref().is_some_and(|lost| lost.reported);
        history.lost = Some(LostChanges { what, reported });
        drop(history);
        self.covered.fetch_max(self.acknowledged.load(Ordering::SeqCst), Ordering::SeqCst);
        self.has_lost.store(true, Ordering::SeqCst);
    }

    /// What a flush must report, once.
    pub(crate) fn take_lost(&self) -> Option<LostChanges> {
        if !self.has_lost.load(Ordering::SeqCst) {
            return None;
        }
        let mut history = self.history();
        self.has_lost.store(false, Ordering::SeqCst);
        history.lost.take()
    }

    /// The server has acknowledged a change that is not stable.
    pub(crate) fn acknowledge(&self) {
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
    }

    /// What a flush that begins now will cover.
    pub(crate) fn mark(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// A flush that began at `mark` succeeded.
    pub(crate) fn cover(&self, mark: u64) {
        self.covered.fetch_max(mark, Ordering::SeqCst);
    }

    /// Whether a flush has something to cover.
    pub(crate) fn is_dirty(&self) -> bool {
        self.acknowledged.load(Ordering::SeqCst) > self.covered.load(Ordering::SeqCst)
    }

    /// A connection has been silent for this many seconds; 0: it has replied.
    pub(crate) fn silent(&self, id: u64, seconds: u64) {
        let mut history = self.history();
        match seconds {
            0 => history.silent.remove(&id),
            seconds => history.silent.insert(id, seconds),
        };
    }

    /// The server may be shutting down: idle connections are to probe it.
    pub(crate) fn request_probe(&self) {
        self.probes_requested.fetch_add(1, Ordering::SeqCst);
        self.probe_requested.notify(usize::MAX);
    }

    /// As [`RemoteState::request_probe`], for a failed attempt to connect: limited in rate.
    pub(crate) fn request_probe_limited(&self) {
        let now = ebb_io::clock::now();
        let mut history = self.history();
        if history
            .probe_requested_at
            .is_none_or(|at| now.saturating_duration_since(at) >= PROBE_INTERVAL)
        {
            history.probe_requested_at = Some(now);
            drop(history);
            self.request_probe();
        }
    }

    pub(crate) fn probes_requested(&self) -> u64 {
        self.probes_requested.load(Ordering::SeqCst)
    }

    /// Waits until more probes were requested than `seen`.
    pub(crate) async fn probe_requested(&self, seen: u64) {
        while self.probes_requested() == seen {
            let listener = self.probe_requested.listen();
            // Checked again after the listener is registered: a later request wakes it.
            if self.probes_requested() != seen {
                return;
            }
            listener.await;
        }
    }

    /// Counts a request that is sent again.
    pub(crate) fn note_replayed(&self) {
        self.replayed.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes why a connection ended; `is_reached` if its server still runs.
    pub(crate) fn note_error(&self, error: &str, is_reached: bool) {
        self.note_failure(error.to_owned(), is_reached);
    }

    /// Notes why a connection could not be made.
    pub(crate) fn note_attempt(&self, error: &NbdError) {
        let text = Advised(error).to_string();
        self.note_failure(text, !matches!(error, NbdError::Connect { .. }));
    }

    fn note_failure(&self, error: String, is_reached: bool) {
        let mut history = self.history();
        (history.last_error, history.is_reached) = (Some(error), is_reached);
        self.note_down(&mut history);
    }

    /// Starts the clock of an outage, unless there is a connection or the clock runs already.
    fn note_down(&self, history: &mut RemoteHistory) {
        if self.connections.load(Ordering::Relaxed) == 0 {
            history.down_since.get_or_insert_with(ebb_io::clock::now);
        }
    }

    pub(crate) fn last_error(&self) -> String {
        self.history().last_error.clone().unwrap_or_else(|| "no connection yet".to_owned())
    }

    /// Whether the store was aborted.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Closes the store: every connection receives the end of its stream and sends `NBD_CMD_DISC`.
    pub(crate) fn close(&self) {
        self.end_all(Shutdown::Read);
    }

    /// Aborts the store: connections end without `NBD_CMD_DISC`, and their requests fail.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.end_all(Shutdown::Both);
    }

    fn end_all(&self, how: Shutdown) {
        self.closed.store(true, Ordering::Release);
        // A socket that is added later is closed by its link, which then reads `closed`.
        for socket in self.history().sockets.values().filter_map(Weak::upgrade) {
            let _ = rustix::net::shutdown(&socket, how);
        }
        self.end.close();
    }

    /// What `waiting` returns, or `None` as soon as the store is closed.
    pub(crate) async fn unless_closed<T>(&self, waiting: impl Future<Output = T>) -> Option<T> {
        let closed = async {
            // Never returns a value: the channel carries none.
            let _ = self.ended.recv().await;
            None
        };
        futures_lite::future::or(async { Some(waiting.await) }, closed).await
    }

    pub(crate) fn state(&self, address: String) -> StoreState {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let history = self.history();
        StoreState {
            address,
            connections: get(&self.connections),
            lost: get(&self.lost),
            reconnects: get(&self.reconnects),
            in_flight: get(&self.in_flight),
            replayed: get(&self.replayed),
            unflushed: get(&self.acknowledged).saturating_sub(get(&self.covered)),
            last_error: history.last_error.clone(),
            is_reached: history.is_reached,
            since_seconds: ebb_io::clock::since(history.down_since.unwrap_or(history.since))
                .as_secs(),
            silent_seconds: history.silent.values().copied().max().unwrap_or(0),
            offline: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> Arc<OwnedFd> {
        Arc::new(std::os::unix::net::UnixStream::pair().unwrap().0.into())
    }

    #[test]
    fn attempt_that_reached_the_server_is_told_from_one_that_did_not() {
        let shared = RemoteState::new(LostWrites::Report);
        let reached = || shared.state(String::new()).is_reached;
        let address = || "a".to_owned();
        let size = NbdError::Size { address: address(), export: address(), size: 1, unit: 512 };
        shared.note_attempt(&size);
        assert!(reached());
        let source = std::io::ErrorKind::ConnectionRefused.into();
        shared.note_attempt(&NbdError::Connect { address: address(), source });
        assert!(!reached());
        shared.note_attempt(&size);
        shared.note_error("the server has closed the connection", false);
        assert!(!reached());
        shared.note_error("the server did not reply for 2 s", true);
        assert!(reached());
    }

    #[test]
    fn what_was_acknowledged_and_not_flushed_is_reported_once() {
        let shared = RemoteState::new(LostWrites::Report);
        let id = shared.connected(&socket(), false);
        shared.acknowledge();
        let mark = shared.mark();
        shared.acknowledge();
        shared.cover(mark);
        shared.disconnected(id, false);
        let lost = shared.take_lost().unwrap();
        assert!(lost.what.contains("1 changes (numbers 2 to 2"), "{lost}");
        assert!(!lost.reported && shared.take_lost().is_none());
        // No new change was acknowledged: another lost connection loses no data.
        let id = shared.connected(&socket(), true);
        shared.disconnected(id, false);
        assert!(shared.take_lost().is_none());
        // What a server has reported is not forgotten for another cause.
        shared.lose("reported".into(), true);
        shared.lose("presumed".into(), false);
        assert!(shared.take_lost().unwrap().reported);
    }

    /// A connection that no request has used does not count, so that the server may have been there
    /// until the first attempt has failed.
    #[test]
    fn outage_begins_with_the_first_failure() {
        let age = |shared: &RemoteState, seconds| {
            let (mut history, by) = (shared.history(), Duration::from_secs(seconds));
            history.since = history.since.checked_sub(by).unwrap();
            history.down_since = history.down_since.map(|at| at.checked_sub(by).unwrap());
        };
        let since = |shared: &RemoteState| shared.state(String::new()).since_seconds;
        let shared = RemoteState::new(LostWrites::Report);
        age(&shared, 1000);
        shared.note_error("refused", false);
        assert!(since(&shared) < 1000, "{}", since(&shared));
        // A further failure does not start the clock again.
        age(&shared, 2000);
        shared.note_error("refused", false);
        assert!(since(&shared) >= 2000, "{}", since(&shared));
        let id = shared.connected(&socket(), true);
        assert!(since(&shared) < 1000);
        age(&shared, 3000);
        // Another worker cannot connect, and the server is there.
        shared.note_error("refused", false);
        assert!(since(&shared) >= 3000);
        shared.disconnected(id, false);
        assert!(since(&shared) < 1000);
        age(&shared, 4000);
        shared.note_error("refused", false);
        assert!(since(&shared) >= 4000);
    }

    #[test]
    fn a_flush_covers_what_was_acknowledged_before_it_was_submitted() {
        let shared = RemoteState::new(LostWrites::Flush);
        shared.acknowledge();
        let mark = shared.mark();
        shared.acknowledge();
        shared.cover(mark);
        assert!(shared.is_dirty());
        shared.cover(shared.mark());
        assert!(!shared.is_dirty());
        shared.cover(0);
        assert!(!shared.is_dirty(), "an older flush that ends later takes nothing back");
    }
}
