//! What a daemon hands over to its successor, so that NBD clients keep their connections through a restart: its listening
//! sockets, and the connections of clients between two requests, with the result of their handshakes.
//!
//! The successor gets descriptors, one of which is a file in memory that says what the others are. The way is either the
//! service manager's store of descriptors ([`service_manager`]), or a socket between the two daemons ([`takeover`]).
//!
//! # Invariants
//! - A daemon hands over after it has closed its volumes: everything acknowledged is on the stores, and their locks are free. Of a
//!   volume that could not be closed no connection is handed over, and its lock is not free; the others are handed over.
//! - At any time at most one of the two reads from a connection or accepts clients.
//! - What cannot be handed over, or does not fit, is closed: the client then connects again, as after any restart.

pub(crate) mod derived_keys;
pub(crate) mod service_manager;
mod state;
pub(crate) mod takeover;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use ebb_config::Listen;
use ebb_export_nbd::KeptConnection;
use ebb_io::fd_from;

use self::state::{ConnectionState, HandoverState, ListenerState};
use crate::listener::{Listener, SocketFile};

pub use self::service_manager::passed_listeners;
pub(crate) use self::state::HandoverStateError;

/// What one daemon hands over to the next.
#[derive(Debug, Default)]
pub(crate) struct HandedOver {
    pub(crate) listeners: Vec<HandedListener>,
    pub(crate) connections: Vec<KeptConnection>,
}

/// The path of a socket's file, and its device and inode.
pub(crate) type LeftFile = (PathBuf, (u64, u64));

/// A listening socket that is handed over, with its file.
#[derive(Debug)]
pub(crate) struct HandedListener {
    socket: OwnedFd,
    /// What the configuration calls it; `None` for a socket of the service manager.
    address: Option<String>,
    /// Its name in the log.
    name: String,
    file: Option<LeftFile>,
}

impl HandedListener {
    /// A listener that is not closed by the daemon that has it. Its file stays.
    pub(crate) fn of(listener: Listener) -> HandedListener {
        let (address, name) = (listener.address.clone(), listener.name.clone());
        let (socket, file) = listener.into_parts();
        let file = file.and_then(SocketFile::leave);
        HandedListener { socket, address, name, file }
    }

    /// Its name in the log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The listener, which does not remove its file, and the file.
    pub(crate) fn into_listener(self) -> (Listener, Option<LeftFile>) {
        (Listener::handed_over(self.socket, None, self.name, self.address), self.file)
    }
}

impl HandedOver {
    /// Whether there is a listener of this address.
    pub(crate) fn has_listener(&self, address: &Listen) -> bool {
        let address = address.to_string();
        self.listeners.iter().any(|listener| listener.address.as_deref() == Some(&*address))
    }

    /// The TCP addresses to which the listeners for `address` are bound.
    pub(crate) fn bound_at(&self, address: &Listen) -> Vec<SocketAddr> {
        let address = address.to_string();
        let own = self.listeners.iter().filter(|one| one.address.as_deref() == Some(&*address));
        own.filter_map(|one| rustix::net::getsockname(&one.socket).ok()?.try_into().ok()).collect()
    }

    /// The sockets that the service manager has passed.
    pub(crate) fn take_passed(&mut self) -> Vec<HandedListener> {
        let passed = |listener: &mut HandedListener| listener.address.is_none();
        self.listeners.extract_if(.., passed).collect()
    }

    /// A file in memory that says what the sockets are, and the sockets.
    ///
    /// # Errors
    /// Of the system.
    pub(crate) fn descriptors(&self) -> std::io::Result<(OwnedFd, Vec<BorrowedFd<'_>>)> {
        let cookie = |socket: BorrowedFd<'_>| rustix::net::sockopt::socket_cookie(socket);
        let mut state = HandoverState::default();
        let mut sockets = Vec::new();
        for listener in &self.listeners {
            let socket = listener.socket.as_fd();
            sockets.push(socket);
            state.listeners.push(ListenerState {
                socket: cookie(socket)?,
                address: listener.address.clone(),
                name: listener.name.clone(),
                file: listener.file.clone(),
            });
        }
        let mut rests = Vec::new();
        for connection in &self.connections {
            let socket = connection.socket().as_fd();
            sockets.push(socket);
            state.connections.push(ConnectionState {
                socket: cookie(socket)?,
                session: connection.state(),
                rest: connection.rest().len() as u64,
            });
            rests.push(connection.rest());
        }
        Ok((state::write(&state, &rests)?, sockets))
    }

    /// What a predecessor has handed over: `state` as [`HandedOver::descriptors`] made it, and the sockets in any order. What
    /// has no socket, and a socket that is not described, is left out.
    ///
    /// # Errors
    /// [`HandoverStateError`].
    pub(crate) fn from_descriptors(
        state: &OwnedFd,
        sockets: Vec<OwnedFd>,
    ) -> Result<HandedOver, HandoverStateError> {
        let (state, rests) = state::read(state)?;
        let mut by_cookie = std::collections::HashMap::new();
        for socket in sockets {
            if let Ok(cookie) = rustix::net::sockopt::socket_cookie(&socket) {
                by_cookie.insert(cookie, socket);
            }
        }
        let mut handed = HandedOver::default();
        for ListenerState { socket, address, name, file } in state.listeners {
            let Some(socket) = by_cookie.remove(&socket) else { continue };
            handed.listeners.push(HandedListener { socket, address, name, file });
        }
        for (ConnectionState { socket, session, .. }, rest) in
            state.connections.into_iter().zip(rests)
        {
            let Some(socket) = by_cookie.remove(&socket) else { continue };
            let volume = session.export.clone();
            match KeptConnection::new(fd_from(socket), session, rest) {
                Ok(connection) => handed.connections.push(connection),
                Err(error) => tracing::warn!(volume, %error, "a connection cannot be continued"),
            }
        }
        Ok(handed)
    }
}
