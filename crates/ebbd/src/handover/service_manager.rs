//! The service manager's store of descriptors: what is put there when a daemon ends is passed to the next one
//! (`FileDescriptorStoreMax=` of systemd, sd_notify(3)).
//!
//! # Invariants
//! - The successor removes from the store what it has received, and knows that it is removed before it uses a connection:
//!   if it is killed, no later daemon gets connections with an old state.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use ebb_advice::Advised;
use rustix::event::{PollFd, PollFlags, poll};
use sd_notify::NotifyState;

use super::HandedOver;
use crate::listener::Listener;

/// The names of the descriptors in the store.
const STATE: &str = "ebbd-state";
const SOCKETS: &str = "ebbd-sockets";
/// The most descriptors of one message; the kernel's limit is 253.
const BATCH: usize = 200;
/// How long the service manager may take to remove descriptors.
const BARRIER: Duration = Duration::from_secs(5);

/// The number of descriptors that the service manager stores for this process; 0 without a store.
pub(crate) fn capacity() -> usize {
    let number = std::env::var("FDSTORE").ok().and_then(|text| text.parse().ok());
    number.filter(|_| std::env::var_os("NOTIFY_SOCKET").is_some()).unwrap_or(0)
}

/// Puts everything into the store, as far as there is room.
///
/// # Errors
/// Of the system.
pub(crate) fn store(mut handed: HandedOver) -> std::io::Result<usize> {
    let room = capacity().saturating_sub(1);
    // The service manager opens its own sockets anew, or has kept them.
    drop(handed.take_passed());
    let excess = (handed.listeners.len() + handed.connections.len()).saturating_sub(room);
    handed.connections.truncate(handed.connections.len().saturating_sub(excess));
    let (state, sockets) = handed.descriptors()?;
    // A client that hangs up is noticed by the successor, which must find each socket that the state names or none.
    let message = |name| [NotifyState::FdStore, NotifyState::FdName(name)];
    for batch in sockets.chunks(BATCH) {
        sd_notify::notify_with_fds(&message(SOCKETS), batch)?;
    }
    sd_notify::notify_with_fds(&message(STATE), &[state.as_fd()])?;
    Ok(handed.connections.len())
}

/// What the service manager has passed to this process.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    /// Listening sockets of its own.
    pub(crate) listeners: Vec<Listener>,
    state: Option<OwnedFd>,
    sockets: Vec<OwnedFd>,
}

/// The number of listening sockets that the service manager has passed.
///
/// # Errors
/// If the environment variables are malformed.
pub fn passed_listeners() -> std::io::Result<usize> {
    let others = |(_, name): &(i32, String)| name != STATE && name != SOCKETS;
    Ok(numbers_and_names()?.iter().filter(|named| others(named)).count())
}

fn numbers_and_names() -> std::io::Result<Vec<(i32, String)>> {
    // Without sockets, names are those of the parent process.
    match sd_notify::listen_fds()?.len() {
        0 => Ok(Vec::new()),
        _ => Ok(sd_notify::listen_fds_with_names()?.collect()),
    }
}

/// The descriptors that the service manager has passed (`LISTEN_FDS`, `LISTEN_FDNAMES`). To be called once.
///
/// # Errors
/// If the environment variables are malformed, or a descriptor is not a listening socket.
pub(crate) fn passed() -> anyhow::Result<Passed> {
    let mut passed = Passed::default();
    for (number, name) in numbers_and_names().context("cannot read LISTEN_FDS")? {
        // SAFETY: the service manager passed this descriptor for us to own, and this function is
        // called once, before anything else could have taken it.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        match &*name {
            STATE => passed.state = Some(fd),
            SOCKETS => passed.sockets.push(fd),
            _ => {
                let name = format!("socket {number} of the service manager");
                crate::listener::check_passed(&fd, &name).map_err(Advised)?;
                passed.listeners.push(Listener::handed_over(fd, None, name, None));
            }
        }
    }
    Ok(passed)
}

impl Passed {
    /// What a predecessor has put into the store, and whether there was anything: then the store has it until
    /// [`empty_store`].
    pub(crate) fn take_over(mut self) -> (HandedOver, bool) {
        let stored = self.state.is_some() || !self.sockets.is_empty();
        let mut handed = self.stored();
        let listeners = self.listeners.into_iter().map(super::HandedListener::of);
        handed.listeners.extend(listeners);
        (handed, stored)
    }

    fn stored(&mut self) -> HandedOver {
        let (state, sockets) = (self.state.take(), std::mem::take(&mut self.sockets));
        let Some(state) = state else { return HandedOver::default() };
        HandedOver::from_descriptors(&state, sockets).unwrap_or_else(|error| {
            tracing::warn!(%error, "the connections of the daemon before are not used: clients have to connect again");
            HandedOver::default()
        })
    }
}

/// Empties the store, and waits until it is empty.
///
/// # Errors
/// Of the system, or it takes too long: then the connections must not be used.
pub(crate) fn empty_store() -> std::io::Result<()> {
    for name in [STATE, SOCKETS] {
        sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)])?;
    }
    // The service manager closes its end when it has read the messages before.
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    sd_notify::notify_with_fds(&[NotifyState::Custom("BARRIER=1")], &[theirs.as_fd()])?;
    drop(theirs);
    wait_for_hangup(ours.as_fd())
}

fn wait_for_hangup(pipe: BorrowedFd<'_>) -> std::io::Result<()> {
    let mut closed = [PollFd::from_borrowed_fd(pipe, PollFlags::empty())];
    let limit = BARRIER.try_into().map_err(|_| std::io::ErrorKind::InvalidInput)?;
    match poll(&mut closed, Some(&limit))? {
        0 => Err(std::io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}
