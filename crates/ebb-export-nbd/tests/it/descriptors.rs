//! A process without free descriptors: handshakes are evicted for newer connections.
//!
//! It limits the descriptors of its process.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ebb_io::fd_from;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{Client, FLUSH, HANG, Rig, Stream, Style, memory};

/// More than the descriptors that the process may still open, and fewer than the handshakes of one address.
const SILENT: usize = 100;
const FREE: u64 = 40;

fn make_socket(family: AddressFamily) -> OwnedFd {
    socket(family, SocketType::STREAM, None).unwrap()
}

#[test]
fn silent_peers_that_hold_all_descriptors_do_not_keep_a_client_out() {
    let rig = Rig::with([memory("disk", 1 << 20)]);
    assert_eq!(rig.client("disk", Style::Simple).ask(FLUSH, 0, 0, 0), 0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    rig.listen(fd_from(listener));
    let path = SocketAddrUnix::new(rig.path()).unwrap();
    // The clients have their descriptors before there are no more.
    let silent: Vec<_> = (0..SILENT).map(|_| make_socket(AddressFamily::INET)).collect();
    let clients = [make_socket(AddressFamily::UNIX), make_socket(AddressFamily::UNIX)];
    let before = getrlimit(Resource::Nofile);
    let used = u64::try_from(clients[1].as_raw_fd()).unwrap() + 1;
    setrlimit(Resource::Nofile, Rlimit { current: Some(used + FREE), ..before }).unwrap();
    let login = |socket: OwnedFd| {
        connect(&socket, &path).unwrap();
        let socket = UnixStream::from(socket);
        socket.set_read_timeout(Some(HANG)).unwrap();
        let mut stream: Box<dyn Stream> = Box::new(socket);
        Client::greet(&mut stream).unwrap();
        let mut client = Client::go(stream, "disk", Style::Simple).unwrap();
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
        client
    };
    let [first, second] = clients;
    // The kernel applies to an accept the limit of when it began: this one began before.
    let first = login(first);
    silent.iter().for_each(|socket| connect(socket, &address).unwrap());
    let mut silent: Vec<_> = silent.into_iter().map(TcpStream::from).collect();
    // Until there is no descriptor left, or one was freed because there was none.
    while rustix::io::dup(&second).is_ok() && !silent.iter_mut().any(is_closed) {
        std::thread::yield_now();
    }
    let second = login(second);
    // A few were evicted. Those accepted first are all closed when their time is up, which makes room, too.
    let greeted = &mut silent[..usize::try_from(FREE).unwrap() / 2];
    assert!(greeted.iter_mut().any(|peer| !is_closed(peer)), "none was evicted: they timed out");
    setrlimit(Resource::Nofile, before).unwrap();
    drop((silent, first, second));
    rig.stop();
}

/// Whether the server has closed the connection, after a greeting or before it.
fn is_closed(peer: &mut TcpStream) -> bool {
    peer.set_nonblocking(true).unwrap();
    loop {
        match peer.read(&mut [0; 64]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}
