//! The frontend's end of a vhost-user connection: negotiates, shares memory, starts queues.
//!
//! It negotiates as QEMU does: event indices and indirect descriptors, and the region of requests in flight, if they are
//! offered. The write cache is always on: a backend that publishes it as off while it is on would otherwise be compared
//! with one that makes each write durable.
//!
//! Source: QEMU's `interop/vhost-user.rst`.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ring::SharedMemory;
use ebb_vhost_proto::{ProtocolFeatures, VirtioFeatures, WRITEBACK_OFFSET, request};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::ring::{DriverQueue, QUEUE_BYTES, RING_SIZE, RingFormat};

/// How long a backend may take to listen, and to reply.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the guest's memory is in this process, as far as the backend knows.
const USER: u64 = 0x7f00_0000_0000;
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
const HEADER: usize = 12;
/// Bytes of the config space that a frontend reads: up to the fields of discards.
const CONFIG_BYTES: u32 = 60;
/// The longest body of a reply that is expected.
const LONGEST: u32 = 4096;

/// A connected device, whose queues are started.
#[derive(Debug)]
pub struct Frontend {
    /// The connection: the backend ends the device with it.
    _socket: UnixStream,
    _inflight: Option<OwnedFd>,
    /// Size of the disk, blocks of 4 KiB.
    pub blocks: u64,
    /// Its queues.
    pub queues: Vec<DriverQueue>,
}

struct Connection {
    socket: UnixStream,
    /// The features of the protocol that were negotiated.
    protocol: ProtocolFeatures,
}

fn failed(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

fn number_at(body: &[u8], at: usize) -> io::Result<u64> {
    let bytes = body.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).ok_or_else(|| failed("a reply is too short"))
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC)?)
}

impl Connection {
    /// Connects as soon as the backend listens.
    fn open(path: &Path) -> io::Result<Connection> {
        let limit = Instant::now() + PATIENCE;
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error) if Instant::now() > limit => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Connection { socket, protocol: ProtocolFeatures::NONE })
    }

    fn send(&self, number: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let length = u32::try_from(body.len()).map_err(io::Error::other)?;
        let bytes = [words(&[number, VERSION | flags, length]), body.to_vec()].concat();
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(failed("too many descriptors"));
        }
        let part = [IoSlice::new(&bytes)];
        let sent = sendmsg(&self.socket, &part, &mut control, SendFlags::NOSIGNAL)?;
        (&self.socket).write_all(&bytes[sent..])
    }

    fn receive_exact(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut room);
            let mut part = [IoSliceMut::new(&mut bytes[done..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = recvmsg(&self.socket, &mut part, &mut control, flags)?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if received == 0 {
                return Err(failed("the backend has closed the connection"));
            }
            done += received;
        }
        Ok(())
    }

    fn receive(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (mut header, mut fds) = ([0; HEADER], Vec::new());
        self.receive_exact(&mut header, &mut fds)?;
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if length > LONGEST {
            return Err(failed(format!("a reply of {length} bytes")));
        }
        let mut body = vec![0; length as usize];
        self.receive_exact(&mut body, &mut fds)?;
        Ok((body, fds))
    }

    /// A request with a reply of its own.
    fn ask(&self, number: u32, body: &[u8]) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        self.send(number, 0, body, &[])?;
        self.receive()
    }

    /// A request without one: it is acknowledged if that was negotiated.
    fn set(&self, number: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if !self.protocol.contains(ProtocolFeatures::REPLY_ACK) {
            return self.send(number, 0, body, fds);
        }
        self.send(number, NEED_REPLY, body, fds)?;
        match number_at(&self.receive()?.0, 0)? {
            0 => Ok(()),
            _ => Err(failed(format!("the backend refused request {number}"))),
        }
    }

    /// Negotiates what this frontend uses, and returns the virtio features.
    fn negotiate(&mut self) -> io::Result<VirtioFeatures> {
        let offered = VirtioFeatures(number_at(&self.ask(request::GET_FEATURES, &[])?.0, 0)?);
        let wanted = [
            VirtioFeatures::VERSION_1,
            VirtioFeatures::PROTOCOL_FEATURES,
            VirtioFeatures::RING_EVENT_IDX,
            VirtioFeatures::RING_INDIRECT_DESC,
            VirtioFeatures::BLK_FLUSH,
            VirtioFeatures::BLK_CONFIG_WCE,
            VirtioFeatures::BLK_MULTI_QUEUE,
        ];
        let features = wanted.iter().fold(0, |all, one| all | (one.0 & offered.0));
        self.set(request::SET_OWNER, &[], &[])?;
        let offered = number_at(&self.ask(request::GET_PROTOCOL_FEATURES, &[])?.0, 0)?;
        let wanted = [
            ProtocolFeatures::MQ,
            ProtocolFeatures::REPLY_ACK,
            ProtocolFeatures::CONFIG,
            ProtocolFeatures::INFLIGHT_SHMFD,
        ];
        let protocol = wanted.iter().fold(0, |all, one| all | (one.0 & offered));
        self.set(request::SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[])?;
        self.protocol = ProtocolFeatures(protocol);
        Ok(VirtioFeatures(features))
    }

    /// Switches the write cache on, and returns the size of the disk in blocks of 4 KiB.
    fn configure(&self, features: VirtioFeatures) -> io::Result<u64> {
        let mut body = words(&[0, CONFIG_BYTES, 0]);
        body.resize(HEADER + CONFIG_BYTES as usize, 0);
        let (config, _) = self.ask(request::GET_CONFIG, &body)?;
        let sectors = number_at(&config, HEADER)?;
        if features.contains(VirtioFeatures::BLK_CONFIG_WCE) {
            let body = [words(&[WRITEBACK_OFFSET, 1, 0]), vec![1]].concat();
            self.set(request::SET_CONFIG, &body, &[])?;
        }
        Ok(sectors / 8)
    }

    fn share(&self, memory: &OwnedFd, bytes: u64) -> io::Result<()> {
        let region = [0, bytes, USER, 0].map(u64::to_le_bytes).concat();
        let body = [words(&[1, 0]), region].concat();
        self.set(request::SET_MEM_TABLE, &body, &[memory.as_fd()])
    }

    /// A region where the backend records requests in flight.
    fn share_inflight(&self, queues: u16) -> io::Result<OwnedFd> {
        let shape = [queues, RING_SIZE].map(u16::to_le_bytes).concat();
        // The structure ends with padding.
        let body = [vec![0; 16], shape, vec![0; 4]].concat();
        let (reply, fds) = self.ask(request::GET_INFLIGHT_FD, &body)?;
        let fd =
            fds.into_iter().next().ok_or_else(|| failed("no region for requests in flight"))?;
        self.set(request::SET_INFLIGHT_FD, &reply, &[fd.as_fd()])?;
        Ok(fd)
    }

    fn start(&self, index: u32, queue: &DriverQueue) -> io::Result<()> {
        let [descriptors, available, used] = queue.addresses().map(|at| at + USER);
        self.set(request::SET_VRING_NUM, &words(&[index, RING_SIZE.into()]), &[])?;
        self.set(request::SET_VRING_BASE, &words(&[index, 0]), &[])?;
        let addresses = [descriptors, used, available, 0].map(u64::to_le_bytes).concat();
        self.set(request::SET_VRING_ADDR, &[words(&[index, 0]), addresses].concat(), &[])?;
        let file = u64::from(index).to_le_bytes();
        self.set(request::SET_VRING_KICK, &file, &[queue.kick()])?;
        self.set(request::SET_VRING_CALL, &file, &[queue.call()])?;
        self.set(request::SET_VRING_ENABLE, &words(&[index, 1]), &[])
    }
}

impl Frontend {
    /// Connects to the backend at `path`, when it listens, and starts so many queues. All requests write, or all read.
    ///
    /// # Errors
    /// The backend does not listen, or refuses; of the system calls.
    pub fn connect(path: &Path, queues: u16, write: bool) -> io::Result<Frontend> {
        let mut connection = Connection::open(path)?;
        let features = connection.negotiate()?;
        let blocks = connection.configure(features)?;
        let format = RingFormat {
            event_idx: features.contains(VirtioFeatures::RING_EVENT_IDX),
            indirect: features.contains(VirtioFeatures::RING_INDIRECT_DESC),
        };
        let bytes = QUEUE_BYTES * usize::from(queues);
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, bytes as u64)?;
        let memory = Arc::new(SharedMemory::map(fd.as_fd(), 0, bytes, Arc::default())?);
        connection.set(request::SET_FEATURES, &features.0.to_le_bytes(), &[])?;
        let inflight = match connection.protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            true => Some(connection.share_inflight(queues)?),
            false => None,
        };
        connection.share(&fd, bytes as u64)?;
        let mut started = Vec::new();
        for index in 0..queues {
            let base = QUEUE_BYTES * usize::from(index);
            let queue = DriverQueue::new(&memory, base, format, [event()?, event()?], write);
            connection.start(index.into(), &queue)?;
            started.push(queue);
        }
        Ok(Frontend { _socket: connection.socket, _inflight: inflight, blocks, queues: started })
    }
}
