//! A small frontend of vhost-user-blk, which reads only: for tests that count memory, in which a virtual machine would be
//! far too large.
//!
//! It accesses the memory that it shares by `pread` and `pwrite`. All its requests have the same buffer, so that it costs
//! no more memory than a client of NBD; what they read is not looked at. The buffer is not aligned as direct I/O needs it:
//! the daemon cannot have the kernel transfer the data, and holds it in its pools. Its notifications are not suppressed, and it
//! negotiates nothing but virtio 1.0: its one queue is enabled from the start.
//!
//! Sources: QEMU's `interop/vhost-user.rst`; virtio 1.2, sections 2.7 and 5.2.

use crate::harness::process::PATIENCE;
use crate::{Error, Result, check};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The most requests in flight.
pub const DEPTH_MAX: u32 = 32;
/// The most bytes of a request.
pub const LENGTH_MAX: u32 = 128 << 10;

/// Places in the shared memory: the ring's parts, headers and status bytes of the requests, their data.
const AVAILABLE: u64 = 0x800;
const USED: u64 = 0xc00;
const SLOTS: u64 = 0x1400;
const SLOT: u64 = 32;
const DATA: u64 = 0x2010;
const BYTES: u64 = 0x3000 + LENGTH_MAX as u64;
/// Descriptors; a request has three.
const SIZE: u16 = 128;
/// The address of the shared memory in this process, as the daemon is told; the guest's addresses begin at 0.
const USER: u64 = 0x7f00_0000_0000;

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
/// `VRING_DESC_F_NEXT` and `VRING_DESC_F_WRITE`.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Numbers of messages.
mod message {
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
}

/// See the module.
#[derive(Debug)]
pub struct Frontend {
    /// The connection, which serves the queue as long as it is open.
    socket: UnixStream,
    memory: File,
    kick: OwnedFd,
    call: OwnedFd,
    /// The indices of both rings: no request is in flight between two bursts.
    index: u16,
}

impl Frontend {
    /// Connects to a socket and sets up a queue.
    ///
    /// # Errors
    /// Nothing listens there; of the system calls.
    pub fn connect(path: &Path) -> Result<Frontend> {
        let connected = UnixStream::connect(path);
        let socket = connected.map_err(Error::io(path.display().to_string()))?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let made = || -> rustix::io::Result<_> {
            Ok((memfd_create("guest", MemfdFlags::CLOEXEC)?, event()?, event()?))
        };
        let (memory, kick, call) = made().map_err(|e| Error::io("share memory")(e.into()))?;
        let memory = File::from(memory);
        memory.set_len(BYTES).map_err(Error::io("size the memory"))?;
        let frontend = Frontend { socket, memory, kick, call, index: 0 };
        frontend.set_up().map_err(Error::io("set up a queue"))?;
        Ok(frontend)
    }

    fn set_up(&self) -> io::Result<()> {
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        self.send(message::SET_OWNER, &[], None)?;
        self.send(message::SET_FEATURES, &words(&[VERSION_1]), None)?;
        // One region: guest address, bytes, address in this process, offset in the file.
        let table = words(&[1, 0, BYTES, USER, 0]);
        self.send(message::SET_MEM_TABLE, &table, Some(self.memory.as_fd()))?;
        // The queue's number is the lower half of the first word.
        self.send(message::SET_VRING_NUM, &words(&[u64::from(SIZE) << 32]), None)?;
        self.send(message::SET_VRING_BASE, &words(&[0]), None)?;
        let rings = words(&[0, USER, USER + USED, USER + AVAILABLE, 0]);
        self.send(message::SET_VRING_ADDR, &rings, None)?;
        self.send(message::SET_VRING_CALL, &words(&[0]), Some(self.call.as_fd()))?;
        self.send(message::SET_VRING_KICK, &words(&[0]), Some(self.kick.as_fd()))
    }

    fn send(&self, request: u32, body: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let length = u32::try_from(body.len()).unwrap_or(0);
        let mut bytes: Vec<u8> =
            [request, 1, length].iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(body);
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let sent =
            sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        // A message is far smaller than the socket's buffer.
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Has `depth` reads of `length` bytes, one behind the other from the disk's start, in flight at once, and waits for all.
    ///
    /// # Errors
    /// More than [`DEPTH_MAX`] or [`LENGTH_MAX`]; a read fails or is not completed; the connection has ended.
    pub fn burst(&mut self, depth: u32, length: u32) -> Result {
        check(depth <= DEPTH_MAX && length <= LENGTH_MAX, || "too many or too large".into())?;
        let count = u16::try_from(depth).unwrap_or(0);
        self.publish(count, length).map_err(Error::io("write requests"))?;
        let end = self.index.wrapping_add(count);
        loop {
            let mut used = [0; 2];
            self.memory.read_exact_at(&mut used, USED + 2).map_err(Error::io("read the ring"))?;
            if u16::from_le_bytes(used) == end {
                break;
            }
            self.wait()?;
        }
        self.index = end;
        for n in 0..u64::from(count) {
            let mut status = [0];
            let at = SLOTS + n * SLOT + 16;
            self.memory.read_exact_at(&mut status, at).map_err(Error::io("read a status"))?;
            check(status == [0], || format!("read {n} has status {status:?}"))?;
        }
        Ok(())
    }

    fn publish(&self, count: u16, length: u32) -> io::Result<()> {
        for n in 0..count {
            let slot = SLOTS + u64::from(n) * SLOT;
            let sector = u64::from(n) * u64::from(length / 512);
            // The header of a read, and a status that the daemon has to change.
            let header = [0_u64.to_le_bytes(), sector.to_le_bytes(), [0xff; 8]].concat();
            self.memory.write_all_at(&header, slot)?;
            let first = n * 3;
            self.describe(first, slot, 16, NEXT)?;
            self.describe(first + 1, DATA, length, NEXT | WRITE)?;
            self.describe(first + 2, slot + 16, 1, WRITE)?;
            let place = u64::from(self.index.wrapping_add(n) % SIZE);
            self.memory.write_all_at(&first.to_le_bytes(), AVAILABLE + 4 + 2 * place)?;
        }
        let next = self.index.wrapping_add(count);
        self.memory.write_all_at(&next.to_le_bytes(), AVAILABLE + 2)?;
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    fn describe(&self, at: u16, address: u64, length: u32, flags: u16) -> io::Result<()> {
        let next = if flags & NEXT == 0 { 0 } else { at + 1 };
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_all_at(&bytes, u64::from(at) * 16)
    }

    /// Waits for a notification, or the end of the connection.
    fn wait(&self) -> Result {
        let limit = Timespec::try_from(PATIENCE).map_err(|e| Error::unexpected(e.to_string()))?;
        let ended = PollFlags::RDHUP | PollFlags::HUP;
        let mut fds = [
            PollFd::new(&self.call, PollFlags::IN),
            PollFd::from_borrowed_fd(self.socket.as_fd(), ended),
        ];
        let ready = poll(&mut fds, Some(&limit)).map_err(|e| Error::io("poll")(e.into()))?;
        check(ready > 0, || "a read is not completed".into())?;
        check(!fds[1].revents().intersects(ended), || "the daemon has disconnected".into())?;
        // Nothing to read only if the notification was taken before.
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
        Ok(())
    }
}
