//! Who may open which volume (`allow`): real clients against a whole daemon, over unix sockets as several users, over TCP of
//! both versions, over TLS with keys and certificates, and over vhost-user. Each client sees, opens and is refused exactly
//! what the table says.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
use testbed::harness::process::PATIENCE;
use testbed::harness::server::Setup;
use testbed::harness::tls::{Authority, Role, pre_shared_keys};
use testbed::{Error, Result, Server, Tool, check};

/// Users and a group that this test's processes are for a while, if root runs it.
const USER: u32 = 65_534;
const MEMBER: u32 = 65_533;
const GROUP: u32 = 54_321;

/// The volumes, each with its `allow` as an option; `OWN` stands for the user who runs the test.
const VOLUMES: &[(&str, Option<&str>)] = &[
    ("open", None),
    ("closed", Some("")),
    ("own", Some("uid:OWN")),
    ("user", Some("uid:65534")),
    ("group", Some("gid:54321")),
    ("v4", Some("net:127.0.0.0/8")),
    ("v6", Some("net:::1")),
    ("two", Some("uid:65534,,net:::1")),
    ("elsewhere", Some("net:10.0.0.0/8,,net:fd00::/8")),
    ("alice", Some("psk:alice")),
    ("bob", Some("psk:bob")),
    ("client", Some("cn:a c*t")),
    ("hosts", Some("cn:*.host")),
    ("guest", Some("xen:guest1,,xen:0")),
];

/// A client: how its program is run, what its URIs begin and end with, and the volumes that it may open.
struct Client {
    name: &'static str,
    prefix: Vec<String>,
    uri: (String, String),
    opens: &'static [&'static str],
}

impl Client {
    fn info(&self, options: &[&str], export: &str) -> Tool {
        let mut words = self.prefix.clone();
        words.push("nbdinfo".to_owned());
        words.extend(options.iter().map(|option| (*option).to_owned()));
        words.push(format!("{}{export}{}", self.uri.0, self.uri.1));
        Tool::new(&words[0]).args(&words[1..])
    }

    /// It is listed what it may open, it can open that, and the rest is for it as a name that no volume has.
    fn conforms(&self) -> Result {
        let listed = self.info(&["--list", "--json"], "").ok()?;
        let exports = listed.json()?["exports"].as_array().cloned().unwrap_or_default();
        let names = exports.iter().filter_map(|export| export["export-name"].as_str());
        let (names, opens): (BTreeSet<_>, BTreeSet<_>) =
            (names.collect(), self.opens.iter().copied().collect());
        listed.check(names == opens, &format!("{} to see {opens:?}", self.name))?;
        let unknown = self.info(&["--size"], "nameless").fails()?.stderr;
        for (volume, _) in VOLUMES {
            let size = self.info(&["--size"], volume);
            if opens.contains(volume) {
                let size = size.ok()?;
                size.check(size.stdout.trim() == "1048576", "the size of the volume")?;
            } else {
                let refused = size.fails()?;
                let same = refused.stderr == unknown.replace("nameless", volume);
                refused.check(same, &format!("{}: the same as {unknown}", self.name))?;
            }
        }
        Ok(())
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

/// The same program as another user.
fn as_user(user: u32, groups: &str) -> Vec<String> {
    let user = user.to_string();
    let words = ["setpriv", "--reuid", &user, "--regid", &user, groups];
    words.map(str::to_owned).into()
}

fn free_port(address: &str) -> Result<u16> {
    let listener = TcpListener::bind((address, 0)).map_err(Error::io("find a port"))?;
    listener.local_addr().map(|found| found.port()).map_err(Error::io("find a port"))
}

fn with_volumes(mut setup: Setup) -> Setup {
    let own = rustix::process::getuid().as_raw().to_string();
    for (name, allow) in VOLUMES {
        let allow = allow.map(|entries| format!(",allow={}", entries.replace("OWN", &own)));
        setup = setup.volume(&format!("{name}=memory:1M{}", allow.unwrap_or_default()));
    }
    setup
}

/// Lets other users reach a file or directory of the test.
fn open_to_all(path: &Path, mode: u32) -> Result {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(Error::io(path.display().to_string()))
}

fn unix(server: &Server) -> (String, String) {
    ("nbd+unix:///".to_owned(), format!("?socket={}", server.socket().display()))
}

/// What processes of this user see over a unix socket.
const OWN: &[&str] = &["open", "own"];

#[test]
fn clients_by_user_group_and_address() -> Result {
    let (v4, v6) = (free_port("127.0.0.1")?, free_port("::1")?);
    let mut server = with_volumes(Setup::new()?.vhost_user())
        .args(["--listen", &format!("tcp:127.0.0.1:{v4}"), "--listen", &format!("tcp:[::1]:{v6}")])
        .start()?;
    let client = |name, prefix, uri, opens| Client { name, prefix, uri, opens };
    let tcp = |address: String| (format!("nbd://{address}/"), String::new());
    let mut clients = vec![
        client("this user", vec![], unix(&server), OWN),
        client("IPv4", vec![], tcp(format!("127.0.0.1:{v4}")), &["open", "v4"]),
        client("IPv6", vec![], tcp(format!("[::1]:{v6}")), &["open", "v6", "two"]),
    ];
    // Only root can be other users.
    if is_root() {
        open_to_all(server.dir(), 0o755)?;
        open_to_all(&server.socket(), 0o666)?;
        let user = as_user(USER, "--clear-groups");
        clients.push(client("a user", user, unix(&server), &["open", "user", "two"]));
        let member = as_user(MEMBER, "--groups=54321");
        clients.push(client("a member", member, unix(&server), &["open", "group"]));
    }
    for client in &clients {
        client.conforms()?;
    }
    let log = server.log();
    let own = rustix::process::getuid().as_raw();
    let why = format!(
        "may not open volume closed: no entry of the volume's `allow` matches uid {own}, pid "
    );
    check(log.contains(&why), || format!("`{why}` in the log:\n{log}"))?;
    frontends_of_vhost_user(&server)?;
    server.healthy()?;
    server.stop()
}

/// Whether the daemon answers a frontend of vhost-user that connects as this user.
fn is_served(socket: &Path, (user, groups): (Option<u32>, &[u32])) -> Result<bool> {
    std::thread::scope(|scope| {
        // The identity of a thread, which ends with it.
        let asked = scope.spawn(|| {
            if let Some(user) = user {
                let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
                set_thread_groups(&groups)?;
                set_thread_gid(Gid::from_raw(user))?;
                set_thread_uid(Uid::from_raw(user))?;
            }
            let mut stream = UnixStream::connect(socket)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            // VHOST_USER_GET_FEATURES of version 1, without a payload. A refused connection may be closed before it is sent.
            let sent = stream.write_all(&[1_u32, 1, 0].map(u32::to_le_bytes).concat());
            let answered = sent.and_then(|()| stream.read_exact(&mut [0; 20]));
            match answered.map_err(|error| (error.kind(), error)) {
                Ok(()) => Ok(true),
                Err((std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut, error)) => {
                    Err(error)
                }
                Err(_) => Ok(false),
            }
        });
        asked.join().unwrap_or_else(|_| Err(std::io::Error::other("it panicked")))
    })
    .map_err(Error::io("ask as a frontend of vhost-user"))
}

fn frontends_of_vhost_user(server: &Server) -> Result {
    type Who<'a> = (Option<u32>, &'a [u32]);
    let mut frontends: Vec<(Who<'_>, &[&str])> = vec![((None, &[]), OWN)];
    if is_root() {
        open_to_all(&server.dir().join("vhost"), 0o755)?;
        frontends.push(((Some(USER), &[]), &["open", "user", "two"]));
        frontends.push(((Some(MEMBER), &[GROUP]), &["open", "group"]));
    }
    for (volume, _) in VOLUMES {
        let socket = server.vhost_socket(volume);
        if is_root() {
            open_to_all(&socket, 0o666)?;
        }
        for (who, opens) in &frontends {
            let served = is_served(&socket, *who)?;
            check(served == opens.contains(volume), || {
                format!("{volume} over vhost-user to {who:?}: served {served}")
            })?;
        }
    }
    Ok(())
}

#[test]
fn clients_by_pre_shared_key() -> Result {
    let setup = Setup::new()?;
    let keys = pre_shared_keys(&setup.dir().join("keys"), &["alice", "bob", "carol"])?;
    let port = free_port("127.0.0.1")?;
    let mut server = with_volumes(setup)
        .args(["--listen", &format!("tcp:127.0.0.1:{port}"), "--tls=on", "--tls-psk"])
        .arg(&keys)
        .start()?;
    let keys = format!("tls-psk-file={}", keys.display());
    let socket = format!("?socket={}&{keys}", server.socket().display());
    let over_unix = |user: &str| (format!("nbds+unix://{user}@/"), socket.clone());
    let over_tcp = |user: &str| (format!("nbds://{user}@127.0.0.1:{port}/"), format!("?{keys}"));
    let client = |name, uri, opens| Client { name, prefix: vec![], uri, opens };
    for client in [
        client("alice", over_unix("alice"), &["open", "own", "alice"]),
        client("alice over TCP", over_tcp("alice"), &["open", "v4", "alice"]),
        client("bob", over_unix("bob"), &["open", "own", "bob"]),
        client("bob over TCP", over_tcp("bob"), &["open", "v4", "bob"]),
        client("carol over TCP", over_tcp("carol"), &["open", "v4"]),
        client("plain", unix(&server), OWN),
    ] {
        client.conforms()?;
    }
    server.healthy()?;
    server.stop()
}

#[test]
fn clients_by_certificate() -> Result {
    let setup = Setup::new()?;
    let authority = Authority::new(setup.dir().join("authority"))?;
    let files = authority.issue(Role::Server, setup.dir().join("server"))?;
    let own = authority.issue(Role::Client, setup.dir().join("client"))?;
    let other = authority.issue_named("a.b.host", setup.dir().join("other"))?;
    let port = free_port("127.0.0.1")?;
    let mut server = with_volumes(setup)
        .args(["--listen", &format!("tcp:127.0.0.1:{port}"), "--tls=on", "--tls-verify-peer"])
        .arg("--tls-certificates")
        .arg(&files)
        .start()?;
    let certificates = |dir: &Path| format!("tls-certificates={}", dir.display());
    let over_unix = |dir: &Path| {
        let socket = server.socket();
        ("nbds+unix:///".to_owned(), format!("?socket={}&{}", socket.display(), certificates(dir)))
    };
    let over_tcp =
        |dir: &Path| (format!("nbds://127.0.0.1:{port}/"), format!("?{}", certificates(dir)));
    let client = |name, uri, opens| Client { name, prefix: vec![], uri, opens };
    for client in [
        client("a client", over_unix(&own), &["open", "own", "client"]),
        client("a client over TCP", over_tcp(&own), &["open", "v4", "client"]),
        client("a.b.host", over_unix(&other), &["open", "own", "hosts"]),
        client("a.b.host over TCP", over_tcp(&other), &["open", "v4", "hosts"]),
        client("plain", unix(&server), OWN),
    ] {
        client.conforms()?;
    }
    server.healthy()?;
    server.stop()
}
