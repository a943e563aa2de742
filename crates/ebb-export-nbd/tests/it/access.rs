//! Who may open which volume: clients of a unix socket and of TCP. Those of TLS are in `tls.rs`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use common::{Client, FLUSH, HANG, Rig, Stream, Style, memory};
use ebb_access::{AccessEntry, AccessList};
use ebb_io::fd_from;

const MIB: u64 = 1 << 20;

fn list(entries: &[String]) -> AccessList {
    let entries = entries.iter().map(|text| AccessEntry::parse(text).unwrap());
    AccessList::new(entries.collect()).unwrap()
}

/// A way to connect.
struct Road<'a>(&'static str, Box<dyn Fn() -> Box<dyn Stream> + 'a>);

impl Road<'_> {
    fn connect(&self) -> Box<dyn Stream> {
        let mut stream = (self.1)();
        Client::greet(&mut stream).unwrap();
        stream
    }

    fn go(&self, name: &str) -> Client {
        Client::go(self.connect(), name, Style::Simple).unwrap()
    }
}

fn tcp(rig: &Rig, address: &str) -> SocketAddr {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap();
    rig.listen(fd_from(listener));
    address
}

fn roads(rig: &Rig) -> Vec<Road<'_>> {
    let stream = |address| {
        move || -> Box<dyn Stream> {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(HANG)).unwrap();
            Box::new(stream)
        }
    };
    // A dual-stack socket, which sees IPv4 addresses mapped into IPv6.
    let any = tcp(rig, "[::]:0").port();
    vec![
        Road("unix", Box::new(|| Box::new(rig.stream()))),
        Road("IPv4", Box::new(stream(tcp(rig, "127.0.0.1:0")))),
        Road("mapped", Box::new(stream(SocketAddr::from(([127, 0, 0, 1], any))))),
        Road("IPv6", Box::new(stream(SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, any))))),
    ]
}

/// A request for an export by name, as INFO and GO have it.
fn request(name: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap().to_be_bytes();
    [&length[..], name.as_bytes(), &[0, 0]].concat()
}

/// What the old option, which has no error reply, is answered with.
fn export_name(road: &Road<'_>, name: &str) -> Vec<u8> {
    let mut stream = road.connect();
    let length = u32::try_from(name.len()).unwrap().to_be_bytes();
    stream.write_all(&[b"IHAVEOPT\0\0\0\x01", &length[..], name.as_bytes()].concat()).unwrap();
    let mut reply = vec![0; 10];
    let count = stream.read(&mut reply).unwrap_or(0);
    reply.truncate(count);
    reply
}

/// A volume of the table: the name, its entries, and the roads on which it can be opened.
type Row = (&'static str, Option<Vec<String>>, &'static [&'static str]);

fn table() -> Vec<Row> {
    let own = |text: &str| text.to_owned();
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let every: &[&str] = &["unix", "IPv4", "mapped", "IPv6"];
    let v4: &[&str] = &["IPv4", "mapped"];
    vec![
        ("open", None, every),
        ("closed", Some(vec![]), &[]),
        ("user", Some(vec![format!("uid:{uid}")]), &["unix"]),
        ("other-user", Some(vec![format!("uid:{}", uid + 1)]), &[]),
        ("group", Some(vec![format!("gid:{gid}")]), &["unix"]),
        ("other-group", Some(vec![own("gid:4294967294")]), &[]),
        ("v4", Some(vec![own("net:127.0.0.0/8")]), v4),
        ("v4-elsewhere", Some(vec![own("net:10.0.0.0/8")]), &[]),
        ("v6", Some(vec![own("net:::1")]), &["IPv6"]),
        ("two", Some(vec![own("net:::1"), format!("uid:{uid}")]), &["unix", "IPv6"]),
        ("psk", Some(vec![own("psk:alice")]), &[]),
        ("cn", Some(vec![own("cn:*")]), &[]),
        ("xen", Some(vec![own("xen:0"), own("xen:guest")]), &[]),
    ]
}

#[test]
fn a_client_sees_what_it_may_open_and_nothing_else() {
    let rig = Rig::with(table().iter().map(|(name, ..)| memory(name, MIB)));
    let volumes = rig.server.volumes();
    for (name, entries, _) in table() {
        volumes.set_allowed(name, entries.map(|entries| list(&entries)));
    }
    for road in roads(&rig) {
        let names = |stream: &mut dyn Stream| {
            let replies = Client::option(stream, 3, b"").unwrap();
            let names = replies.iter().filter(|(kind, _)| *kind == 2).map(|(_, text)| &text[4..]);
            names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect::<Vec<_>>()
        };
        let listed = names(&mut road.connect());
        let unknown = |option, stream: &mut dyn Stream| {
            Client::option(stream, option, &request("no such volume")).unwrap()
        };
        for (name, _, allowed) in table() {
            let expected = allowed.contains(&road.0);
            let place = format!("{name} over {}", road.0);
            assert_eq!(listed.iter().any(|one| one == name), expected, "listed: {place}");
            rig.server.set_default(Some(name));
            for requested in [name, ""] {
                for option in [6, 7] {
                    let mut stream = road.connect();
                    let replies = Client::option(&mut stream, option, &request(requested)).unwrap();
                    let opened = replies.last().unwrap().0 == 1;
                    assert_eq!(opened, expected, "option {option}: {place}");
                    if !expected {
                        assert_eq!(replies, unknown(option, &mut stream), "{place}");
                    }
                }
                let reply = export_name(&road, requested);
                assert_eq!(reply.is_empty(), !expected, "EXPORT_NAME: {place}");
            }
            // Nor does it see why a volume is not served.
            volumes.refuse(&format!("{name}@x"), "it is being opened");
            let mut stream = road.connect();
            let refused = Client::option(&mut stream, 6, &request(&format!("{name}@x"))).unwrap();
            assert_eq!(refused == unknown(6, &mut stream), !expected, "refused: {place}");
        }
    }
}

#[test]
fn a_client_that_may_no_longer_open_its_volume_is_disconnected() {
    let rig = Rig::with([memory("a", MIB), memory("a@snapshot", MIB), memory("b", MIB)]);
    let roads = roads(&rig);
    let (unix, v4) = (&roads[0], &roads[1]);
    let mut clients: Vec<_> = ["a", "a@snapshot", "b"].map(|name| unix.go(name)).into();
    let mut others: Vec<_> = ["a", "a@snapshot", "b"].map(|name| v4.go(name)).into();
    for client in clients.iter_mut().chain(&mut others) {
        assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    }
    rig.server.volumes().set_allowed("a", Some(list(&["net:127.0.0.1".to_owned()])));
    rig.server.end_disallowed();
    assert!(clients[0].is_at_end() && clients[1].is_at_end());
    assert_eq!(clients[2].ask(FLUSH, 0, 0, 0), 0, "another volume");
    assert!(others.iter_mut().all(|client| client.ask(FLUSH, 0, 0, 0) == 0), "still allowed");
    rig.server.volumes().set_allowed("a", None);
    assert_eq!(unix.go("a").ask(FLUSH, 0, 0, 0), 0);
}
