//! The URI of a remote NBD export, as in the NBD project's URI specification (`doc/uri.md`), with
//! additional parameters for the decisions of a client.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::uri::{UriParameters, bad, decode, encode, push_parameters, seconds};
use super::{BadValue, MAX_HOST_BYTES, shorten, unix_path};

/// The port of NBD, as assigned by IANA.
const PORT: u16 = 10809;
/// The longest export name, bytes ("Conventions" of the protocol).
const MAX_EXPORT_BYTES: usize = 4096;
/// How long requests wait for a lost server by default.
const RECONNECT_DEFAULT: Duration = Duration::from_secs(60);
/// The form of a URI, as a remedy.
const FORM: &str = "write nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=/path";
/// The parameters a URI may have.
const PARAMETERS: [&str; 8] = [
    "socket",
    "tls-certificates",
    "tls-psk-file",
    "tls-hostname",
    "tls-verify-peer",
    "reconnect",
    "silence",
    "lost-writes",
];

/// An export of an NBD server, and how its client connects to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server is.
    pub server: NbdHost,
    /// The name of the export; empty selects the server's default.
    pub export: String,
    /// TLS, if it is used.
    pub tls: Option<NbdUriTls>,
    /// How long requests wait for a lost server before they fail.
    pub reconnect: Duration,
    /// How long a server may leave requests without a reply before its connection counts as lost; `None`: without
    /// limit.
    pub silence: Option<Duration>,
    /// Whether writes that were acknowledged and not flushed when a connection was lost are reported as lost.
    pub report_lost_writes: bool,
}

/// Where an NBD server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdHost {
    /// A host name or an address (without brackets), and a port.
    Tcp(String, u16),
    /// A unix stream socket.
    Unix(PathBuf),
}

/// TLS of an NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUriTls {
    /// The keys.
    pub keys: NbdUriKeys,
    /// The name that the server's certificate must have; by default the host.
    pub hostname: Option<String>,
    /// Whether the server's certificate is verified.
    pub verify: bool,
}

/// The keys of an NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdUriKeys {
    /// The certificate authorities of the host.
    System,
    /// A directory of certificates.
    Certificates(PathBuf),
    /// A file of pre-shared keys, and the name of the one to use.
    Psk(PathBuf, String),
}

impl fmt::Display for NbdHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdHost::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            NbdHost::Tcp(host, port) => write!(f, "{host}:{port}"),
            NbdHost::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The schemes, each with whether it is over TLS and on a unix socket.
pub(super) const SCHEMES: [(&str, bool, bool); 4] = [
    ("nbd", false, false),
    ("nbds", true, false),
    ("nbd+unix", false, true),
    ("nbds+unix", true, true),
];

/// The options of `scheme://rest`.
pub(super) fn parse((tls, unix): (bool, bool), rest: &str) -> Result<NbdUri, BadValue> {
    let rest = rest
        .strip_prefix("//")
        .ok_or_else(|| bad("an NBD URI has two slashes after its scheme", FORM))?;
    if rest.contains('#') {
        return Err(bad("an NBD URI has no part after a `#`", "write %23 for a `#` in a name"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let parameters = UriParameters::parse(query, &PARAMETERS, FORM)?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, host) = match authority.rsplit_once('@') {
        // Shown nowhere: not in this message either.
        Some((user, _)) if user.contains(':') => {
            let message = "an NBD URI has no password: the protocol has none, and it would be shown with the address";
            let remedy = "remove the colon and what follows it; keys are in files: tls-psk-file or tls-certificates; write \
                          %3A for a colon in the name of a key";
            return Err(bad(message, remedy));
        }
        Some((user, host)) => (Some(decode(user)?), host),
        None => (None, authority),
    };
    let server = if unix { socket(host, &parameters)? } else { tcp(host, &parameters)? };
    let export = decode(path)?;
    if export.len() > MAX_EXPORT_BYTES {
        let message = format!("the export name has {} bytes", export.len());
        return Err(bad(message, "the protocol allows at most 4096"));
    }
    let tls = if tls { Some(encryption(&parameters, user)?) } else { no_tls(&parameters, user)? };
    let time = |name| parameters.get(name).map(|text| seconds(name, text)).transpose();
    let report_lost_writes = match parameters.get("lost-writes") {
        None | Some("flush") => false,
        Some("report") => true,
        Some(other) => {
            let message = format!("`{}` is not a value of lost-writes", shorten(other));
            return Err(bad(message, "write lost-writes=flush or lost-writes=report"));
        }
    };
    Ok(NbdUri {
        server,
        export,
        tls,
        reconnect: time("reconnect")?.unwrap_or(RECONNECT_DEFAULT),
        silence: time("silence")?.filter(|time| !time.is_zero()),
        report_lost_writes,
    })
}

fn socket(host: &str, parameters: &UriParameters) -> Result<NbdHost, BadValue> {
    if !host.is_empty() {
        let message = format!("a unix socket has no host, and there is `{}`", shorten(host));
        return Err(bad(message, "write three slashes: nbd+unix:///EXPORT?socket=/path"));
    }
    let path = parameters
        .get("socket")
        .ok_or_else(|| bad("the path of the socket is missing", "add ?socket=/path/to/socket"))?;
    unix_path(path).map(NbdHost::Unix)
}

fn tcp(authority: &str, parameters: &UriParameters) -> Result<NbdHost, BadValue> {
    if parameters.get("socket").is_some() {
        let remedy = "write nbd+unix:// or nbds+unix:// for a unix socket";
        return Err(bad("`socket` belongs to a unix socket", remedy));
    }
    let no_host = || bad(format!("`{}` is not a valid host", shorten(authority)), FORM);
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(no_host)?;
        let port = match rest {
            "" => None,
            rest => Some(rest.strip_prefix(':').ok_or_else(no_host)?),
        };
        (ipv6(host).ok_or_else(no_host)?, port)
    } else {
        match authority.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                let message =
                    format!("`{}` has an IPv6 address without brackets", shorten(authority));
                return Err(bad(message, "write nbd://[::1]:10809/EXPORT"));
            }
            Some((host, port)) => (name(host).ok_or_else(no_host)?, Some(port)),
            None => (name(authority).ok_or_else(no_host)?, None),
        }
    };
    let port = match port {
        None => PORT,
        Some(port) => Some(port)
            .filter(|port| port.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|port| port.parse::<u16>().ok())
            .filter(|port| *port != 0)
            .ok_or_else(|| {
                bad(
                    format!("`{}` is not a port", shorten(port)),
                    "the port is a number from 1 to 65535",
                )
            })?,
    };
    Ok(NbdHost::Tcp(host, port))
}

/// A name or an IPv4 address.
fn name(host: &str) -> Option<String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    let is_name = (1..=MAX_HOST_BYTES).contains(&host.len()) && host.bytes().all(fits);
    is_name.then(|| host.to_ascii_lowercase())
}

/// An IPv6 address. The per cent sign before its zone may be written as `%25` (RFC 6874).
fn ipv6(host: &str) -> Option<String> {
    match host.split_once("%25").filter(|(_, zone)| !zone.is_empty()) {
        Some((address, zone)) => super::zone::ipv6(&format!("{address}%{zone}")),
        None => super::zone::ipv6(host),
    }
}

fn encryption(parameters: &UriParameters, user: Option<String>) -> Result<NbdUriTls, BadValue> {
    let path = |name| parameters.get(name).map(super::path).transpose();
    let keys = match (path("tls-certificates")?, path("tls-psk-file")?) {
        (Some(_), Some(_)) => {
            let message = "there are both tls-certificates and tls-psk-file";
            return Err(bad(message, "keep one of certificates and pre-shared keys"));
        }
        (Some(folder), None) => NbdUriKeys::Certificates(folder),
        (None, Some(file)) => {
            let remedy = "write nbds://NAME@HOST/EXPORT with a name of the file";
            let user = user.ok_or_else(|| bad("pre-shared keys need the name of one", remedy))?;
            NbdUriKeys::Psk(file, user)
        }
        (None, None) => NbdUriKeys::System,
    };
    let verify = match parameters.get("tls-verify-peer") {
        None | Some("1" | "true") => true,
        Some("0" | "false") => false,
        Some(other) => {
            let message = format!("`{}` is neither true nor false", shorten(other));
            return Err(bad(message, "write tls-verify-peer=true or tls-verify-peer=false"));
        }
    };
    let hostname = parameters.get("tls-hostname").map(str::to_owned);
    Ok(NbdUriTls { keys, hostname, verify })
}

/// Refuses TLS parameters without TLS: the operator expects encryption.
fn no_tls(parameters: &UriParameters, user: Option<String>) -> Result<Option<NbdUriTls>, BadValue> {
    let given = parameters.names().find(|name| name.starts_with("tls-"));
    match (given, user) {
        (Some(name), _) => {
            let message = format!("`{name}` has no effect without TLS");
            Err(bad(message, "write nbds:// or nbds+unix://, or remove it"))
        }
        (None, Some(user)) => {
            let message = format!("the user `{}` has no effect without TLS", shorten(&user));
            Err(bad(message, "write nbds:// or nbds+unix://, or remove it"))
        }
        (None, None) => Ok(None),
    }
}

/// The text of `uri`, with those parameters that are not the default.
pub(super) fn text(uri: &NbdUri) -> String {
    let mut parameters = Vec::new();
    let mut user = String::new();
    let host = match &uri.server {
        NbdHost::Unix(path) => {
            parameters.push(("socket", path.to_string_lossy().into_owned()));
            String::new()
        }
        tcp @ NbdHost::Tcp(..) => tcp.to_string().replace('%', "%25"),
    };
    if let Some(tls) = &uri.tls {
        match &tls.keys {
            NbdUriKeys::System => {}
            NbdUriKeys::Certificates(folder) => {
                parameters.push(("tls-certificates", folder.to_string_lossy().into_owned()));
            }
            NbdUriKeys::Psk(file, name) => {
                // A colon would begin a password.
                user = format!("{}@", encode(name).replace(':', "%3A"));
                parameters.push(("tls-psk-file", file.to_string_lossy().into_owned()));
            }
        }
        if let Some(hostname) = &tls.hostname {
            parameters.push(("tls-hostname", hostname.clone()));
        }
        if !tls.verify {
            parameters.push(("tls-verify-peer", "false".to_owned()));
        }
    }
    if uri.reconnect != RECONNECT_DEFAULT {
        parameters.push(("reconnect", uri.reconnect.as_secs().to_string()));
    }
    if let Some(silence) = uri.silence {
        parameters.push(("silence", silence.as_secs().to_string()));
    }
    if uri.report_lost_writes {
        parameters.push(("lost-writes", "report".to_owned()));
    }
    let s = if uri.tls.is_some() { "s" } else { "" };
    let unix = if matches!(uri.server, NbdHost::Unix(_)) { "+unix" } else { "" };
    let mut text = format!("nbd{s}{unix}://{user}{host}/{}", encode(&uri.export));
    push_parameters(&mut text, parameters);
    text
}
