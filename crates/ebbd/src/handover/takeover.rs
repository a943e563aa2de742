//! A handover between two daemons that run at the same time: `ebbd serve --takeover`.
//!
//! The successor listens at a socket of its own and tells the running daemon its path over the control socket. The running
//! daemon connects to it, closes its volumes, sends what it hands over, and then both proceed in steps:
//!
//! | from | message | meaning |
//! |---|---|---|
//! | successor | `Hello` | it waits for a handover |
//! | predecessor | `State` | what follows, in a file in memory, and the number of sockets |
//! | predecessor | `Sockets` | up to 200 of them, repeated until the successor has all |
//! | successor | `Ready` | each store was tried, or none has responded for 2 s and no key is being derived; it uses none of the connections yet |
//! | predecessor | `Go` | the successor may serve guests and new clients |
//! | successor | `Done` | it does, and the connections are its own; the predecessor exits |
//! | predecessor | `Abort` | with the reason: the predecessor goes on serving, the successor exits |
//! | successor | `Abort` | before `Go`, with the reason: it exits |
//!
//! What is left when one of them ends:
//!
//! | when | of the predecessor | of the successor |
//! |---|---|---|
//! | before all sockets are sent | the successor starts as after a kill: clients connect again | the predecessor serves |
//! | then, until `Go` | the successor serves, with the connections | the predecessor serves again |
//! | after `Go`, before `Done` | the same | the predecessor serves again. If the successor is only silent, for 20 s, that counts as `Done` |
//! | after `Done` | nothing else ends | it is the end of a daemon as any other |
//!
//! A predecessor that could not close a volume does not serve again: it exits with status 1. One that a signal stops after all sockets are
//! sent leaves the service to its successor.
//!
//! # Invariants
//! - Before `Done` only the predecessor may use the connections again, which it does if the successor's end of the socket is
//!   closed; after it only the successor.
//! - The successor takes the end of the stream without `Abort` for the end of the predecessor, which sends nothing more and
//!   uses nothing any more: it then serves with what it has received.
//! - Only a process of the daemon's user gets the descriptors, or one of root that can bind the socket for it.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_advice::{Advice, Advised};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use tokio::sync::oneshot;

use super::HandedOver;
use crate::listener::Listener;

/// The version of these messages.
const PROTOCOL: u32 = 1;
/// How long the successor may take to say that it is one.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How long the successor may take to open its volumes, and how long to begin to serve after that.
pub(crate) const READY_LIMIT: Duration = Duration::from_secs(60);
const DONE_LIMIT: Duration = Duration::from_secs(20);
/// How long the predecessor may take to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How often a wait looks whether a signal has requested the end.
const PAUSE: Duration = Duration::from_millis(50);
/// How long the predecessor may take to write its dirty data and to close its volumes.
const CLOSE_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);
/// The most descriptors of one message; the kernel's limit is 253.
const BATCH: usize = 200;
/// The most sockets of a handover.
const SOCKETS_MAX: u32 = 1 << 20;
/// The longest reason of an abort, bytes.
const REASON_MAX: usize = 4096;

/// A message: its kind, a number, and for an abort the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hello,
    State,
    Sockets,
    Ready,
    Go,
    Done,
    Abort,
}

/// The first byte of each kind.
const KINDS: [(Kind, u8); 7] = [
    (Kind::Hello, b'h'),
    (Kind::State, b's'),
    (Kind::Sockets, b'f'),
    (Kind::Ready, b'r'),
    (Kind::Go, b'g'),
    (Kind::Done, b'd'),
    (Kind::Abort, b'a'),
];

impl Kind {
    fn byte(self) -> u8 {
        KINDS.iter().find(|(kind, _)| *kind == self).map_or(0, |(_, byte)| *byte)
    }
}

/// Why a handover has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeoverError {
    /// The other daemon has ended, or has closed its socket.
    #[error("the other daemon has ended")]
    Gone,
    #[error("the other daemon has not answered in {} s", .0.as_secs())]
    Late(Duration),
    #[error("a signal has requested the end")]
    Interrupted,
    /// The predecessor goes on; or the successor could not start.
    #[error("{0}")]
    Aborted(String),
    #[error("the other daemon does not follow the protocol of a takeover")]
    Invalid,
    /// Some of the sockets were lost.
    #[error("this process may not have as many descriptors as the other daemon hands over")]
    Descriptors,
    #[error("the socket between the daemons failed")]
    Io(#[from] io::Error),
}

impl Advice for TakeoverError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            TakeoverError::Invalid => Some("is it an ebbd of this version?".into()),
            TakeoverError::Descriptors => Some("raise its limit (ulimit -n)".into()),
            TakeoverError::Gone
            | TakeoverError::Late(_)
            | TakeoverError::Interrupted
            | TakeoverError::Aborted(_)
            | TakeoverError::Io(_) => None,
        }
    }
}

/// The socket between predecessor and successor.
#[derive(Debug)]
struct Peer(UnixStream);

impl Peer {
    fn new(stream: UnixStream) -> io::Result<Peer> {
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        let own = rustix::process::geteuid();
        if peer.uid != own && !peer.uid.is_root() {
            return Err(ErrorKind::PermissionDenied.into());
        }
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PAUSE))?;
        stream.set_write_timeout(Some(CONNECT_LIMIT))?;
        Ok(Peer(stream))
    }

    fn send(&self, kind: Kind, number: u32, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = [0; 5];
        bytes[0] = kind.byte();
        bytes[1..].copy_from_slice(&number.to_le_bytes());
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let parts = [IoSlice::new(&bytes)];
        let sent = rustix::net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)?;
        // Five bytes into an empty socket, or none.
        (&self.0).write_all(&bytes[sent..])
    }

    /// The next message, with its descriptors.
    fn receive(
        &self,
        limit: Duration,
        end: &AtomicBool,
    ) -> Result<(Kind, u32, Vec<OwnedFd>), TakeoverError> {
        let deadline = Instant::now() + limit;
        let mut bytes = [0; 5];
        let mut fds = Vec::new();
        let mut filled = 0;
        while filled < bytes.len() {
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes[filled..])];
            match rustix::net::recvmsg(&self.0, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) if received.bytes == 0 => return Err(TakeoverError::Gone),
                Ok(received) => {
                    if received.flags.contains(ReturnFlags::CTRUNC) {
                        return Err(TakeoverError::Descriptors);
                    }
                    filled += received.bytes;
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            fds.extend(rights);
                        }
                    }
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                    if end.load(Ordering::SeqCst) {
                        return Err(TakeoverError::Interrupted);
                    }
                    if Instant::now() >= deadline {
                        return Err(TakeoverError::Late(limit));
                    }
                }
                Err(rustix::io::Errno::CONNRESET) => return Err(TakeoverError::Gone),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        let [kind, number @ ..] = bytes;
        let number = u32::from_le_bytes(number);
        let kind = KINDS.into_iter().find(|(_, byte)| *byte == kind).map(|(kind, _)| kind);
        match kind.ok_or(TakeoverError::Invalid)? {
            Kind::Abort => Err(TakeoverError::Aborted(self.reason(number)?)),
            kind => Ok((kind, number, fds)),
        }
    }

    fn await_kind(
        &self,
        kind: Kind,
        limit: Duration,
        end: &AtomicBool,
    ) -> Result<(), TakeoverError> {
        match self.receive(limit, end)? {
            (received, ..) if received == kind => Ok(()),
            _ => Err(TakeoverError::Invalid),
        }
    }

    /// Why a message could not be sent: the reason that the other daemon has sent before, if there is one.
    fn ended(&self, error: io::Error, end: &AtomicBool) -> TakeoverError {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                self.receive(CONNECT_LIMIT, end).err().unwrap_or(TakeoverError::Gone)
            }
            _ => error.into(),
        }
    }

    fn abort(&self, reason: &str) {
        let reason: String = reason.chars().take(REASON_MAX / 4).collect();
        let length = u32::try_from(reason.len()).unwrap_or(0);
        // The successor may have ended.
        let _ = self
            .send(Kind::Abort, length, &[])
            .and_then(|()| (&self.0).write_all(reason.as_bytes()));
    }

    fn reason(&self, length: u32) -> Result<String, TakeoverError> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > REASON_MAX {
            return Err(TakeoverError::Invalid);
        }
        let mut text = vec![0; length];
        (&self.0).read_exact(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// A successor that waits for what this daemon hands over.
pub(crate) struct Successor(Peer, Option<oneshot::Sender<String>>);

impl fmt::Debug for Successor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Successor")
    }
}

/// What has become of a handover.
#[derive(Debug)]
pub(crate) enum HandoverEnd {
    /// The successor serves.
    Done,
    /// This daemon must serve again, with what it has not handed over.
    Back(Box<HandedOver>, TakeoverError),
}

impl Successor {
    /// The successor that listens at `path`.
    ///
    /// # Errors
    /// It does not listen, or is of another user.
    pub(crate) fn connect(path: &Path) -> io::Result<Successor> {
        // Does not wait for a place in the queue of a socket that is not accepted from.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Peer::new(UnixStream::from(socket)).map(|peer| Successor(peer, None))
    }

    /// Whether it is a successor: any program may listen at a socket.
    pub(crate) fn greets(&self, end: &AtomicBool) -> bool {
        matches!(self.0.receive(HELLO_LIMIT, end), Ok((Kind::Hello, PROTOCOL, _)))
    }

    /// Why it is refused, if that happens; dropped if the successor ends before.
    pub(crate) fn refusal(&mut self) -> oneshot::Receiver<String> {
        let (sender, refusal) = oneshot::channel();
        self.1 = Some(sender);
        refusal
    }

    /// Whether it still waits.
    pub(crate) fn is_waiting(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.0.0, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|found| found == 0)
    }

    /// Tells it that this daemon goes on serving.
    pub(crate) fn refuse(self, reason: &str) {
        if let Some(refused) = self.1 {
            // Who waits for it ends with the daemon.
            let _ = refused.send(reason.to_owned());
        }
        self.0.abort(reason);
    }

    /// Hands everything over, and waits until the successor serves. No volume is open here meanwhile. A daemon that cannot
    /// serve again leaves the service to a successor that is late.
    pub(crate) fn hand_over(
        self,
        handed: HandedOver,
        can_serve_again: bool,
        end: &AtomicBool,
    ) -> HandoverEnd {
        let begun = self.prepare(&handed, end).and_then(|()| {
            let sent = self.0.send(Kind::Go, 0, &[]);
            sent.map_err(|error| self.0.ended(error, end))
        });
        match begun {
            Ok(()) => {}
            // The successor has everything, and takes the end of the stream for leave to serve.
            Err(TakeoverError::Interrupted) => return HandoverEnd::Done,
            Err(error) if !can_serve_again => {
                return HandoverEnd::Back(Box::new(handed), error);
            }
            Err(error) => {
                self.0.abort(&format!("the predecessor serves again: {}", Advised(&error)));
                // It has the locks of the volumes until it ends.
                self.wait_until_gone(end);
                return HandoverEnd::Back(Box::new(handed), error);
            }
        }
        // A signal does not end this wait: the successor may need this daemon to serve.
        match self.0.await_kind(Kind::Done, DONE_LIMIT, &AtomicBool::default()) {
            Err(error @ TakeoverError::Gone) => HandoverEnd::Back(Box::new(handed), error),
            // It lives, and has its volumes open.
            Ok(()) | Err(_) => HandoverEnd::Done,
        }
    }

    /// Waits until the successor has ended, or a signal has requested the end.
    fn wait_until_gone(&self, end: &AtomicBool) {
        let mut waited = Duration::ZERO;
        while self.is_waiting() && !end.load(Ordering::SeqCst) {
            if waited.as_secs() % 10 == 5 && waited.subsec_millis() == 0 {
                tracing::warn!("the successor has not ended, and has the volumes' locks: kill it");
            }
            std::thread::park_timeout(PAUSE);
            waited += PAUSE;
        }
    }

    fn prepare(&self, handed: &HandedOver, end: &AtomicBool) -> Result<(), TakeoverError> {
        let (state, sockets) = handed.descriptors()?;
        let count = u32::try_from(sockets.len()).map_err(|_| TakeoverError::Invalid)?;
        self.0.send(Kind::State, count, &[state.as_fd()])?;
        for batch in sockets.chunks(BATCH) {
            self.0.send(Kind::Sockets, u32::try_from(batch.len()).unwrap_or(0), batch)?;
        }
        self.0.await_kind(Kind::Ready, READY_LIMIT, end)
    }
}

/// The predecessor, after it has handed over and before it may exit.
pub(crate) struct Predecessor {
    peer: Arc<Peer>,
    report: Arc<Mutex<Option<Arc<Peer>>>>,
}

/// Tells a predecessor why its successor ends. It holds the socket until `Go` has come, or the
/// predecessor has ended: then the predecessor learns of an end by the close of the socket.
pub(crate) struct FailureReport(Arc<Mutex<Option<Arc<Peer>>>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FailureReport {
    /// An earlier version would take the reason for `Done` after `Go`: then it learns only of the
    /// end.
    pub(crate) fn send(&self, why: &str) {
        if let Some(peer) = lock(&self.0).take() {
            peer.abort(&format!("the successor could not start: {why}"));
        }
    }
}

impl fmt::Debug for Predecessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Predecessor")
    }
}

impl Predecessor {
    fn of(peer: Peer) -> Predecessor {
        Predecessor { peer: Arc::new(peer), report: Arc::default() }
    }

    /// For the end of this daemon before it serves.
    pub(crate) fn failure_report(&self) -> FailureReport {
        *lock(&self.report) = Some(self.peer.clone());
        FailureReport(self.report.clone())
    }

    /// Waits for the predecessor to connect to `listener`.
    ///
    /// # Errors
    /// [`TakeoverError::Gone`]: it has ended. [`TakeoverError::Aborted`]: it goes on serving. Others of [`TakeoverError`].
    pub(crate) fn accept(
        listener: &Listener,
        end: &AtomicBool,
    ) -> Result<Predecessor, TakeoverError> {
        let socket = std::os::unix::net::UnixListener::from(listener.fd.try_clone()?);
        socket.set_nonblocking(true)?;
        let deadline = Instant::now() + CONNECT_LIMIT;
        loop {
            match socket.accept() {
                Ok((stream, _)) => match Peer::new(stream) {
                    Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
                    peer => {
                        let peer = peer?;
                        if let Err(error) = peer.send(Kind::Hello, PROTOCOL, &[]) {
                            return Err(peer.ended(error, end));
                        }
                        return Ok(Predecessor::of(peer));
                    }
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
            if end.load(Ordering::SeqCst) {
                return Err(TakeoverError::Interrupted);
            }
            if Instant::now() >= deadline {
                return Err(TakeoverError::Late(CONNECT_LIMIT));
            }
        }
    }

    /// Waits until the predecessor has closed its volumes, which takes as long as they have dirty data, and returns what it
    /// hands over.
    ///
    /// # Errors
    /// [`TakeoverError::Gone`]: it has ended without a handover. [`TakeoverError::Aborted`]: it goes on serving.
    pub(crate) fn receive(&self, end: &AtomicBool) -> Result<HandedOver, TakeoverError> {
        let (kind, count, state) = self.peer.receive(CLOSE_LIMIT, end)?;
        let state = <[OwnedFd; 1]>::try_from(state).map_err(|_| TakeoverError::Invalid)?;
        if kind != Kind::State || count > SOCKETS_MAX {
            return Err(TakeoverError::Invalid);
        }
        let mut sockets = Vec::new();
        while sockets.len() < usize::try_from(count).unwrap_or(usize::MAX) {
            match self.peer.receive(CONNECT_LIMIT, end)? {
                (Kind::Sockets, 1.., more) if !more.is_empty() => sockets.extend(more),
                _ => return Err(TakeoverError::Invalid),
            }
        }
        HandedOver::from_descriptors(&state[0], sockets).map_err(|error| {
            TakeoverError::Aborted(format!("what it has handed over cannot be used: {error}"))
        })
    }

    /// Reports that this daemon could serve, and waits until guests and new clients may be served; this is so, too, if the
    /// predecessor has ended.
    ///
    /// # Errors
    /// Nothing may be served: the predecessor serves again.
    pub(crate) fn ready(&self, end: &AtomicBool) -> Result<(), TakeoverError> {
        let go = self.peer.send(Kind::Ready, 0, &[]).map_err(TakeoverError::from);
        // Also if it cannot be sent: an abort may have arrived before.
        let turn = self.peer.await_kind(Kind::Go, READY_LIMIT, end);
        lock(&self.report).take();
        match turn {
            Ok(()) => Ok(()),
            Err(TakeoverError::Gone) => {
                if let Err(error) = go {
                    tracing::debug!(%error, "the predecessor has ended");
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes the connections, and lets the predecessor exit.
    pub(crate) fn done(self) {
        // It may have ended.
        let _ = self.peer.send(Kind::Done, 0, &[]);
    }
}

#[cfg(test)]
mod tests;
