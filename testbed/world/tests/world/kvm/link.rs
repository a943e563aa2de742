//! A VMM's end of a vhost-user connection: one message at a time. Nothing waits.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;

use ebb_vhost_proto::{FrontendMessage, ProtocolFeatures};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::drivers::fuzzing::vhost::encode;

/// Bytes of a message's header.
const HEADER: usize = 12;

/// The connection has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended;

/// The reply to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// An acknowledgement if those were negotiated, else none.
    Acknowledgement,
    Features,
    ProtocolFeatures,
    Config,
    Inflight,
    Base(usize),
}

pub(super) struct Reply {
    pub(super) to: Expected,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

struct Message {
    number: u32,
    body: Vec<u8>,
    fds: Vec<Arc<OwnedFd>>,
    reply: Expected,
}

/// See the module.
pub(super) struct Link {
    socket: UnixStream,
    /// On it the backend sends messages.
    pub(super) backend: Option<UnixStream>,
    pub(super) protocol: ProtocolFeatures,
    waiting: VecDeque<Message>,
    awaited: Option<Expected>,
    received: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Link {
    pub(super) fn connect(address: &SocketAddr) -> Option<Link> {
        let socket = UnixStream::connect_addr(address).ok()?;
        socket.set_nonblocking(true).unwrap();
        Some(Link {
            socket,
            backend: None,
            protocol: ProtocolFeatures::NONE,
            waiting: VecDeque::new(),
            awaited: None,
            received: Vec::new(),
            fds: Vec::new(),
        })
    }

    /// To be sent after those before it.
    pub(super) fn push(
        &mut self,
        message: &FrontendMessage<'_>,
        fds: &[&Arc<OwnedFd>],
        reply: Expected,
    ) {
        let (number, body) = encode(message);
        let fds = fds.iter().copied().cloned().collect();
        self.waiting.push_back(Message { number, body, fds, reply });
    }

    pub(super) fn set(&mut self, message: &FrontendMessage<'_>, fds: &[&Arc<OwnedFd>]) {
        self.push(message, fds, Expected::Acknowledgement);
    }

    /// Whether all messages were sent, and have their replies.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.awaited.is_none()
    }

    /// Whether the backend reports a change of the config space.
    pub(super) fn has_news(&mut self) -> bool {
        let Some(backend) = &self.backend else { return false };
        // Whole messages: each is 12 bytes.
        rustix::io::read(backend, &mut [0; 16 * HEADER]).is_ok_and(|bytes| bytes > 0)
    }

    /// Sends the next message, or receives a reply.
    pub(super) fn step(&mut self) -> Result<Option<Reply>, Ended> {
        if self.awaited.is_none() {
            self.send_next()?;
        }
        self.receive()
    }

    fn send_next(&mut self) -> Result<(), Ended> {
        while self.awaited.is_none() {
            let Some(message) = self.waiting.pop_front() else { return Ok(()) };
            let acknowledges = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
            let plain = message.reply == Expected::Acknowledgement;
            let flags = 1 | u32::from(plain && acknowledges) << 3;
            let header = [message.number, flags, message.body.len() as u32].map(u32::to_le_bytes);
            let bytes = [header.concat(), message.body].concat();
            let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(|fd| fd.as_fd()).collect();
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut room);
            if !fds.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            }
            let part = [IoSlice::new(&bytes)];
            let sent = sendmsg(&self.socket, &part, &mut control, SendFlags::NOSIGNAL);
            // The socket is empty: a message has room.
            if sent != Ok(bytes.len()) {
                return Err(Ended);
            }
            self.awaited = (!plain || acknowledges).then_some(message.reply);
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<Reply>, Ended> {
        loop {
            let length = self.received.get(8..HEADER);
            let body = length.map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()));
            let missing = HEADER + body as usize - self.received.len();
            if missing == 0 {
                let body = std::mem::take(&mut self.received).split_off(HEADER);
                let to = self.awaited.take().ok_or(Ended)?;
                return Ok(Some(Reply { to, body, fds: std::mem::take(&mut self.fds) }));
            }
            let mut bytes = vec![0; missing];
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut room);
            let part = &mut [IoSliceMut::new(&mut bytes)];
            let received = recvmsg(&self.socket, part, &mut control, RecvFlags::CMSG_CLOEXEC);
            let received = match received {
                Ok(received) => received.bytes,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(_) => 0,
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    self.fds.extend(more);
                }
            }
            if received == 0 {
                return Err(Ended);
            }
            self.received.extend_from_slice(&bytes[..received]);
        }
    }
}
