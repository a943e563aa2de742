//! The values of a configuration: addresses, stores and choices, as text and as types.
//!
//! Each type parses its text form, and displays it. Only the form is checked here; whether settings
//! fit together is checked in [`super::resolve`].

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ebb_access::{AccessEntry, AccessError, AccessList};

pub use self::connect_to::ConnectTo;
pub use self::key_file::KeyFile;
pub use self::key_source::KeySource;
pub use self::nbd::{NbdHost, NbdUri, NbdUriKeys, NbdUriTls};
pub use self::rbd::{LuksVersion, RbdUri, RbdUriEncryption};
use super::error::{BadValue, ConfigErrorKind, suggest};
use super::shorten::shorten;
use crate::Size;

/// The longest path of a unix socket in bytes: `sun_path` of unix(7) less its terminating zero.
pub const MAX_UNIX_PATH_BYTES: usize = 107;

/// The longest host name in bytes (RFC 1035, section 2.3.4).
const MAX_HOST_BYTES: usize = 253;

/// The longest volume name in bytes. The NBD protocol allows 4096; file names and logs do not.
pub const MAX_NAME_BYTES: usize = 255;

/// The size of a volume is a multiple of this, in bytes.
pub const SECTOR_BYTES: u64 = 512;

/// The prefixes of stores.
pub(super) const STORES: [&str; 9] =
    ["file:", "qcow2:", "memory:", "null:", "rbd:", "nbd:", "nbds:", "nbd+unix:", "nbds+unix:"];

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Listen {
    /// A unix stream socket at a path of 1 to [`MAX_UNIX_PATH_BYTES`] bytes.
    Unix(PathBuf),
    /// A TCP socket at `HOST:PORT`, in one normal form: the host in lower case or an IPv6
    /// address in brackets, the port 0 to 65535 without leading zeroes.
    Tcp(String),
}

/// The socket of a volume for vhost-user-blk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VhostSocket {
    /// None, also if the daemon has a directory of them.
    None,
    /// A path of 1 to [`MAX_UNIX_PATH_BYTES`] bytes.
    Path(PathBuf),
}

/// The store of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUri {
    /// A regular file or a block device.
    File(PathBuf),
    /// A file or block device with an image in QEMU's qcow2 format: read-only.
    Qcow2(PathBuf),
    /// Memory of this size: a multiple of 512, 512 to 2^63 - 512.
    Memory(Size),
    /// Reads as zeroes, discards writes; sizes as for `Memory`.
    Null(Size),
    /// An export of an NBD server. Whether it is read-only is a setting of the volume.
    Nbd(Box<NbdUri>),
    /// An image of a Ceph cluster, or a snapshot of one.
    Rbd(Box<RbdUri>),
}

/// A setting with a fixed set of words.
pub trait Choice: Copy + PartialEq + 'static {
    /// The name of the setting, for messages.
    const WHAT: &'static str;
    /// Each word with its meaning.
    const ALL: &'static [(&'static str, Self)];

    /// The words.
    fn names() -> impl Iterator<Item = &'static str> + Clone {
        Self::ALL.iter().map(|(name, _)| *name)
    }

    /// The word for this choice.
    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, choice)| *choice == self).map_or("", |(name, _)| name)
    }

    /// The choice for a word, or an error with a suggestion.
    fn parse(text: &str) -> Result<Self, BadValue> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or_else(
            || {
                BadValue::new(
                    ConfigErrorKind::UnknownChoice,
                    format!("`{}` is no {}", shorten(text), Self::WHAT),
                    suggest(text, Self::names(), "the values are"),
                )
            },
        )
    }
}

/// Whether files are opened with `O_DIRECT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectMode {
    /// If the file system supports it.
    #[default]
    Auto,
    /// Always; opening fails if the file system does not support it.
    On,
    /// Never.
    Off,
}

/// The cache mode of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// No cache: each request goes to the store.
    None,
    /// Data that was read or written is cached; a write is acknowledged when the store has completed it.
    Writethrough,
    /// A write is acknowledged when it is in memory, and written to the store later; a flush waits for that.
    Writeback,
}

/// Whether connections are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsSetting {
    /// Never.
    #[default]
    Off,
    /// If the client requests it.
    On,
    /// Always; other clients are refused.
    Require,
}

/// What happens to I/O memory that no request uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleMemory {
    /// It is lent to the kernel, and returned under memory pressure.
    #[default]
    Lend,
    /// It is kept until memory pressure, then returned.
    Drop,
    /// It is kept, whatever the pressure.
    Keep,
    /// It is returned as soon as requests have completed.
    None,
}

/// Whether the daemon limits what its threads may ask of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// It does, as far as the kernel can.
    #[default]
    On,
    /// It does not.
    Off,
}

/// The log level; each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// What the daemon could not do.
    Error,
    /// What an operator should check.
    Warn,
    /// Start, stop, reload, connections.
    #[default]
    Info,
    /// Details.
    Debug,
}

/// The form of the log's lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object in each line.
    Json,
}

impl Choice for LogFormat {
    const WHAT: &'static str = "form of the log";
    const ALL: &'static [(&'static str, Self)] = &[("text", Self::Text), ("json", Self::Json)];
}

impl Choice for DirectMode {
    const WHAT: &'static str = "mode of direct I/O";
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("on", Self::On), ("off", Self::Off)];
}

impl Choice for CacheMode {
    const WHAT: &'static str = "cache mode";
    const ALL: &'static [(&'static str, Self)] = &[
        ("none", Self::None),
        ("writethrough", Self::Writethrough),
        ("writeback", Self::Writeback),
    ];
}

impl Choice for TlsSetting {
    const WHAT: &'static str = "mode of TLS";
    const ALL: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("on", Self::On), ("require", Self::Require)];
}

impl Choice for IdleMemory {
    const WHAT: &'static str = "mode of idle memory";
    const ALL: &'static [(&'static str, Self)] =
        &[("lend", Self::Lend), ("drop", Self::Drop), ("keep", Self::Keep), ("none", Self::None)];
}

impl Choice for SandboxMode {
    const WHAT: &'static str = "mode of the sandbox";
    const ALL: &'static [(&'static str, Self)] = &[("on", Self::On), ("off", Self::Off)];
}

impl Choice for LogLevel {
    const WHAT: &'static str = "log level";
    const ALL: &'static [(&'static str, Self)] = &[
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
    ];
}

macro_rules! display_choice {
    ($($choice:ty),*) => {$(
        impl fmt::Display for $choice {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    )*};
}
display_choice!(DirectMode, CacheMode, TlsSetting, IdleMemory, SandboxMode, LogLevel, LogFormat);

impl FromStr for Listen {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.split_once(':') {
            Some(("unix", path)) => unix_path(path).map(Self::Unix),
            Some(("tcp", address)) => tcp_address(address).map(Self::Tcp),
            _ => {
                let remedy = if text.starts_with('/') {
                    format!("write unix:{}", shorten(text))
                } else {
                    "write unix:/path/to/socket or tcp:HOST:PORT".to_owned()
                };
                let message = format!("`{}` is no address", shorten(text));
                Err(BadValue::new(ConfigErrorKind::InvalidValue, message, remedy))
            }
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for VhostSocket {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "none" => Ok(Self::None),
            text => {
                let path = unix_path(text.strip_prefix("unix:").unwrap_or(text))?;
                must_be_absolute(&path)?;
                Ok(Self::Path(path))
            }
        }
    }
}

impl fmt::Display for VhostSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Refuses a path of vhost-user that depends on the working directory, which the VMM does not share.
pub(super) fn must_be_absolute(path: &Path) -> Result<(), BadValue> {
    if path.is_absolute() {
        return Ok(());
    }
    let message = format!("{} is a relative path", path.display());
    Err(BadValue::new(ConfigErrorKind::InvalidValue, message, "write a path from / on"))
}

fn unix_path(text: &str) -> Result<PathBuf, BadValue> {
    if text.len() > MAX_UNIX_PATH_BYTES {
        return Err(BadValue::new(
            ConfigErrorKind::OutOfRange,
            format!("the socket path has {} bytes, more than the system allows", text.len()),
            format!("choose a path of at most {MAX_UNIX_PATH_BYTES} bytes"),
        ));
    }
    if text.starts_with('@') {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("`{}` is an abstract socket, which has no access rights", shorten(text)),
            "write a path: unix:/path/to/socket",
        ));
    }
    if text.ends_with('/') {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("socket path `{}` names a directory", shorten(text)),
            format!("add a file name: unix:{}nbd.sock", shorten(text)),
        ));
    }
    path(text)
}

/// A path that is not empty and has no zero bytes.
pub(super) fn path(text: &str) -> Result<PathBuf, BadValue> {
    if text.is_empty() {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            "the path is empty",
            "write the whole path, such as /run/ebbd/nbd.sock or /var/lib/ebbd/disk.img",
        ));
    }
    if text.contains('\0') {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("path `{}` has a zero byte in it", shorten(text)),
            "remove it: file names cannot contain zero bytes",
        ));
    }
    Ok(PathBuf::from(text))
}

/// The path of the control socket: as that of any unix socket, and `unix:` may be left out.
pub fn control_path(text: &str) -> Result<PathBuf, BadValue> {
    if text.starts_with("tcp:") {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            "the control socket cannot be at a TCP port, which has no access rights",
            "write unix:/path/to/socket",
        ));
    }
    unix_path(text.strip_prefix("unix:").unwrap_or(text))
}

/// The address of the page: TCP, and `tcp:` may be left out.
pub(crate) fn web_address(text: &str) -> Result<String, BadValue> {
    if text.starts_with("unix:") {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            "the page cannot be at a unix socket, because browsers do not support that",
            "write tcp:127.0.0.1:9477",
        ));
    }
    tcp_address(text.strip_prefix("tcp:").unwrap_or(text))
}

/// An additional host name of the page: as in a URL, without scheme and port.
pub(crate) fn web_name(text: &str) -> Result<String, BadValue> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if text.is_empty() || text.len() > 253 || !text.bytes().all(fits) {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("`{}` is not a host name", shorten(text)),
            "write the name as in the URL, without http:// and without a port",
        ));
    }
    Ok(text.to_owned())
}

/// What the broker may open.
pub(crate) fn open_path(text: &str) -> Result<PathBuf, BadValue> {
    let path = PathBuf::from(text);
    let above = path.components().any(|part| part == std::path::Component::ParentDir);
    if path.is_absolute() && !above {
        return Ok(path);
    }
    Err(BadValue::new(
        ConfigErrorKind::InvalidValue,
        format!("`{}` is no absolute path without `..`", shorten(text)),
        "write a path that begins with /: open_paths = [\"/srv/disks\"]",
    ))
}

fn tcp_address(text: &str) -> Result<String, BadValue> {
    let bad = |message: &str, remedy: &str| {
        BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("TCP address `{}` {message}", shorten(text)),
            remedy,
        )
    };
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        let remedy = format!("write the host before the port: 127.0.0.1:{}", shorten(text));
        return Err(bad("has no host", &remedy));
    }
    let no_port = || bad("has no port", "add one, as in 127.0.0.1:10809, the port of NBD");
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest
            .split_once(']')
            .ok_or_else(|| bad("has no closing bracket", "write tcp:[::1]:10809"))?;
        let ip = zone::ipv6(host).ok_or_else(|| {
            bad(
                "has no IPv6 address between its brackets",
                "write tcp:[::1]:10809, or tcp:[fe80::1%eth0]:10809 for a link-local address",
            )
        })?;
        (format!("[{ip}]"), rest.strip_prefix(':').ok_or_else(no_port)?)
    } else {
        let (host, port) = text.rsplit_once(':').ok_or_else(no_port)?;
        if host.contains(':') {
            return Err(bad("has an IPv6 address without brackets", "write tcp:[::1]:10809"));
        }
        if host.is_empty() || host == "*" {
            return Err(bad(
                "has no host",
                "for all addresses of the machine write tcp:[::]:10809 or tcp:0.0.0.0:10809",
            ));
        }
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
        if host.len() > MAX_HOST_BYTES || !host.bytes().all(fits) {
            return Err(bad(
                "has an invalid host",
                "write an IP address, or a name of at most 253 letters, digits, dots and hyphens",
            ));
        }
        (host.to_ascii_lowercase(), port)
    };
    // `u16::from_str` also takes a plus sign, which no other tool would understand.
    let port = Some(port)
        .filter(|port| port.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|port| port.parse::<u16>().ok())
        .ok_or_else(|| bad("has an invalid port", "the port is a number from 0 to 65535"))?;
    Ok(format!("{host}:{port}"))
}

impl FromStr for StoreUri {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.split_once(':') {
            Some(("file", rest)) => path(rest).map(Self::File),
            Some(("qcow2", rest)) => path(rest).map(Self::Qcow2),
            Some(("memory", size)) => volume_size(size.parse()?).map(Self::Memory),
            Some(("null", size)) => volume_size(size.parse()?).map(Self::Null),
            Some(("rbd", rest)) => rbd::parse(rest).map(|uri| Self::Rbd(Box::new(uri))),
            given => {
                let scheme = given.map_or(text, |(scheme, _)| scheme);
                if let (Some((_, rest)), Some((_, tls, unix))) =
                    (given, nbd::SCHEMES.iter().find(|(name, ..)| *name == scheme))
                {
                    return nbd::parse((*tls, *unix), rest).map(|uri| Self::Nbd(Box::new(uri)));
                }
                let remedy = if text.starts_with(['/', '.']) {
                    format!("write file:{}", shorten(text))
                } else {
                    suggest(scheme, STORES, "a store is one of")
                };
                let message = format!("`{}` is no store", shorten(&without_password(text)));
                Err(BadValue::new(ConfigErrorKind::InvalidValue, message, remedy))
            }
        }
    }
}

/// `text`, which may be a URI of another kind, without the password in it.
fn without_password(text: &str) -> std::borrow::Cow<'_, str> {
    let redacted = || {
        let (scheme, rest) = text.split_once("://")?;
        let authority = rest.split(['/', '?', '#']).next()?;
        let (user, _) = authority.rsplit_once('@')?.0.split_once(':')?;
        let host = rest.get(authority.rfind('@')?..)?;
        Some(format!("{scheme}://{user}:***{host}"))
    };
    redacted().map_or(text.into(), Into::into)
}

impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Qcow2(path) => write!(f, "qcow2:{}", path.display()),
            Self::Memory(size) => write!(f, "memory:{size}"),
            Self::Null(size) => write!(f, "null:{size}"),
            Self::Nbd(uri) => f.write_str(&nbd::text(uri)),
            Self::Rbd(uri) => f.write_str(&rbd::text(uri)),
        }
    }
}

/// `size` if a volume may have it: a multiple of 512 above 0 that fits in a signed file offset.
pub(super) fn volume_size(size: Size) -> Result<Size, BadValue> {
    let bytes = size.bytes();
    if bytes == 0 {
        return Err(BadValue::new(
            ConfigErrorKind::OutOfRange,
            "the size of a volume cannot be 0",
            "give it a size, such as 1G",
        ));
    }
    if !bytes.is_multiple_of(SECTOR_BYTES) {
        let below = bytes - bytes % SECTOR_BYTES;
        let near =
            if below == 0 { SECTOR_BYTES } else { below.saturating_add(SECTOR_BYTES) & !511 };
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            format!("size {bytes} is not a multiple of {SECTOR_BYTES} bytes, the sector of a disk"),
            format!("the next multiple is {near}"),
        ));
    }
    if i64::try_from(bytes).is_err() {
        return Err(BadValue::new(
            ConfigErrorKind::OutOfRange,
            format!("size {size} exceeds the largest file offset"),
            "choose a size below 8388608T",
        ));
    }
    Ok(size)
}

/// `name` if it is a valid name of a volume.
pub(super) fn volume_name(name: &str) -> Result<String, BadValue> {
    let bad = |kind, message: String, remedy: &str| Err(BadValue::new(kind, message, remedy));
    if name.is_empty() {
        return bad(
            ConfigErrorKind::OutOfRange,
            "a volume has an empty name".to_owned(),
            "give it a name, and set `default = true` to make it the default export",
        );
    }
    if name.len() > MAX_NAME_BYTES {
        return bad(
            ConfigErrorKind::OutOfRange,
            format!("a volume's name has {} bytes", name.len()),
            "choose a name of at most 255 bytes",
        );
    }
    if name.chars().any(char::is_control) {
        return bad(
            ConfigErrorKind::InvalidValue,
            format!("the volume name `{}` has control characters", shorten(name)),
            "remove them",
        );
    }
    if let Some(hidden) = name.chars().find(|c| is_hidden(*c)) {
        return bad(
            ConfigErrorKind::InvalidValue,
            format!(
                "the volume name `{}` has the character {}, which is invisible or changes the direction of text",
                shorten(name).escape_debug(),
                hidden.escape_unicode()
            ),
            "remove it",
        );
    }
    Ok(name.to_owned())
}

/// Whether terminals do not show the character, or show others in another order: names that differ would look alike.
/// General category Cf of Unicode as far as it matters, and the separators of lines and paragraphs.
fn is_hidden(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    )
}

/// A whole number on the command line; in the file TOML parses it.
pub(super) fn number(text: &str) -> Result<i64, BadValue> {
    text.parse().map_err(|_| {
        let message = format!("`{}` is no whole number", shorten(text));
        BadValue::new(ConfigErrorKind::InvalidValue, message, "write digits only, such as 1024")
    })
}

/// A boolean on the command line; in the file TOML parses it.
pub(super) fn boolean(text: &str) -> Result<bool, BadValue> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => {
            let remedy = match text.to_ascii_lowercase().as_str() {
                "yes" | "on" | "1" | "y" | "true" => "write `true`",
                "no" | "off" | "0" | "n" | "false" => "write `false`",
                _ => "write `true` or `false`",
            };
            let message = format!("`{}` is neither true nor false", shorten(text));
            Err(BadValue::new(ConfigErrorKind::InvalidValue, message, remedy))
        }
    }
}

/// An entry of `allow`. Looks names of users and groups up.
pub(super) fn access_entry(text: &str) -> Result<AccessEntry, BadValue> {
    AccessEntry::parse(text).map_err(|error| bad_entry(text, &error))
}

/// An entry of `allow` in a file: a user or group that the host does not have now is no reason not to start.
pub(super) fn access_entry_in_file(text: &str) -> Result<AccessEntry, BadValue> {
    AccessEntry::parse_known_later(text).map_err(|error| bad_entry(text, &error))
}

fn bad_entry(text: &str, error: &AccessError) -> BadValue {
    let message = format!("`{}`: {error}", shorten(text));
    BadValue::new(ConfigErrorKind::InvalidValue, message, error.remedy())
}

/// The entries of `allow`.
pub(super) fn access_list(entries: Vec<AccessEntry>) -> Result<AccessList, BadValue> {
    AccessList::new(entries).map_err(|error| {
        BadValue::new(ConfigErrorKind::OutOfRange, error.to_string(), error.remedy())
    })
}

mod connect_to;
mod key_file;
mod key_source;
mod nbd;
mod rbd;
#[cfg(test)]
mod tests;
mod uri;
mod zone;
