//! TLS with certificates and with pre-shared keys: clients with valid credentials are accepted, others refused.

use std::fs;
use std::path::{Path, PathBuf};
use testbed::harness::nbd::Client;
use testbed::harness::pattern::content;
use testbed::harness::process::Held;
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role, pre_shared_keys};
use testbed::harness::tool::Outcome;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;

/// Directories with certificates: the server's, a valid client's, and one of another authority.
struct Certificates {
    server: PathBuf,
    client: PathBuf,
    stranger: PathBuf,
}

fn certificates(dir: &Path) -> Result<Certificates> {
    let authority = Authority::new(dir.join("authority"))?;
    let other = Authority::new(dir.join("other-authority"))?;
    Ok(Certificates {
        server: authority.issue(Role::Server, dir.join("server"))?,
        client: authority.issue(Role::Client, dir.join("client"))?,
        stranger: other.issue(Role::Client, dir.join("stranger"))?,
    })
}

fn by_certificate(server: &Server, dir: &Path) -> String {
    server.tls_uri("", "disk", &format!("tls-certificates={}", dir.display()))
}

fn by_key(server: &Server, user: &str, file: &Path) -> String {
    server.tls_uri(user, "disk", &format!("tls-psk-file={}", file.display()))
}

fn info(uri: &str) -> Tool {
    Tool::new("nbdinfo").arg("--json").arg(uri)
}

/// Requires that the client connected over TLS and sees the disk.
fn sees_the_disk(outcome: &Outcome) -> Result {
    let json = outcome.json()?;
    outcome.check(json["TLS"] == true, "TLS")?;
    outcome.check(json["exports"][0]["export-size"] == 16 * MIB, "the size of the disk")
}

/// Copies a file into the disk and back with `nbdcopy` on four connections.
fn copies(server: &Server, uri: &str) -> Result {
    let (source, back) = (server.dir().join("source"), server.dir().join("back"));
    let data = content(3, 0, 16 << 20);
    fs::write(&source, &data).map_err(Error::io("write a file"))?;
    Tool::new("nbdcopy").args(["--connections=4", "--flush"]).arg(&source).arg(uri).ok()?;
    Tool::new("nbdcopy").arg("--connections=4").arg(uri).arg(&back).ok()?;
    Tool::new("cmp").arg(&source).arg(&back).ok()?;
    Tool::new("cmp").arg(&source).arg(server.image_path("disk")).ok()?;
    Ok(())
}

/// `qemu-img info` with TLS credentials given as a QEMU object.
fn qemu(server: &Server, credentials: &str, hostname: &str) -> Tool {
    Tool::new("qemu-img")
        .args(["info", "--output=json", "--object"])
        .arg(format!("{credentials},id=tls0,endpoint=client"))
        .arg("--image-opts")
        .arg(format!("{},tls-creds=tls0{hostname}", server.qemu_options("disk")))
}

/// Requires that the daemon still serves a valid client.
fn still_serves(server: &mut Server, uri: &str) -> Result {
    sees_the_disk(&info(uri).ok()?)?;
    server.healthy()
}

#[test]
fn clients_with_certificates_are_accepted_and_plain_clients_are_refused() -> Result {
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    let mut server = setup
        .image("disk", 16 * MIB)?
        .arg("--tls=require")
        .arg("--tls-certificates")
        .arg(&files.server)
        .start()?;
    let uri = by_certificate(&server, &files.client);
    sees_the_disk(&info(&uri).ok()?)?;
    copies(&server, &uri)?;
    let credentials = format!("tls-creds-x509,dir={}", files.client.display());
    let outcome = qemu(&server, &credentials, ",tls-hostname=localhost").ok()?;
    outcome.check(outcome.json()?["virtual-size"] == 16 * MIB, "the size of the disk")?;

    // Plain clients: all options except STARTTLS are refused, including the list of exports.
    info(&server.uri("disk")).fails()?;
    let list = format!("nbd+unix://?socket={}", server.socket().display());
    let outcome = Tool::new("nbdinfo").args(["--json", "--list"]).arg(&list).fails()?;
    outcome.check(!outcome.stdout.contains("disk\""), "no names of volumes")?;
    Tool::new("qemu-img").args(["info", &server.uri("disk")]).fails()?;
    check(Client::open(&server.socket(), "disk").is_err(), || {
        "a client without TLS was accepted".into()
    })?;
    // A client that trusts another authority does not accept the server.
    // (QEMU checks that on a unix socket too; nbdinfo has no name to check there.)
    let stranger = format!("tls-creds-x509,dir={}", files.stranger.display());
    qemu(&server, &stranger, ",tls-hostname=localhost").fails()?;
    // Nor does a client that expects another server name.
    qemu(&server, &credentials, ",tls-hostname=elsewhere.example").fails()?;
    still_serves(&mut server, &uri)
}

#[test]
fn a_client_must_show_its_certificate_where_peers_are_verified() -> Result {
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    // A client without a certificate, and one whose certificate another authority signed.
    let anonymous = setup.dir().join("anonymous");
    let impostor = setup.dir().join("impostor");
    for (dir, names) in
        [(&anonymous, &[][..]), (&impostor, &["client-cert.pem", "client-key.pem"][..])]
    {
        fs::create_dir(dir).map_err(Error::io("make a directory"))?;
        let authority = files.client.join("ca-cert.pem");
        fs::copy(authority, dir.join("ca-cert.pem")).map_err(Error::io("copy"))?;
        for name in names {
            fs::copy(files.stranger.join(name), dir.join(name)).map_err(Error::io("copy"))?;
        }
    }
    let mut server = setup
        .image("disk", 16 * MIB)?
        .args(["--tls=require", "--tls-verify-peer", "--tls-certificates"])
        .arg(&files.server)
        .start()?;
    let uri = by_certificate(&server, &files.client);
    sees_the_disk(&info(&uri).ok()?)?;
    let credentials = format!("tls-creds-x509,dir={}", files.client.display());
    qemu(&server, &credentials, ",tls-hostname=localhost").ok()?;
    info(&by_certificate(&server, &anonymous)).fails()?;
    info(&by_certificate(&server, &impostor)).fails()?;
    still_serves(&mut server, &uri)
}

#[test]
fn a_pre_shared_key_is_accepted_and_a_wrong_one_is_refused() -> Result {
    let setup = Setup::new()?;
    let keys = pre_shared_keys(&setup.dir().join("keys"), &["alice", "bob"])?;
    let wrong = pre_shared_keys(&setup.dir().join("wrong"), &["alice", "mallory"])?;
    let mut server =
        setup.image("disk", 16 * MIB)?.arg("--tls=require").arg("--tls-psk").arg(&keys).start()?;
    for user in ["alice", "bob"] {
        sees_the_disk(&info(&by_key(&server, user, &keys)).ok()?)?;
    }
    copies(&server, &by_key(&server, "bob", &keys))?;
    let credentials = |file: &Path, user: &str| {
        let dir = file.parent().unwrap_or(file).display();
        format!("tls-creds-psk,dir={dir},username={user}")
    };
    let outcome = qemu(&server, &credentials(&keys, "alice"), "").ok()?;
    outcome.check(outcome.json()?["virtual-size"] == 16 * MIB, "the size of the disk")?;

    info(&by_key(&server, "alice", &wrong)).fails()?;
    info(&by_key(&server, "mallory", &wrong)).fails()?;
    qemu(&server, &credentials(&wrong, "alice"), "").fails()?;
    info(&server.uri("disk")).fails()?;
    let uri = by_key(&server, "alice", &keys);
    still_serves(&mut server, &uri)
}

#[test]
fn optional_tls_serves_both() -> Result {
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    let mut server = setup
        .image("disk", 16 * MIB)?
        .arg("--tls=on")
        .arg("--tls-certificates")
        .arg(&files.server)
        .start()?;
    let uri = by_certificate(&server, &files.client);
    sees_the_disk(&info(&uri).ok()?)?;
    let plain = info(&server.uri("disk")).ok()?;
    plain.check(plain.json()?["TLS"] == false, "no TLS")?;
    // Data written over TLS can be read without it.
    copies(&server, &uri)?;
    let back = server.dir().join("plain");
    Tool::new("nbdcopy").arg(server.uri("disk")).arg(&back).ok()?;
    Tool::new("cmp").arg(&back).arg(server.image_path("disk")).ok()?;
    // A connection that requests TLS and then sends plain text is closed, and other connections are not affected.
    plain_after_starttls(&server)?;
    still_serves(&mut server, &uri)
}

fn plain_after_starttls(server: &Server) -> Result {
    use std::io::{Read, Write};
    let mut handshake = testbed::harness::nbd::Handshake::connect(&server.socket())?;
    let accepted = handshake.option(5, &[]);
    check(accepted.is_ok(), || format!("STARTTLS refused: {accepted:?}"))?;
    let mut stream = handshake.into_stream();
    let lie = testbed::harness::nbd::option_bytes(3, &[]);
    stream.write_all(&lie).map_err(Error::io("send"))?;
    let mut rest = Vec::new();
    // A clean end or a reset: the connection must end.
    let ended = stream.read_to_end(&mut rest);
    check(!matches!(&ended, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), || {
        "a plain option after STARTTLS: the connection stays open".into()
    })
}

/// The beginning of TLS as a client sends it: a record header and a ClientHello with meaningless
/// content, cut after `n` bytes.
fn half_a_hello(n: usize) -> Vec<u8> {
    let mut hello = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    hello.extend((0..520).map(|i| u8::try_from(i % 251).unwrap_or(0)));
    hello.truncate(n % 531);
    hello
}

#[test]
fn handshakes_cut_within_tls_leave_nothing_behind() -> Result {
    use std::io::Write;
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    let mut server = setup
        .image("disk", 16 * MIB)?
        .args(["--tls=require", "--tls-certificates"])
        .arg(&files.server)
        .log_level("error")
        .start()?;
    let socket = server.socket();
    let run = |from: usize, count: usize| -> Result {
        for n in from..from + count {
            let mut hand = testbed::harness::nbd::Handshake::connect(&socket)?;
            hand.option(5, &[])?;
            // The server may detect the error before all of it was sent.
            let _ = hand.into_stream().write_all(&half_a_hello(n));
        }
        Ok(())
    };
    let fresh = Held::by(server.pid()?)?;
    run(0, 300)?;
    fresh.returned(64 * MIB)?;
    let held = Held::by(server.pid()?)?;
    run(300, 3000)?;
    // As many handshakes as are allowed at a time wait for each other, and the allocator keeps the
    // memory that they used. A leak of 3 KiB for each of these would exceed this.
    held.returned(8 * MIB)?;
    let uri = by_certificate(&server, &files.client);
    still_serves(&mut server, &uri)?;
    server.stop()
}

#[test]
fn a_client_that_stalls_within_tls_delays_no_other_client() -> Result {
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    let mut server = setup
        .image("disk", 16 * MIB)?
        .args(["--tls=require", "--tls-certificates"])
        .arg(&files.server)
        .start()?;
    let mut stalled = Vec::new();
    for n in [0, 5, 100] {
        let mut hand = testbed::harness::nbd::Handshake::connect(&server.socket())?;
        hand.option(5, &[])?;
        let mut stream = hand.into_stream();
        std::io::Write::write_all(&mut stream, &half_a_hello(n)).map_err(Error::io("send"))?;
        stalled.push(stream);
    }
    let uri = by_certificate(&server, &files.client);
    still_serves(&mut server, &uri)?;
    server.stop()
}

#[test]
fn without_tls_it_is_not_offered() -> Result {
    let setup = Setup::new()?;
    let files = certificates(setup.dir())?;
    let server = setup.image("disk", 16 * MIB)?.start()?;
    info(&by_certificate(&server, &files.client)).fails()?;
    info(&server.uri("disk")).ok().map(drop)
}
