//! The socket of a frontend: messages with their descriptors in, replies out. Nothing waits.
//!
//! The kernel limits the descriptors that are sent and not received, for all sockets of this process's user: a frontend has
//! one at most ([`FrontendSocket::awaits_reader`]), and a message that the kernel refuses therefore is sent later.

use std::collections::VecDeque;
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ebb_vhost_proto::{Assembler, MAX_DESCRIPTORS, MessageHeader, OutgoingMessage, ProtocolError};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::unread::unread_bytes;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("the frontend disconnected")]
    Disconnected,
    #[error("the socket failed: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

impl From<rustix::io::Errno> for SocketError {
    fn from(error: rustix::io::Errno) -> SocketError {
        SocketError::Io(error.into())
    }
}

/// A message of the frontend: header, body, descriptors.
pub(crate) type ReceivedMessage = (MessageHeader, Vec<u8>, Vec<OwnedFd>);

/// A message that is being sent.
struct Outgoing {
    message: OutgoingMessage,
    sent: usize,
    /// Sent along with the first byte.
    fd: Option<OwnedFd>,
}

/// See the module.
pub(crate) struct FrontendSocket {
    socket: OwnedFd,
    assembler: Assembler,
    /// The descriptors that came with the message's bytes.
    descriptors: Vec<OwnedFd>,
    outgoing: VecDeque<Outgoing>,
    /// A descriptor was sent, and was not read when this was last looked at.
    descriptor_unread: bool,
    /// Too many descriptors of this user are in flight: to be tried again.
    pub(crate) retries: bool,
}

impl FrontendSocket {
    /// `socket` is non-blocking.
    pub(crate) fn new(socket: OwnedFd) -> FrontendSocket {
        FrontendSocket {
            socket,
            assembler: Assembler::new(),
            descriptors: Vec::new(),
            outgoing: VecDeque::new(),
            descriptor_unread: false,
            retries: false,
        }
    }

    /// Receives what has arrived of the next message; true if it is complete.
    pub(crate) fn receive(&mut self) -> Result<bool, SocketError> {
        loop {
            let space = self.assembler.space();
            if space.is_empty() {
                return Ok(true);
            }
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut room);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received =
                recvmsg(&self.socket, &mut [IoSliceMut::new(space)], &mut control, flags);
            let received = match received {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    // Those beyond what any message needs are closed at once.
                    let room = MAX_DESCRIPTORS.saturating_sub(self.descriptors.len());
                    self.descriptors.extend(fds.take(room));
                }
            }
            if received == 0 {
                return Err(SocketError::Disconnected);
            }
            self.assembler.advance(received)?;
        }
    }

    /// Ends the connection for the peer, also while this is not dropped.
    pub(crate) fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Takes the message that is complete, with its descriptors.
    pub(crate) fn take(&mut self) -> Option<ReceivedMessage> {
        let (header, body) = self.assembler.take()?;
        let body = body.to_vec();
        Some((header, body, std::mem::take(&mut self.descriptors)))
    }

    /// Sends a message, now or when the frontend has read earlier ones.
    pub(crate) fn send(
        &mut self,
        message: OutgoingMessage,
        fd: Option<OwnedFd>,
    ) -> Result<(), SocketError> {
        self.outgoing.push_back(Outgoing { message, sent: 0, fd });
        self.send_rest()
    }

    /// Continues to send.
    pub(crate) fn send_rest(&mut self) -> Result<(), SocketError> {
        self.retries = false;
        while let Some(next) = self.outgoing.front_mut() {
            let bytes = next.message.as_bytes().get(next.sent..).unwrap_or_default();
            match send_part(self.socket.as_fd(), bytes, next.fd.as_ref()) {
                Ok(sent) => {
                    self.descriptor_unread |= next.fd.take().is_some();
                    next.sent += sent;
                    if next.sent >= next.message.as_bytes().len() {
                        self.outgoing.pop_front();
                    }
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
                Err(rustix::io::Errno::TOOMANYREFS) => {
                    self.retries = true;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether the frontend has yet to read a descriptor: its next message is to be read afterwards.
    pub(crate) fn awaits_reader(&mut self) -> bool {
        if self.descriptor_unread {
            self.descriptor_unread = unread_bytes(&self.socket).is_ok_and(|bytes| bytes > 0);
        }
        self.descriptor_unread
    }

    /// Whether a message waits for the frontend to read.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outgoing.is_empty()
    }
}

impl AsFd for FrontendSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn send_part(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<&OwnedFd>,
) -> rustix::io::Result<usize> {
    #[cfg(any(test, feature = "sim"))]
    if crate::area::crash::is_dead() {
        // A process that has died sends nothing.
        return Ok(bytes.len());
    }
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let fds: Vec<BorrowedFd<'_>> = fd.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        let pushed = control.push(SendAncillaryMessage::ScmRights(&fds));
        debug_assert!(pushed, "there is room for one descriptor");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// Sends a message on another socket of the frontend, which need not be read: a message that finds no room is not sent.
pub(crate) fn send_if_room(socket: &OwnedFd, message: &OutgoingMessage) -> bool {
    let sent = send_part(socket.as_fd(), message.as_bytes(), None);
    sent.is_ok_and(|sent| sent == message.as_bytes().len())
}
