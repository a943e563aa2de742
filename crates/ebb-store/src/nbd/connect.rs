//! From an address to a connection in transmission phase. Blocking, so it runs on the thread that opens the store
//! and later on a thread of its own, and limited by one deadline for all steps.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_io::{Io, clock};
use ebb_tls::{ClientTls, TlsRead, TlsSession};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::connector;
use super::export::RemoteExport;
use super::handshake::Negotiation;
use super::link::Remote;
use super::options::{NbdAddress, NbdError, NbdOptions};

/// The time limit for connecting and negotiating together.
pub(crate) const ATTEMPT: Duration = Duration::from_secs(10);
/// A TCP connection whose peer acknowledges nothing for this long is lost.
const TCP_PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection in transmission phase.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) fd: OwnedFd,
    pub(crate) tls: Option<TlsSession>,
    pub(crate) export: RemoteExport,
}

/// [`connect`] on a thread of its own, as soon as the limits on such threads permit: see [`connector`]. If this future
/// is dropped, the thread ends within its time limit and closes its connection.
pub(crate) async fn connect_off_worker(
    io: &Io,
    remote: Arc<Remote>,
) -> Result<Connected, NbdError> {
    let address = remote.options.address.to_string();
    let target = (address.clone(), remote.options.export.clone());
    let call = move || connect(&remote.options, remote.tls.as_ref());
    #[cfg(feature = "sim")]
    if clock::is_virtual() {
        return super::sim::attempt(io, call).await;
    }
    let result = connector::run(io, target, call).await;
    result.unwrap_or_else(|source| Err(NbdError::Connect { address, source }))
}

/// Connects and enters the transmission phase.
pub(crate) fn connect(
    options: &NbdOptions,
    tls: Option<&ClientTls>,
) -> Result<Connected, NbdError> {
    let deadline = clock::now() + ATTEMPT;
    let address = || options.address.to_string();
    let fd = open_socket(&options.address, deadline)
        .map_err(|source| NbdError::Connect { address: address(), source })?;
    let broken = |source| NbdError::Handshake { address: address(), source };
    let mut wire = BlockingStream { fd, deadline, tls: None };
    if let Some(context) = tls {
        let no_zeroes = Negotiation::greet(&mut wire, options)?.start_tls()?;
        let session = context.session().map_err(broken)?;
        wire.start_tls(session)
            .map_err(|source| NbdError::TlsFailed { address: address(), source })?;
        let (export, _) = Negotiation::resume(&mut wire, options, no_zeroes).enter()?;
        return wire.done(export).map_err(broken);
    }
    let (export, _) = Negotiation::greet(&mut wire, options)?.enter()?;
    wire.done(export).map_err(broken)
}

fn open_socket(address: &NbdAddress, deadline: Instant) -> io::Result<OwnedFd> {
    match address {
        NbdAddress::Unix(path) => {
            let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            // If the server does not accept, connecting waits.
            sockopt::set_socket_timeout(&fd, Timeout::Send, Some(time_left(deadline)?))?;
            rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
            Ok(fd)
        }
        NbdAddress::Tcp { host, port } => {
            let unknown = io::ErrorKind::AddrNotAvailable;
            let mut last = io::Error::new(unknown, "the name has no address");
            let found = (host.as_str(), *port).to_socket_addrs().map_err(|error| {
                match error.raw_os_error() {
                    Some(_) => error,
                    None => io::Error::new(unknown, error),
                }
            });
            for address in found? {
                match TcpStream::connect_timeout(&address, time_left(deadline)?) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        let fd = OwnedFd::from(stream);
                        enable_keepalive(&fd)?;
                        return Ok(fd);
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Lets the kernel detect a peer that vanished without closing the connection.
fn enable_keepalive(fd: &OwnedFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, TCP_PEER_TIMEOUT / 4)?;
    sockopt::set_tcp_keepintvl(fd, TCP_PEER_TIMEOUT / 10)?;
    sockopt::set_tcp_keepcnt(fd, 5)?;
    let timeout = u32::try_from(TCP_PEER_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(fd, timeout)?;
    Ok(())
}

/// The remaining time, never zero (which would mean no limit).
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(clock::now());
    if left < Duration::from_millis(1) { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A blocking stream with a deadline, in plain text or under TLS.
struct BlockingStream {
    fd: OwnedFd,
    deadline: Instant,
    tls: Option<TlsSession>,
}

impl BlockingStream {
    fn receive(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        #[cfg(feature = "sim")]
        if clock::is_virtual() {
            return super::sim::receive(&self.fd, buf);
        }
        sockopt::set_socket_timeout(&self.fd, Timeout::Recv, Some(time_left(self.deadline)?))?;
        loop {
            match rustix::net::recv(&self.fd, &mut *buf, RecvFlags::empty()) {
                Ok((count, _)) => return Ok(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn transmit(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            sockopt::set_socket_timeout(&self.fd, Timeout::Send, Some(time_left(self.deadline)?))?;
            match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn send_output(&mut self) -> io::Result<()> {
        let mut cipher = [0; 4096];
        loop {
            let Some(tls) = &mut self.tls else { return Ok(()) };
            let count = tls.take_output(&mut cipher);
            if count == 0 {
                return Ok(());
            }
            self.transmit(&cipher[..count])?;
        }
    }

    /// Receives more cipher text from the socket.
    fn feed(&mut self) -> io::Result<()> {
        let mut cipher = [0; 4096];
        match self.receive(&mut cipher)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                if let Some(tls) = &mut self.tls {
                    tls.feed(&cipher[..count]);
                }
                Ok(())
            }
        }
    }

    fn start_tls(&mut self, session: TlsSession) -> io::Result<()> {
        self.tls = Some(session);
        loop {
            let done = self.tls.as_mut().map_or(Ok(true), TlsSession::handshake);
            // An alert may have to be sent also when the handshake has failed.
            self.send_output()?;
            if done? {
                return Ok(());
            }
            self.feed()?;
        }
    }

    fn done(self, export: RemoteExport) -> io::Result<Connected> {
        for which in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&self.fd, which, None)?;
        }
        Ok(Connected { fd: self.fd, tls: self.tls, export })
    }
}

impl Read for BlockingStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(tls) = &mut self.tls else { return self.receive(buf) };
            match tls.read(buf)? {
                TlsRead::Data(count) => return Ok(count),
                TlsRead::Again => self.send_output()?,
                TlsRead::NeedsInput => {
                    self.send_output()?;
                    self.feed()?;
                }
            }
        }
    }
}

impl Write for BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.transmit(bytes)?,
            Some(tls) => {
                tls.write(bytes)?;
                self.send_output()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connected {
    /// Sends `NBD_CMD_DISC` if the connection is in plain text, and returns the export's
    /// properties.
    pub(crate) fn disconnect(self) -> RemoteExport {
        if self.tls.is_none() {
            let mut request = [0; ebb_nbd_proto::REQUEST_LEN];
            request[..4].copy_from_slice(&ebb_nbd_proto::magic::REQUEST.to_be_bytes());
            let command = ebb_nbd_proto::Command::Disconnect.to_wire();
            request[6..8].copy_from_slice(&command.to_be_bytes());
            let fd = self.fd;
            let send = move || rustix::net::send(&fd, &request, SendFlags::NOSIGNAL);
            // A server that has disconnected needs none. Not by a worker itself, which may not.
            let _ = ebb_sandbox::threads::call(send);
        }
        self.export
    }
}
