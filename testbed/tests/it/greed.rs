//! Clients that stall, flood or connect in great numbers: other clients are served, memory stays
//! within the limit, and the daemon still stops when requested.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use testbed::harness::nbd::{self, Client, Handshake, Request, option_bytes, wire};
use testbed::harness::pattern::content;
use testbed::harness::process::{Held, resident, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const MIB: u64 = 1 << 20;
const DISK: u64 = 16 * MIB;

/// Another client writes and reads back, a hundred times.
fn other_clients_are_served(server: &mut Server) -> Result {
    let mut client = Client::open(&server.socket(), "disk")?;
    for round in 0..100 {
        let offset = 8 * MIB + 4096 * round;
        let data = content(round + 1, offset, 4096);
        client.write(offset, &data, 0)?;
        check(client.read(offset, 4096)? == data, || "another client reads wrong data".into())?;
    }
    client.flush()?;
    client.disconnect()?;
    server.healthy()
}

fn transmission(server: &Server) -> Result<UnixStream> {
    Ok(Client::open(&server.socket(), "disk")?.into_stream())
}

fn send(stream: &mut UnixStream, bytes: &[u8]) -> Result {
    stream.write_all(bytes).map_err(Error::io("send"))
}

/// Sends copies of `bytes` until the server reads no more for a while; returns how many were sent.
fn flood(stream: &mut UnixStream, bytes: &[u8], most: usize) -> Result<usize> {
    let pause = Some(Duration::from_millis(400));
    stream.set_write_timeout(pause).map_err(Error::io("set a time limit"))?;
    for sent in 0..most {
        match stream.write_all(bytes) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(sent);
            }
            // It may also disconnect a client that does not read.
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                return Ok(sent);
            }
            Err(e) => return Err(Error::io("flood")(e)),
        }
    }
    Ok(most)
}

#[test]
fn stalled_clients_delay_no_other_client_and_the_daemon_still_stops() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let mut stalled = Vec::new();
    let write = Request { command: wire::CMD_WRITE, length: 1 << 20, ..Request::default() };
    let read = Request { command: wire::CMD_READ, length: 4096, ..Request::default() };
    for _ in 0..8 {
        // Sends nothing, not even its flags.
        stalled.push(nbd::connect(&server.socket(), nbd::PATIENCE).map_err(Error::io("connect"))?);
        // Stops in the middle of an option's header, and of its data.
        for part in [9, 20] {
            let mut stream = Handshake::connect(&server.socket())?.into_stream();
            send(&mut stream, &option_bytes(wire::OPT_GO, &[0; 30])[..part])?;
            stalled.push(stream);
        }
        // Stops after GO; within a request's header; within a payload; before its last byte.
        stalled.push(transmission(&server)?);
        let mut stream = transmission(&server)?;
        send(&mut stream, &read.bytes()[..11])?;
        stalled.push(stream);
        for part in [1000, (1 << 20) - 1] {
            let mut stream = transmission(&server)?;
            send(&mut stream, &write.bytes())?;
            send(&mut stream, &vec![3; part])?;
            stalled.push(stream);
        }
        // Reads part of a reply.
        let mut stream = transmission(&server)?;
        send(&mut stream, &read.bytes())?;
        stream.read_exact(&mut [0; 100]).map_err(Error::io("read half a reply"))?;
        stalled.push(stream);
    }
    other_clients_are_served(&mut server)?;
    server.stop()
}

#[test]
fn clients_that_never_read_are_throttled() -> Result {
    let limits = ["--connection-memory", "8M", "--max-request", "1M"];
    let mut server = Setup::new()?.image("disk", DISK)?.args(limits).start()?;
    other_clients_are_served(&mut server)?;
    let mut data = Client::open(&server.socket(), "disk")?;
    for offset in 0..8 {
        data.write(offset * MIB, &content(offset + 1, offset * MIB, 1 << 20), 0)?;
    }
    data.disconnect()?;
    let held = Held::by(server.pid()?)?;
    let before = resident(server.pid()?)?;

    let read = Request { command: wire::CMD_READ, length: 1 << 20, ..Request::default() }.bytes();
    let small = Request { command: wire::CMD_READ, length: 512, ..Request::default() }.bytes();
    let write = Request { command: wire::CMD_WRITE, length: 512, ..Request::default() }.bytes();
    let write = [&write[..], &[0; 512]].concat();
    let bad = Request { command: 99, ..Request::default() }.bytes();
    let mut flooders = Vec::new();
    let mut account = String::new();
    for (what, bytes) in [
        ("large reads", &read[..]),
        ("small reads", &small),
        ("writes", &write),
        ("commands that do not exist", &bad),
    ] {
        let mut stream = transmission(&server)?;
        let sent = flood(&mut stream, bytes, 1_000_000)?;
        check(sent < 1_000_000, || {
            format!("the server read a million {what} from a client that reads no replies")
        })?;
        flooders.push(stream);
        other_clients_are_served(&mut server)?;
        let grown = resident(server.pid()?)?.saturating_sub(before);
        account +=
            &format!("after {sent} {what}: {} KiB more than at the beginning\n", grown / 1024);
        // Every connection at its limit, and a margin.
        check(grown <= (flooders.len() as u64 * 8 + 8) * MIB, || {
            format!("{} clients with 8 MiB each at most:\n{account}", flooders.len())
        })?;
    }
    drop(flooders);
    // Buffers may be kept, as many as for one connection.
    held.returned(8 * MIB)?;
    other_clients_are_served(&mut server)?;
    server.stop()
}

#[test]
fn a_flood_does_not_keep_the_daemon_from_ending() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let read = Request { command: wire::CMD_READ, length: 1 << 20, ..Request::default() }.bytes();
    let mut stream = transmission(&server)?;
    flood(&mut stream, &read, 100_000)?;
    server.stop()
}

#[test]
fn the_number_of_connections_is_limited_and_closed_ones_make_room() -> Result {
    let limit = ["--max-clients", "4"];
    let mut server = Setup::new()?.image("disk", DISK)?.args(limit).start()?;
    // The connection that saw the daemon start may still be open.
    let open = || Ok(Client::open(&server.socket(), "disk").ok());
    let mut clients = Vec::new();
    for n in 1..=4 {
        let what = format!("client {n} of 4 is served");
        clients.push(until(&what, Duration::from_secs(20), open)?);
    }
    // The fifth is refused or has to wait; it must not be served.
    let limit = Duration::from_millis(500);
    let mut fifth = nbd::connect(&server.socket(), limit).map_err(Error::io("connect"))?;
    let served = fifth.read_exact(&mut [0; 18]).is_ok();
    check(!served, || "a fifth client is greeted, with --max-clients 4".into())?;
    drop(fifth);
    for client in &mut clients {
        client.read(0, 4096)?;
    }
    clients.pop();
    clients.push(until("room for another client", Duration::from_secs(20), open)?);
    for client in &mut clients {
        client.read(0, 4096)?;
    }
    drop(clients);
    server.healthy()?;
    server.stop()
}
