//! `ebbd get`, `set`, `stat`, `volume`, `limit`, `client`, `pressure` and others: the client of the control socket.
//!
//! The client speaks HTTP/1.0, so that a reply is not chunked and ends with the connection. The size
//! of a reply and the time to wait for it are bounded.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_api::stat::Stat;
use ebb_api::{
    ChangeView, DEFAULT_PATH, ErrorBody, OperationView, ParameterView, PressureBody, SetBody,
    SuccessorState, TakeoverBody,
};
use ebb_config::{control_path, suggest};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::persistent::PersistentClient;
use self::table::TextTable;
use crate::cli::{GetArgs, PressureArgs, SetArgs, StatArgs, StatTopic};
use crate::exit_status;

mod changes;
mod clients;
mod config;
mod events;
mod limit;
pub mod operation;
mod persistent;
mod rates;
mod show;
mod show_clusters;
mod show_guests;
mod status;
mod table;
mod terminal;
mod top;
pub mod volume;
mod watch;

pub use self::clients::clients;
pub use self::config::{diff_config, show_config};
pub use self::events::events;
pub use self::limit::{limit, limits_of};
pub(crate) use self::show::{key_state, limit_values, time};
pub use self::status::status;
pub use self::top::top;
pub use terminal::terminal_text;

/// The environment variable with the path of the control socket.
pub const SOCKET_VARIABLE: &str = "EBBD_CONTROL";

/// How long the daemon may take to reply.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest reply, bytes: enough for the statistics of ten thousand volumes.
const MAX_REPLY_BYTES: u64 = 64 << 20;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The daemon refused the request: a mistake on the command line.
    #[error("{message}; {remedy}")]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    Refused { message: String, remedy: String },
    /// The daemon could not do it.
    #[error("{message}; {remedy}")]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    Failed { message: String, remedy: String },
    /// The operation was cancelled before it was done.
    #[error("operation {id} ({kind}) was cancelled before it was done")]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    Cancelled { id: u64, kind: String },
    /// The daemon cannot be reached, or does not reply.
    #[error("cannot reach the daemon at {}{}", path.display(),
        remedy.map(|text| format!(" ({text})")).unwrap_or_default())]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    Unreachable { path: PathBuf, remedy: Option<&'static str>, source: io::Error },
    /// The daemon got a request for a change, and did not reply.
    #[error("the daemon at {} did not reply: the outcome is unknown; {}", path.display(), Self::LOOK)]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    UnknownOutcome { path: PathBuf, source: io::Error },
    /// The reply is not one of ebbd.
    #[error("{}: {what}; is the daemon an ebbd of this version?", path.display())]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    InvalidReply { path: PathBuf, what: String },
    /// Another server of ebbd, or of another program.
    #[error("{}: an NBD server replies there; {}", path.display(), Self::CONTROL)]
    #[allow(missing_docs, reason = "the fields are the words of the message")]
    NbdServer { path: PathBuf },
}

impl ClientError {
    const CONTROL: &str = "give the path of the control socket, `control` in the configuration";
    const LOOK: &str = "look with `ebbd status`, `ebbd operation list` and `ebbd volume list` before you repeat it";

    /// The error of a request, or of its operation: whether it fails at once or later makes no
    /// difference.
    fn of_status(status: u16, failure: ErrorBody) -> ClientError {
        let ErrorBody { message, remedy, .. } = failure;
        match status {
            400..500 => ClientError::Refused { message, remedy },
            _ => ClientError::Failed { message, remedy },
        }
    }

    /// Returns the exit status of a command that fails with it.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Refused { .. } => exit_status::USAGE,
            Self::Unreachable { .. } | Self::UnknownOutcome { .. } => exit_status::UNREACHABLE,
            _ => exit_status::FAILED,
        }
    }

    /// Returns the message without the remedy, and the remedy if there is one.
    pub fn parts(&self) -> (String, Option<String>) {
        let remedy = match self {
            Self::Refused { message, remedy } | Self::Failed { message, remedy } => {
                return (message.clone(), Some(remedy.clone()));
            }
            Self::Unreachable { path, remedy, source } => {
                let message = format!("cannot reach the daemon at {}: {source}", path.display());
                return (message, remedy.map(str::to_owned));
            }
            Self::UnknownOutcome { path, source } => {
                let path = path.display();
                let message =
                    format!("the daemon at {path} did not reply: {source}: the outcome is unknown");
                return (message, Some(Self::LOOK.to_owned()));
            }
            Self::NbdServer { path } => {
                let message = format!("{}: an NBD server replies there", path.display());
                return (message, Some(Self::CONTROL.to_owned()));
            }
            Self::Cancelled { .. } | Self::InvalidReply { .. } => None,
        };
        (self.to_string(), remedy)
    }
}

/// The value of a parameter, or a table of all.
///
/// # Errors
/// [`ClientError`].
pub fn get(args: &GetArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let target = owner(args.volume.as_deref(), args.bdi.as_deref(), args.limit_group.as_deref());
    if let Some(name) = &args.name {
        let view: ParameterView =
            daemon.json("GET", &format!("{target}/{}", encoded(name)), None)?;
        return Ok(if args.json { json_text(view) } else { format!("{}\n", view.text) });
    }
    let views: Vec<ParameterView> = daemon.json("GET", &target, None)?;
    if args.json {
        return Ok(json_text(views));
    }
    let mut table = TextTable::new(&["PARAMETER", "VALUE", "ORIGIN", "RANGE", "UNIT"], 0b1_1101);
    for view in views {
        table.row([view.name, view.text, view.origin, view.range, view.unit]);
    }
    Ok(table.text())
}

/// Sets or unsets a parameter, and returns the change as text.
///
/// # Errors
/// [`ClientError`].
pub fn set(args: &SetArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let path = owner(args.volume.as_deref(), args.bdi.as_deref(), args.limit_group.as_deref());
    let target = format!("{path}/{}", encoded(&args.name));
    let body = args.value.as_deref().map(|value| text(SetBody { value: value.into() }));
    let method = if body.is_some() { "PUT" } else { "DELETE" };
    let change: ChangeView = daemon.json(method, &target, body.as_deref())?;
    if args.json {
        return Ok(json_text(change));
    }
    Ok(format!("{}: {} -> {}\n", change.name, change.from, change.to))
}

/// Publishes a level of memory pressure. Returns nothing to print, except with `--json`.
///
/// # Errors
/// [`ClientError`].
pub fn pressure(args: &PressureArgs) -> Result<String, ClientError> {
    let body = text(PressureBody { level: args.level.clone(), seconds: args.seconds });
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let reply: serde_json::Value = daemon.json("POST", "/v1/pressure", Some(&body))?;
    Ok(if args.json { json_text(reply) } else { String::new() })
}

/// Whether this failure of a connection means that no daemon is there, or that it has just ended.
fn has_ended(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(kind, NotFound | ConnectionRefused | ConnectionReset | BrokenPipe | UnexpectedEof)
}

/// Asks the daemon at a control socket to hand over to the successor that listens at `socket` and
/// has the `state` directory. False if no daemon is there.
///
/// # Errors
/// [`ClientError`].
pub(crate) fn request_takeover(
    control: &Path,
    socket: &Path,
    state: SuccessorState,
) -> Result<bool, ClientError> {
    let daemon = DaemonClient { path: control.to_owned(), timeout: TIMEOUT };
    let socket = socket.display().to_string();
    let body = text(TakeoverBody { socket, state: Some(state) });
    match daemon.json::<OperationView>("POST", "/v1/takeover", Some(&body)) {
        Ok(_) => Ok(true),
        Err(
            ClientError::Unreachable { source, .. } | ClientError::UnknownOutcome { source, .. },
        ) if has_ended(source.kind()) => Ok(false),
        // It is no ebbd, and has this one's addresses.
        Err(ClientError::InvalidReply { .. } | ClientError::NbdServer { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The statistics of the daemon, as tables or JSON.
///
/// # Errors
/// [`ClientError`].
pub fn stat(args: &StatArgs) -> Result<String, ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    topic(args, &daemon.json("GET", "/v1/stat", None)?)
}

/// The topic that was asked for, as text.
fn topic(args: &StatArgs, stat: &Stat) -> Result<String, ClientError> {
    let unknown = |name: &str| ClientError::Refused {
        message: format!("there is no volume `{name}`"),
        remedy: suggest(name, stat.volumes.iter().map(|volume| &*volume.name), "the volumes are"),
    };
    let volume = |name: &String| {
        stat.volumes.iter().find(|volume| volume.name == *name).ok_or_else(|| unknown(name))
    };
    let volumes = match &args.name {
        Some(name) => std::slice::from_ref(volume(name)?),
        None => &stat.volumes[..],
    };
    if args.json {
        let value = match args.what {
            None => serde_json::json!(stat),
            Some(StatTopic::Volume) if args.name.is_some() => serde_json::json!(volumes.first()),
            Some(StatTopic::Volume | StatTopic::Remote) => serde_json::json!(volumes),
            Some(StatTopic::Cluster) => serde_json::json!(stat.clusters),
            Some(StatTopic::Bdi) => serde_json::json!(stat.bdis),
            Some(StatTopic::Memory) => serde_json::json!(stat.memory),
            Some(StatTopic::Cache) => serde_json::json!(stat.cache),
            Some(StatTopic::Pressure) => serde_json::json!(stat.pressure),
            Some(StatTopic::Xen) => serde_json::json!(stat.xen),
            Some(StatTopic::Vhost) => serde_json::json!(stat.vhost),
            Some(StatTopic::Worker) => serde_json::json!(stat.workers),
            Some(StatTopic::Limit) => serde_json::json!(stat.limit_groups),
        };
        // A stream has an object in each line.
        let mut rounded = value;
        round(&mut rounded);
        let stream = args.watch.is_some();
        return Ok(if stream { format!("{rounded}\n") } else { json_text(rounded) });
    }
    let text = match args.what {
        None => show::all(stat),
        Some(StatTopic::Volume) => show::volumes(volumes),
        Some(StatTopic::Remote) => show::remotes(volumes),
        Some(StatTopic::Cluster) => show_clusters::clusters(&stat.clusters),
        Some(StatTopic::Bdi) => show::bdis(&stat.bdis),
        Some(StatTopic::Memory) => stat.memory.as_ref().map_or_else(String::new, show::memory),
        Some(StatTopic::Cache) => {
            stat.cache.as_ref().map_or_else(String::new, |cache| show::cache(cache, volumes))
        }
        Some(StatTopic::Pressure) => {
            stat.pressure.as_ref().map_or_else(String::new, show::pressure)
        }
        Some(StatTopic::Xen) => show_guests::xen(&stat.xen),
        Some(StatTopic::Vhost) => show_guests::vhost(&stat.vhost),
        Some(StatTopic::Worker) => show::workers(&stat.workers),
        Some(StatTopic::Limit) => show::limits(volumes, &stat.limit_groups),
    };
    Ok(show::or_none(text.trim_start(), args.what))
}

/// Passes the table of `stat --watch` to `show`, or with `--json` a line, repeatedly, until `show` returns false. A daemon
/// that is restarted is waited for.
///
/// # Errors
/// [`ClientError`], after the first reply only a refusal.
pub fn watch(
    args: &StatArgs,
    seconds: u64,
    mut show: impl FnMut(&str) -> bool,
) -> Result<(), ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let mut before: Stat = daemon.json("GET", "/v1/stat", None)?;
    let daemon = PersistentClient::new(daemon);
    loop {
        std::thread::sleep(Duration::from_secs(seconds));
        let (now, lost) = daemon.ask(|daemon| daemon.json::<Stat>("GET", "/v1/stat", None))?;
        if lost {
            // The counters of a daemon that was restarted begin at 0.
            before = Stat::default();
        }
        let shown = match (args.json, args.what) {
            (false, None | Some(StatTopic::Volume)) => {
                watch::flow(&before, &now, args.name.as_deref())
            }
            _ => topic(args, &now)?,
        };
        if !show(&shown) {
            return Ok(());
        }
        before = now;
    }
}

/// The text of a body.
fn text(body: impl Serialize) -> String {
    serde_json::json!(body).to_string()
}

/// What `--json` prints: on a terminal in lines that are indented, elsewhere as one line.
pub fn json_text(value: impl Serialize) -> String {
    let mut value = serde_json::json!(value);
    round(&mut value);
    match io::stdout().is_terminal() {
        true => format!("{value:#}\n"),
        false => format!("{value}\n"),
    }
}

/// Rounds fractions: to 3 decimals, and those below 1, such as times of requests in seconds, to 9.
fn round(value: &mut serde_json::Value) {
    use serde_json::Value;
    match value {
        Value::Array(items) => items.iter_mut().for_each(round),
        Value::Object(fields) => fields.values_mut().for_each(round),
        Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().unwrap_or_default();
            let unit = if exact.abs() < 1.0 { 1e9 } else { 1e3 };
            if let Some(rounded) = serde_json::Number::from_f64((exact * unit).round() / unit) {
                *number = rounded;
            }
        }
        _ => {}
    }
}

/// The path of the parameters of an owner.
fn owner(volume: Option<&str>, bdi: Option<&str>, group: Option<&str>) -> String {
    match (volume, bdi, group) {
        (Some(volume), ..) => format!("/v1/volumes/{}/parameters", encoded(volume)),
        (None, Some(bdi), _) => format!("/v1/bdis/{}/parameters", encoded(bdi)),
        (None, None, Some(group)) => format!("/v1/limit-groups/{}/parameters", encoded(group)),
        (None, None, None) => "/v1/parameters".to_owned(),
    }
}

/// `name` as a part of a path.
fn encoded(name: &str) -> String {
    let mut out = String::new();
    for byte in terminal::restored(name).bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    // These two have a special meaning in paths.
    match out.as_str() {
        "." => "%2E".to_owned(),
        ".." => "%2E%2E".to_owned(),
        _ => out,
    }
}

pub(crate) struct DaemonClient {
    path: PathBuf,
    /// How long the daemon may take to reply.
    timeout: Duration,
}

impl DaemonClient {
    /// The daemon at the socket of the option, of the environment variable, or at the default path.
    pub(crate) fn new(option: Option<&str>) -> Result<Self, ClientError> {
        let variable = std::env::var(SOCKET_VARIABLE).ok().filter(|path| !path.is_empty());
        let text = option.map(str::to_owned).or(variable);
        let text = text.unwrap_or_else(|| DEFAULT_PATH.to_owned());
        let path = control_path(&text)
            .map_err(|bad| ClientError::Refused { message: bad.message, remedy: bad.remedy })?;
        Ok(Self { path, timeout: TIMEOUT })
    }

    /// With another limit of the time for a reply.
    pub(crate) fn within(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The process that listens at the socket.
    pub(crate) fn process(&self) -> Option<u32> {
        let socket = std::os::unix::net::UnixStream::connect(&self.path).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    fn invalid(&self, what: impl Into<String>) -> ClientError {
        ClientError::InvalidReply { path: self.path.clone(), what: what.into() }
    }

    pub(crate) fn json<T: DeserializeOwned>(
        &self,
        method: &str,
        target: &str,
        body: Option<&str>,
    ) -> Result<T, ClientError> {
        let bytes = self.request(method, target, body)?;
        serde_json::from_slice(&bytes).map_err(|error| self.invalid(error.to_string()))
    }

    /// Sends a request, and returns the body of a successful reply.
    fn request(
        &self,
        method: &str,
        target: &str,
        body: Option<&str>,
    ) -> Result<Vec<u8>, ClientError> {
        self.exchange(method, target, body).map(|(_, body)| body)
    }

    /// Sends a request, and returns the whole reply.
    fn ask(&self, request: &[u8]) -> Result<Vec<u8>, RequestFailure> {
        let connect = || {
            let stream = UnixStream::connect(&self.path)?;
            stream.set_read_timeout(Some(self.timeout))?;
            stream.set_write_timeout(Some(self.timeout))?;
            Ok(stream)
        };
        let mut stream = connect().map_err(RequestFailure::NotSent)?;
        // A daemon that refuses a request early closes the connection, and its reply can still be
        // read.
        let written = stream.write_all(request);
        let mut answer = Vec::new();
        let read = stream.take(MAX_REPLY_BYTES).read_to_end(&mut answer);
        match (written, read) {
            (Err(error), _) if answer.is_empty() => Err(RequestFailure::NotSent(error)),
            (_, Err(error)) => Err(RequestFailure::NoReply(error)),
            (_, Ok(_)) if is_cut_off(&answer) => {
                let ended = "it ended before it replied";
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, ended);
                Err(RequestFailure::NoReply(error))
            }
            _ => Ok(answer),
        }
    }

    /// Sends a request, and returns the status and the body of a successful reply.
    fn exchange(
        &self,
        method: &str,
        target: &str,
        body: Option<&str>,
    ) -> Result<(u16, Vec<u8>), ClientError> {
        let body = body.unwrap_or_default();
        let request = format!(
            "{method} {target} HTTP/1.0\r\nHost: ebbd\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = self.ask(request.as_bytes()).map_err(|failure| {
            let source = match failure {
                RequestFailure::NoReply(source) if method != "GET" => {
                    let (path, source) = (self.path.clone(), named_timeout(source));
                    return ClientError::UnknownOutcome { path, source };
                }
                RequestFailure::NoReply(source) | RequestFailure::NotSent(source) => {
                    named_timeout(source)
                }
            };
            let remedy = match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Some(
                    "start it with `control` in its configuration, or give its socket with --control",
                ),
                io::ErrorKind::PermissionDenied => {
                    Some("run this as the daemon's user, or as root")
                }
                _ => None,
            };
            ClientError::Unreachable { path: self.path.clone(), remedy, source }
        })?;
        let (status, body) =
            split(&answer).ok_or_else(|| match answer.starts_with(b"NBDMAGIC") {
                true => ClientError::NbdServer { path: self.path.clone() },
                false => self.invalid("the reply is not HTTP"),
            })?;
        if (200..300).contains(&status) {
            return Ok((status, terminal::with_stand_ins(body)));
        }
        let Ok(failure) = serde_json::from_slice::<ErrorBody>(&terminal::with_stand_ins(body))
        else {
            return Err(self.invalid(format!("it replied with status {status}")));
        };
        Err(ClientError::of_status(status, failure))
    }
}

/// Why there is no reply.
enum RequestFailure {
    /// The daemon did not get the whole request.
    NotSent(io::Error),
    /// The daemon may have carried out the request.
    NoReply(io::Error),
}

/// The error of a socket, whose own words for a time limit say nothing of one.
fn named_timeout(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "it did not reply in time")
        }
        _ => error,
    }
}

/// Returns true if a reply ended before its head was complete.
fn is_cut_off(answer: &[u8]) -> bool {
    let start = b"HTTP/1.";
    let same = answer.iter().zip(start).all(|(a, b)| a == b);
    same && !answer.windows(4).any(|window| window == b"\r\n\r\n")
}

/// The status and the body of an HTTP reply.
fn split(answer: &[u8]) -> Option<(u16, &[u8])> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let (head, body) = answer.split_at(end);
    let line = std::str::from_utf8(head).ok()?.lines().next()?;
    let mut words = line.split(' ');
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    let status = words.next()?.parse().ok()?;
    Some((status, body.get(4..)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_in_paths_are_percent_encoded() {
        assert_eq!(encoded("max_buffer_pages"), "max_buffer_pages");
        assert_eq!(encoded("install cd/é"), "install%20cd%2F%C3%A9");
        assert_eq!(encoded(".."), "%2E%2E");
    }

    #[test]
    fn fractions_are_rounded_and_whole_numbers_are_not() {
        let mut value = serde_json::json!({
            "seconds": 83.0 + 1.0 / 3.0, "all": [0.1 + 0.2, 12.34e-6, 1e15], "bytes": u64::MAX,
        });
        round(&mut value);
        let rounded = serde_json::json!({
            "seconds": 83.333, "all": [0.3, 12.34e-6, 1e15], "bytes": u64::MAX,
        });
        assert_eq!(value, rounded);
    }

    #[test]
    fn a_late_reply_is_the_message_and_no_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let daemon = DaemonClient { path, timeout: Duration::from_millis(10) };
        let error = daemon.json::<serde_json::Value>("GET", "/v1/stat", None).unwrap_err();
        assert_eq!(error.exit_status(), exit_status::UNREACHABLE);
        let (message, remedy) = error.parts();
        assert!(message.ends_with(": it did not reply in time"), "{message}");
        assert_eq!(remedy, None);
    }

    /// The error of a request to a daemon that sends `answer` and ends.
    fn ended(method: &str, answer: &'static [u8]) -> ClientError {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            assert!(stream.read(&mut request).unwrap() > 0);
            stream.write_all(answer).unwrap();
        });
        let daemon = DaemonClient { path, timeout: TIMEOUT };
        let error = daemon.json::<serde_json::Value>(method, "/v1/x", None).unwrap_err();
        server.join().unwrap();
        error
    }

    #[test]
    fn outcome_is_unknown_if_the_daemon_ends_before_its_reply() {
        for answer in [&b""[..], b"HTTP", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n"] {
            for method in ["POST", "PUT", "PATCH", "DELETE"] {
                let error = ended(method, answer);
                assert_eq!(error.exit_status(), exit_status::UNREACHABLE);
                let (message, remedy) = error.parts();
                assert!(message.ends_with("the outcome is unknown"), "{message}");
                assert!(remedy.unwrap().contains("`ebbd operation list`"));
                assert!(error.to_string().contains("`ebbd operation list`"), "{error}");
            }
            // Nothing was to be changed.
            let error = ended("GET", answer);
            assert_eq!(error.exit_status(), exit_status::UNREACHABLE);
            assert!(error.parts().0.ends_with(": it ended before it replied"), "{error}");
        }
        let other = ended("POST", b"SSH-2.0\r\n");
        assert!(matches!(other, ClientError::InvalidReply { .. }), "{other}");
        let nbd = ended("GET", b"NBDMAGICIHAVEOPT\0\x03");
        assert!(nbd.to_string().contains("an NBD server replies there; give"), "{nbd}");
    }

    #[test]
    fn names_from_the_daemon_forge_no_line() {
        let body = b"HTTP/1.1 500 x\r\n\r\n{\"error\":\"io\",\"message\":\"a\\nb\\u001b[2J\",\"remedy\":\"c\"}";
        let error = ended("POST", body);
        let text = error.to_string();
        assert!(!text.contains(['\n', '\x1b']), "{text:?}");
        assert_eq!(terminal_text(&text), "a\\u000ab\\u001b[2J; c");
    }

    #[test]
    fn a_reply_is_split_into_status_and_body() {
        assert_eq!(split(b"HTTP/1.1 404 Not Found\r\na: b\r\n\r\n{}"), Some((404, &b"{}"[..])));
        for bad in ["", "HTTP/1.1 200 OK\r\n", "SSH-2.0\r\n\r\n", "HTTP/1.1 x\r\n\r\n"] {
            assert_eq!(split(bad.as_bytes()), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_reply_panics(answer: Vec<u8>, tail in "HTTP/1.1 [0-9]{0,6}\r\n\r\n.*") {
            let _ = split(&answer);
            let _ = split(tail.as_bytes());
        }
    }
}
