//! A frontend: a VMM, with the driver of its guest.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ring::SharedMemory;
use ebb_vhost_proto::{
    ConfigRange, FrontendMessage as M, InflightArea, LogArea, ProtocolFeatures, VirtioFeatures,
    VringAddress, VringFile, VringState, request,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::HANG;
use super::driver::{Buffer, Done, Driver, kind, status};
use super::fuzzing::vhost::encode;
use super::guest::{Guest, GuestRegion, USER, memfd};
use super::packed::PackedPlaces;

/// What a VMM sends as the base of a queue after a reconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The used index, as QEMU.
    Used,
    /// The available index, as Cloud Hypervisor.
    Available,
}

/// What a frontend wants.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    pub queues: usize,
    pub size: u16,
    /// Features that it does not accept.
    pub without: VirtioFeatures,
    pub without_protocol: ProtocolFeatures,
    pub indirect: bool,
    pub inflight: bool,
    pub base: Base,
    /// Rings are polled: no kick descriptor.
    pub polled: bool,
    pub packed: bool,
}

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes {
            queues: 1,
            size: 64,
            without: VirtioFeatures::NONE,
            without_protocol: ProtocolFeatures::NONE,
            indirect: false,
            inflight: true,
            base: Base::Used,
            polled: false,
            packed: false,
        }
    }
}

/// A reply: the request's number, the body, descriptors.
pub type Reply = (u32, Vec<u8>, Vec<OwnedFd>);

/// See the module.
pub struct Frontend {
    pub socket: UnixStream,
    pub guest: Guest,
    pub wishes: Wishes,
    pub drivers: Vec<Driver>,
    pub features: VirtioFeatures,
    pub protocol: ProtocolFeatures,
    pub kicks: Vec<OwnedFd>,
    pub calls: Vec<OwnedFd>,
    pub inflight: Option<(Arc<OwnedFd>, InflightArea)>,
    /// On it the backend sends requests.
    pub backend: Option<UnixStream>,
    pub log: Option<SharedMemory>,
    /// Whether the backend has the memory.
    shared: bool,
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub fn is_readable(fd: &impl AsFd, timeout: Duration) -> bool {
    let timeout = rustix::fs::Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Whether an eventfd was signalled since the last look.
pub fn take_event(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

/// Sends bytes and descriptors; false if the backend has closed the connection.
pub fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        let part = [IoSlice::new(&bytes[sent..])];
        match sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL) {
            Ok(more) => sent += more,
            Err(_) => return false,
        }
        control.clear();
    }
    true
}

/// The bytes of a message.
pub fn bytes_of(message: &M<'_>, need_reply: bool) -> Vec<u8> {
    let (number, body) = encode(message);
    let flags = 1 | u32::from(need_reply) << 3;
    let header = [number, flags, body.len() as u32].map(u32::to_le_bytes).concat();
    [header, body].concat()
}

/// Receives exactly this many bytes; `None` at the end of the connection.
fn receive_bytes(socket: &UnixStream, len: usize, fds: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
    let (mut bytes, mut done) = (vec![0; len], 0);
    while done < len {
        assert!(is_readable(socket, HANG), "the backend does not reply");
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut part = [IoSliceMut::new(&mut bytes[done..])];
        let received = recvmsg(socket, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC);
        let received = received.map_or(0, |received| received.bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if received == 0 {
            return None;
        }
        done += received;
    }
    Some(bytes)
}

/// Receives a message; `None` at the end of the connection.
pub fn receive(socket: &UnixStream) -> Option<Reply> {
    let mut fds = Vec::new();
    let header = receive_bytes(socket, 12, &mut fds)?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let body = receive_bytes(socket, word(8) as usize, &mut fds)?;
    Some((word(0), body, fds))
}

fn number(body: &[u8]) -> u64 {
    u64::from_le_bytes(body[..8].try_into().unwrap())
}

impl Frontend {
    /// Connects, and says nothing.
    pub fn connect(path: &Path, guest: Guest, wishes: Wishes) -> Frontend {
        let drivers = (0..wishes.queues).map(|queue| Driver::new(queue, wishes.size)).collect();
        Frontend {
            socket: UnixStream::connect(path).unwrap(),
            guest,
            wishes,
            drivers,
            features: VirtioFeatures::NONE,
            protocol: ProtocolFeatures::NONE,
            kicks: (0..wishes.queues).map(|_| event()).collect(),
            calls: (0..wishes.queues).map(|_| event()).collect(),
            inflight: None,
            backend: None,
            log: None,
            shared: false,
        }
    }

    pub fn try_send(&self, message: &M<'_>, need_reply: bool, fds: &[&OwnedFd]) -> bool {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        send_raw(&self.socket, &bytes_of(message, need_reply), &fds)
    }

    /// Sends a message that has no reply of its own; `None` if the connection ended, else whether it succeeded, as far
    /// as the backend says.
    pub fn set(&self, message: &M<'_>, fds: &[&OwnedFd]) -> Option<bool> {
        let acknowledged = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        if !self.try_send(message, acknowledged, fds) {
            return None;
        }
        if !acknowledged {
            return Some(true);
        }
        let (_, body, _) = receive(&self.socket)?;
        Some(number(&body) == 0)
    }

    pub fn must(&self, message: &M<'_>, fds: &[&OwnedFd]) {
        assert_eq!(self.set(message, fds), Some(true), "{message:?}");
    }

    /// Sends a message and receives its reply.
    pub fn ask(&self, message: &M<'_>) -> Reply {
        assert!(self.try_send(message, false, &[]), "{message:?}: the connection has ended");
        let reply = receive(&self.socket);
        reply.unwrap_or_else(|| panic!("{message:?}: the backend closed the connection"))
    }

    pub fn number(&self, message: &M<'_>) -> u64 {
        number(&self.ask(message).1)
    }

    pub fn config(&self, offset: u32, size: u32) -> Vec<u8> {
        let (_, body, _) = self.ask(&M::GetConfig(ConfigRange { offset, size, flags: 0 }));
        body[12..].to_vec()
    }

    pub fn capacity(&self) -> u64 {
        number(&self.config(0, 60)) * 512
    }

    /// Switches the write cache on or off, as a guest does.
    pub fn set_cache(&self, on: bool) {
        let range = ConfigRange { offset: 32, size: 1, flags: 0 };
        self.must(&M::SetConfig(range, &[on.into()]), &[]);
    }

    /// Negotiates what is offered, but for what is not wished for.
    pub fn negotiate(&mut self) {
        let offered = VirtioFeatures(self.number(&M::GetFeatures));
        let unwanted =
            VirtioFeatures::LOG_ALL.with_if(!self.wishes.packed, VirtioFeatures::RING_PACKED);
        self.features = offered.beyond(self.wishes.without).beyond(unwanted);
        self.must(&M::SetOwner, &[]);
        if self.features.contains(VirtioFeatures::PROTOCOL_FEATURES) {
            let offered = ProtocolFeatures(self.number(&M::GetProtocolFeatures));
            let accepted = offered.beyond(self.wishes.without_protocol);
            self.must(&M::SetProtocolFeatures(accepted), &[]);
            self.protocol = accepted;
        }
        for driver in &mut self.drivers {
            driver.event_idx = self.features.contains(VirtioFeatures::RING_EVENT_IDX);
            driver.indirect = self.wishes.indirect;
            if self.wishes.packed && driver.packed.is_none() {
                driver.packed = Some(PackedPlaces::new(driver.size));
            }
        }
        if self.protocol.contains(ProtocolFeatures::BACKEND_REQ) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            self.must(&M::SetBackendReqFd, &[&theirs.into()]);
            self.backend = Some(ours);
        }
    }

    /// A new inflight region.
    pub fn create_inflight(&mut self) {
        let (queues, queue_size) = (self.wishes.queues as u16, self.wishes.size);
        let area = InflightArea { mmap_size: 0, mmap_offset: 0, queues, queue_size };
        let (_, body, mut fds) = self.ask(&M::GetInflightFd(area));
        let area =
            InflightArea { mmap_size: number(&body), mmap_offset: number(&body[8..]), ..area };
        self.inflight = Some((Arc::new(fds.remove(0)), area));
    }

    /// Shares the memory, one region at a time if that was negotiated.
    pub fn share_memory(&self) {
        if self.protocol.contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS) {
            self.guest.regions.iter().for_each(|region| self.add_region(region));
        } else {
            assert_eq!(self.set_table(&self.guest.regions), Some(true));
        }
    }

    pub fn add_region(&self, region: &GuestRegion) {
        self.must(&M::AddMemReg(region.place), &[&region.file]);
    }

    pub fn set_table(&self, regions: &[GuestRegion]) -> Option<bool> {
        let place = |region: &GuestRegion| {
            let of = region.place;
            [of.guest_address, of.bytes, of.user_address, of.mmap_offset].map(u64::to_le_bytes)
        };
        let count = u64::from(regions.len() as u32).to_le_bytes().to_vec();
        let body = [count, regions.iter().flat_map(place).flatten().collect()].concat();
        let acknowledged = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        let flags = 1 | u32::from(acknowledged) << 3;
        let header = [request::SET_MEM_TABLE, flags, body.len() as u32].map(u32::to_le_bytes);
        let fds: Vec<BorrowedFd<'_>> = regions.iter().map(|region| region.file.as_fd()).collect();
        if !send_raw(&self.socket, &[header.concat(), body].concat(), &fds) {
            return None;
        }
        if !acknowledged {
            return Some(true);
        }
        Some(number(&receive(&self.socket)?.1) == 0)
    }

    /// Configures all queues and starts them.
    pub fn start(&mut self) {
        self.must(&M::SetFeatures(self.features), &[]);
        if self.wishes.inflight && self.protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                self.create_inflight();
            }
            let (fd, area) = self.inflight.as_ref().unwrap();
            self.must(&M::SetInflightFd(*area), &[fd]);
        }
        if !std::mem::replace(&mut self.shared, true) {
            self.share_memory();
        }
        for queue in 0..self.wishes.queues {
            let driver = &self.drivers[queue];
            let base = match self.wishes.base {
                Base::Available if driver.packed.is_none() => driver.available.into(),
                _ => driver.ring_base(&self.guest),
            };
            self.start_queue(queue, base);
        }
    }

    pub fn addresses(&self, queue: usize) -> VringAddress {
        let [descriptor, available, used] = self.drivers[queue].rings().map(|at| at + USER);
        let log = self.drivers[queue].rings()[2];
        VringAddress { index: queue as u32, flags: 0, descriptor, used, available, log }
    }

    pub fn start_queue(&self, queue: usize, base: u32) {
        let index = queue as u32;
        let state = |number| VringState { index, number };
        self.must(&M::SetVringNum(state(self.wishes.size.into())), &[]);
        self.must(&M::SetVringBase(state(base)), &[]);
        self.must(&M::SetVringAddr(self.addresses(queue)), &[]);
        self.set_kick(queue);
        let file = VringFile { index, has_descriptor: true };
        self.must(&M::SetVringCall(file), &[&self.calls[queue]]);
        if self.features.contains(VirtioFeatures::PROTOCOL_FEATURES) {
            self.enable(queue, true);
        }
    }

    pub fn set_kick(&self, queue: usize) {
        let (index, has_descriptor) = (queue as u32, !self.wishes.polled);
        let fds = if has_descriptor { vec![&self.kicks[queue]] } else { vec![] };
        self.must(&M::SetVringKick(VringFile { index, has_descriptor }), &fds);
    }

    pub fn enable(&self, queue: usize, enabled: bool) {
        self.must(&M::SetVringEnable { index: queue as u32, enabled }, &[]);
    }

    /// Stops a queue; returns its base.
    pub fn stop_queue(&self, queue: usize) -> u16 {
        let (_, body, _) = self.ask(&M::GetVringBase(queue as u32));
        (number(&body) >> 32) as u16
    }

    /// Connects anew, as a VMM does when the backend has been replaced.
    pub fn reconnect(&mut self, path: &Path) {
        self.socket = UnixStream::connect(path).unwrap();
        self.protocol = ProtocolFeatures::NONE;
        self.shared = false;
        self.negotiate();
        self.start();
    }

    /// As [`Frontend::reconnect`]; false if the backend refuses the guest: it ends the connection.
    pub fn try_reconnect(&mut self, path: &Path) -> bool {
        self.socket = UnixStream::connect(path).unwrap();
        self.protocol = ProtocolFeatures::NONE;
        self.shared = false;
        self.negotiate();
        let (fd, area) = self.inflight.as_ref().unwrap();
        self.set(&M::SetFeatures(self.features), &[]).is_some()
            && self.set(&M::SetInflightFd(*area), &[fd]).is_some()
            && self.set(&M::SetOwner, &[]).is_some()
    }

    pub fn is_closed(&self) -> bool {
        is_readable(&self.socket, HANG)
            && matches!(rustix::io::read(&self.socket, &mut [0; 1]), Ok(0) | Err(_))
    }

    pub fn kick(&self, queue: usize) {
        rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).unwrap();
    }

    /// Puts a request into the ring; its data is in the room of its head.
    pub fn request(&mut self, queue: usize, kind: u32, sector: u64, len: u32) -> u16 {
        let driver = &mut self.drivers[queue];
        let data =
            (driver.data(driver.next_head()), len, kind == kind::READ || kind == kind::GET_ID);
        driver.request(
            &self.guest,
            kind,
            sector,
            if len > 0 { std::slice::from_ref(&data) } else { &[] },
        )
    }

    /// Makes requests visible, and notifies the backend.
    pub fn publish(&mut self, queue: usize) {
        if self.drivers[queue].publish(&self.guest) {
            self.kick(queue);
        }
    }

    /// Waits for a completion.
    pub fn wait(&mut self, queue: usize) -> Done {
        let begun = Instant::now();
        loop {
            if let Some(done) = self.drivers[queue].take(&self.guest) {
                return done;
            }
            self.drivers[queue].arm(&self.guest);
            if self.drivers[queue].has_used(&self.guest) {
                continue;
            }
            assert!(begun.elapsed() < HANG, "a request hangs");
            is_readable(&self.calls[queue], HANG);
            take_event(&self.calls[queue]);
        }
    }

    /// Sends one request with data at the room of its head, and waits for it.
    pub fn transfer(&mut self, queue: usize, kind: u32, sector: u64, data: &mut [u8]) -> Done {
        let head = self.drivers[queue].next_head();
        let at = self.drivers[queue].data(head);
        self.guest.write(at, data);
        self.request(queue, kind, sector, data.len() as u32);
        self.publish(queue);
        let done = self.wait(queue);
        assert_eq!(done.head, head);
        data.copy_from_slice(&self.guest.read(at, data.len()));
        done
    }

    pub fn write(&mut self, queue: usize, sector: u64, data: &[u8]) -> u8 {
        self.transfer(queue, kind::WRITE, sector, &mut data.to_vec()).status
    }

    pub fn read(&mut self, queue: usize, sector: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        assert_eq!(self.transfer(queue, kind::READ, sector, &mut data).status, status::OK);
        data
    }

    pub fn flush(&mut self, queue: usize) -> u8 {
        self.transfer(queue, kind::FLUSH, 0, &mut []).status
    }

    /// Sends one chain of these buffers with a header in front, and waits for it.
    pub fn chain(&mut self, queue: usize, buffers: &[Buffer]) -> Done {
        self.drivers[queue].add(&self.guest, buffers);
        self.publish(queue);
        self.wait(queue)
    }

    /// Shares a log of the first 8 GiB, and switches it on.
    pub fn start_log(&mut self) {
        let file = memfd(256 << 10);
        let size = 256 << 10;
        self.log = Some(SharedMemory::map(file.as_fd(), 0, 256 << 10, Arc::default()).unwrap());
        let message = M::SetLogBase(Some(LogArea { size, offset: 0 }));
        assert!(self.try_send(&message, false, &[&file]));
        assert!(receive(&self.socket).is_some());
        self.features = self.features.with(VirtioFeatures::LOG_ALL);
        self.must(&M::SetFeatures(self.features), &[]);
    }

    /// Whether the page of a guest address is in the log.
    pub fn is_logged(&self, address: u64) -> bool {
        let (page, mut byte) = (address / 4096, [0]);
        assert!(self.log.as_ref().unwrap().read((page / 8) as usize, &mut byte));
        byte[0] & 1 << (page % 8) != 0
    }
}
