//! Listening sockets: the daemon's own, or those that the service manager passed.
//!
//! The stale unix socket of a daemon that has ended is replaced; a socket that a running server
//! listens at is an error.

mod error;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_access::socket_addresses;
use ebb_config::Listen;

pub use self::error::ListenError;
use self::error::bind_error;
use crate::resolved_names::ResolvedNames;
pub use crate::socket_file::SocketFile;
use crate::socket_file::{Occupant, SocketPlace, UnnamedSocket, occupant};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

/// How long to wait for another server to close its socket, and the pause between two checks.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);
/// When to log that a server has ended and its requests have not: usually they do at once.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Of a socket for the daemon's user and group.
const PRIVATE: rustix::fs::Mode = rustix::fs::Mode::from_raw_mode(0o660);

/// A listening socket, and the file to remove when it is closed.
#[derive(Debug)]
pub struct Listener {
    // Dropped before the socket.
    file: Option<SocketFile>,
    /// The socket.
    pub fd: OwnedFd,
    /// Its name in the log.
    pub name: String,
    /// Its address in the configuration, if it has one there.
    pub(crate) address: Option<String>,
    /// Whether the socket of a daemon that has ended was there.
    pub replaces_stale: bool,
}

impl Listener {
    /// A socket of a predecessor, or of the service manager.
    pub(crate) fn handed_over(
        fd: OwnedFd,
        file: Option<SocketFile>,
        name: String,
        address: Option<String>,
    ) -> Listener {
        Listener { file, fd, name, address, replaces_stale: false }
    }

    /// Whether it is of the service manager, or at an address of the configuration.
    pub(crate) fn is_wanted(&self, config: &ebb_config::Config) -> bool {
        let Some(own) = &self.address else { return true };
        config.listen.iter().any(|address| address.to_string() == *own)
    }

    /// The place of its file, if it has one.
    pub(crate) fn place(&self) -> Option<SocketPlace> {
        self.file.as_ref()?.place()
    }

    /// Removes this file when it is closed.
    pub(crate) fn own_file(&mut self, file: SocketFile) {
        self.file = Some(file);
    }

    /// The socket, and its file, which must be dropped first.
    pub fn into_parts(self) -> (OwnedFd, Option<SocketFile>) {
        (self.fd, self.file)
    }
}

/// Opens the sockets at an address: one for each address of a host's name. Waits for another server
/// to close its unix socket there, unless `end` is set.
///
/// # Errors
/// [`ListenError`].
pub fn open(address: &Listen, end: &AtomicBool) -> Result<Vec<Listener>, ListenError> {
    open_resolved(address, &ResolvedNames::default(), end)
}

/// As [`open`], at the addresses of a name that are known already.
pub(crate) fn open_resolved(
    address: &Listen,
    names: &ResolvedNames,
    end: &AtomicBool,
) -> Result<Vec<Listener>, ListenError> {
    let opened = match address {
        Listen::Unix(path) => {
            let wait = Wait { until: Instant::now() + CLOSE_TIMEOUT, for_ended: true };
            let opened = unix_until(path, None, end, wait)?;
            log_stale(path, opened.replaces_stale);
            vec![opened]
        }
        Listen::Tcp(address) => match names.of_name(address) {
            [] => open_tcp(address)?,
            found => open_tcp_at(address, found.to_vec())?,
        },
    };
    let address = Some(address.to_string());
    Ok(opened.into_iter().map(|one| Listener { address: address.clone(), ..one }).collect())
}

/// Opens sockets at the addresses of a host's name that are not among those `handed` over by a
/// predecessor. An address that cannot be opened is left out: clients have the others.
pub(crate) fn open_others(
    address: &Listen,
    names: &ResolvedNames,
    handed: &[SocketAddr],
) -> Vec<Listener> {
    let Listen::Tcp(host) = address else { return Vec::new() };
    let opened = bind_others(host, names.of_name(host).to_vec(), handed);
    let address = Some(address.to_string());
    opened.into_iter().map(|one| Listener { address: address.clone(), ..one }).collect()
}

fn bind_others(name: &str, found: Vec<SocketAddr>, handed: &[SocketAddr]) -> Vec<Listener> {
    let (mut opened, port) = (Vec::new(), handed.first().map(SocketAddr::port));
    for mut one in found {
        one.set_port(if one.port() == 0 { port.unwrap_or(0) } else { one.port() });
        if handed.contains(&one) {
            continue;
        }
        match TcpListener::bind(one) {
            Ok(socket) => {
                let name = name_of(&socket, name);
                opened.push(Listener::handed_over(socket.into(), None, name, None));
            }
            Err(error) => note_missing(name, one, &error),
        }
    }
    opened
}

/// Checks whether a socket can be opened at an address, while a daemon may have its own there. Opens nothing.
///
/// # Errors
/// [`ListenError`].
pub fn check(address: &Listen) -> Result<(), ListenError> {
    let failed = |name: String| move |source| bind_error(&name, source);
    match address {
        Listen::Unix(path) => {
            let failed = failed(format!("unix:{}", path.display()));
            match std::fs::symlink_metadata(path) {
                Ok(found) if !found.file_type().is_socket() => {
                    return Err(ListenError::NotASocket { path: path.into() });
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                    std::fs::metadata(folder.unwrap_or(Path::new("."))).map_err(&failed)?;
                }
                Err(error) => return Err(failed(error)),
            }
            rustix::net::SocketAddrUnix::new(path).map_err(|error| failed(error.into())).map(drop)
        }
        Listen::Tcp(address) => {
            let failed = failed(format!("tcp:{address}"));
            let mut found = socket_addresses(address).map_err(&failed)?;
            // Any port shows whether the address is one of this host.
            found.iter_mut().for_each(|address| address.set_port(0));
            TcpListener::bind(found.as_slice()).map_err(failed).map(drop)
        }
    }
}

/// Opens a unix socket that only the daemon's user and group may connect to; `end` as for [`open`].
///
/// # Errors
/// [`ListenError`].
pub fn open_private(path: &Path, end: &AtomicBool) -> Result<Listener, ListenError> {
    let wait = Wait { until: Instant::now() + CLOSE_TIMEOUT, for_ended: true };
    let opened = unix_until(path, Some(PRIVATE), end, wait)?;
    log_stale(path, opened.replaces_stale);
    Ok(opened)
}

fn log_stale(path: &Path, replaced: bool) {
    if replaced {
        tracing::info!(socket = %path.display(), "replaced a stale socket");
    }
}

/// As [`open_private`], and waits for another server until `deadline`. The caller logs that a stale socket was replaced.
///
/// # Errors
/// [`ListenError`].
pub fn open_private_until(
    path: &Path,
    end: &AtomicBool,
    deadline: Instant,
) -> Result<Listener, ListenError> {
    unix_until(path, Some(PRIVATE), end, Wait { until: deadline, for_ended: false })
}

/// How long to wait for another server to close its socket.
#[derive(Clone, Copy)]
struct Wait {
    until: Instant,
    /// Longer if the server has ended, and its last requests have not: as long as they take.
    for_ended: bool,
}

/// Opens a unix socket, in the place of a stale one. The socket of a killed daemon accepts connections until the kernel has
/// completed its last requests, which may take long on a device that hangs, and its successor waits that long.
fn unix_until(
    path: &Path,
    mode: Option<rustix::fs::Mode>,
    end: &AtomicBool,
    wait: Wait,
) -> Result<Listener, ListenError> {
    let (begun, mut is_told) = (Instant::now(), false);
    let name = format!("unix:{}", path.display());
    let failed = |source| bind_error(&name, source);
    loop {
        let found = occupant(path);
        match found {
            Occupant::OtherFile => return Err(ListenError::NotASocket { path: path.into() }),
            Occupant::Nothing | Occupant::StaleSocket => {
                let socket = UnnamedSocket::beside(path, mode).map_err(failed)?;
                if let Ok((fd, file)) = socket.publish(path, found).map_err(failed)? {
                    let replaces_stale = found == Occupant::StaleSocket;
                    let file = Some(file);
                    return Ok(Listener { fd, name, address: None, file, replaces_stale });
                }
            }
            Occupant::Server | Occupant::EndedServer => {}
        }
        let waits_for_ended = wait.for_ended && found == Occupant::EndedServer;
        if waits_for_ended && !is_told && begun.elapsed() >= TOLD_AFTER {
            is_told = true;
            tracing::warn!(
                socket = %path.display(),
                "its server has ended, and its last requests may hang in the kernel: check the devices and the kernel's log (dmesg); if the socket is that of another program, stop it; waiting"
            );
        }
        if end.load(Ordering::SeqCst) {
            return Err(ListenError::Interrupted);
        }
        if Instant::now() >= wait.until && !waits_for_ended {
            return Err(ListenError::InUse { path: path.into() });
        }
        // This blocks the main thread, before a client or guest is served, or a thread of its own.
        std::thread::park_timeout(PAUSE);
    }
}

/// The directory of a path that has one other than the working directory.
pub(crate) fn directory_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|directory| !directory.as_os_str().is_empty())
}

fn note_missing(name: &str, address: SocketAddr, error: &io::Error) {
    tracing::warn!(name, %address, %error, "not listening at an address of the name");
}

/// Opens sockets at all addresses of the name that this host has. Without a port (0) all get the
/// port of the first one.
///
/// # Errors
/// [`ListenError`]: the host has none of the addresses, or one is in use.
pub(crate) fn open_tcp(address: &str) -> Result<Vec<Listener>, ListenError> {
    let found = socket_addresses(address);
    open_tcp_at(address, found.map_err(|source| bind_error(&format!("tcp:{address}"), source))?)
}

fn open_tcp_at(address: &str, found: Vec<SocketAddr>) -> Result<Vec<Listener>, ListenError> {
    let failed = |source| bind_error(&format!("tcp:{address}"), source);
    let (mut listeners, mut missing, mut port) = (Vec::new(), None, None);
    for mut one in found {
        one.set_port(port.unwrap_or(one.port()));
        match TcpListener::bind(one) {
            Ok(socket) => {
                port = socket.local_addr().ok().map(|bound| bound.port());
                let name = name_of(&socket, address);
                listeners.push(Listener::handed_over(socket.into(), None, name, None));
            }
            // An address of another host, or of a protocol that this one does not have.
            Err(error) if is_missing(&error) => missing = Some((one, error)),
            Err(error) => return Err(failed(error)),
        }
    }
    match missing {
        Some((_, error)) if listeners.is_empty() => Err(failed(error)),
        Some((one, error)) => {
            note_missing(address, one, &error);
            Ok(listeners)
        }
        None if listeners.is_empty() => Err(failed(io::ErrorKind::AddrNotAvailable.into())),
        None => Ok(listeners),
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
}

/// The name of a socket in the log.
fn name_of(socket: &TcpListener, address: &str) -> String {
    match socket.local_addr() {
        Ok(bound) => format!("tcp:{bound}"),
        Err(_) => format!("tcp:{address}"),
    }
}

/// The socket with this number, which the parent process passed. To be called once, before anything else is opened.
///
/// # Errors
/// If there is no such socket, or it is not a stream socket of the local domain that listens or is connected.
pub fn passed(number: i32) -> io::Result<OwnedFd> {
    let invalid = || io::Error::other(format!("descriptor {number} is not an open socket"));
    // The first three are standard input and output.
    let path = std::fs::read_link(format!("/proc/self/fd/{number}")).map_err(|_| invalid())?;
    if number < 3 || !path.to_string_lossy().starts_with("socket:") {
        return Err(invalid());
    }
    // SAFETY: it is open, and the parent passed it for us to own: this function is called once, before anything else could
    // have opened or taken it.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let domain = socket_domain(&socket)?;
    if (domain, socket_type(&socket)?) != (AddressFamily::UNIX, SocketType::STREAM) {
        let text = format!("descriptor {number} is not a unix socket of the type SOCK_STREAM");
        return Err(io::Error::other(text));
    }
    if !socket_acceptconn(&socket)? && rustix::net::getpeername(&socket).is_err() {
        let text = format!("socket {number} neither listens nor is connected");
        return Err(io::Error::other(text));
    }
    Ok(socket)
}

/// Checks that the service manager has passed a socket that accepts connections of clients.
///
/// # Errors
/// [`ListenError::Passed`].
pub(crate) fn check_passed(fd: &OwnedFd, name: &str) -> Result<(), ListenError> {
    let wrong = |kind| Err(ListenError::Passed { name: name.to_owned(), kind });
    let Ok(of) = socket_type(fd) else { return wrong("not a socket") };
    match socket_domain(fd) {
        Ok(AddressFamily::UNIX | AddressFamily::INET | AddressFamily::INET6) => {}
        _ => return wrong("neither a unix socket nor a TCP socket"),
    }
    match of {
        SocketType::STREAM if socket_acceptconn(fd).unwrap_or(false) => Ok(()),
        SocketType::STREAM => wrong("a socket that does not listen, such as a single connection"),
        SocketType::DGRAM => wrong("a datagram socket"),
        _ => wrong("not a stream socket"),
    }
}

/// Whether the peer of a unix socket had `group` among its supplementary groups when it connected (`SO_PEERGROUPS`).
///
/// # Errors
/// The kernel's; it has this since Linux 4.13.
pub fn peer_has_group(socket: BorrowedFd<'_>, group: u32) -> io::Result<bool> {
    Ok(ebb_access::peer_groups(socket)?.contains(&group))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener;

    use ebb_advice::{Advice, full_text};

    use super::*;

    fn open(address: &Listen) -> Result<Listener, ListenError> {
        let mut opened = super::open(address, &AtomicBool::default())?;
        assert_eq!(opened.len(), 1);
        Ok(opened.remove(0))
    }

    fn open_private(path: &Path) -> Result<Listener, ListenError> {
        super::open_private(path, &AtomicBool::default())
    }

    #[test]
    fn waiting_for_a_socket_in_use_ends_when_the_daemon_is_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _other = open(&Listen::Unix(path.clone())).unwrap();
        let end = AtomicBool::new(true);
        let refused = super::open(&Listen::Unix(path.clone()), &end);
        assert!(matches!(refused, Err(ListenError::Interrupted)), "{refused:?}");
        let refused = super::open_private(&path, &end);
        assert!(matches!(refused, Err(ListenError::Interrupted)), "{refused:?}");
        assert!(path.exists(), "the other server's socket was removed");
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the file stays when its server has ended");
        let listener = open(&Listen::Unix(path.clone())).unwrap();
        assert!(matches!(open(&Listen::Unix(path.clone())), Err(ListenError::InUse { .. })));
        drop(listener);
        assert!(!path.exists(), "removed when closed");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(open(&Listen::Unix(path.clone())), Err(ListenError::NotASocket { .. })));
        assert!(path.exists());
    }

    #[test]
    fn the_socket_of_another_daemon_at_the_same_path_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let unix = |path: &Path| open(&Listen::Unix(path.into()));
        for open in [open_private as fn(&Path) -> _, unix] {
            let first = open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let second = open(&path).unwrap();
            drop(first);
            assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
            drop(second);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_private_socket_is_accessible_to_its_user_and_group_only() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let listener = open_private(&path).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!(found.permissions().mode() & 0o7777, 0o660);
        assert_eq!(found.gid(), rustix::process::getegid().as_raw());
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        assert!(matches!(open_private(&path), Err(ListenError::InUse { .. })));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn the_groups_of_a_peer_are_those_of_its_process() {
        use std::os::fd::AsFd;
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        // A pair has the credentials of the process that made it.
        let own = rustix::process::getgroups().unwrap();
        for group in &own {
            assert!(peer_has_group(one.as_fd(), group.as_raw()).unwrap(), "{group:?}");
        }
        let other = (1..).find(|group| own.iter().all(|own| own.as_raw() != *group)).unwrap();
        assert!(!peer_has_group(one.as_fd(), other).unwrap(), "{other}");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_has_group(file.as_fd(), other).is_err());
    }

    #[test]
    fn an_address_that_cannot_be_listened_at_is_found_without_listening() {
        let folder = tempfile::tempdir().unwrap();
        let unix = |name: &str| Listen::Unix(folder.path().join(name));
        let tcp = |address: &str| Listen::Tcp(address.to_owned());
        std::fs::write(folder.path().join("file"), "").unwrap();
        let served = UnixListener::bind(folder.path().join("served")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let in_use = port.local_addr().unwrap().to_string();
        for good in [unix("new"), unix("served"), tcp("127.0.0.1:1"), tcp("[::]:0"), tcp(&in_use)] {
            check(&good).unwrap_or_else(|error| panic!("{good:?}: {error}"));
        }
        assert!(!folder.path().join("new").exists(), "it listens");
        drop((served, port));
        for (bad, expected) in [
            (unix("file"), "exists and is not a socket"),
            (unix("none/s"), "directory does not exist"),
            (unix("file/s"), "file/s"),
            (unix(&"x".repeat(200)), "xxx"),
            (tcp("192.0.2.1:1"), "this host has no such address"),
            (tcp("name.invalid:1"), "its name has no address"),
            (tcp("[fe80::1%none]:1"), "its name has no address"),
        ] {
            let error = full_text(&check(&bad).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    fn address_of(listener: &Listener) -> SocketAddr {
        TcpListener::from(listener.fd.try_clone().unwrap()).local_addr().unwrap()
    }

    /// `localhost` has the addresses of the host's file, which are one or two.
    #[test]
    fn every_address_of_a_name_is_listened_at() {
        let address = Listen::Tcp("localhost:0".to_owned());
        let opened = super::open(&address, &AtomicBool::default()).unwrap();
        let available = |one: &std::net::SocketAddr| TcpListener::bind(one).is_ok();
        let found = socket_addresses("localhost:0").unwrap();
        assert_eq!(opened.len(), found.iter().filter(|one| available(one)).count(), "{found:?}");
        let mut ports = Vec::new();
        for listener in &opened {
            let socket = TcpListener::from(listener.fd.try_clone().unwrap());
            let bound = socket.local_addr().unwrap();
            std::net::TcpStream::connect(bound).unwrap();
            assert_eq!(listener.name, format!("tcp:{bound}"));
            assert_eq!(listener.address.as_deref(), Some("tcp:localhost:0"));
            ports.push(bound.port());
        }
        ports.dedup();
        assert_eq!(ports.len(), 1, "one port");
        let addresses: Vec<_> = opened.iter().map(address_of).collect();
        let names = ResolvedNames::of(std::slice::from_ref(&address), Duration::from_mins(1));
        assert!(open_others(&address, &names, &addresses).is_empty(), "a predecessor had all");
        // A port that is taken at any of them is an error.
        let taken = Listen::Tcp(format!("localhost:{}", ports[0]));
        let error = full_text(&super::open(&taken, &AtomicBool::default()).unwrap_err());
        assert!(error.contains("another server uses it"), "{error}");
    }

    /// The predecessor listened at the first address only, or the name had no other one then.
    #[test]
    fn addresses_without_socket_of_predecessor_are_opened() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let found =
            |port| ["127.0.0.1", "127.0.0.2"].map(|ip| SocketAddr::new(ip.parse().unwrap(), port));
        let second = found(first.port())[1];
        for port in [0, first.port()] {
            let opened = bind_others("name", found(port).to_vec(), &[first]);
            assert_eq!(opened.iter().map(address_of).collect::<Vec<_>>(), [second]);
            // One that is in use does not end a takeover.
            assert!(bind_others("name", found(port).to_vec(), &[first]).is_empty());
        }
    }

    #[test]
    fn passed_descriptor_that_does_not_listen_is_rejected_by_kind() {
        use std::os::unix::net::{UnixDatagram, UnixStream};
        let listens = TcpListener::bind("127.0.0.1:0").unwrap();
        check_passed(&OwnedFd::from(listens), "socket 3").unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        let raw = (AddressFamily::NETLINK, SocketType::RAW);
        let netlink = rustix::net::socket(raw.0, raw.1, None).unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (fd, expected) in [
            (OwnedFd::from(one), "does not listen"),
            (UnixDatagram::unbound().unwrap().into(), "a datagram socket"),
            (udp.into(), "a datagram socket"),
            (file.into(), "not a socket"),
            (netlink, "neither a unix socket nor a TCP socket"),
        ] {
            let error = full_text(&check_passed(&fd, "socket 3").unwrap_err());
            assert!(error.contains("socket 3: it is ") && error.contains(expected), "{error}");
            assert!(error.contains("ListenStream="), "{error}");
        }
        drop(other);
    }

    #[test]
    fn the_error_names_a_missing_directory() {
        let error = open(&Listen::Unix("/nonexistent/folder/s".into())).unwrap_err();
        assert!(error.remedy().unwrap().contains("directory does not exist"), "{error}");
    }
}
