//! Sockets: the broker makes each one, and connects or binds it as long as it has it, too.
//!
//! The broker keeps a socket that it has made until it is connected or bound: afterwards closing it in the daemon is to end it. One that is
//! closed in the daemon before that is found when further ones are made.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_sandbox::threads;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::paths::{Fault, not_named};
use crate::resolve::resolve;
use crate::rules::{CurrentRules, PathAccess};
use crate::target::{GuardedDaemon, lower};

/// The longest address, bytes: `struct sockaddr_storage`.
const ADDRESS_MAX: u64 = 128;
/// The most that is sent with an address at once, bytes: a request to the kernel, or a message to the service manager.
const DATAGRAM_MAX: u64 = 64 << 10;
/// From this number on, sockets that the daemon has closed are looked for.
const LOOK_FOR_CLOSED: usize = 16;
/// How many names of connected sockets are kept.
const CONNECTED_MAX: usize = 1024;
/// How often it is looked whether the daemon still has a socket that is being connected.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The most sockets that are neither connected nor bound.
const SOCKETS_MAX: usize = 8192;

/// Sockets that are neither connected nor bound, by their numbers in the daemon.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    made: Mutex<HashMap<i32, Arc<Socket>>>,
    /// The names of those that were connected last: connecting one again fails as the kernel fails it. librados finds out by that
    /// whether a connection has been made.
    connected: Mutex<VecDeque<PathBuf>>,
}

#[derive(Debug)]
struct Socket {
    own: OwnedFd,
    family: AddressFamily,
    kind: SocketType,
    /// Its name in `/proc/PID/fd`.
    name: PathBuf,
}

impl Sockets {
    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Arc<Socket>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket that has this number in the daemon.
    fn get(&self, target: &GuardedDaemon, number: u64) -> Result<(i32, Arc<Socket>), Errno> {
        let number = lower(number).cast_signed();
        let socket = self.lock().get(&number).cloned().ok_or(Errno::PERM)?;
        match std::fs::read_link(target.descriptor(number)) {
            Ok(name) if name == socket.name => Ok((number, socket)),
            // It is closed, and another descriptor may have its number.
            _ => {
                self.forget(number, &socket);
                Err(Errno::PERM)
            }
        }
    }

    /// Forgets a socket that is connected.
    fn note_connected(&self, number: i32, socket: &Arc<Socket>) {
        let mut connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        if connected.len() >= CONNECTED_MAX {
            connected.pop_front();
        }
        connected.push_back(socket.name.clone());
        drop(connected);
        self.forget(number, socket);
    }

    fn was_connected(&self, target: &GuardedDaemon, number: u64) -> bool {
        let name = std::fs::read_link(target.descriptor(lower(number).cast_signed()));
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        name.is_ok_and(|name| connected.contains(&name))
    }

    /// Waits for the end of connecting, on a thread, and forgets the socket then, or when the daemon has closed it.
    fn wait_for_connection(
        self: &Arc<Self>,
        target: &Arc<GuardedDaemon>,
        number: i32,
        socket: &Arc<Socket>,
    ) {
        let (own, target, its) = (self.clone(), target.clone(), socket.clone());
        let wait = move || loop {
            let mut ready = [PollFd::new(&its.own, PollFlags::OUT)];
            let ended = poll(&mut ready, Some(&LOOK_EVERY));
            if ended.is_ok_and(|count| count > 0) {
                let failed = ready[0].revents().intersects(PollFlags::ERR | PollFlags::HUP);
                match failed {
                    true => own.forget(number, &its),
                    false => own.note_connected(number, &its),
                }
                return;
            }
            let name = std::fs::read_link(target.descriptor(number));
            if !name.is_ok_and(|name| name == its.name) {
                return own.forget(number, &its);
            }
        };
        if threads::run(wait).is_err() {
            self.forget(number, socket);
        }
    }

    fn forget(&self, number: i32, socket: &Arc<Socket>) {
        let mut made = self.lock();
        if made.get(&number).is_some_and(|known| Arc::ptr_eq(known, socket)) {
            made.remove(&number);
        }
    }

    /// Notes a socket that the daemon has got.
    pub(crate) fn keep(&self, number: i32, made: NewSocket) {
        let NewSocket { own, family, kind, .. } = made;
        let link = format!("/proc/self/fd/{}", own.as_raw_fd());
        let Ok(name) = std::fs::read_link(link) else { return };
        self.lock().insert(number, Arc::new(Socket { own, family, kind, name }));
    }

    /// Forgets those that the daemon has closed.
    fn look_for_closed(&self, target: &GuardedDaemon) {
        let mut made = self.lock();
        if made.len() >= LOOK_FOR_CLOSED {
            made.retain(|number, socket| {
                std::fs::read_link(target.descriptor(*number)).is_ok_and(|name| name == socket.name)
            });
        }
    }
}

/// A socket that the daemon does not have yet.
#[derive(Debug)]
pub(crate) struct NewSocket {
    pub own: OwnedFd,
    pub close_on_exec: bool,
    family: AddressFamily,
    kind: SocketType,
}

/// An address in the daemon's memory.
enum Address {
    /// Disconnects.
    None,
    Internet(SocketAddr),
    Path(PathBuf),
    /// A unix socket without a path.
    Abstract(Vec<u8>),
    Netlink(rustix::net::netlink::SocketAddrNetlink),
}

impl Address {
    fn read(target: &GuardedDaemon, address: u64, length: u64) -> Result<Address, Errno> {
        let length = u64::from(lower(length));
        if !(2..=ADDRESS_MAX).contains(&length) {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; usize::try_from(length).map_err(|_| Errno::INVAL)?];
        target.read(address, &mut bytes)?;
        let part = |from: usize, count: usize| bytes.get(from..from + count).ok_or(Errno::INVAL);
        let family = u16::from_ne_bytes([bytes[0], bytes[1]]);
        let port = || Ok::<_, Errno>(u16::from_be_bytes([part(2, 1)?[0], part(3, 1)?[0]]));
        let word = |from| {
            let mut word = [0; 4];
            word.copy_from_slice(part(from, 4)?);
            Ok::<_, Errno>(u32::from_ne_bytes(word))
        };
        match AddressFamily::from_raw(family) {
            AddressFamily::UNSPEC => Ok(Address::None),
            AddressFamily::INET => {
                let ip: [u8; 4] = part(4, 4)?.try_into().map_err(|_| Errno::INVAL)?;
                Ok(Address::Internet(SocketAddr::new(ip.into(), port()?)))
            }
            AddressFamily::INET6 => {
                let ip: [u8; 16] = part(8, 16)?.try_into().map_err(|_| Errno::INVAL)?;
                let scope = if bytes.len() >= 28 { word(24)? } else { 0 };
                let whole = std::net::SocketAddrV6::new(ip.into(), port()?, word(4)?, scope);
                Ok(Address::Internet(whole.into()))
            }
            AddressFamily::NETLINK => {
                let (process, groups) = (word(4)?, word(8)?);
                Ok(Address::Netlink(rustix::net::netlink::SocketAddrNetlink::new(process, groups)))
            }
            AddressFamily::UNIX => match &bytes[2..] {
                [] => Err(Errno::INVAL),
                [0, name @ ..] => Ok(Address::Abstract(name.to_vec())),
                path => {
                    let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
                    Ok(Address::Path(Path::new(OsStr::from_bytes(&path[..end])).to_owned()))
                }
            },
            _ => Err(Errno::AFNOSUPPORT),
        }
    }
}

/// What makes calls with sockets for the daemon.
pub(crate) struct SocketCalls<'a> {
    pub target: &'a Arc<GuardedDaemon>,
    pub rules: &'a Arc<CurrentRules>,
    pub sockets: &'a Arc<Sockets>,
}

/// What is done with an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deed {
    Connect,
    Bind,
    Send,
}

impl Deed {
    fn text(self) -> &'static str {
        match self {
            Deed::Connect => "connect to",
            Deed::Bind => "listen at",
            Deed::Send => "send to",
        }
    }
}

impl SocketCalls<'_> {
    /// Makes a socket.
    pub(crate) fn make(&self, [family, kind, protocol, ..]: [u64; 6]) -> Result<NewSocket, Fault> {
        let number = u16::try_from(lower(family)).map_err(|_| Errno::AFNOSUPPORT)?;
        let family = AddressFamily::from_raw(number);
        let kind = lower(kind);
        let flags =
            SocketFlags::from_bits_retain(kind) & (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let kind = SocketType::from_raw(kind & !flags.bits());
        let refused = |what: &str| Fault::Refused(what.to_owned());
        let known = match (family, kind, lower(protocol)) {
            (AddressFamily::UNIX, SocketType::STREAM | SocketType::SEQPACKET, 0) => true,
            (AddressFamily::UNIX, SocketType::DGRAM, 0) => {
                if !self.rules.unix_datagrams() {
                    return Err(refused(
                        "make a unix socket for datagrams: there is no service manager",
                    ));
                }
                true
            }
            (AddressFamily::INET | AddressFamily::INET6, SocketType::STREAM, 0 | 6) => true,
            (AddressFamily::INET | AddressFamily::INET6, SocketType::DGRAM, 0 | 17) => {
                if !self.rules.datagrams() {
                    return Err(refused(
                        "make a socket for datagrams: no name of a host has to be looked up",
                    ));
                }
                true
            }
            // NETLINK_ROUTE, by which the C library asks for the host's addresses.
            (AddressFamily::NETLINK, SocketType::RAW | SocketType::DGRAM, 0) => true,
            _ => false,
        };
        if !known {
            return Err(Errno::PERM.into());
        }
        self.sockets.look_for_closed(self.target);
        if self.sockets.lock().len() >= SOCKETS_MAX {
            return Err(Errno::NFILE.into());
        }
        let all = flags | SocketFlags::CLOEXEC;
        let protocol = std::num::NonZeroU32::new(lower(protocol)).map(Protocol::from_raw);
        let own = rustix::net::socket_with(family, kind, all, protocol)?;
        Ok(NewSocket { own, close_on_exec: flags.contains(SocketFlags::CLOEXEC), family, kind })
    }

    pub(crate) fn connect(&self, [number, address, length, ..]: [u64; 6]) -> Result<(), Fault> {
        let (number, socket) = match self.sockets.get(self.target, number) {
            Err(_) if self.sockets.was_connected(self.target, number) => {
                return Err(Errno::ISCONN.into());
            }
            found => found?,
        };
        let address = Address::read(self.target, address, length)?;
        let datagrams = socket.kind == SocketType::DGRAM;
        let result = self.with_address(&socket, address, Deed::Connect, |to| match to {
            None => Ok(rustix::net::connect_unspec(&socket.own)?),
            Some(to) => Ok(rustix::net::connect(&socket.own, to)?),
        });
        // The C library connects one for datagrams several times, to compare addresses.
        match &result {
            _ if datagrams => {}
            Ok(()) | Err(Fault::Failed(Errno::ISCONN)) => {
                self.sockets.note_connected(number, &socket);
            }
            Err(Fault::Failed(Errno::INPROGRESS)) => {
                self.sockets.wait_for_connection(self.target, number, &socket);
            }
            Err(_) => {}
        }
        result
    }

    pub(crate) fn bind(&self, [number, address, length, ..]: [u64; 6]) -> Result<(), Fault> {
        let (number, socket) = self.sockets.get(self.target, number)?;
        let address = Address::read(self.target, address, length)?;
        self.with_address(&socket, address, Deed::Bind, |to| {
            let to = to.ok_or(Errno::INVAL)?;
            Ok(rustix::net::bind(&socket.own, to)?)
        })?;
        if socket.family != AddressFamily::NETLINK {
            self.sockets.forget(number, &socket);
        }
        Ok(())
    }

    /// Sends bytes to an address: how many were.
    pub(crate) fn send(&self, arguments: [u64; 6]) -> Result<i64, Fault> {
        let [number, bytes, count, flags, address, length] = arguments;
        let (_, socket) = self.sockets.get(self.target, number)?;
        let address = Address::read(self.target, address, length)?;
        if count > DATAGRAM_MAX {
            return Err(Errno::MSGSIZE.into());
        }
        let mut data = vec![0; usize::try_from(count).map_err(|_| Errno::MSGSIZE)?];
        self.target.read(bytes, &mut data)?;
        let flags = SendFlags::from_bits_retain(lower(flags)) | SendFlags::NOSIGNAL;
        let mut sent = 0;
        self.with_address(&socket, address, Deed::Send, |to| {
            let to = to.ok_or(Errno::INVAL)?;
            sent = rustix::net::sendto(&socket.own, &data, flags, to)?;
            Ok(())
        })?;
        i64::try_from(sent).map_err(|_| Errno::OVERFLOW.into())
    }

    /// Does something with an address that the rules allow.
    fn with_address(
        &self,
        socket: &Socket,
        address: Address,
        deed: Deed,
        run: impl FnOnce(Option<&SocketAddrAny>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let refused = |shown: &dyn std::fmt::Display, why: &str| {
            Fault::Refused(format!("{} {shown}: {why}", deed.text()))
        };
        match address {
            Address::None => run(None),
            Address::Internet(at) => {
                let allowed = match deed {
                    Deed::Bind => self.rules.listen(at),
                    _ => self.rules.server(at),
                };
                // Name servers, and what the C library compares addresses by. To whom datagrams go cannot be decided anyway:
                // see `CurrentRules::datagrams`.
                let lookup = deed == Deed::Connect && socket.kind == SocketType::DGRAM;
                if !allowed && !lookup {
                    let why = "it is not in `connect_to`, and the configuration does not name it";
                    return Err(refused(&at, why));
                }
                run(Some(&at.into()))
            }
            Address::Netlink(kernel) => run(Some(&kernel.into())),
            Address::Abstract(name) => {
                if !self.rules.any_path() {
                    return Err(refused(&"an abstract socket", "`open_paths` names paths only"));
                }
                run(Some(&SocketAddrUnix::new_abstract_name(&name)?.into()))
            }
            Address::Path(path) => self.with_path(&path, deed, run),
        }
    }

    fn with_path(
        &self,
        path: &Path,
        deed: Deed,
        run: impl FnOnce(Option<&SocketAddrAny>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // Longer paths are reached by the descriptor of their folder.
        let link = path.parent().and_then(|folder| folder.strip_prefix("/proc/self/fd").ok());
        let number = link.and_then(|number| number.to_str()?.parse::<i32>().ok());
        let folder = number.map(|number| self.target.folder_of(number)).transpose()?;
        let name = path.file_name().ok_or(Errno::INVAL)?;
        let whole = match &folder {
            Some(folder) => {
                let own = format!("/proc/self/fd/{}", folder.as_fd().as_raw_fd());
                rustix::fs::readlink(own, Vec::new())
                    .map(|at| Path::new(OsStr::from_bytes(at.as_bytes())).join(name))?
            }
            None => self.target.folder.join(path),
        };
        if whole.starts_with("/proc") || !self.rules.path(&whole, PathAccess::Write) {
            return Err(not_named(deed.text(), &whole));
        }
        // By a folder in any case: the path itself may be too long for an address.
        let folder = match folder {
            Some(folder) => folder,
            None => {
                let above = whole.parent().unwrap_or(Path::new("/"));
                let above = resolve(CWD, above.as_os_str().as_bytes(), true)?;
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&above.folder, &above.name, flags, Mode::empty())?
            }
        };
        let own = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        run(Some(&SocketAddrUnix::new(&own)?.into()))
    }
}

#[cfg(test)]
mod tests {
    use seeded::Random;

    use super::*;
    use crate::target::own;

    fn read(target: &GuardedDaemon, bytes: &[u8], length: u64) -> Result<Address, Errno> {
        Address::read(target, bytes.as_ptr().expose_provenance() as u64, length)
    }

    #[test]
    fn addresses_are_read_as_the_kernel_reads_them() {
        let target = own();
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&[2, 0, 0x2a, 0x39, 10, 1, 2, 3]);
        let Ok(Address::Internet(at)) = read(&target, &bytes, 16) else { panic!() };
        assert_eq!(at, "10.1.2.3:10809".parse().unwrap());
        // The upper half of the length does not count.
        assert!(read(&target, &bytes, 16 | 1 << 40).is_ok());
        bytes[..6].copy_from_slice(&[1, 0, b'/', b's', 0, b'x']);
        let Ok(Address::Path(path)) = read(&target, &bytes, 6) else { panic!() };
        assert_eq!(path, Path::new("/s"));
        bytes[2] = 0;
        assert!(
            matches!(read(&target, &bytes, 5), Ok(Address::Abstract(name)) if name == [b's', 0])
        );
        assert!(matches!(read(&target, &bytes, 2), Err(Errno::INVAL)));
        for length in [0, 1, 129, u64::MAX] {
            assert!(matches!(read(&target, &bytes, length), Err(Errno::INVAL)), "{length}");
        }
        for (family, short) in [(2, 7), (10, 23), (16, 11)] {
            bytes[..2].copy_from_slice(&[family, 0]);
            assert!(matches!(read(&target, &bytes, short), Err(Errno::INVAL)), "{family}");
        }
        assert!(matches!(Address::read(&target, 8, 16), Err(Errno::FAULT)));
    }

    #[test]
    fn any_bytes_are_an_address_or_an_error() {
        let target = own();
        let mut random = Random::new(1);
        let mut read_ones = 0;
        for _ in 0..100_000 {
            let mut bytes = random.bytes(128);
            let family = [0, 1, 2, 10, 16, 17][random.index(6)];
            bytes[..2].copy_from_slice(&[family, 0]);
            read_ones += u32::from(read(&target, &bytes, random.below(140)).is_ok());
        }
        assert!(read_ones > 10_000, "{read_ones}");
    }
}
