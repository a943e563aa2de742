//! The broker's loop.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_sandbox::threads;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::paths::{Fault, Paths, only_names, opens};
use crate::ring;
use crate::rules::CurrentRules;
use crate::sockets::{SocketCalls, Sockets};
use crate::sys::{self, CallReply, Notice};
use crate::target::GuardedDaemon;

/// The most calls that are being made at a time: each has a thread, which may hang with a disk.
const CALLS_MAX: usize = 8192;
/// How long the same refusal is not logged again, and how many different ones are in that time.
const REFUSALS_EVERY: Duration = Duration::from_secs(10);
const REFUSALS_MAX: usize = 20;

/// The broker.
pub(crate) struct BrokerServer {
    pub listener: OwnedFd,
    /// Ends with the daemon.
    pub channel: UnixStream,
    pub target: Arc<GuardedDaemon>,
    pub rules: Arc<CurrentRules>,
    /// The operations that rings take.
    pub operations: Vec<u8>,
    pub sockets: Arc<Sockets>,
    pub calls: AtomicUsize,
    pub refusals: Refusals,
}

/// Limits how often refusals are logged: different ones at once, and the same again after some time.
#[derive(Default)]
pub(crate) struct Refusals {
    last: Mutex<HashMap<String, Instant>>,
    more: AtomicU64,
}

impl Refusals {
    fn log(&self, what: &str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|_, when| when.elapsed() < REFUSALS_EVERY);
        if last.contains_key(what) || last.len() >= REFUSALS_MAX {
            self.more.fetch_add(1, Ordering::Relaxed);
            return;
        }
        last.insert(what.to_owned(), Instant::now());
        drop(last);
        match self.more.swap(0, Ordering::Relaxed) {
            0 => tracing::warn!("the broker refused to {what}"),
            more => tracing::warn!(more, "the broker refused to {what}"),
        }
    }
}

impl BrokerServer {
    /// Makes calls until the daemon has ended.
    pub(crate) fn run(self) {
        let server = Arc::new(self);
        loop {
            let mut waiting = [
                PollFd::new(&server.listener, PollFlags::IN),
                PollFd::new(&server.channel, PollFlags::RDHUP),
            ];
            match poll(&mut waiting, None) {
                Err(Errno::INTR) => continue,
                Err(_) => return,
                Ok(_) if !waiting[1].revents().is_empty() => return,
                Ok(_) if waiting[0].revents().contains(PollFlags::IN) => {}
                // No process has the filter any more.
                Ok(_) => return,
            }
            match sys::receive(server.listener.as_fd()) {
                Ok(notice) => server.start(notice),
                // The thread that made it has ended, or a signal has come.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {}
                Err(error) => {
                    tracing::error!("the broker cannot receive calls: {error}");
                    return;
                }
            }
        }
    }

    fn start(self: &Arc<BrokerServer>, notice: Notice) {
        let busy = CallReply::Error(libc::EAGAIN);
        if self.calls.fetch_add(1, Ordering::Relaxed) >= CALLS_MAX {
            self.calls.fetch_sub(1, Ordering::Relaxed);
            return sys::reply(self.listener.as_fd(), notice.id, busy);
        }
        let server = self.clone();
        let call = move || {
            server.call(&notice);
            server.calls.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = threads::run(call) {
            self.calls.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!("the broker cannot make a thread: {error}");
            sys::reply(self.listener.as_fd(), notice.id, busy);
        }
    }

    /// Makes a call.
    fn call(&self, notice: &Notice) {
        let listener = self.listener.as_fd();
        if !self.target.has_thread(notice.thread) {
            return sys::reply(listener, notice.id, CallReply::Error(libc::EPERM));
        }
        if only_names(notice) {
            return sys::reply(listener, notice.id, CallReply::Continue);
        }
        let reply = match self.result(notice) {
            Ok(None) => return,
            Ok(Some(value)) => CallReply::Value(value),
            Err(Fault::Failed(error)) => CallReply::Error(error.raw_os_error()),
            Err(Fault::Refused(what)) => {
                self.refusals.log(&what);
                CallReply::Error(libc::EACCES)
            }
        };
        sys::reply(listener, notice.id, reply);
    }

    /// What the call returns; `None` if the daemon has its descriptor already.
    fn result(&self, notice: &Notice) -> Result<Option<i64>, Fault> {
        let (target, rules) = (&self.target, &self.rules);
        let paths = Paths { target, rules, thread: notice.thread };
        let sockets = SocketCalls { target, rules, sockets: &self.sockets };
        match notice.number {
            number if opens(number) => {
                let (opened, close_on_exec) = paths.open(notice)?;
                self.give(notice, &opened, (close_on_exec, true)).map(|_| None)
            }
            libc::SYS_socket => {
                let made = sockets.make(notice.arguments)?;
                // It is noted before the daemon can use it.
                let number = self.give(notice, &made.own, (made.close_on_exec, false))?;
                self.sockets.keep(number, made);
                Ok(Some(number.into()))
            }
            libc::SYS_connect => sockets.connect(notice.arguments).map(|()| Some(0)),
            libc::SYS_bind => sockets.bind(notice.arguments).map(|()| Some(0)),
            libc::SYS_sendto => sockets.send(notice.arguments).map(Some),
            libc::SYS_io_uring_setup => {
                let [entries, address, ..] = notice.arguments;
                let ring = ring::make(target, [entries, address], &self.operations)?;
                self.give(notice, &ring, (true, true)).map(|_| None)
            }
            _ => paths.change(notice).map(|()| Some(0)),
        }
    }

    /// Puts a descriptor into the daemon: its number there.
    fn give(&self, notice: &Notice, fd: &OwnedFd, how: (bool, bool)) -> Result<i32, Fault> {
        sys::give(self.listener.as_fd(), notice.id, fd.as_fd(), how)
            .map_err(|error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO).into())
    }
}
