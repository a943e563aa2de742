//! Clients that send invalid input or disconnect at any point: they affect no other client, and all
//! their resources are released. (Clients that stall or flood: `greed.rs`.)

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use testbed::harness::nbd::{
    self, Client, Failure, Handshake, Request, go_data, option_bytes, wire,
};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::Held;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const MIB: u64 = 1 << 20;
const DISK: u64 = 16 * MIB;

/// Requires that a request is refused with one of these errors.
fn refused<T>(what: &str, answer: std::result::Result<T, Failure>, errors: &[u32]) -> Result {
    match answer {
        Err(Failure::Refused(error)) if errors.contains(&error) => Ok(()),
        other => Err(Error::unexpected(format!(
            "{what}: expected an error of {errors:?}, seen {:?}",
            other.map(drop)
        ))),
    }
}

/// Requires that an option is refused with one of these replies.
fn option_refused<T>(
    what: &str,
    answer: std::result::Result<T, Failure>,
    replies: &[u32],
) -> Result {
    match answer {
        Err(Failure::OptionRefused(reply)) if replies.contains(&reply) => Ok(()),
        other => Err(Error::unexpected(format!(
            "{what}: expected a reply of {replies:x?}, seen {:x?}",
            other.map(drop)
        ))),
    }
}

/// Requires that the server closes the connection; returns what it sent before.
fn closed(what: &str, stream: &mut UnixStream) -> Result<Vec<u8>> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => Ok(rest),
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
            Ok(rest)
        }
        Err(e) => Err(Error::unexpected(format!(
            "{what}: expected the end of the connection, seen {e} after {} bytes",
            rest.len()
        ))),
    }
}

/// Requires that another client is served, and that the daemon has neither exited nor panicked.
fn other_clients_are_served(server: &mut Server) -> Result {
    let mut client = Client::open(&server.socket(), "disk")?;
    let data = content(77, DISK - 4096, 4096);
    client.write(DISK - 4096, &data, 0)?;
    check(client.read(DISK - 4096, 4096)? == data, || "another client reads wrong data".into())?;
    client.disconnect()?;
    server.healthy()
}

#[test]
fn requests_past_the_end_are_refused_and_the_connection_continues() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let block = vec![1; 4096];
    let edges = [DISK, DISK - 512, u64::MAX - 511, u64::MAX - 4095, 1 << 63, DISK + MIB];
    for offset in edges {
        let at = |what: &str| format!("{what} of 4096 bytes at {offset} of {DISK}");
        refused(&at("READ"), client.read(offset, 4096), &[wire::EINVAL])?;
        refused(&at("WRITE"), client.write(offset, &block, 0), &[wire::ENOSPC])?;
        let mut command = |number| client.command(number, 0, offset, 4096);
        refused(&at("TRIM"), command(wire::CMD_TRIM), &[wire::EINVAL])?;
        refused(&at("WRITE_ZEROES"), command(wire::CMD_WRITE_ZEROES), &[wire::ENOSPC])?;
        refused(&at("CACHE"), command(wire::CMD_CACHE), &[wire::EINVAL])?;
        let edge = client.read(DISK - 512, 512)?;
        check(edge == vec![0; 512], || at("the disk has changed after a refused request"))?;
    }
    other_clients_are_served(&mut server)
}

#[test]
fn a_length_of_4_gib_is_refused_without_taking_memory() -> Result {
    let setup = Setup::new()?.image("disk", DISK)?.image("big", 8 << 30)?;
    let mut server = setup.start()?;
    other_clients_are_served(&mut server)?;
    let held = Held::by(server.pid()?)?;
    let too_long = [wire::EINVAL, wire::EOVERFLOW];
    for export in ["disk", "big"] {
        for length in [u32::MAX, u32::MAX - 511, 1 << 31, (64 << 20) + 512] {
            let what = |name: &str| format!("{name} of {length} bytes on {export}");
            let mut client = Client::open(&server.socket(), export)?;
            refused(&what("READ"), client.read(0, length), &too_long)?;
            check(client.read(0, 512)?.len() == 512, || what("no read after a READ"))?;
            // The payload of such a write need not be read: a reply or a disconnect is valid.
            let command = wire::CMD_WRITE;
            let request = Request { command, length, ..Request::default() };
            match client.request(request, &[]) {
                Err(Failure::Refused(_) | Failure::Io(_)) => {}
                other => {
                    let seen = other.map(drop);
                    let text = format!("{}: expected a refusal, seen {seen:?}", what("WRITE"));
                    return Err(Error::unexpected(text));
                }
            }
        }
    }
    // Without a payload, long requests on a large disk are valid.
    let mut client = Client::open(&server.socket(), "big")?;
    for command in [wire::CMD_TRIM, wire::CMD_WRITE_ZEROES] {
        client.command(command, 0, 1 << 32, u32::MAX - 511)?;
    }
    client.disconnect()?;
    held.returned(8 * MIB)?;
    other_clients_are_served(&mut server)
}

#[test]
fn a_write_longer_than_allowed_leaves_the_connection_in_order() -> Result {
    let setup = Setup::new()?.image("disk", DISK)?.image("long", 64 * MIB)?;
    let mut server = setup.args(["--max-request", "1M"]).start()?;
    let mut client = Client::open(&server.socket(), "long")?;
    // Clients that do not ask for the limit may assume 32 MiB, whatever is advertised.
    let longest: u32 = 32 << 20;
    let beyond = longest + 512;
    refused("READ beyond 32 MiB", client.read(0, beyond), &[wire::EINVAL, wire::EOVERFLOW])?;
    let data = content(1, 0, longest as usize);
    client.write(0, &data, 0)?;
    check(client.read(0, longest)? == data, || {
        "a request of the largest length reads wrong data".into()
    })?;
    match client.write(0, &vec![9; beyond as usize], 0) {
        // The server may disconnect, or skip the payload and continue. It must not parse data as requests.
        Err(Failure::Io(_)) => client = Client::open(&server.socket(), "long")?,
        Err(Failure::Refused(_)) => {}
        other => return Err(Error::unexpected(format!("WRITE beyond 32 MiB: seen {other:?}"))),
    }
    check(client.read(0, longest)? == data, || "a refused write has changed data".into())?;
    other_clients_are_served(&mut server)
}

#[test]
fn unknown_flags_and_commands_are_refused_and_the_connection_continues() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let before = content(5, 0, 4096);
    client.write(0, &before, 0)?;
    for flag in (6..16).map(|bit| 1 << bit) {
        let what = |name: &str| format!("{name} with flag {flag:#x}");
        for (name, command) in [("TRIM", wire::CMD_TRIM), ("WRITE_ZEROES", wire::CMD_WRITE_ZEROES)]
        {
            refused(&what(name), client.command(command, flag, 0, 4096), &[wire::EINVAL])?;
        }
        let read = Request { command: wire::CMD_READ, flags: flag, length: 512, ..<_>::default() };
        refused(&what("READ"), client.request(read, &[]), &[wire::EINVAL])?;
        // The payload of a refused write must not be parsed as requests.
        refused(&what("WRITE"), client.write(0, &[0x25; 4096], flag), &[wire::EINVAL])?;
        let flush = client.command(wire::CMD_FLUSH, flag, 0, 0);
        refused(&what("FLUSH"), flush, &[wire::EINVAL])?;
    }
    for command in [8, 9, 99, 0x7fff, u16::MAX] {
        let answer = client.command(command, 0, 0, 4096);
        refused(&format!("command {command}"), answer, &[wire::EINVAL])?;
    }
    // Not negotiated: block status, which needs a metadata context.
    let status = client.command(wire::CMD_BLOCK_STATUS, 0, 0, 4096);
    refused("BLOCK_STATUS without a context", status, &[wire::EINVAL])?;
    check(client.read(0, 4096)? == before, || "a refused request has changed data".into())?;
    client.disconnect()?;
    other_clients_are_served(&mut server)
}

#[test]
fn a_read_only_volume_refuses_every_change() -> Result {
    let setup = Setup::new()?.image("disk", DISK)?;
    let path = setup.image_path("ro");
    std::fs::write(&path, vec![0; 1 << 20]).map_err(Error::io("write an image"))?;
    let volume = format!("ro=file:{},read-only=true", path.display());
    let mut server = setup.volume(&volume).start()?;
    let mut client = Client::open(&server.socket(), "ro")?;
    refused("WRITE", client.write(0, &[1; 512], 0), &[wire::EPERM])?;
    for (name, command) in [("TRIM", wire::CMD_TRIM), ("WRITE_ZEROES", wire::CMD_WRITE_ZEROES)] {
        refused(name, client.command(command, 0, 0, 512), &[wire::EPERM, wire::EINVAL])?;
    }
    check(client.read(0, 512)? == vec![0; 512], || "a read-only volume has changed".into())?;
    other_clients_are_served(&mut server)
}

#[test]
fn invalid_options_are_refused_and_the_handshake_continues() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let mut hand = Handshake::connect(&server.socket())?;
    for option in [4, 99, 0xdead_beef] {
        let answer = hand.option(option, &[7; 100]);
        option_refused(&format!("option {option}"), answer, &[wire::REP_ERR_UNSUP])?;
    }
    let unknown = hand.option(wire::OPT_INFO, &go_data("no-such-volume"));
    option_refused("INFO on an unknown export", unknown, &[wire::REP_ERR_UNKNOWN])?;
    let unknown = hand.option(wire::OPT_GO, &go_data("no-such-volume"));
    option_refused("GO on an unknown export", unknown, &[wire::REP_ERR_UNKNOWN])?;
    let bad = [wire::REP_ERR_INVALID, wire::REP_ERR_UNKNOWN, wire::REP_ERR_TOO_BIG];
    let invalid = &bad[..1];
    let not_text = [&[0, 0, 0, 2, 0xff, 0xfe][..], &[0, 0]].concat();
    option_refused("GO on a name that is no UTF-8", hand.option(wire::OPT_GO, &not_text), &bad)?;
    let long = go_data(&"n".repeat(5000));
    option_refused("GO on a name of 5000 bytes", hand.option(wire::OPT_GO, &long), &bad)?;
    for (what, data) in [
        ("no data", vec![]),
        ("half a length", vec![0, 0]),
        ("a name longer than the option", vec![0xff, 0xff, 0xff, 0xff, b'd', 0, 0]),
        ("fewer information requests than said", [go_data("disk"), vec![]].concat()),
    ] {
        let mut data = data;
        if what.starts_with("fewer") {
            let end = data.len();
            data[end - 1] = 3;
        }
        let answer = hand.option(wire::OPT_GO, &data);
        option_refused(&format!("GO with {what}"), answer, invalid)?;
    }
    let answer = hand.option(wire::OPT_LIST, &[1, 2, 3]);
    option_refused("LIST with data", answer, invalid)?;
    for (what, data) in [("no data", vec![]), ("a count of 2^32-1", vec![0, 0, 0, 0, 255, 255])] {
        let answer = hand.option(wire::OPT_SET_META_CONTEXT, &data);
        option_refused(&format!("SET_META_CONTEXT with {what}"), answer, invalid)?;
    }
    // The handshake continues after all of these.
    let mut client = hand.go("disk")?;
    client.read(0, 512)?;
    other_clients_are_served(&mut server)
}

#[test]
fn invalid_input_closes_the_connection() -> Result {
    let mut server = Server::with_disk(DISK)?;
    let held = Held::by(server.pid()?)?;
    let greeting = |flags: u32| -> Result<UnixStream> {
        let mut stream =
            nbd::connect(&server.socket(), nbd::PATIENCE).map_err(Error::io("connect"))?;
        stream.read_exact(&mut [0; 18]).map_err(Error::io("read the greeting"))?;
        stream.write_all(&flags.to_be_bytes()).map_err(Error::io("send flags"))?;
        Ok(stream)
    };
    closed("unknown client flags", &mut greeting(0xffff_fff0)?)?;

    let mut stream = greeting(3)?;
    stream.write_all(&[0x47; 16]).map_err(Error::io("send"))?;
    closed("a wrong option magic", &mut stream)?;

    let mut stream = greeting(3)?;
    stream
        .write_all(&option_bytes(wire::OPT_EXPORT_NAME, b"no-such-volume"))
        .map_err(Error::io("send"))?;
    let said = closed("EXPORT_NAME of an unknown export", &mut stream)?;
    check(said.is_empty(), || {
        format!("there is no error reply to EXPORT_NAME, but {said:02x?} was sent")
    })?;

    // An option of 4 GiB: the server disconnects, or refuses it and skips the data; it allocates no memory for it.
    let mut stream = greeting(3)?;
    let mut option = option_bytes(wire::OPT_GO, &[]);
    option[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    stream.write_all(&option).map_err(Error::io("send"))?;
    let _ = stream.write_all(&vec![0; 4 << 20]);
    drop(stream);

    let mut stream = Client::open(&server.socket(), "disk")?.into_stream();
    stream.write_all(&[0x13; 28]).map_err(Error::io("send"))?;
    closed("a wrong request magic", &mut stream)?;

    let mut stream = Client::open(&server.socket(), "disk")?.into_stream();
    let disconnect = Request { command: wire::CMD_DISC, ..Request::default() };
    stream.write_all(&disconnect.bytes()).map_err(Error::io("send"))?;
    closed("a disconnect", &mut stream)?;

    held.returned(2 * MIB)?;
    other_clients_are_served(&mut server)
}

#[test]
fn noise_in_every_phase_affects_no_other_client() -> Result {
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d003);
    let mut random = Random::new(seed);
    let mut server = Setup::new()?.image("disk", DISK)?.log_level("error").start()?;
    let recorded = conversation();
    for round in 0..600 {
        let socket = server.socket();
        let stream = nbd::connect(&socket, nbd::PATIENCE).map_err(Error::io("connect"))?;
        let mut bytes = recorded.clone();
        match round % 3 {
            0 => bytes.truncate(4),
            1 => bytes.truncate(bytes.len() / 2),
            _ => {}
        }
        // Random bytes after a valid start, or a valid conversation with a few bits flipped.
        if round % 2 == 0 {
            bytes.extend((0..512).map(|_| random.next().to_le_bytes()[0]));
        } else {
            for _ in 0..=random.below(3) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap_or(0);
                bytes[at] ^= 1 << random.below(8);
            }
        }
        talk(stream, &bytes)
            .map_err(|e| Error::unexpected(format!("EBBD_TEST_SEED={seed}, round {round}: {e}")))?;
    }
    other_clients_are_served(&mut server)
}

/// Sends everything, shuts down the sending direction, and reads to the end. Any reply of the server
/// is valid, as long as the connection ends.
fn talk(mut stream: UnixStream, bytes: &[u8]) -> Result<Vec<u8>> {
    // The server may have disconnected meanwhile.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    closed("a client that has shut down its sending direction", &mut stream)
}

/// The bytes of a client that uses every option and every command, sent without waiting for
/// replies.
fn conversation() -> Vec<u8> {
    let context = {
        let mut b = go_data("disk");
        b.truncate(b.len() - 2);
        b.extend(1_u32.to_be_bytes());
        b.extend(15_u32.to_be_bytes());
        b.extend(b"base:allocation");
        b
    };
    let mut all = 3_u32.to_be_bytes().to_vec();
    for (option, data) in [
        (wire::OPT_LIST, vec![]),
        (99, vec![1, 2, 3]),
        (wire::OPT_STRUCTURED_REPLY, vec![]),
        (wire::OPT_SET_META_CONTEXT, context),
        (wire::OPT_INFO, go_data("disk")),
        (wire::OPT_GO, go_data("disk")),
    ] {
        all.extend(option_bytes(option, &data));
    }
    for (command, flags, length) in [
        (wire::CMD_READ, 0, 4096),
        (wire::CMD_WRITE, wire::FLAG_FUA, 512),
        (wire::CMD_FLUSH, 0, 0),
        (wire::CMD_TRIM, 0, 8192),
        (wire::CMD_WRITE_ZEROES, 0, 4096),
        (wire::CMD_BLOCK_STATUS, 0, 65_536),
        (wire::CMD_CACHE, 0, 4096),
        (wire::CMD_WRITE, 0, 512),
        (wire::CMD_READ, 0, 65_536),
        (wire::CMD_DISC, 0, 0),
    ] {
        let cookie = all.len() as u64;
        all.extend(Request { flags, command, cookie, offset: 0, length }.bytes());
        if command == wire::CMD_WRITE {
            all.extend(content(cookie, 0, 512));
        }
    }
    all
}

/// One connection that is cut: after the client has sent `sent` bytes (with or without reading the
/// server's replies), or after `read` bytes of the server's replies.
fn cut(socket: &Path, bytes: &[u8], way: usize, answers: usize, n: usize) -> Result {
    let mut stream = nbd::connect(socket, nbd::PATIENCE).map_err(Error::io("connect"))?;
    let send = |stream: &mut UnixStream, count: usize| {
        // The server may already have disconnected.
        let _ = stream.write_all(&bytes[..count]);
    };
    match way {
        0 => send(&mut stream, n % (bytes.len() + 1)),
        1 => {
            let count = n % (bytes.len() + 1);
            talk(stream, &bytes[..count])
                .map_err(|e| Error::unexpected(format!("cut after {count} bytes sent: {e}")))?;
        }
        _ => {
            let count = n % (answers + 1);
            send(&mut stream, bytes.len());
            // The length of the replies depends on what the disk holds, so they may end earlier.
            let read = stream.take(count as u64).read_to_end(&mut Vec::new());
            read.map_err(Error::io(format!("read {count} of {answers} bytes of replies")))?;
        }
    }
    Ok(())
}

#[test]
fn many_connections_at_once_leave_no_memory_behind() -> Result {
    let limits = ["--max-clients", "1000"];
    let mut server = Setup::new()?.image("disk", DISK)?.args(limits).log_level("error").start()?;
    let socket = server.socket();
    let open = |count: usize| -> Result<Vec<Client>> {
        (0..count).map(|_| Ok(Client::open(&socket, "disk")?)).collect()
    };
    // Starts threads and allocates buffers that are kept on purpose.
    let used = |count: usize| -> Result {
        Ok(open(count)?.iter_mut().try_for_each(|client| client.read(0, 4096).map(drop))?)
    };
    used(20)?;
    let held = Held::by(server.pid()?)?;
    // Memory that is allocated meanwhile and not freed keeps the heap from shrinking.
    used(900)?;
    held.returned(MIB)?;
    other_clients_are_served(&mut server)?;
    server.stop()
}

#[test]
fn ten_thousand_connections_cut_at_every_byte_leave_nothing_behind() -> Result {
    let setup = Setup::new()?.image("disk", DISK)?.log_level("error");
    let mut server = setup.start()?;
    let bytes = conversation();
    let socket = server.socket();
    let stream = nbd::connect(&socket, nbd::PATIENCE).map_err(Error::io("connect"))?;
    let answers = talk(stream, &bytes)?.len();
    // Five option replies, nine replies; 68 KiB of data, unless holes are sent as holes.
    check(answers > 400, || {
        format!("the replies to the whole conversation are only {answers} bytes")
    })?;
    let run = |from: usize, count: usize| -> Result {
        (from..from + count).try_for_each(|n| cut(&socket, &bytes, n % 3, answers, n / 3))
    };
    // First, so that caches and buffers that are kept on purpose are filled.
    let fresh = Held::by(server.pid()?)?;
    run(0, 2000)?;
    fresh.returned(64 * MIB)?;
    let held = Held::by(server.pid()?)?;
    run(2000, 10_000)?;
    held.returned(512 * 1024)?;
    let stream = nbd::connect(&socket, nbd::PATIENCE).map_err(Error::io("connect"))?;
    let last = talk(stream, &bytes)?.len();
    check(last > 400, || format!("afterwards the replies are only {last} bytes"))?;
    other_clients_are_served(&mut server)?;
    server.stop()
}
