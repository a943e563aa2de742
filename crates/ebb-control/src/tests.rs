//! Tests of the control socket in this process: each route, and what no client may do to it.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use ebb_api::ErrorBody;
use ebb_api::stat::{
    FailingGuests, FailureStat, MemoryStat, PressureStat, Stat, VolumeCondition, XenStat, ZoneStat,
};
use ebb_config::params::{
    Configured, MAX_BUFFER_PAGES, MAX_PERSISTENT_GRANTS, MAX_RATIO, ParameterOwner, ParameterScope,
    TABLE,
};
use ebb_export_nbd::{ServerLimits, TlsMode};
use ebb_export_vhost::VhostBackend;
use ebb_export_xen as xen;
use ebb_export_xen::abi::op;
use ebb_export_xen::platform::Platform;
use ebb_export_xen::shm::World;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};
use ebb_store::{NullStore, Store};
use ebb_volume::{Volume, VolumeOptions, Volumes};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::figures::{VolumeBrief, volume_stat};

mod access;
mod frontends;
mod history;
mod lists;
mod manager;
mod page;
mod refusals;

/// How long a test may hang.
const HANG: Duration = Duration::from_secs(90);

struct Running {
    path: std::path::PathBuf,
    parameters: Parameters,
    injected: Arc<Mutex<Vec<u8>>>,
    page: std::net::SocketAddr,
    second_page: std::net::SocketAddr,
    _control: ControlServer,
    _folder: tempfile::TempDir,
}

fn start() -> Running {
    start_with(None, Vec::new())
}

fn own_peers() -> SocketPeers {
    SocketPeers {
        owner: rustix::process::geteuid().as_raw(),
        group: 1,
        has_group: |_, _| Ok(false),
    }
}

/// With the disks of `xen`, and with volumes that are not served.
fn start_with(xen: Option<Figures>, unserved: Vec<VolumeStat>) -> Running {
    start_at(xen, unserved, PageAccess::default())
}

fn start_at(xen: Option<Figures>, unserved: Vec<VolumeStat>, access: PageAccess) -> Running {
    start_full((xen, None), unserved, access)
}

fn start_full(
    (xen, vhost): (Option<Figures>, Option<Arc<VhostBackend>>),
    unserved: Vec<VolumeStat>,
    access: PageAccess,
) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.sock");
    let server = Server::new(Volumes::default(), ServerLimits::default(), TlsMode::Off, None);
    let mut configured = Configured::default();
    for name in ["disk", "a/b %\"ü"] {
        let store = Store::Null(NullStore::new(1 << 20));
        server
            .volumes()
            .add(Volume::new(name, store, VolumeOptions::default()), std::sync::Arc::default());
        configured.volumes.insert(name.to_owned(), std::collections::BTreeMap::new());
    }
    let parameters = Parameters::new(&configured);
    let injected = Arc::new(Mutex::new(Vec::new()));
    let inject = injected.clone();
    let sources = StatSources {
        memory: Some(Box::new(|| MemoryStat {
            zones: vec![ZoneStat { name: "4K".into(), used: 5, ..ZoneStat::default() }],
            ..MemoryStat::default()
        })),
        pressure: Some(Box::new(|| PressureStat { level: 1, ..PressureStat::default() })),
        level: Some(Box::new(|| 1)),
        inject: Some(Box::new(move |level| inject.lock().unwrap().push(level.number()))),
        ..StatSources::default()
    };
    let unserved_names: Vec<String> = unserved.iter().map(|volume| volume.name.clone()).collect();
    let served = server.clone();
    let volumes = move || {
        lists::hold(&unserved);
        let all = served.volumes().list();
        let stat = |volume: &Arc<Volume>| {
            let clients = served.connections(volume.name());
            volume_stat(volume, clients, None, FailingGuests::default())
        };
        all.iter().map(stat).chain(unserved.iter().cloned()).collect()
    };
    let briefs = {
        let (served, unserved) = (server.clone(), unserved_names);
        move || {
            let brief = |volume: Arc<Volume>| VolumeBrief {
                name: volume.name().to_string(),
                state: VolumeCondition::Serving,
                outage: None,
                failing_guests: FailingGuests::default(),
                volume: Some(volume),
            };
            let unserved = unserved.iter().map(|name: &String| VolumeBrief {
                name: name.clone(),
                state: VolumeCondition::Failed,
                outage: None,
                failing_guests: FailingGuests::default(),
                volume: None,
            });
            served.volumes().list().into_iter().map(brief).chain(unserved).collect()
        }
    };
    let shared = ControlContext {
        limit_groups: Box::new(Vec::new),
        server,
        volumes: Box::new(volumes),
        briefs: Box::new(briefs),
        parameters: parameters.clone(),
        sources,
        xen: Arc::new(xen.map(OnceLock::from).unwrap_or_default()),
        vhost: Arc::new(vhost.as_ref().map(|it| it.figures().into()).unwrap_or_default()),
        disconnect_frontend: Box::new(move |number| {
            vhost.as_ref().is_some_and(|vhost| vhost.disconnect(number))
        }),
        manager: Arc::new(manager::NoChanges::default()),
        config: Arc::new(manager::NoChanges::default()),
        workers: Vec::new(),
        listen: Vec::new(),
        events: EventLog::default(),
        peers: own_peers(),
        started: Instant::now(),
    };
    let (unix, tcp) =
        (UnixListener::bind(&path).unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let second = TcpListener::bind("127.0.0.2:0").unwrap();
    let page = PageSocket {
        sockets: [&tcp, &second].map(|one| ControlSocket { fd: one.as_fd(), name: "page" }).into(),
        address: "127.0.0.1:0",
        names: &["proxy.example".to_owned()],
        access,
    };
    let control = ControlSocket { fd: unix.as_fd(), name: "control" };
    let control = ControlServer::start(Some(control), Some(page), Arc::new(shared)).unwrap();
    let [page, second_page] = [tcp, second].map(|one| one.local_addr().unwrap());
    let (_control, _folder) = (control, folder);
    Running { path, parameters, injected, page, second_page, _control, _folder }
}

impl Running {
    /// Sends bytes, and what comes back until the end.
    fn send(&self, bytes: &[u8]) -> String {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        // A refusal may come before all is written.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
        let answer = self.send(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    #[track_caller]
    fn json(&self, method: &str, path: &str, body: &str) -> Value {
        let (status, body) = self.ask(method, path, body);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Asserts the status, the kind of failure and a part of the remedy.
    #[track_caller]
    fn refuses(&self, request: (&str, &str, &str), status: u16, error: &str, remedy: &str) {
        let (found, body) = self.ask(request.0, request.1, request.2);
        let failure: ErrorBody = serde_json::from_str(&body).unwrap();
        assert_eq!((found, failure.error.as_str()), (status, error), "{request:?}: {body}");
        assert!(failure.remedy.contains(remedy), "{request:?}: {body}");
        assert!(!failure.message.is_empty() && body.len() < 600, "{body}");
    }
}

#[test]
fn parameters_are_read_set_and_unset() {
    let daemon = start();
    let all = daemon.json("GET", "/v1/parameters", "");
    assert_eq!(all.as_array().unwrap().len(), TABLE.keys_of(ParameterScope::Daemon).count());
    let path = "/v1/parameters/max_buffer_pages";
    let one = daemon.json("GET", path, "");
    assert_eq!((&one["value"], &one["origin"]), (&json!(1024), &json!("default")));
    let change = daemon.json("PUT", path, "{\"value\": 7}");
    assert_eq!(change, json!({"name": "max_buffer_pages", "from": "1024", "to": "7"}));
    assert_eq!(daemon.parameters.daemon(MAX_BUFFER_PAGES).get(), 7);
    assert_eq!(daemon.json("GET", path, "")["origin"], "run-time");

    let own = "/v1/volumes/a%2Fb%20%25%22%C3%BC/parameters";
    assert_eq!(daemon.json("GET", own, "").as_array().unwrap().len(), 10);
    let own = format!("{own}/max_buffer_pages");
    assert_eq!(daemon.json("GET", &own, "")["origin"], "daemon");
    daemon.json("PUT", &own, "{\"value\": \"9\"}");
    let pages = daemon.parameters.handle(MAX_BUFFER_PAGES, ParameterOwner::Volume("a/b %\"ü"));
    assert_eq!(pages.get(), 9);
    daemon.json("DELETE", &own, "");
    assert_eq!(pages.get(), 7);
    daemon.json("DELETE", path, "");
    assert_eq!(pages.get(), 1024);
}

#[test]
fn parameters_of_backing_devices_have_their_own_paths() {
    let daemon = start();
    daemon.parameters.add_bdi("8:0");
    let max_ratio = daemon.parameters.handle(MAX_RATIO, ParameterOwner::Bdi("8:0"));
    let own = "/v1/bdis/8%3A0/parameters";
    let all = daemon.json("GET", own, "");
    let names: Vec<_> = all.as_array().unwrap().iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["min_ratio", "max_ratio", "max_bytes", "strict_limit"]);
    assert_eq!(all[1]["value"], 100);
    assert_eq!(all[1]["scope"], "bdi");
    let path = format!("{own}/max_ratio");
    let change = daemon.json("PUT", &path, "{\"value\": 12.5}");
    let expected = json!({"name": "max_ratio", "bdi": "8:0", "from": "100", "to": "12.5"});
    assert_eq!(change, expected);
    assert_eq!(max_ratio.get(), 125_000);
    assert_eq!(daemon.json("GET", &path, "")["value"], 12.5);
    daemon.json("DELETE", &path, "");
    assert_eq!(max_ratio.get(), 1_000_000);
    assert_eq!(daemon.json("GET", "/v1/bdis", ""), json!([]));
    let body = "{\"value\": 1}";
    let of = |path: &'static str| ("PUT", path, body);
    daemon.refuses(of("/v1/parameters/max_bytes"), 404, "not_per_bdi", "--bdi");
    daemon.refuses(of("/v1/bdis/8%3A1/parameters/max_bytes"), 404, "unknown_bdi", "8:0");
    daemon.refuses(of("/v1/bdis/8%3A0/parameters/max_bytes"), 422, "out_of_range", "64K");
    daemon.refuses(of("/v1/bdis/8%3A0/parameters/log"), 404, "not_per_bdi", "max_bytes");
}

#[test]
fn refusals_have_a_reason_and_a_remedy() {
    let daemon = start();
    let pages = "/v1/parameters/max_buffer_pages";
    let good = "{\"value\": 7}";
    let cases = [
        (("GET", "/v1/parameters/max_bufer_pages", ""), 404, "unknown_parameter", "did you mean"),
        (("PUT", "/v1/parameters/x", "{"), 404, "unknown_parameter", "the parameters are"),
        (("GET", "/v1/parameters/workers", ""), 404, "unknown_parameter", "key of the config"),
        (("GET", "/v1/volumes/dsk/parameters", ""), 404, "unknown_volume", "did you mean `disk`?"),
        (("PUT", "/v1/volumes/disk/parameters/log", good), 404, "not_per_volume", "omit the"),
        (("PUT", pages, "{\"value\": -1}"), 422, "invalid_value", "0 to 1048576"),
        (("PUT", pages, "{\"value\": 1048577}"), 422, "out_of_range", "0 to 1048576"),
        (("PUT", pages, "{\"value\": 1e400}"), 400, "malformed_json", "value"),
        (("PUT", pages, "{\"value\": [[1]]}"), 422, "invalid_value", "whole number"),
        (
            ("PUT", "/v1/parameters/connection_memory", "{\"value\": \"4K\"}"),
            409,
            "conflict",
            "32M",
        ),
        (("PUT", pages, ""), 400, "malformed_json", "{\"value\""),
        (("PUT", pages, "{\"value\": 7"), 400, "malformed_json", "{\"value\""),
        (("PUT", pages, "{}"), 400, "invalid_body", "{\"value\""),
        (("PUT", pages, "{\"value\": 7, \"volume\": 1}"), 400, "invalid_body", "{\"value\""),
        (("PUT", pages, "\u{0}\u{1b}[31m"), 400, "malformed_json", "{\"value\""),
        (("PUT", "/v1/parameters/%ff", good), 400, "malformed_path", "UTF-8"),
        (("POST", pages, good), 405, "method_not_allowed", "PUT sets"),
        (("GET", "/v1/stats", ""), 404, "not_found", "did you mean `/v1/stat`?"),
        (("GET", "/", ""), 404, "not_found", "the paths are"),
        (("GET", "/nothing/at/all", ""), 404, "not_found", "/v1/openapi.json has those with"),
        (
            ("GET", "/v1/volumes/a/snapshots", ""),
            404,
            "not_found",
            "did you mean `/v1/volumes/a/snapshot`?",
        ),
        (("PUT", pages, "5"), 400, "invalid_body", "{\"value\""),
        (
            ("POST", "/v1/pressure", "{\"level\": \"L4\"}"),
            422,
            "invalid_value",
            "L0, L1, L2 and L3",
        ),
        (("POST", "/v1/pressure", "{\"level\": 1}"), 400, "invalid_body", "\"L1\""),
        (
            ("POST", "/v1/pressure", "{\"level\": \"L1\", \"seconds\": 0}"),
            422,
            "invalid_value",
            "1 to 86400",
        ),
    ];
    for (request, status, error, remedy) in cases {
        daemon.refuses(request, status, error, remedy);
    }
    let long = format!("/v1/parameters/{}", "x".repeat(4000));
    daemon.refuses(("GET", &long, ""), 404, "unknown_parameter", "the parameters are");
    let deep = format!("{{\"value\": {}", "[".repeat(10_000));
    daemon.refuses(("PUT", pages, &deep), 400, "malformed_json", "value");
    assert_eq!(daemon.parameters.daemon(MAX_BUFFER_PAGES).get(), 1024, "nothing was set");
}

#[test]
fn oversize_is_refused_and_bounded() {
    let daemon = start();
    let body = format!("{{\"value\": \"{}\"}}", "1".repeat(MAX_BODY_BYTES));
    daemon.refuses(("PUT", "/v1/parameters/log", &body), 413, "too_large", "send a shorter one");
    // Without a length known beforehand.
    let mut request =
        b"PUT /v1/parameters/log HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..64 {
        request.extend_from_slice(format!("400\r\n{}\r\n", "x".repeat(1024)).as_bytes());
    }
    let answer = daemon.send(&request);
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    // A head without end.
    let answer = daemon.send(format!("GET /{} HTTP/1.1\r\n", "x".repeat(1 << 20)).as_bytes());
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    let answer =
        daemon.send(("GET / HTTP/1.1\r\n".to_owned() + &"a: b\r\n".repeat(9999)).as_bytes());
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert_eq!(daemon.ask("GET", "/v1/version", "").0, 200, "it still serves");
}

#[test]
fn connections_beyond_the_limit_wait() {
    let daemon = start();
    let idle: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| UnixStream::connect(&daemon.path).unwrap()).collect();
    let asked = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let answer = daemon.ask("GET", "/v1/version", "");
            asked.fetch_add(1, Ordering::SeqCst);
            assert_eq!(answer.0, 200);
        });
        // The idle ones leave, and the one that waits is let in.
        drop(idle);
    });
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// A connection to the page, from another address of this machine.
fn connect_page(daemon: &Running, from: [u8; 4]) -> std::net::TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&fd, &std::net::SocketAddr::from((from, 0))).unwrap();
    connect(&fd, &daemon.page).unwrap();
    let stream = std::net::TcpStream::from(fd);
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream
}

/// Asks on a connection that is kept; the head of the answer, lower case, and whether there was one.
fn ask_on(stream: &mut std::net::TcpStream) -> Option<String> {
    stream.write_all(b"GET /v1/version HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"}\n") {
        let mut bytes = [0; 4096];
        let length = stream.read(&mut bytes).ok().filter(|length| *length > 0)?;
        answer.extend_from_slice(&bytes[..length]);
    }
    let text = String::from_utf8(answer).unwrap().to_lowercase();
    assert!(text.starts_with("http/1.1 200"), "{text}");
    text.split_once("\r\n\r\n").map(|(head, _)| head.to_owned())
}

#[test]
fn one_peer_cannot_keep_other_peers_from_the_page() {
    let (daemon, polite, greedy) = (start(), [127, 0, 0, 3], [127, 0, 0, 2]);
    // The oldest, but of an address that has no more than its share.
    let mut honest = connect_page(&daemon, polite);
    assert!(ask_on(&mut honest).is_some());
    let mut held = Vec::new();
    while held.len() + 2 < MAX_CONNECTIONS {
        let mut stream = connect_page(&daemon, greedy);
        let head = ask_on(&mut stream).unwrap();
        assert!(!head.contains("connection: close"), "{head}");
        held.push(stream);
    }
    // None is kept when all are taken.
    let mut last = connect_page(&daemon, greedy);
    let head = ask_on(&mut last).unwrap();
    assert!(head.contains("connection: close"), "{head}");
    assert_eq!(last.read(&mut [0]).unwrap(), 0);
    // All are taken, and all are idle.
    held.push(connect_page(&daemon, greedy));
    let mut newcomer = connect_page(&daemon, [127, 0, 0, 4]);
    assert!(ask_on(&mut newcomer).is_some());
    // The oldest of the greedy has made way for it, and no other.
    assert!(ask_on(&mut held[0]).is_none());
    assert!(held[1..].iter_mut().all(|stream| ask_on(stream).is_some()));
    assert!(ask_on(&mut honest).is_some());
}

#[test]
fn statistics_and_metrics_are_complete() {
    let daemon = start();
    let stat: Stat = serde_json::from_value(daemon.json("GET", "/v1/stat", "")).unwrap();
    let names: Vec<&str> = stat.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["a/b %\"ü", "disk"]);
    assert_eq!(stat.memory.unwrap().zones[0].used, 5);
    assert_eq!(stat.pressure.unwrap().level, 1);
    assert!(stat.resident_bytes > 0);
    let volumes = daemon.json("GET", "/v1/volumes", "");
    assert_eq!(volumes[1]["operations"]["read"]["requests"], 0);
    assert_eq!(daemon.json("GET", "/v1/version", "")["api"], "v1");
    let (status, text) = daemon.ask("GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(text.contains("ebbd_zone_used_blocks{zone=\"4K\"} 5\n") && text.ends_with("# EOF\n"));
}

#[test]
fn a_volume_that_is_not_served_is_shown_and_not_resized() {
    let failure = FailureStat { reason: "no such file".to_owned(), ..FailureStat::default() };
    let volume = |name: &str, state, failure| VolumeStat {
        name: name.to_owned(),
        state,
        failure,
        ..VolumeStat::default()
    };
    let unserved = vec![
        volume("lost disk", VolumeCondition::Failed, Some(failure)),
        volume("new disk", VolumeCondition::Opening, None),
    ];
    let daemon = start_with(None, unserved);
    let volumes = daemon.json("GET", "/v1/volumes", "");
    assert_eq!((&volumes[2]["state"], &volumes[3]["state"]), (&json!("failed"), &json!("opening")));
    let resize = |path: &'static str| ("POST", path, "{}");
    daemon.refuses(resize("/v1/volumes/lost%20disk/resize"), 409, "not_served", "no such file");
    daemon.refuses(resize("/v1/volumes/new%20disk/resize"), 409, "not_served", "in a moment");
    daemon.refuses(resize("/v1/volumes/dsk/resize"), 404, "unknown_volume", "`disk`");
    let (_, answer) = daemon.ask("POST", "/v1/volumes/new%20disk/resize", "{}");
    assert!(answer.contains("the volume is opening"), "{answer}");
}

#[test]
fn disks_of_xen_guests_are_shown_and_follow_the_parameters() {
    let (world, worker) = (World::default(), ebb_io::Worker::start_alone("xen").unwrap());
    let volumes = Volumes::default();
    let store = Store::Null(NullStore::new(1 << 20));
    volumes.add(Volume::new("root", store, VolumeOptions::default()), Arc::default());
    let handles = vec![worker.handle()];
    let options = xen::BackendOptions::new(Arc::new(world.clone()), handles, volumes);
    let grants = options.parameters.clone();
    let backend = xen::Backend::start(options).unwrap();
    let daemon = start_with(Some(backend.figures()), Vec::new());
    let limit = daemon.parameters.daemon(MAX_PERSISTENT_GRANTS);
    limit.watch(move |limit| grants.max_persistent_grants.set(limit));
    let shown = || -> Vec<XenStat> {
        serde_json::from_value(daemon.json("GET", "/v1/stat", "")["xen"].clone()).unwrap()
    };
    assert_eq!(shown(), []);

    let guest = world.guest(7, 256).unwrap();
    let disk = xen::DiskSpec { volume: "root", name: "xvdb", read_only: false };
    xen::attach(&mut *world.xenstore().unwrap(), 7, &disk).unwrap();
    let device = xen::device_number("xvdb").unwrap();
    let mut front = Frontend::new(&world, &guest, device, FrontendConfig::default());
    front.connect().unwrap();
    let mut write = |pages: usize| {
        assert_eq!(front.transfer(0, op::WRITE, 0, &mut vec![1; pages << 12]).unwrap(), 0);
    };
    write(5);
    let [disk] = &shown()[..] else { panic!("one disk") };
    let words = (&*disk.volume, disk.state.as_str(), disk.persistent);
    assert_eq!((disk.domain, disk.device, words), (7, device, ("root", "connected", true)));
    assert_eq!((disk.queues, disk.requests["write"], disk.requests["read"]), (1, 1, 0));
    assert_eq!((disk.mapped_grants, disk.maps, disk.copies), (5, 5, 0));

    daemon.json("PUT", "/v1/parameters/max_persistent_grants", "{\"value\": 0}");
    while shown()[0].mapped_grants > 0 {
        std::thread::yield_now();
    }
    write(3);
    assert_eq!((shown()[0].maps, shown()[0].copies), (5, 3));
    drop(backend);
    assert_eq!(shown(), [], "none after its end");
}

#[test]
fn statistics_are_served_when_workers_have_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let (one, two) =
        (ebb_io::Worker::start_alone("one").unwrap(), ebb_io::Worker::start_alone("two").unwrap());
    let shared = ControlContext {
        limit_groups: Box::new(Vec::new),
        volumes: Box::new(Vec::new),
        briefs: Box::new(Vec::new),
        server: Server::new(Volumes::default(), ServerLimits::default(), TlsMode::Off, None),
        parameters: Parameters::new(&Configured::default()),
        sources: StatSources::default(),
        xen: Arc::default(),
        vhost: Arc::default(),
        disconnect_frontend: Box::new(|_| false),
        manager: Arc::new(manager::NoChanges::default()),
        config: Arc::new(manager::NoChanges::default()),
        workers: vec![one.handle(), two.handle()],
        listen: Vec::new(),
        events: EventLog::default(),
        peers: own_peers(),
        started: Instant::now(),
    };
    let socket = UnixListener::bind(&path).unwrap();
    let control = ControlSocket { fd: socket.as_fd(), name: "control" };
    let _control = ControlServer::start(Some(control), None, Arc::new(shared)).unwrap();
    drop(two);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /v1/stat HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let stat: Stat = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let answers: Vec<bool> = stat.workers.iter().map(|worker| worker.answers).collect();
    assert_eq!(answers, [true, false]);
    assert!(stat.memory.is_none() && stat.pressure.is_none());
    let mut stream = UnixStream::connect(&path).unwrap();
    let body = "{\"level\": \"L1\"}";
    write!(stream, "POST /v1/pressure HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 503 ") && answer.contains("unavailable"), "{answer}");
}

#[test]
fn pressure_is_published_and_held_until_calmed() {
    let daemon = start();
    daemon.json("POST", "/v1/pressure", "{\"level\": \"L1\"}");
    daemon.json("POST", "/v1/pressure", "{\"level\": \"l2\", \"seconds\": 86400}");
    let levels = || daemon.injected.lock().unwrap().clone();
    assert_eq!(levels()[..2], [1, 2]);
    // It is published again while it is held: waits for that, however long this machine takes.
    while levels().len() < 4 {
        std::thread::yield_now();
    }
    daemon.json("POST", "/v1/pressure", "{\"level\": \"L0\"}");
    let calm = levels().len() - 1;
    assert_eq!(levels()[calm], 0);
    assert!(levels()[1..calm].iter().all(|level| *level == 2));
    // Another hold takes as long from one publication to the next: the old one would be seen.
    daemon.json("POST", "/v1/pressure", "{\"level\": \"L1\", \"seconds\": 86400}");
    while levels().len() < calm + 5 {
        std::thread::yield_now();
    }
    assert!(levels()[calm + 1..].iter().all(|level| *level == 1), "{:?}", levels());
}

#[test]
fn changes_from_many_clients_end_as_one_of_them() {
    let daemon = start();
    let seen = Arc::new(Mutex::new(vec![1024]));
    let watch = seen.clone();
    let pages = daemon.parameters.daemon(MAX_BUFFER_PAGES);
    pages.watch(move |pages| watch.lock().unwrap().push(pages));
    std::thread::scope(|scope| {
        for client in 0..8 {
            let daemon = &daemon;
            scope.spawn(move || {
                for n in 0..20 {
                    let body = format!("{{\"value\": {}}}", client * 100 + n);
                    daemon.json("PUT", "/v1/parameters/max_buffer_pages", &body);
                }
            });
        }
    });
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 161);
    assert_eq!(seen.last(), Some(&daemon.parameters.daemon(MAX_BUFFER_PAGES).get()));
}

#[test]
fn a_client_in_the_middle_of_a_request_does_not_hold_up_the_end() {
    let daemon = start();
    let mut stream = UnixStream::connect(&daemon.path).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    stream.write_all(b"PUT /v1/parameters/log HTTP/1.1\r\nContent-Length: 10\r\n\r\n{").unwrap();
    drop(daemon);
    // Reset if the server has not read all of it.
    match stream.read(&mut [0]) {
        Ok(length) => assert_eq!(length, 0),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever bytes come, the daemon goes on.
    #[test]
    fn no_bytes_hurt_it(
        garbage: Vec<u8>,
        method in "GET|PUT|POST|DELETE|[A-Z]{0,9}",
        path in "(/v1/(parameters|volumes|pressure|stat)(/[ -~]{0,20}){0,3})|[ -~]{0,40}",
        length in "[0-9]{1,20}|-1|",
        body in "\\{\"(value|level|seconds)\": ?[ -~]{0,30}\\}|\\PC{0,80}",
    ) {
        let daemon = running();
        daemon.send(&garbage);
        let request = format!("{method} {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}");
        daemon.send(request.as_bytes());
        daemon.send(&[request.as_bytes(), &garbage].concat());
        let (status, _) = daemon.ask("GET", "/v1/version", "");
        prop_assert_eq!(status, 200);
    }
}

/// One daemon for all cases.
fn running() -> &'static Running {
    static DAEMON: std::sync::OnceLock<Running> = std::sync::OnceLock::new();
    DAEMON.get_or_init(start)
}
