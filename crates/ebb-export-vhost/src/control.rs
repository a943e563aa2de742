//! The thread that serves the sockets of frontends: it accepts connections, carries out messages, and ends connections.
//!
//! Invariants: the thread waits in `epoll_wait` only. A frontend that sends half a message, or does not read its replies,
//! is not waited for, and one that sends without end is served in turns. After [`ControlMessage::Withdraw`] or [`ControlMessage::Stop`] a connection is closed as soon as its queues have
//! ended, which [`ServedDisks`](ebb_export::ServedDisks) has them do at once.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ebb_volume::{LogLimit, ServedVolume, Volumes};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{SocketFlags, accept_with};

use crate::commands::{ConnectionId, ControlMessage};
use crate::disk_shared::{DiskShared, FrontendPeer};
use crate::frontend_socket::SocketError;
use crate::session::{FrontendContext, FrontendSession, OUT_OF_BUDGET};
use crate::stuck_writes::{LOOK, WriteWatch};
use crate::volume_socket::VolumeSocket;

/// Connections to one socket: a guest has one, and while it is migrated within a host two.
const CONNECTIONS_MAX: usize = 8;
/// How often a queue tries again that waits for another writer or for its ring, and a connection
/// whose frontend has to read first.
const RETRY: Duration = Duration::from_millis(100);
/// How long to wait before the next accept when the process has no free descriptor.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);
/// Messages of one connection that are handled before those of others.
const MESSAGES_PER_TURN: usize = 32;
/// Events taken with one system call.
const EVENTS: usize = 64;
/// Lines about connections that are refused.
static REFUSALS: LogLimit = LogLimit::new(10, Duration::from_secs(10));

/// The token of the mailbox; sockets and connections are numbered from 1 on.
const MAILBOX: u64 = 0;

/// See the module.
pub(crate) struct FrontendControl {
    pub(crate) epoll: OwnedFd,
    pub(crate) inbox: Receiver<ControlMessage>,
    pub(crate) volumes: Volumes,
    pub(crate) context: FrontendContext,
    pub(crate) queue_memory: usize,
    pub(crate) listeners: BTreeMap<u64, VolumeSocket>,
    pub(crate) sessions: BTreeMap<ConnectionId, FrontendSession>,
    pub(crate) next: u64,
    /// When to accept again, after descriptors had run out.
    pub(crate) accept_again: Option<Instant>,
    pub(crate) stopping: bool,
    /// The workers' writes, and when they were looked at.
    pub(crate) watch: WriteWatch,
    pub(crate) looked: Instant,
}

impl FrontendControl {
    /// Serves until the backend has stopped and all connections have ended.
    pub(crate) fn run(mut self) {
        self.begin();
        while !self.has_ended() && self.serve_events(self.timeout()).is_some() {}
        self.end();
    }

    /// To be called once, before [`FrontendControl::serve_events`].
    pub(crate) fn begin(&mut self) {
        let events = epoll::add(
            &self.epoll,
            self.context.mailbox.wakeup(),
            EventData::new_u64(MAILBOX),
            EventFlags::IN,
        );
        if let Err(error) = events {
            tracing::error!(%error, "vhost-user cannot be served");
            self.stopping = true;
        }
    }

    /// Whether the backend has stopped and all connections have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.stopping && self.sessions.is_empty()
    }

    /// To be called after the last events were served.
    pub(crate) fn end(&self) {
        self.context.served.note_control_end();
    }

    /// Waits for events, at most for `timeout`, and handles them. Returns their number, or `None`
    /// if the thread is to end now.
    pub(crate) fn serve_events(&mut self, timeout: Option<Duration>) -> Option<usize> {
        let mut events = Vec::with_capacity(EVENTS);
        let timeout = timeout.and_then(|time| rustix::fs::Timespec::try_from(time).ok());
        let waited =
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        let now = ebb_mem::clock::now();
        if now.saturating_duration_since(self.looked) >= LOOK {
            self.looked = now;
            self.watch.look();
        }
        if let Err(error) = waited
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "vhost-user is not served any more");
            return None;
        }
        let count = events.len();
        for event in events {
            match event.data.u64() {
                MAILBOX => {
                    self.context.mailbox.clear_wakeup();
                    while let Ok(message) = self.inbox.try_recv() {
                        if matches!(message, ControlMessage::Abandon) {
                            return None;
                        }
                        self.handle(message);
                    }
                }
                token if self.listeners.contains_key(&token) => self.accept(token),
                token => self.serve(ConnectionId(token), event.flags),
            }
        }
        if self.accept_again.is_some_and(|at| now >= at) {
            self.accept_again = None;
            let tokens: Vec<u64> = self.listeners.keys().copied().collect();
            tokens.into_iter().for_each(|token| self.listen(token, true));
        }
        let waiting = self.sessions.values().filter(|session| session.waits_for_others());
        let waiting: Vec<ConnectionId> = waiting.map(|session| session.id).collect();
        waiting.into_iter().for_each(|id| self.with(id, FrontendSession::try_again));
        let waiting = self.sessions.values().filter(|session| session.waits_for_reader());
        let waiting: Vec<ConnectionId> = waiting.map(|session| session.id).collect();
        waiting.into_iter().for_each(|id| self.with(id, |session, _| session.try_reader()));
        Some(count)
    }

    /// The time after which events are to be served although none has happened.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let watch = (!self.sessions.is_empty()).then_some(LOOK);
        let waits = self.sessions.values().any(FrontendSession::waits_for_others);
        let reader = self.sessions.values().filter_map(|session| session.reader_retry(RETRY)).min();
        let accept = self.accept_again;
        let accept = accept.map(|at| at.saturating_duration_since(ebb_mem::clock::now()));
        [accept, waits.then_some(RETRY), reader, watch].into_iter().flatten().min()
    }

    fn handle(&mut self, message: ControlMessage) {
        match message {
            ControlMessage::Ended(end) => {
                let id = end.connection;
                let former = self.sessions.get(&id);
                let ended =
                    former.and_then(|one| Some((one.place_served(end.index)?, one.disk.clone())));
                self.with(id, |session, context| session.note_end(context, &end));
                if let Some((place, disk)) = ended {
                    let is_other = |other: &&mut FrontendSession| {
                        other.id != id && other.disk.has_volume_of(&disk)
                    };
                    let others = self.sessions.values_mut().filter(is_other);
                    others.for_each(|other| other.note_former_end(place, &end));
                }
            }
            ControlMessage::Broken(id, index) => {
                self.with(id, |session, _| {
                    session.note_broken(index);
                    Ok(())
                });
            }
            ControlMessage::MemoryLost(id) | ControlMessage::NotifyFailed(id) => {
                self.with(id, |session, _| {
                    session.close();
                    Ok(())
                });
            }
            ControlMessage::MemoryReleased(id) => {
                self.with(id, |session, context| session.note_released(context));
            }
            ControlMessage::Listen(listener) => {
                let token = self.token();
                self.listeners.insert(token, listener);
                self.listen(token, true);
            }
            ControlMessage::Connected(socket, volume) if !self.stopping => {
                self.connect(socket, &volume, &LogLimit::new(1, Duration::from_secs(1)));
            }
            ControlMessage::Connected(..) => {}
            ControlMessage::Unlisten(path) => {
                let gone = self.listeners.iter().find(|(_, listener)| listener.path() == path);
                if let Some(token) = gone.map(|(token, _)| *token) {
                    self.listen(token, false);
                    self.listeners.remove(&token);
                }
            }
            ControlMessage::Withdraw(volume) => {
                let is_of = |session: &FrontendSession| {
                    std::ptr::eq(volume.as_ptr(), Arc::as_ptr(&session.disk.volume))
                };
                self.close_sessions(is_of);
            }
            ControlMessage::AllowChanged => {
                let volumes = self.volumes.clone();
                let disallowed = |session: &FrontendSession| {
                    !volumes.admits(session.disk.volume.name(), &session.disk.peer.who)
                };
                self.sessions.values().filter(|one| disallowed(one)).for_each(log_disallowed);
                self.close_sessions(disallowed);
            }
            ControlMessage::Disconnect(id) => {
                self.with(id, |session, _| {
                    session.close();
                    Ok(())
                });
            }
            ControlMessage::Resized => {
                self.sessions.values_mut().for_each(FrontendSession::announce_size);
            }
            ControlMessage::Stop => {
                self.stopping = true;
                let tokens: Vec<u64> = self.listeners.keys().copied().collect();
                tokens.into_iter().for_each(|token| self.listen(token, false));
                self.listeners.clear();
                self.close_sessions(|_| true);
            }
            // Handled by the caller.
            ControlMessage::Abandon => {}
        }
    }

    fn close_sessions(&mut self, which: impl Fn(&FrontendSession) -> bool) {
        let closed = self.sessions.values_mut().filter(|session| which(session));
        closed.for_each(FrontendSession::close);
        let ended = self.sessions.values().filter(|session| which(session));
        let ended: Vec<ConnectionId> = ended.map(|session| session.id).collect();
        ended.into_iter().for_each(|id| self.settle(id));
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Begins or ceases to wait for connections to a socket.
    fn listen(&mut self, token: u64, begin: bool) {
        let Some(listener) = self.listeners.get(&token) else { return };
        let result = match begin {
            true => {
                epoll::add(&self.epoll, listener.as_fd(), EventData::new_u64(token), EventFlags::IN)
            }
            false => epoll::delete(&self.epoll, listener.as_fd()),
        };
        match result {
            Ok(()) | Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOENT) => {}
            Err(error) => tracing::error!(%error, path = %listener.path().display(),
                "cannot wait for connections to this socket"),
        }
    }

    fn accept(&mut self, token: u64) {
        let Some(listener) = self.listeners.get(&token) else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(listener.as_fd(), flags) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Err(error) => {
                if let Some(suppressed) = REFUSALS.admit(ebb_mem::clock::now()) {
                    tracing::warn!(%error, suppressed, "cannot accept a frontend of vhost-user");
                }
                let tokens: Vec<u64> = self.listeners.keys().copied().collect();
                tokens.into_iter().for_each(|token| self.listen(token, false));
                self.accept_again = Some(ebb_mem::clock::now() + OUT_OF_DESCRIPTORS);
                return;
            }
        };
        let (name, log_limit) = (listener.volume().clone(), listener.log_limit.clone());
        self.connect(socket, &name, &log_limit);
    }

    /// Serves a volume to the frontend at the other end of `socket`; `log_limit` limits the lines about its coming and going.
    fn connect(&mut self, socket: OwnedFd, name: &str, log_limit: &LogLimit) {
        let peer = FrontendPeer::of(&socket);
        let refuse = |reason: &str| {
            if let Some(suppressed) = REFUSALS.admit(ebb_mem::clock::now()) {
                let (pid, uid) = (peer.pid, peer.uid);
                tracing::warn!(
                    volume = name,
                    pid,
                    uid,
                    reason,
                    suppressed,
                    "refused a frontend of vhost-user"
                );
            }
        };
        if !self.volumes.admits(name, &peer.who) {
            return refuse("no entry of the volume's `allow` matches it");
        }
        let Some(ServedVolume { volume, pool }) = self.volumes.get(name) else {
            let reason = self.volumes.refusal(name);
            return refuse(reason.as_deref().unwrap_or("there is no such volume"));
        };
        let same = |session: &&FrontendSession| Arc::ptr_eq(&session.disk.volume, &volume);
        if self.sessions.values().filter(same).count() >= CONNECTIONS_MAX {
            return refuse("too many connections to this disk");
        }
        // Those of connections that have ended are unmapped.
        let mappings = self.sessions.values().find(same).map(|other| other.mappings.clone());
        let mappings = mappings.unwrap_or_else(|| self.context.mappings.volume());
        if !self.context.descriptors.admits_frontend(name) {
            return refuse(OUT_OF_BUDGET);
        }
        let id = ConnectionId(self.token());
        let disk = DiskShared::new(volume, pool, (id.0, peer.clone()), self.queue_memory);
        let mut session = FrontendSession::new(id, socket, disk, mappings);
        let interest = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) =
            epoll::add(&self.epoll, session.socket.as_fd(), EventData::new_u64(id.0), interest)
        {
            return refuse(&error.to_string());
        }
        if self.stopping || !self.context.served.add(&id, &session.disk) {
            return refuse("the volume is being closed");
        }
        session.count_descriptors(&mut self.context);
        let logged = log_limit.admit(ebb_mem::clock::now());
        if let Some(suppressed) = logged {
            tracing::info!(
                volume = &**session.disk.volume.name(),
                connection = %id,
                pid = peer.pid,
                uid = peer.uid,
                suppressed,
                "a frontend of vhost-user connected"
            );
        }
        session.is_logged = logged.is_some();
        self.sessions.insert(id, session);
    }

    /// Handles what has happened on a connection's socket.
    fn serve(&mut self, id: ConnectionId, flags: EventFlags) {
        self.with(id, |session, context| {
            if flags.contains(EventFlags::OUT) {
                session.socket.send_rest()?;
            }
            let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP);
            for _ in 0..MESSAGES_PER_TURN {
                if !session.may_receive() {
                    break;
                }
                if !session.socket.receive()? {
                    return if gone { Err(SocketError::Disconnected) } else { Ok(()) };
                }
                session.handle(context)?;
            }
            if session.is_readable() {
                // There may be more: it is reported again, after the events of others.
                return Ok(());
            }
            if gone { Err(SocketError::Disconnected) } else { Ok(()) }
        });
    }

    /// Calls `act` with a connection, and ends it if that fails.
    fn with(
        &mut self,
        id: ConnectionId,
        act: impl FnOnce(&mut FrontendSession, &mut FrontendContext) -> Result<(), SocketError>,
    ) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if let Err(error) = act(session, &mut self.context)
            && !session.closing
        {
            let (volume, connection) = (&**session.disk.volume.name(), id);
            match error {
                // So was its "connected" line.
                _ if !session.is_logged => {
                    tracing::debug!(volume, %connection, %error, "a connection of a frontend ended");
                }
                SocketError::Disconnected => {
                    tracing::info!(volume, %connection, "a frontend of vhost-user disconnected");
                }
                error => {
                    tracing::warn!(volume, %connection, %error, "closed the connection of a frontend");
                }
            }
            session.disk.gone.store(true, Ordering::Relaxed);
            session.close();
            session.is_end_logged = true;
        }
        self.settle(id);
    }

    /// Waits for what a connection can do next, or ends it if it is closed and its queues have ended.
    fn settle(&mut self, id: ConnectionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.count_descriptors(&mut self.context);
        if session.closing {
            // A socket that was closed by its peer would be reported for ever.
            let _ = epoll::delete(&self.epoll, session.socket.as_fd());
            if !session.has_queues() {
                if session.is_logged && !session.is_end_logged {
                    let volume = &**session.disk.volume.name();
                    tracing::info!(volume, connection = %id, "the connection of a frontend ended");
                }
                session.release_descriptors(&mut self.context);
                self.context.served.remove(&id);
                self.sessions.remove(&id);
            }
            return;
        }
        let mut interest = EventFlags::empty();
        if session.is_readable() {
            interest |= EventFlags::IN | EventFlags::RDHUP;
        }
        if session.socket.is_blocked() && !session.socket.retries {
            interest |= EventFlags::OUT;
        }
        let _ =
            epoll::modify(&self.epoll, session.socket.as_fd(), EventData::new_u64(id.0), interest);
    }
}

/// Logs that a frontend may not open its volume any more.
fn log_disallowed(session: &FrontendSession) {
    if let Some(suppressed) = REFUSALS.admit(ebb_mem::clock::now()) {
        let (volume, who) = (&**session.disk.volume.name(), &session.disk.peer.who);
        tracing::warn!(volume, connection = %session.id, %who, suppressed,
            "no entry of the volume's `allow` matches the frontend any more: its connection ends");
    }
}
