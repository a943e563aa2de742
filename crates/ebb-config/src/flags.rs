//! The command line as a layer, which overrides the file.
//!
//! A volume is written `NAME=STORE[,option=value]...`. The first `=` ends the name, commas
//! separate options, and a comma in a path is written twice, as in options of QEMU.

use std::path::PathBuf;

use super::error::{
    BadValue, ConfigError, ConfigErrorKind, Located, ValueLocation, shorten, suggest,
};
use super::keys::VOLUME;
use super::layer::{Layer, VolumeLayer};
use super::value::{self, Choice, IdleMemory, LogLevel, TlsSetting, volume_name};
use crate::Size;

/// The settings of the command line, and the number of inherited sockets. `None`, `false` and empty
/// mean that the file applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Volumes, each `NAME=STORE[,option=value]...`. One of the same name in the file is replaced.
    pub volumes: Vec<String>,
    /// Addresses, added to those of the file.
    pub listen: Vec<String>,
    /// Whether connections are encrypted.
    pub tls: Option<TlsSetting>,
    /// The directory of the certificates; replaces a `tls_psk` of the file, too.
    pub tls_certificates: Option<PathBuf>,
    /// The file of the pre-shared keys; replaces `tls_certificates` of the file, too.
    pub tls_psk: Option<PathBuf>,
    /// Whether clients must show a certificate.
    pub tls_verify_peer: bool,
    /// The maximum number of connections at a time; 1 to 65536 is allowed.
    pub max_clients: Option<i64>,
    /// The largest payload; 4K to 64M is allowed.
    pub max_request: Option<Size>,
    /// Request memory of a connection; `max_request` or more is allowed.
    pub connection_memory: Option<Size>,
    /// Worker threads; 1 to 64 is allowed.
    pub workers: Option<i64>,
    /// The log level.
    pub log: Option<LogLevel>,
    /// The path of the control socket, with or without `unix:` before it.
    pub control: Option<String>,
    /// The address of the page, with or without `tcp:` before it.
    pub web: Option<String>,
    /// `--web-names NAME`, repeatable.
    pub web_names: Vec<String>,
    /// Whether disks of Xen guests are served.
    pub xen: bool,
    /// Free pages that each queue keeps; 0 to 1048576 is allowed.
    pub max_buffer_pages: Option<i64>,
    /// Milliseconds of a squeeze; 0 to 60000 is allowed.
    pub buffer_squeeze_duration_ms: Option<i64>,
    /// What happens to idle I/O memory.
    pub idle_memory: Option<IdleMemory>,
    /// The maximum size of the cache; 0 or 1M to 1T is allowed.
    pub cache_max: Option<Size>,
    /// The size the cache keeps under memory pressure; at most `cache_max`.
    pub cache_min: Option<Size>,
    /// The number of listening sockets passed in by the service manager (`LISTEN_FDS`). If there
    /// are any, addresses are refused.
    pub inherited_sockets: usize,
}

fn located<T>(option: &str, value: Option<T>) -> Option<Located<T>> {
    value.map(|value| Located { value, place: ValueLocation::option(option) })
}

/// The layer of the command line.
pub(super) fn layer(overrides: &Overrides) -> Result<Layer, ConfigError> {
    let mut layer = Layer {
        workers: located("--workers", overrides.workers),
        log: located("--log", overrides.log),
        xen: located("--xen", overrides.xen.then_some(true)),
        max_buffer_pages: located("--max-buffer-pages", overrides.max_buffer_pages),
        buffer_squeeze_duration_ms: located(
            "--buffer-squeeze-duration-ms",
            overrides.buffer_squeeze_duration_ms,
        ),
        idle_memory: located("--idle-memory", overrides.idle_memory),
        cache_max: located("--cache-max", overrides.cache_max),
        cache_min: located("--cache-min", overrides.cache_min),
        max_clients: located("--max-clients", overrides.max_clients),
        max_request: located("--max-request", overrides.max_request),
        connection_memory: located("--connection-memory", overrides.connection_memory),
        tls: located("--tls", overrides.tls),
        tls_certificates: located("--tls-certificates", overrides.tls_certificates.clone()),
        tls_psk: located("--tls-psk", overrides.tls_psk.clone()),
        tls_verify_peer: located("--tls-verify-peer", overrides.tls_verify_peer.then_some(true)),
        ..Layer::default()
    };
    for path in [&layer.tls_certificates, &layer.tls_psk].into_iter().flatten() {
        if path.value.as_os_str().is_empty() {
            return Err(path.error(
                ConfigErrorKind::InvalidValue,
                "the path is empty",
                "write the whole path",
            ));
        }
    }
    if let Some(text) = &overrides.control {
        let place = ValueLocation::option("--control");
        let value = value::control_path(text).map_err(|bad| place.error(bad))?;
        layer.control = Some(Located { value, place });
    }
    if let Some(text) = &overrides.web {
        let place = ValueLocation::option("--web");
        let value = value::web_address(text).map_err(|bad| place.error(bad))?;
        layer.web = Some(Located { value, place });
    }
    for text in &overrides.web_names {
        let place = ValueLocation::option(format!("--web-names {}", shorten(text)));
        let value = value::web_name(text).map_err(|bad| place.error(bad))?;
        layer.web_names.push(Located { value, place });
    }
    for text in &overrides.listen {
        let place = ValueLocation::option(format!("--listen {}", shorten(text)));
        let value = text.parse().map_err(|bad| place.error(bad))?;
        layer.listen.push(Located { value, place });
    }
    for text in &overrides.volumes {
        layer.volumes.push(volume(text)?);
    }
    Ok(layer)
}

/// The remedy for an invalid volume.
const FORM: &str = "write --volume NAME=STORE[,option=value]..., such as disk=memory:1G";

fn volume(text: &str) -> Result<VolumeLayer, ConfigError> {
    let place = ValueLocation::option(format!("--volume {}", shorten(text)));
    let fail = |bad: BadValue| place.error(bad);
    let no_name = || BadValue::new(ConfigErrorKind::InvalidValue, "the volume has no name", FORM);
    let (name, rest) = text.split_once('=').ok_or_else(|| fail(no_name()))?;
    if value::STORES.iter().any(|scheme| name.starts_with(scheme)) {
        // The first `=` belongs to an option.
        return Err(fail(no_name()));
    }
    let name = volume_name(name).map_err(fail)?;
    let mut pieces = split_commas(rest).into_iter();
    let store: super::StoreUri = pieces.next().unwrap_or_default().parse().map_err(fail)?;
    let at = |option: &str| ValueLocation::option(format!("--volume {}: {option}", shorten(&name)));
    let mut volume = VolumeLayer {
        store: Located { value: store, place: place.clone() },
        size: None,
        create: None,
        read_only: None,
        shared: None,
        direct: None,
        cache: None,
        bdi: None,
        default: None,
        max_buffer_pages: None,
        buffer_squeeze_duration_ms: None,
        place: place.clone(),
        name: name.clone(),
    };
    for piece in pieces {
        let (option, text) = split_option(&piece).map_err(fail)?;
        let place = at(option);
        let fail = |bad: BadValue| place.error(bad);
        let fresh = match option {
            "size" => {
                let size = text.parse().map_err(|error: crate::SizeError| fail(error.into()));
                set(&mut volume.size, size?, &place)
            }
            "create" => set(&mut volume.create, value::boolean(text).map_err(fail)?, &place),
            "read-only" => set(&mut volume.read_only, value::boolean(text).map_err(fail)?, &place),
            "shared" => set(&mut volume.shared, value::boolean(text).map_err(fail)?, &place),
            "direct" => set(&mut volume.direct, Choice::parse(text).map_err(fail)?, &place),
            "cache" => set(&mut volume.cache, Choice::parse(text).map_err(fail)?, &place),
            "bdi" => set(&mut volume.bdi, value::volume_name(text).map_err(fail)?, &place),
            "default" => set(&mut volume.default, value::boolean(text).map_err(fail)?, &place),
            "max-buffer-pages" => {
                set(&mut volume.max_buffer_pages, value::number(text).map_err(fail)?, &place)
            }
            "buffer-squeeze-duration-ms" => {
                let number = value::number(text).map_err(fail)?;
                set(&mut volume.buffer_squeeze_duration_ms, number, &place)
            }
            _ => return Err(fail(unknown_option(option))),
        };
        if !fresh {
            return Err(fail(BadValue::new(
                ConfigErrorKind::Duplicate,
                "the option is given twice",
                "keep one of them",
            )));
        }
    }
    Ok(volume)
}

/// Stores `value` in `slot`; false if the slot had a value.
fn set<T>(slot: &mut Option<Located<T>>, value: T, place: &ValueLocation) -> bool {
    let fresh = slot.is_none();
    *slot = Some(Located { value, place: place.clone() });
    fresh
}

/// The names of the options a volume has on the command line.
fn option_names() -> Vec<String> {
    VOLUME.keys.iter().filter(|key| key.name != "store").map(|key| key.option_name()).collect()
}

fn unknown_option(option: &str) -> BadValue {
    let names = option_names();
    BadValue::new(
        ConfigErrorKind::UnknownKey,
        "a volume has no such option",
        suggest(option, names.iter().map(String::as_str), "the options are"),
    )
}

fn split_option(piece: &str) -> Result<(&str, &str), BadValue> {
    if let Some(pair) = piece.split_once('=') {
        return Ok(pair);
    }
    let message = format!("`{}` is not of the form option=value", shorten(piece));
    let remedy = match piece {
        "create" | "read-only" | "shared" | "default" => format!("write {piece}=true"),
        "read_only" => "write read-only=true".to_owned(),
        "" => "remove the comma that no option follows".to_owned(),
        _ => format!(
            "the options are {}; a comma in a path is written twice",
            option_names().join(", ")
        ),
    };
    Err(BadValue::new(ConfigErrorKind::InvalidValue, message, remedy))
}

/// `text` split at single commas; two commas in a row are one comma within a piece.
fn split_commas(text: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            pieces.push(String::new());
        } else if let Some(last) = pieces.last_mut() {
            last.push(c);
        }
    }
    pieces
}

#[cfg(test)]
mod tests;
