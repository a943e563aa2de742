//! The URI of a remote NBD export, as in the NBD project's URI specification (`doc/uri.md`), with
//! additional parameters for the decisions of a client.

use std::time::Duration;

use ebb_store::{LostWrites, NbdAddress, NbdOptions, NbdTls, NbdTlsKeys};

use super::{BadValue, ConfigErrorKind, MAX_HOST_BYTES, shorten, suggest, unix_path};

/// The port of NBD, as assigned by IANA.
const PORT: u16 = 10809;
/// The longest export name, bytes ("Conventions" of the protocol).
const MAX_EXPORT_BYTES: usize = 4096;
/// The longest time requests may wait for a server, seconds: a day.
const MAX_RECONNECT: u64 = 86_400;
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

/// The schemes, each with whether it is over TLS and on a unix socket.
pub(super) const SCHEMES: [(&str, bool, bool); 4] = [
    ("nbd", false, false),
    ("nbds", true, false),
    ("nbd+unix", false, true),
    ("nbds+unix", true, true),
];

fn bad(message: impl Into<String>, remedy: impl Into<String>) -> BadValue {
    BadValue::new(ConfigErrorKind::InvalidValue, message.into(), remedy.into())
}

/// The parameters of a URI, decoded.
#[derive(Default)]
struct Parameters(Vec<(&'static str, String)>);

impl Parameters {
    fn parse(query: &str) -> Result<Parameters, BadValue> {
        let mut list: Vec<(&'static str, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| bad(format!("`{}` is no parameter=value", shorten(pair)), FORM))?;
            let known = PARAMETERS.iter().find(|known| **known == name).ok_or_else(|| {
                let message = format!("an NBD URI has no parameter `{}`", shorten(name));
                bad(message, suggest(name, PARAMETERS, "the parameters are"))
            })?;
            if list.iter().any(|(given, _)| given == known) {
                return Err(bad(format!("`{known}` is given twice"), "keep one of them"));
            }
            list.push((known, decode(value)?));
        }
        Ok(Parameters(list))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }
}

/// The options of `scheme://rest`.
pub(super) fn parse((tls, unix): (bool, bool), rest: &str) -> Result<NbdOptions, BadValue> {
    let rest = rest
        .strip_prefix("//")
        .ok_or_else(|| bad("an NBD URI has two slashes after its scheme", FORM))?;
    if rest.contains('#') {
        return Err(bad("an NBD URI has no part after a `#`", "write %23 for a `#` in a name"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let parameters = Parameters::parse(query)?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(decode(user)?), host),
        None => (None, authority),
    };
    let address = if unix { socket(host, &parameters)? } else { tcp(host, &parameters)? };
    let export = decode(path)?;
    if export.len() > MAX_EXPORT_BYTES {
        let message = format!("the export name has {} bytes", export.len());
        return Err(bad(message, "the protocol allows at most 4096"));
    }
    let mut options = NbdOptions::new(address, &export);
    options.tls =
        if tls { Some(encryption(&parameters, user)?) } else { no_tls(&parameters, user)? };
    if let Some(text) = parameters.get("reconnect") {
        options.reconnect = seconds("reconnect", text)?;
    }
    if let Some(text) = parameters.get("silence") {
        options.silence = Some(seconds("silence", text)?).filter(|time| !time.is_zero());
    }
    options.lost_writes = match parameters.get("lost-writes") {
        None | Some("flush") => LostWrites::Flush,
        Some("report") => LostWrites::Report,
        Some(other) => {
            let message = format!("`{}` is not a value of lost-writes", shorten(other));
            return Err(bad(message, "write lost-writes=flush or lost-writes=report"));
        }
    };
    Ok(options)
}

fn socket(host: &str, parameters: &Parameters) -> Result<NbdAddress, BadValue> {
    if !host.is_empty() {
        let message = format!("a unix socket has no host, and there is `{}`", shorten(host));
        return Err(bad(message, "write three slashes: nbd+unix:///EXPORT?socket=/path"));
    }
    let path = parameters
        .get("socket")
        .ok_or_else(|| bad("the path of the socket is missing", "add ?socket=/path/to/socket"))?;
    unix_path(path).map(NbdAddress::Unix)
}

fn tcp(authority: &str, parameters: &Parameters) -> Result<NbdAddress, BadValue> {
    if parameters.get("socket").is_some() {
        let remedy = "write nbd+unix:// or nbds+unix:// for a unix socket";
        return Err(bad("`socket` belongs to a unix socket", remedy));
    }
    let no_host = || bad(format!("`{}` is not a valid host", shorten(authority)), FORM);
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(no_host)?;
        host.parse::<std::net::Ipv6Addr>().map_err(|_| no_host())?;
        if rest.is_empty() {
            (host, None)
        } else {
            (host, Some(rest.strip_prefix(':').ok_or_else(no_host)?))
        }
    } else {
        match authority.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                let message =
                    format!("`{}` has an IPv6 address without brackets", shorten(authority));
                return Err(bad(message, "write nbd://[::1]:10809/EXPORT"));
            }
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        }
    };
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':');
    if host.is_empty() || host.len() > MAX_HOST_BYTES || !host.bytes().all(fits) {
        return Err(no_host());
    }
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
    Ok(NbdAddress::Tcp { host: host.to_ascii_lowercase(), port })
}

fn encryption(parameters: &Parameters, user: Option<String>) -> Result<NbdTls, BadValue> {
    let path = |name| parameters.get(name).map(super::path).transpose();
    let keys = match (path("tls-certificates")?, path("tls-psk-file")?) {
        (Some(_), Some(_)) => {
            let message = "there are both tls-certificates and tls-psk-file";
            return Err(bad(message, "keep one of certificates and pre-shared keys"));
        }
        (Some(folder), None) => NbdTlsKeys::Certificates(folder),
        (None, Some(file)) => {
            let remedy = "write nbds://NAME@HOST/EXPORT with a name of the file";
            let user = user.ok_or_else(|| bad("pre-shared keys need the name of one", remedy))?;
            NbdTlsKeys::Psk { file, user }
        }
        (None, None) => NbdTlsKeys::System,
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
    Ok(NbdTls { keys, hostname, verify })
}

/// Refuses TLS parameters without TLS: the operator expects encryption.
fn no_tls(parameters: &Parameters, user: Option<String>) -> Result<Option<NbdTls>, BadValue> {
    let given = parameters.0.iter().find(|(name, _)| name.starts_with("tls-"));
    match (given, user) {
        (Some((name, _)), _) => {
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

fn seconds(name: &str, text: &str) -> Result<Duration, BadValue> {
    let digits = text.strip_suffix('s').unwrap_or(text);
    Some(digits)
        .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse::<u64>().ok())
        .filter(|seconds| *seconds <= MAX_RECONNECT)
        .map(Duration::from_secs)
        .ok_or_else(|| {
            let message = format!("`{}` is not a time in seconds", shorten(text));
            bad(message, format!("write seconds from 0 to 86400, such as {name}=60"))
        })
}

/// `text` with `%XX` decoded; UTF-8 without zero bytes.
fn decode(text: &str) -> Result<String, BadValue> {
    let fail = |what: &str| {
        let message = format!("`{}` {what}", shorten(text));
        bad(message, "write % and two hexadecimal digits for a byte, %25 for a % itself")
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err(fail("has a % without two hexadecimal digits"));
        };
        bytes.extend(u8::try_from(high * 16 + low).ok());
    }
    if bytes.contains(&0) {
        return Err(fail("has a zero byte in it"));
    }
    String::from_utf8(bytes).map_err(|_| fail("is not UTF-8"))
}

/// `text` with everything encoded that could end it early.
fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// The URI of `options`, with those parameters that are not the default.
pub(super) fn uri(options: &NbdOptions) -> String {
    let mut parameters = Vec::new();
    let mut user = String::new();
    let host = match &options.address {
        NbdAddress::Unix(path) => {
            parameters.push(("socket", path.to_string_lossy().into_owned()));
            String::new()
        }
        tcp @ NbdAddress::Tcp { .. } => tcp.to_string(),
    };
    if let Some(tls) = &options.tls {
        match &tls.keys {
            NbdTlsKeys::System => {}
            NbdTlsKeys::Certificates(folder) => {
                parameters.push(("tls-certificates", folder.to_string_lossy().into_owned()));
            }
            NbdTlsKeys::Psk { file, user: name } => {
                user = format!("{}@", encode(name));
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
    if options.reconnect != ebb_store::RECONNECT_DEFAULT {
        parameters.push(("reconnect", options.reconnect.as_secs().to_string()));
    }
    if let Some(silence) = options.silence {
        parameters.push(("silence", silence.as_secs().to_string()));
    }
    if options.lost_writes == LostWrites::Report {
        parameters.push(("lost-writes", "report".to_owned()));
    }
    let s = if options.tls.is_some() { "s" } else { "" };
    let unix = if matches!(options.address, NbdAddress::Unix(_)) { "+unix" } else { "" };
    let mut text = format!("nbd{s}{unix}://{user}{host}/{}", encode(&options.export));
    for (number, (name, value)) in parameters.into_iter().enumerate() {
        let before = if number == 0 { '?' } else { '&' };
        text.push_str(&format!("{before}{name}={}", encode(&value)));
    }
    text
}
