//! Peers that send endless handshake records and receive nothing: memory does not grow.
//!
//! It measures the memory of its process.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use ebb_io::{Worker, fd_from};
use ebb_tls::{ServerTls, Transport};
use openssl::ssl::SslVersion;

use crate::sealer::{self, DATA, HANDSHAKE, Library, Sealer};

const GROWTH_MAX: usize = 1 << 20;
/// Bytes sent at a time, and before memory is first measured.
const BATCH: usize = 64 << 10;
const WARM_UP: usize = 512 << 10;

fn flood_bytes() -> usize {
    let mib = usize::try_from(seeded::scaled(6)).unwrap_or(usize::MAX >> 20);
    mib.max(3) << 20
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() << 10
}

/// A worker that serves one connection under TLS: it receives, and sends pending output.
fn serve(server: &ServerTls) -> (Worker, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let session = server.session().unwrap();
    let worker = Worker::start_alone("tls-test").unwrap();
    worker.handle().spawn(move |io| async move {
        let mut transport = Transport::new(fd_from(ours), None);
        if transport.start_tls(&io, session, 1).await.is_err() {
            return;
        }
        let transport = Rc::new(transport);
        let sender = async {
            loop {
                transport.wants_send().await;
                if transport.send_pending(&io).await.is_err() {
                    return;
                }
            }
        };
        let receiver = async {
            loop {
                let buf = io.pool().take(4096).await;
                if !matches!(transport.recv(&io, buf, 0..4096).await.0, Ok(1..)) {
                    return;
                }
            }
        };
        futures_lite::future::or(receiver, sender).await;
    });
    theirs.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    (worker, theirs)
}

/// Sends batches until enough bytes were sent, or the server receives no more; returns how many bytes it received
/// and by how many the process grew.
fn send(mut socket: &UnixStream, mut batch: impl FnMut() -> Vec<u8>) -> (usize, usize) {
    let (mut sent, mut before, mut most) = (0, None, 0);
    while sent < flood_bytes() {
        let bytes = batch();
        if socket.write_all(&bytes).is_err() {
            // The server has stopped receiving, or has closed the connection.
            break;
        }
        sent += bytes.len();
        if sent >= WARM_UP {
            let now = resident();
            most = most.max(now.saturating_sub(*before.get_or_insert(now)));
        }
    }
    (sent, most)
}

fn with_keys(
    version: SslVersion,
    server: &ServerTls,
    say: fn(&mut Sealer, &mut Vec<u8>),
) -> (usize, usize) {
    let (_worker, socket) = serve(server);
    let library = Library::new(version);
    let mut client = library.client(&socket);
    client.do_handshake().unwrap();
    let mut sealer = library.sealer(client.ssl());
    send(&socket, || {
        let mut batch = Vec::with_capacity(BATCH + (20 << 10));
        while batch.len() < BATCH {
            say(&mut sealer, &mut batch);
        }
        batch
    })
}

/// An endless message of 16 MiB, in records of this size, to one server after the other: each
/// closes the connection at some point.
fn without_keys(server: &ServerTls, size: usize) -> (usize, usize) {
    let (mut sum, mut growth, mut before) = (0, 0, None);
    let head = [sealer::CLIENT_HELLO, 0xff, 0xff, 0xff];
    let record = |body: &[u8]| {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [&[HANDSHAKE, 3, 1][..], &length, body].concat()
    };
    while sum < flood_bytes() {
        let (_worker, mut socket) = serve(server);
        let _ = socket.write_all(&record(&head));
        let batch = record(&vec![3; size]).repeat(BATCH / (size + 5) + 1);
        let mut sent = batch.len();
        while sent < WARM_UP && socket.write_all(&batch).is_ok() {
            sent += batch.len();
        }
        sum += sent;
        drop(socket);
        let now = resident();
        // Threads and rings of the first server are not freed.
        if sum >= 4 * WARM_UP {
            growth = growth.max(now.saturating_sub(*before.get_or_insert(now)));
        }
    }
    (sum, growth)
}

#[test]
fn endless_handshake_records_do_not_grow_memory() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, sealer::KEY_LINE).unwrap();
    let server = ServerTls::from_psk(&keys).unwrap();
    let floods = [
        (
            "TLS 1.2: renegotiation",
            with_keys(SslVersion::TLS1_2, &server, |sealer, batch| {
                batch.extend(sealer.seal(HANDSHAKE, &sealer::hello()));
            }),
        ),
        (
            "TLS 1.2: beginnings of a message of 16 MiB",
            with_keys(SslVersion::TLS1_2, &server, |sealer, batch| {
                let mut body = vec![3; 16 << 10];
                body[..4].copy_from_slice(&[sealer::CLIENT_HELLO, 0xff, 0xff, 0xff]);
                batch.extend(sealer.seal(HANDSHAKE, &body));
            }),
        ),
        (
            "TLS 1.2: fragments of 1 byte",
            with_keys(SslVersion::TLS1_2, &server, |sealer, batch| {
                batch.extend(sealer.seal(HANDSHAKE, &[sealer::CLIENT_HELLO]));
            }),
        ),
        (
            "TLS 1.3: fragments of a message of 16 MiB",
            with_keys(SslVersion::TLS1_3, &server, |sealer, batch| {
                let mut body = vec![3; 16 << 10];
                body[..4].copy_from_slice(&[sealer::KEY_UPDATE, 0xff, 0xff, 0xff]);
                batch.extend(sealer.seal(HANDSHAKE, &body));
            }),
        ),
        (
            "TLS 1.3: key updates that request a reply",
            with_keys(SslVersion::TLS1_3, &server, |sealer, batch| {
                batch.extend(sealer.update(true));
                batch.extend(sealer.seal(DATA, &[7]));
            }),
        ),
        (
            "TLS 1.3: key updates that request none",
            with_keys(SslVersion::TLS1_3, &server, |sealer, batch| {
                batch.extend(sealer.update(false));
                batch.extend(sealer.seal(DATA, &[7]));
            }),
        ),
        ("without keys: fragments of 1 byte", without_keys(&server, 1)),
        ("without keys: fragments of 16 KiB", without_keys(&server, 16 << 10)),
    ];
    for (name, (sent, growth)) in floods {
        println!("{name}: {} KiB taken, {} KiB grown", sent >> 10, growth >> 10);
        assert!(growth <= GROWTH_MAX, "{name}: {growth} bytes more after {sent} bytes");
    }
}
