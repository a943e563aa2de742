//! The values of a configuration: addresses, stores and choices, as text and as types.
//!
//! Each parses from the text people write and displays as that text again. What is refused here
//! is refused for its form alone; whether settings fit together is decided in [`super::resolve`].

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

use ebb_store::NbdOptions;

use super::error::{BadValue, ErrorKind, shorten, suggest};
use crate::size::Size;

/// The longest path of a unix socket in bytes: `sun_path` of unix(7) less its terminating zero.
pub const MAX_UNIX_PATH_BYTES: usize = 107;

/// The longest host name in bytes (RFC 1035, section 2.3.4).
const MAX_HOST_BYTES: usize = 253;

/// The longest volume name in bytes. The NBD protocol allows 4096; file names and logs do not.
pub const MAX_NAME_BYTES: usize = 255;

/// The unit every volume's size is a multiple of, in bytes.
pub const SECTOR_BYTES: u64 = 512;

/// How a store begins.
pub(super) const STORES: [&str; 7] =
    ["file:", "memory:", "null:", "nbd:", "nbds:", "nbd+unix:", "nbds+unix:"];

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Listen {
    /// A unix stream socket at a path of 1 to [`MAX_UNIX_PATH_BYTES`] bytes.
    Unix(PathBuf),
    /// A TCP socket at `HOST:PORT`, in one normal form: the host in lower case or an IPv6
    /// address in brackets, the port 0 to 65535 without leading zeroes.
    Tcp(String),
}

/// Where the bytes of a volume live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUri {
    /// A regular file or a block device.
    File(PathBuf),
    /// Memory of this size: a multiple of 512, 512 to 2^63 - 512.
    Memory(Size),
    /// Reads as zeroes, forgets writes; sizes as for `Memory`.
    Null(Size),
    /// An export of an NBD server. Read-only is the volume's to say.
    Nbd(Box<NbdOptions>),
}

/// A word out of a fixed set.
pub trait Choice: Copy + PartialEq + 'static {
    /// What is chosen, for messages.
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

    /// The choice for a word, or an error that suggests one.
    fn parse(text: &str) -> Result<Self, BadValue> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or_else(
            || {
                BadValue::new(
                    ErrorKind::UnknownChoice,
                    format!("`{}` is no {}", shorten(text), Self::WHAT),
                    suggest(text, Self::names(), "the values are"),
                )
            },
        )
    }
}

/// Whether files are opened with `O_DIRECT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where it works.
    #[default]
    Auto,
    /// Always; opening fails where it does not work.
    On,
    /// Never.
    Off,
}

/// What the cache does for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Nothing: each request goes to the store.
    None,
    /// It keeps what was read and written; a write is acknowledged when the store has it.
    Writethrough,
    /// A write is acknowledged from memory, and reaches the store later; a flush waits for that.
    Writeback,
}

/// Whether connections are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// Never.
    #[default]
    Off,
    /// If the client asks.
    On,
    /// Always; other clients are turned away.
    Require,
}

/// What becomes of I/O memory that no request uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleMemory {
    /// It is lent to the kernel, and returned under memory pressure.
    #[default]
    Lend,
    /// It is kept until memory pressure, then returned.
    Drop,
    /// It is kept, whatever the pressure.
    Keep,
    /// It is returned as soon as requests are done.
    None,
}

/// What goes to the log, each level with all before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// What the daemon could not do.
    Error,
    /// What an operator should look at.
    Warn,
    /// What the daemon does: start, stop, reload, connections.
    #[default]
    Info,
    /// Why it does so.
    Debug,
}

impl Choice for Direct {
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

impl Choice for Tls {
    const WHAT: &'static str = "mode of TLS";
    const ALL: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("on", Self::On), ("require", Self::Require)];
}

impl Choice for IdleMemory {
    const WHAT: &'static str = "way to treat idle memory";
    const ALL: &'static [(&'static str, Self)] =
        &[("lend", Self::Lend), ("drop", Self::Drop), ("keep", Self::Keep), ("none", Self::None)];
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
display_choice!(Direct, CacheMode, Tls, IdleMemory, LogLevel);

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
                Err(BadValue::new(ErrorKind::InvalidValue, message, remedy))
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

fn unix_path(text: &str) -> Result<PathBuf, BadValue> {
    if text.len() > MAX_UNIX_PATH_BYTES {
        return Err(BadValue::new(
            ErrorKind::OutOfRange,
            format!("the socket path has {} bytes, more than the system allows", text.len()),
            format!("choose a path of at most {MAX_UNIX_PATH_BYTES} bytes"),
        ));
    }
    if text.starts_with('@') {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            format!("`{}` is an abstract socket, which has no access rights", shorten(text)),
            "write a path: unix:/path/to/socket",
        ));
    }
    if text.ends_with('/') {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            format!("socket path `{}` names a directory", shorten(text)),
            format!("add a file name: unix:{}nbd.sock", shorten(text)),
        ));
    }
    path(text)
}

/// A path as far as its text can tell: not empty, no zero bytes.
pub(super) fn path(text: &str) -> Result<PathBuf, BadValue> {
    if text.is_empty() {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            "the path is empty",
            "write the whole path, such as /run/ebbd/nbd.sock or /var/lib/ebbd/disk.img",
        ));
    }
    if text.contains('\0') {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            format!("path `{}` has a zero byte in it", shorten(text)),
            "no file name can have one: take it out",
        ));
    }
    Ok(PathBuf::from(text))
}

/// The path of the control socket: as that of any unix socket, and `unix:` may be left out.
pub(crate) fn control_path(text: &str) -> Result<PathBuf, BadValue> {
    if text.starts_with("tcp:") {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
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
            ErrorKind::InvalidValue,
            "the page cannot be at a unix socket, which browsers do not know",
            "write tcp:127.0.0.1:9477",
        ));
    }
    tcp_address(text.strip_prefix("tcp:").unwrap_or(text))
}

/// A further name of the page: as in a URL, without scheme and port.
pub(crate) fn web_name(text: &str) -> Result<String, BadValue> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if text.is_empty() || text.len() > 253 || !text.bytes().all(fits) {
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            format!("`{}` is no name of a machine", shorten(text)),
            "write the name as in the URL, without http:// and without a port",
        ));
    }
    Ok(text.to_owned())
}

fn tcp_address(text: &str) -> Result<String, BadValue> {
    let bad = |message: &str, remedy: &str| {
        BadValue::new(
            ErrorKind::InvalidValue,
            format!("TCP address `{}` {message}", shorten(text)),
            remedy,
        )
    };
    let no_port = || bad("has no port", "add the port; that of NBD is 10809: tcp:127.0.0.1:10809");
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest
            .split_once(']')
            .ok_or_else(|| bad("has no closing bracket", "write tcp:[::1]:10809"))?;
        let ip: Ipv6Addr = host.parse().map_err(|_| {
            bad("has no IPv6 address between its brackets", "write tcp:[::1]:10809")
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
                "has no proper host",
                "write an IP address, or a name of at most 253 letters, digits, dots and hyphens",
            ));
        }
        (host.to_ascii_lowercase(), port)
    };
    // `u16::from_str` also takes a plus sign, which no other tool would understand.
    let port = Some(port)
        .filter(|port| port.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|port| port.parse::<u16>().ok())
        .ok_or_else(|| bad("has no proper port", "the port is a number from 0 to 65535"))?;
    Ok(format!("{host}:{port}"))
}

impl FromStr for StoreUri {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.split_once(':') {
            Some(("file", rest)) => path(rest).map(Self::File),
            Some(("memory", size)) => volume_size(size.parse()?).map(Self::Memory),
            Some(("null", size)) => volume_size(size.parse()?).map(Self::Null),
            given => {
                let scheme = given.map_or(text, |(scheme, _)| scheme);
                if let (Some((_, rest)), Some((_, tls, unix))) =
                    (given, nbd::SCHEMES.iter().find(|(name, ..)| *name == scheme))
                {
                    return nbd::parse((*tls, *unix), rest).map(|o| Self::Nbd(Box::new(o)));
                }
                let remedy = if text.starts_with(['/', '.']) {
                    format!("write file:{}", shorten(text))
                } else {
                    suggest(scheme, STORES, "a store is one of")
                };
                let message = format!("`{}` is no store", shorten(text));
                Err(BadValue::new(ErrorKind::InvalidValue, message, remedy))
            }
        }
    }
}

impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Memory(size) => write!(f, "memory:{size}"),
            Self::Null(size) => write!(f, "null:{size}"),
            Self::Nbd(options) => f.write_str(&nbd::uri(options)),
        }
    }
}

/// `size` if a volume may have it: a multiple of 512 above 0 that a signed file offset can hold.
pub(super) fn volume_size(size: Size) -> Result<Size, BadValue> {
    let bytes = size.bytes();
    if bytes == 0 {
        return Err(BadValue::new(
            ErrorKind::OutOfRange,
            "a volume of no bytes is no disk",
            "give it a size, such as 1G",
        ));
    }
    if !bytes.is_multiple_of(SECTOR_BYTES) {
        let below = bytes - bytes % SECTOR_BYTES;
        let near =
            if below == 0 { SECTOR_BYTES } else { below.saturating_add(SECTOR_BYTES) & !511 };
        return Err(BadValue::new(
            ErrorKind::InvalidValue,
            format!("size {bytes} is no multiple of {SECTOR_BYTES} bytes, the sector of a disk"),
            format!("the next multiple is {near}"),
        ));
    }
    if i64::try_from(bytes).is_err() {
        return Err(BadValue::new(
            ErrorKind::OutOfRange,
            format!("size {size} is beyond the largest file offset"),
            "choose a size below 8388608T",
        ));
    }
    Ok(size)
}

/// `name` if a volume may be called so.
pub(super) fn volume_name(name: &str) -> Result<String, BadValue> {
    let bad = |kind, message: String, remedy: &str| Err(BadValue::new(kind, message, remedy));
    if name.is_empty() {
        return bad(
            ErrorKind::OutOfRange,
            "a volume has an empty name".to_owned(),
            "name it, and give it `default = true` if it shall answer to the empty name",
        );
    }
    if name.len() > MAX_NAME_BYTES {
        return bad(
            ErrorKind::OutOfRange,
            format!("a volume's name has {} bytes", name.len()),
            "choose a name of at most 255 bytes",
        );
    }
    if name.chars().any(char::is_control) {
        return bad(
            ErrorKind::InvalidValue,
            format!("the volume name `{}` has control characters", shorten(name)),
            "take them out",
        );
    }
    Ok(name.to_owned())
}

/// A whole number of the command line; in the file TOML has its own.
pub(super) fn number(text: &str) -> Result<i64, BadValue> {
    text.parse().map_err(|_| {
        let message = format!("`{}` is no whole number", shorten(text));
        BadValue::new(ErrorKind::InvalidValue, message, "write digits only, such as 1024")
    })
}

/// A truth value of the command line; in the file TOML has its own.
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
            Err(BadValue::new(ErrorKind::InvalidValue, message, remedy))
        }
    }
}

mod nbd;
#[cfg(test)]
mod tests;
