//! Connecting and disconnecting clients, limits on clients, stopping the server, withdrawing volumes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};

use common::{Client, FLUSH, HANG, READ, Rig, STYLES, Stream, Style, WRITE, file, memory, pattern};
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_io::fd_from;
use ebb_store::{Direct, Store, TestStore};
use ebb_volume::{Operation, Volume, VolumeOptions, Writer};

const MIB: u64 = 1 << 20;

#[test]
fn more_clients_than_allowed_are_refused_until_one_disconnects() {
    let rig =
        Rig::new(ServerLimits { max_clients: 2, ..ServerLimits::default() }, TlsMode::Off, None);
    rig.server.volumes().add(memory("disk", MIB), std::sync::Arc::default());
    let first = rig.client("disk", Style::Simple);
    let mut second = rig.client("disk", Style::Simple);
    let mut third: Box<dyn Stream> = Box::new(rig.stream());
    assert!(Client::greet(&mut third).is_err(), "closed without a greeting");
    assert_eq!(second.ask(FLUSH, 0, 0, 0), 0, "other connections continue");
    drop(first);
    while rig.server.clients() > 1 {
        std::thread::yield_now();
    }
    assert_eq!(rig.client("disk", Style::Simple).ask(FLUSH, 0, 0, 0), 0);
}

/// Those in the handshake count, too: each has a descriptor.
#[test]
fn a_server_refuses_connections_beyond_its_limit_of_descriptors() {
    let rig = Rig::new(ServerLimits::default(), TlsMode::Off, None);
    rig.server.volumes().add(memory("disk", MIB), std::sync::Arc::default());
    rig.server.limit_accepted_connections(2);
    let mut first = rig.client("disk", Style::Simple);
    let mut handshake: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut handshake).unwrap();
    // A peer that does not complete the handshake keeps no client out.
    let mut second = rig.client("disk", Style::Simple);
    let mut byte = [0];
    assert!(!matches!(handshake.read(&mut byte), Ok(1)), "the handshake was not evicted");
    while rig.server.accepted_connections() > 2 {
        std::thread::yield_now();
    }
    let mut third: Box<dyn Stream> = Box::new(rig.stream());
    assert!(Client::greet(&mut third).is_err(), "closed without a greeting");
    assert_eq!(first.ask(FLUSH, 0, 0, 0), 0, "it stays connected");
    assert_eq!(second.ask(FLUSH, 0, 0, 0), 0, "it stays connected");
}

/// Clients of one volume, however many connect, leave connections free for another volume; the error names the reason.
#[test]
fn clients_of_one_volume_leave_connections_for_another_volume() {
    let rig =
        Rig::new(ServerLimits { max_clients: 10, ..ServerLimits::default() }, TlsMode::Off, None);
    rig.server.volumes().add(memory("disk", MIB), std::sync::Arc::default());
    rig.server.volumes().add(memory("other", MIB), std::sync::Arc::default());
    let mut clients: Vec<_> = (0..8).map(|_| rig.client("disk", Style::Simple)).collect();
    let go = |name: &str| {
        let mut stream: Box<dyn Stream> = Box::new(rig.stream());
        Client::greet(&mut stream).unwrap();
        let length = u32::try_from(name.len()).unwrap().to_be_bytes();
        let request = [&length[..], name.as_bytes(), &[0, 0]].concat();
        let (kind, text) = Client::option(&mut stream, 7, &request).unwrap().pop().unwrap();
        (kind, String::from_utf8_lossy(&text).into_owned())
    };
    for _ in 0..3 {
        let (kind, text) = go("disk");
        assert_eq!(kind, (1 << 31) + 2, "NBD_REP_ERR_POLICY: {text}");
        assert!(text.contains("max_clients (10)") && text.contains("volume disk"), "{text}");
    }
    let mut other = rig.client("other", Style::Simple);
    assert_eq!(other.ask(FLUSH, 0, 0, 0), 0);
    assert!(
        clients.iter_mut().all(|client| client.ask(FLUSH, 0, 0, 0) == 0),
        "connected clients stay connected"
    );
    assert_eq!(rig.server.clients(), 9);
    drop(other);
    rig.run(|server, io| async move {
        server.volumes().remove("other");
        server.withdraw(&io, "other").await;
    });
    // The only volume may use all connections.
    clients.extend((0..2).map(|_| rig.client("disk", Style::Simple)));
    assert!(clients.iter_mut().all(|client| client.ask(FLUSH, 0, 0, 0) == 0));
}

/// While a guest is the writer of a volume, clients are refused with the reason, and may connect when it has stopped
/// writing; while a client is connected the guest is refused, however many connections there are.
#[test]
fn a_volume_with_another_writer_is_refused_to_clients() {
    let volume = memory("disk", MIB);
    let rig = Rig::with([volume.clone()]);
    let guest = || Writer { name: "Xen guest 3".into(), group: None };
    let lease = volume.claim_writer(guest(), false).unwrap();
    let mut refused: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut refused).unwrap();
    let mut name = 4u32.to_be_bytes().to_vec();
    name.extend(b"disk\0\0");
    let (kind, text) = Client::option(&mut refused, 7, &name).unwrap().pop().unwrap();
    assert_eq!(kind, (1 << 31) + 2, "NBD_REP_ERR_POLICY");
    assert!(String::from_utf8(text).unwrap().contains("written to by Xen guest 3"));
    drop(lease);
    let mut clients = [rig.client("disk", Style::Simple), rig.client("disk", Style::Simple)];
    assert!(clients.iter_mut().all(|client| client.ask(FLUSH, 0, 0, 0) == 0));
    let [first, second] = clients;
    drop(first);
    assert!(volume.claim_writer(guest(), false).is_err());
    drop(second);
    while volume.claim_writer(guest(), false).is_err() {
        std::thread::yield_now();
    }
}

/// Handshakes do not count as clients, and the newest handshake is always accepted.
#[test]
fn a_thousand_peers_that_never_finish_the_handshake_do_not_keep_clients_out() {
    let rig =
        Rig::new(ServerLimits { max_clients: 4, ..ServerLimits::default() }, TlsMode::Off, None);
    rig.server.volumes().add(memory("disk", MIB), std::sync::Arc::default());
    let mut first = rig.client("disk", Style::Simple);
    let idle: Vec<_> = (0..1000).map(|_| rig.stream()).collect();
    for style in STYLES {
        assert_eq!(rig.client("disk", style).ask(FLUSH, 0, 0, 0), 0);
    }
    assert_eq!(first.ask(FLUSH, 0, 0, 0), 0, "connected clients stay connected");
    drop(idle);
}

/// Sends reads without receiving replies.
fn stuff(client: &mut Client, reads: u64, length: u64) {
    let mut bytes = Vec::new();
    for cookie in 1..=reads {
        bytes.extend(client.header(READ, 0, cookie, 0, length));
    }
    client.stream.write_all(&bytes).unwrap();
}

/// Receives replies until the end of the stream, which must not come within a reply; returns their number.
fn drain(client: &mut Client, length: usize, expected: &[u8]) -> u64 {
    let mut replies = 0;
    loop {
        match client.reply(|_| Some((0, length))) {
            Ok(reply) => {
                assert_eq!(reply.error, 0);
                assert!(reply.data == expected[..length]);
                replies += 1;
            }
            Err(error) => {
                use std::io::ErrorKind::{ConnectionReset, UnexpectedEof};
                assert!(matches!(error.kind(), ConnectionReset | UnexpectedEof), "{error}");
                return replies;
            }
        }
    }
}

fn reads_carried_out(volume: &Volume) -> u64 {
    volume.stats().of(Operation::Read).requests
}

#[test]
fn a_write_that_waits_for_its_data_counts_as_queued() {
    let volume = memory("disk", MIB);
    let rig = Rig::with([volume.clone()]);
    let mut client = rig.client("disk", Style::Simple);
    assert_eq!(client.write(0, 0, &pattern(1, 4096)), 0);
    let header = client.header(WRITE, 0, 1, 0, 4096);
    client.stream.write_all(&header).unwrap();
    // The same worker serves another client after it has received the header.
    assert!(rig.client("disk", Style::Simple).read(0, 4096).is_ok());
    client.stream.write_all(&pattern(2, 4096)).unwrap();
    assert_eq!(client.reply(|_| None).unwrap().error, 0);
    let stats = volume.stats();
    assert_eq!(stats.service_times(Operation::Write).count(), 2);
    // On a busy machine the first one may have waited for its data, too.
    assert!(stats.queued_times(Operation::Write).count() >= 1);
}

#[test]
fn a_stop_sends_the_replies_to_requests_in_flight_and_then_closes() {
    for style in STYLES {
        let volume = memory("disk", 4 * MIB);
        let rig = Rig::with([volume.clone()]);
        let mut client = rig.client("disk", style);
        let expected = pattern(1, 64 << 10);
        assert_eq!(client.write(0, 0, &expected), 0);
        stuff(&mut client, 200, 64 << 10);
        // After one reply, the server is processing the rest.
        assert_eq!(client.reply(|_| Some((0, 64 << 10))).unwrap().error, 0);
        let draining = std::thread::spawn(move || drain(&mut client, 64 << 10, &expected));
        rig.stop();
        assert_eq!(draining.join().unwrap() + 1, reads_carried_out(&volume), "{style:?}");
    }
}

/// Closing a TCP socket with unread requests resets the connection, which discards replies not yet received.
#[test]
fn a_stop_over_tcp_loses_no_reply() {
    for round in 0..10 {
        let volume = memory("disk", 4 * MIB);
        let rig = Rig::with([volume.clone()]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        rig.listen(fd_from(listener));
        let tcp = TcpStream::connect(address).unwrap();
        tcp.set_read_timeout(Some(HANG)).unwrap();
        let mut stream: Box<dyn Stream> = Box::new(tcp);
        Client::greet(&mut stream).unwrap();
        let mut client = Client::go(stream, "disk", Style::Simple).unwrap();
        let expected = pattern(2, 256 << 10);
        assert_eq!(client.write(0, 0, &expected), 0);
        stuff(&mut client, 1000, 256 << 10);
        for _ in 0..=round {
            assert_eq!(client.reply(|_| Some((0, 256 << 10))).unwrap().error, 0);
        }
        let draining = std::thread::spawn(move || drain(&mut client, 256 << 10, &expected));
        rig.stop();
        let replies = draining.join().unwrap() + round + 1;
        assert_eq!(replies, reads_carried_out(&volume), "replies and executed requests");
    }
}

/// A client that requests more than its memory budget and never receives a reply must not keep a stop
/// from ending.
#[test]
fn a_stop_does_not_wait_for_a_client_that_receives_no_replies() {
    for connection_memory in [1 << 20, 64 << 20] {
        let limits = ServerLimits { connection_memory, ..ServerLimits::default() };
        let rig = Rig::new(limits, TlsMode::Off, None);
        rig.server.volumes().add(memory("disk", 4 * MIB), std::sync::Arc::default());
        let mut client = rig.client("disk", Style::Simple);
        assert_eq!(client.write(0, 0, &pattern(3, 1 << 20)), 0);
        stuff(&mut client, 200, MIB);
        // The server is sending when the first bytes have arrived.
        client.bytes(1000);
        rig.stop();
        drop(client);
    }
}

#[test]
fn a_volume_removed_under_load_ends_its_connections_and_keeps_what_it_acknowledged() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("image");
    let rig = Rig::with([file("disk", &path, 16 * MIB, Direct::Auto), memory("other", MIB)]);
    let mut bystander = rig.client("other", Style::Simple);
    let writers: Vec<_> = STYLES
        .into_iter()
        .zip(0u64..)
        .map(|(style, number)| {
            let mut client = rig.client("disk", style);
            std::thread::spawn(move || {
                // Each in its own 4 MiB; how many writes were acknowledged.
                let mut acknowledged = 0u64;
                loop {
                    let at = number * 4 * MIB + acknowledged % 1024 * 4096;
                    let mut bytes = client.header(1, 0, acknowledged + 1, at, 4096);
                    bytes.extend(pattern(acknowledged, 4096));
                    if client.stream.write_all(&bytes).is_err() {
                        return acknowledged;
                    }
                    match client.reply(|_| None) {
                        Ok(reply) if reply.error == 0 => acknowledged += 1,
                        // NBD_ESHUTDOWN
                        Ok(reply) => assert_eq!(reply.error, 108),
                        Err(_) => return acknowledged,
                    }
                }
            })
        })
        .collect();
    let progress = std::time::Instant::now();
    while std::fs::read(&path).unwrap()[..4096] == [0; 4096] {
        assert!(progress.elapsed() < HANG);
    }
    rig.run(|server, io| async move {
        let disk = server.volumes().remove("disk").unwrap();
        server.withdraw(&io, "disk").await;
        disk.close(&io).await
    })
    .unwrap();
    let content = std::fs::read(&path).unwrap();
    for (number, writer) in writers.into_iter().enumerate() {
        let acknowledged = writer.join().unwrap();
        for last in acknowledged.saturating_sub(1024)..acknowledged {
            let at = number * (4 << 20) + usize::try_from(last % 1024 * 4096).unwrap();
            let found = &content[at..at + 4096];
            // A later write to the same place may have been executed without a reply.
            let later = pattern(last + 1024, 4096);
            assert!(found == pattern(last, 4096) || found == later, "writer {number}: {last}");
        }
    }
    assert_eq!(bystander.ask(FLUSH, 0, 0, 0), 0, "other volumes continue");
    let mut stream: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut stream).unwrap();
    let name = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
    let replies = Client::option(&mut stream, 7, &name).unwrap();
    assert_eq!(replies.last().unwrap().0, (1 << 31) + 6, "unknown after its removal");
}

/// A device that hangs may keep the process from exiting, and so its descriptors open.
#[test]
fn clients_with_hanging_requests_see_the_end_of_the_stream_when_they_are_disconnected() {
    let test = std::sync::Arc::new(TestStore::new(MIB, 1));
    let volume = Volume::new("disk", Store::Test(test.clone()), VolumeOptions::default());
    let rig = Rig::with([volume]);
    let mut client = rig.client("disk", Style::Simple);
    let mut idle: Box<dyn Stream> = Box::new(rig.stream());
    Client::greet(&mut idle).unwrap();
    test.hang();
    stuff(&mut client, 1, 4096);
    while test.hanging() == 0 {
        std::thread::yield_now();
    }
    rig.server.begin_stop();
    assert!(rig.server.disconnect_all() > 0);
    assert_eq!(drain(&mut client, 4096, &[]), 0, "the request is still in flight");
    assert_eq!(test.hanging(), 1);
    test.release();
    rig.stop();
    assert_eq!(rig.server.disconnect_all(), 0);
}
