//! The configuration file: parses TOML into a layer, each value with its line.
//!
//! The text is parsed once into a table with spans. Keys are compared with [`super::keys`] first, so
//! that a misspelt key gets a suggestion even if there are other mistakes; then serde checks types,
//! and texts are parsed into values. A test checks that serde accepts the keys of the table and no
//! others.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ebb_access::AccessList;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{BadValue, ConfigError, ConfigErrorKind, Located, ValueLocation};
use super::keys::{self, BDI, LIMIT_GROUP, NBD, Section, TOP, VOLUME};
use super::layer::{BdiLayer, Layer, LimitGroupLayer, LimitsLayer, VolumeLayer};
use super::lines::Lines;
use super::repairs::Repairs;
use super::shorten::shorten;
use super::value::{self, Choice};
use super::{MAX_FILE_BYTES, value::volume_name};
use crate::{Percent, Size};

/// The top of the file, as serde reads it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTop {
    listen: Option<Vec<Spanned<String>>>,
    workers: Option<Spanned<i64>>,
    log: Option<Spanned<String>>,
    log_format: Option<Spanned<String>>,
    control: Option<Spanned<String>>,
    state: Option<Spanned<String>>,
    web: Option<Spanned<String>>,
    web_names: Option<Vec<Spanned<String>>>,
    web_tokens: Option<Spanned<String>>,
    web_tls_certificates: Option<Spanned<String>>,
    xen: Option<Spanned<bool>>,
    vhost_user: Option<Spanned<String>>,
    max_buffer_pages: Option<Spanned<i64>>,
    buffer_squeeze_duration_ms: Option<Spanned<i64>>,
    idle_memory: Option<Spanned<String>>,
    sandbox: Option<Spanned<String>>,
    open_paths: Option<Vec<Spanned<String>>>,
    connect_to: Option<Vec<Spanned<String>>>,
    cache_max: Option<Spanned<Size>>,
    cache_min: Option<Spanned<Size>>,
    nbd: Option<FileNbd>,
    bdi: Option<BTreeMap<Spanned<String>, FileBdi>>,
    limit_group: Option<BTreeMap<Spanned<String>, FileLimitGroup>>,
    volume: Option<BTreeMap<Spanned<String>, FileVolume>>,
}

/// A table `[bdi.NAME]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileBdi {
    min_ratio: Option<Spanned<Percent>>,
    max_ratio: Option<Spanned<Percent>>,
    max_bytes: Option<Spanned<Size>>,
    strict_limit: Option<Spanned<bool>>,
}

/// The table `[nbd]`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileNbd {
    max_clients: Option<Spanned<i64>>,
    max_request: Option<Spanned<Size>>,
    connection_memory: Option<Spanned<Size>>,
    tls: Option<Spanned<String>>,
    tls_certificates: Option<Spanned<String>>,
    tls_psk: Option<Spanned<String>>,
    tls_verify_peer: Option<Spanned<bool>>,
}

/// A table `[volume.NAME]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileVolume {
    store: Option<Spanned<String>>,
    base: Option<Spanned<String>>,
    size: Option<Spanned<Size>>,
    create: Option<Spanned<bool>>,
    encryption: Option<Spanned<String>>,
    read_only: Option<Spanned<bool>>,
    shared: Option<Spanned<bool>>,
    allow: Option<Spanned<Vec<Spanned<String>>>>,
    direct: Option<Spanned<String>>,
    cache: Option<Spanned<String>>,
    bdi: Option<Spanned<String>>,
    default: Option<Spanned<bool>>,
    vhost_user: Option<Spanned<String>>,
    max_buffer_pages: Option<Spanned<i64>>,
    buffer_squeeze_duration_ms: Option<Spanned<i64>>,
    limit_iops: Option<Spanned<i64>>,
    limit_read_iops: Option<Spanned<i64>>,
    limit_write_iops: Option<Spanned<i64>>,
    limit_bandwidth: Option<Spanned<Size>>,
    limit_read_bandwidth: Option<Spanned<Size>>,
    limit_write_bandwidth: Option<Spanned<Size>>,
    limit_burst_ms: Option<Spanned<i64>>,
    limit_group: Option<Spanned<String>>,
}

/// A table `[limit_group.NAME]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLimitGroup {
    limit_iops: Option<Spanned<i64>>,
    limit_read_iops: Option<Spanned<i64>>,
    limit_write_iops: Option<Spanned<i64>>,
    limit_bandwidth: Option<Spanned<Size>>,
    limit_read_bandwidth: Option<Spanned<Size>>,
    limit_write_bandwidth: Option<Spanned<Size>>,
    limit_burst_ms: Option<Spanned<i64>>,
}

/// The limits of a table that has the fields of [`LimitsLayer`].
macro_rules! limits {
    ($source:expr, $table:expr, $key:expr) => {
        LimitsLayer {
            iops: $table.limit_iops.map(|v| $source.located(&$key("limit_iops"), v)),
            read_iops: $table.limit_read_iops.map(|v| $source.located(&$key("limit_read_iops"), v)),
            write_iops: $table
                .limit_write_iops
                .map(|v| $source.located(&$key("limit_write_iops"), v)),
            bandwidth: $table.limit_bandwidth.map(|v| $source.located(&$key("limit_bandwidth"), v)),
            read_bandwidth: $table
                .limit_read_bandwidth
                .map(|v| $source.located(&$key("limit_read_bandwidth"), v)),
            write_bandwidth: $table
                .limit_write_bandwidth
                .map(|v| $source.located(&$key("limit_write_bandwidth"), v)),
            burst_ms: $table.limit_burst_ms.map(|v| $source.located(&$key("limit_burst_ms"), v)),
        }
    };
}

/// The layer of the file at `path`.
pub(super) fn read(path: &Path) -> Result<Layer, ConfigError> {
    parse(&read_text(path)?, path)
}

/// The text of the file at `path`.
pub(super) fn read_text(path: &Path) -> Result<String, ConfigError> {
    String::from_utf8(read_bytes(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let mut fault = whole_file(path, ConfigErrorKind::Syntax, "the file is not UTF-8 text");
        fault.line = Some(Lines::new(error.as_bytes()).number(at));
        fault.remedy = "save it as UTF-8".to_owned();
        fault
    })
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, ConfigError> {
    let failed = |error: io::Error| {
        let message = format!("cannot read the configuration file: {error}");
        let mut fault = whole_file(path, ConfigErrorKind::Read, &message);
        fault.remedy = match error.kind() {
            io::ErrorKind::NotFound => "check the path".to_owned(),
            io::ErrorKind::PermissionDenied => {
                "let the daemon's user read it, or start the daemon as another user".to_owned()
            }
            _ => "give a file that can be read".to_owned(),
        };
        fault.source = Some(error);
        fault
    };
    let mut bytes = Vec::new();
    // One byte above the limit shows that a file is too large; reading a device might never end.
    let mut file = File::open(path).map_err(failed)?.take(MAX_FILE_BYTES + 1);
    let length = file.read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(length).is_ok_and(|length| length > MAX_FILE_BYTES) {
        let message = format!("the file is larger than {}", Size::new(MAX_FILE_BYTES));
        let mut fault = whole_file(path, ConfigErrorKind::TooLarge, &message);
        fault.remedy = "give a configuration file".to_owned();
        return Err(fault);
    }
    Ok(bytes)
}

fn whole_file(path: &Path, kind: ConfigErrorKind, message: &str) -> ConfigError {
    ConfigError {
        kind,
        file: Some(path.to_path_buf()),
        line: None,
        key: None,
        message: message.to_owned(),
        remedy: String::new(),
        source: None,
    }
}

/// The layer of a file with this `text`; `path` stands for the file in errors.
pub(super) fn parse(text: &str, path: &Path) -> Result<Layer, ConfigError> {
    parse_repaired(text, path, &Repairs::default())
}

/// As [`parse`], with these repairs of the table.
pub(super) fn parse_repaired(
    text: &str,
    path: &Path,
    repairs: &Repairs,
) -> Result<Layer, ConfigError> {
    let source = Source { text, lines: Lines::new(text.as_bytes()), path: Rc::from(path) };
    let mut table = DeTable::parse(text).map_err(|error| source.syntax_error(error))?;
    repairs.apply(table.get_mut(), &source.lines);
    source.check_keys(table.get_ref())?;
    let top = FileTop::deserialize(toml::Deserializer::from(table))
        .map_err(|error| source.type_error(&error))?;
    source.layer(top)
}

/// What a file of the state directory says of a volume.
pub(super) enum StateLayer {
    /// Everything.
    Whole(Box<VolumeLayer>),
    /// What a volume of the configuration has instead of its own settings.
    Overrides {
        size: Option<Located<Size>>,
        /// What the size replaces, as it was written.
        size_replaces: Option<String>,
        limits: Box<LimitsLayer>,
        limit_group: Option<Located<String>>,
    },
}

/// The layer of a file of the state directory about the volume `name`: the keys of a volume, at the top of the file.
pub(super) fn parse_state(name: &str, text: &str, path: &Path) -> Result<StateLayer, ConfigError> {
    let source = Source { text, lines: Lines::new(text.as_bytes()), path: Rc::from(path) };
    let mut table = DeTable::parse(text).map_err(|error| source.syntax_error(error))?;
    // Not a key of volumes: only the daemon writes it, beside a size.
    let replaces = match table.get_ref().contains_key("store") {
        true => None,
        false => table.get_mut().remove("size_replaces"),
    };
    let size_replaces = replaces.and_then(|text| text.get_ref().as_str().map(str::to_owned));
    source.check_section(&VOLUME, VOLUME.names(), "", table.get_ref())?;
    let keys: Vec<_> = table.get_ref().keys().map(|key| key.get_ref().to_string()).collect();
    let volume = FileVolume::deserialize(toml::Deserializer::from(table))
        .map_err(|error| source.type_error(&error))?;
    let place = ValueLocation { file: Some(Rc::clone(&source.path)), line: None, key: "".into() };
    match volume {
        overrides @ FileVolume { store: None, .. } => {
            if keys.is_empty() {
                let message = "the file has no settings: it was cut off";
                let remedy = "restore it, or run `ebbd volume remove`";
                let bad = BadValue::new(ConfigErrorKind::Missing, message, remedy);
                return Err(ConfigError { key: None, ..place.error(bad) });
            }
            if keys.iter().any(|key| key != "size" && !key.starts_with("limit_")) {
                let message = "the volume has no `store`";
                let remedy = "add it; without it only `size` and limits are allowed, for a volume of the configuration \
                              file";
                return Err(place.error(BadValue::new(ConfigErrorKind::Missing, message, remedy)));
            }
            let key = str::to_owned;
            Ok(StateLayer::Overrides {
                size: overrides.size.map(|size| source.located("size", size)),
                size_replaces,
                limits: Box::new(limits!(source, overrides, key)),
                limit_group: source.convert("limit_group", overrides.limit_group, volume_name)?,
            })
        }
        whole => source
            .volume(name.to_owned(), place, "", whole)
            .map(|volume| StateLayer::Whole(Box::new(volume))),
    }
}

/// The text of a file, which converts spans to locations.
struct Source<'a> {
    text: &'a str,
    lines: Lines,
    path: Rc<Path>,
}

impl Source<'_> {
    fn place(&self, key: impl Into<Box<str>>, span: &Range<usize>) -> ValueLocation {
        let line = self.lines.number(span.start);
        ValueLocation { file: Some(Rc::clone(&self.path)), line: Some(line), key: key.into() }
    }

    fn located<T>(&self, key: &str, value: Spanned<T>) -> Located<T> {
        Located { place: self.place(key, &value.span()), value: value.into_inner() }
    }

    /// Converts a text value to its type.
    fn convert<T>(
        &self,
        key: &str,
        text: Option<Spanned<String>>,
        parse: impl FnOnce(&str) -> Result<T, BadValue>,
    ) -> Result<Option<Located<T>>, ConfigError> {
        text.map(|text| {
            let text = self.located(key, text);
            let value = parse(&text.value).map_err(|bad| text.place.error(bad))?;
            Ok(Located { value, place: text.place })
        })
        .transpose()
    }

    /// The value of `allow`; a mistake is in the line of its entry.
    fn allow(
        &self,
        key: &str,
        list: Spanned<Vec<Spanned<String>>>,
    ) -> Result<Located<AccessList>, ConfigError> {
        let Located { value, place } = self.located(key, list);
        let entries = value.into_iter().map(|text| {
            let text = self.located(key, text);
            value::access_entry_in_file(&text.value).map_err(|bad| text.place.error(bad))
        });
        let value = value::access_list(entries.collect::<Result<_, _>>()?);
        Ok(Located { value: value.map_err(|bad| place.error(bad))?, place })
    }

    fn syntax_error(&self, error: toml::de::Error) -> ConfigError {
        // The parser's first error need not be the earliest one: after an unterminated string it may
        // report a key without a value. The earliest error is the useful one. A text may have an
        // error in every other byte, so all errors are collected for texts of usual length only.
        let start = |error: &toml::de::Error| error.span().map_or(usize::MAX, |span| span.start);
        let mut all = vec![error];
        if self.text.len() <= RECOVER_BYTES {
            all.extend(DeTable::parse_recoverable(self.text).1);
        }
        let first = all.iter().min_by_key(|error| start(error));
        let message = first.map(|error| one_line(error.message())).unwrap_or_default();
        let message = format!("the file is not TOML: {message}");
        let mut fault = whole_file(&self.path, ConfigErrorKind::Syntax, &message);
        fault.line =
            first.and_then(toml::de::Error::span).map(|span| self.lines.number(span.start));
        fault.remedy = "see ebbd.toml(5) for an example of each key".to_owned();
        fault
    }

    /// The error for a value that serde refused: a wrong type, or an invalid size.
    fn type_error(&self, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or_default();
        // Serde has consumed the table; it is parsed again for the error only.
        let table = DeTable::parse(self.text).map(Spanned::into_inner).unwrap_or_default();
        let key = key_at(&table, span.start).unwrap_or_default();
        let bad = BadValue::new(
            ConfigErrorKind::InvalidValue,
            one_line(error.message()),
            keys::expected(&key),
        );
        let mut fault = self.place(key.join("."), &span).error(bad);
        fault.key = fault.key.filter(|key| !key.is_empty());
        fault
    }

    fn check_keys(&self, top: &DeTable<'_>) -> Result<(), ConfigError> {
        self.check_section(&TOP, keys::top_names(), "", top)?;
        if let Some(nbd) = subtable(top, "nbd") {
            self.check_section(&NBD, NBD.names(), "nbd.", nbd)?;
        }
        for (kind, section) in [("bdi", &BDI), ("limit_group", &LIMIT_GROUP), ("volume", &VOLUME)] {
            for (name, table) in subtable(top, kind).into_iter().flatten() {
                if let DeValue::Table(table) = table.get_ref() {
                    let prefix = format!("{kind}.{}.", shorten(name.get_ref()));
                    self.check_section(section, section.names(), &prefix, table)?;
                }
            }
        }
        Ok(())
    }

    fn check_section(
        &self,
        section: &Section,
        mut known: impl Iterator<Item = &'static str> + Clone,
        prefix: &str,
        table: &DeTable<'_>,
    ) -> Result<(), ConfigError> {
        // The table is sorted by key; the first mistake in the file is the more useful one.
        let unknown = table
            .iter()
            .filter(|(key, _)| !known.clone().any(|name| name == key.get_ref().as_ref()))
            .min_by_key(|(key, _)| key.span().start);
        let Some((key, value)) = unknown else { return Ok(()) };
        debug_assert!(known.all(|name| name != key.get_ref().as_ref()));
        // The key of a table with a header has the span of its part of the header.
        let name = shorten(key.get_ref());
        let what = if matches!(value.get_ref(), DeValue::Table(_)) { "table" } else { "key" };
        let bad = BadValue::new(
            ConfigErrorKind::UnknownKey,
            format!("there is no such {what}"),
            keys::unknown_key_remedy(section, key.get_ref()),
        );
        Err(self.place(format!("{prefix}{name}"), &key.span()).error(bad))
    }

    fn layer(&self, top: FileTop) -> Result<Layer, ConfigError> {
        let nbd = top.nbd.unwrap_or_default();
        let path = |text: &str| value::path(text);
        let mut layer = Layer {
            workers: top.workers.map(|n| self.located("workers", n)),
            log: self.convert("log", top.log, Choice::parse)?,
            log_format: self.convert("log_format", top.log_format, Choice::parse)?,
            control: self.convert("control", top.control, value::control_path)?,
            state: self.convert("state", top.state, path)?,
            web: self.convert("web", top.web, value::web_address)?,
            web_tokens: self.convert("web_tokens", top.web_tokens, path)?,
            web_tls_certificates: self.convert(
                "web_tls_certificates",
                top.web_tls_certificates,
                path,
            )?,
            xen: top.xen.map(|on| self.located("xen", on)),
            vhost_user: self.convert("vhost_user", top.vhost_user, path)?,
            max_buffer_pages: top.max_buffer_pages.map(|n| self.located("max_buffer_pages", n)),
            buffer_squeeze_duration_ms: top
                .buffer_squeeze_duration_ms
                .map(|n| self.located("buffer_squeeze_duration_ms", n)),
            idle_memory: self.convert("idle_memory", top.idle_memory, Choice::parse)?,
            sandbox: self.convert("sandbox", top.sandbox, Choice::parse)?,
            cache_max: top.cache_max.map(|size| self.located("cache_max", size)),
            cache_min: top.cache_min.map(|size| self.located("cache_min", size)),
            max_clients: nbd.max_clients.map(|n| self.located("nbd.max_clients", n)),
            max_request: nbd.max_request.map(|n| self.located("nbd.max_request", n)),
            connection_memory: nbd
                .connection_memory
                .map(|n| self.located("nbd.connection_memory", n)),
            tls: self.convert("nbd.tls", nbd.tls, Choice::parse)?,
            tls_certificates: self.convert("nbd.tls_certificates", nbd.tls_certificates, path)?,
            tls_psk: self.convert::<PathBuf>("nbd.tls_psk", nbd.tls_psk, path)?,
            tls_verify_peer: nbd.tls_verify_peer.map(|b| self.located("nbd.tls_verify_peer", b)),
            ..Layer::default()
        };
        for name in top.web_names.into_iter().flatten() {
            layer.web_names.extend(self.convert("web_names", Some(name), value::web_name)?);
        }
        if let Some(paths) = top.open_paths {
            let kept = layer.open_paths.insert(Vec::new());
            for path in paths {
                kept.extend(self.convert("open_paths", Some(path), value::open_path)?);
            }
        }
        if let Some(servers) = top.connect_to {
            let kept = layer.connect_to.insert(Vec::new());
            for server in servers {
                kept.extend(self.convert("connect_to", Some(server), str::parse)?);
            }
        }
        for address in top.listen.into_iter().flatten() {
            layer.listen.extend(self.convert("listen", Some(address), str::parse)?);
        }
        for (name, bdi) in top.bdi.into_iter().flatten() {
            let table = format!("bdi.{}", shorten(name.get_ref()));
            let place = self.place(table.as_str(), &name.span());
            let key = |key: &str| format!("{table}.{key}");
            layer.bdis.push(BdiLayer {
                name: volume_name(name.get_ref()).map_err(|bad| place.error(bad))?,
                min_ratio: bdi.min_ratio.map(|part| self.located(&key("min_ratio"), part)),
                max_ratio: bdi.max_ratio.map(|part| self.located(&key("max_ratio"), part)),
                max_bytes: bdi.max_bytes.map(|size| self.located(&key("max_bytes"), size)),
                strict_limit: bdi.strict_limit.map(|on| self.located(&key("strict_limit"), on)),
            });
        }
        for (name, group) in top.limit_group.into_iter().flatten() {
            let table = format!("limit_group.{}", shorten(name.get_ref()));
            let place = self.place(table.as_str(), &name.span());
            let key = |key: &str| format!("{table}.{key}");
            layer.limit_groups.push(LimitGroupLayer {
                name: group_name(name.get_ref()).map_err(|bad| place.error(bad))?,
                limits: limits!(self, group, key),
            });
        }
        for (name, volume) in top.volume.into_iter().flatten() {
            let table = format!("volume.{}", shorten(name.get_ref()));
            let place = self.place(table.as_str(), &name.span());
            let name = volume_name(name.get_ref()).map_err(|bad| place.error(bad))?;
            layer.volumes.push(self.volume(name, place, &format!("{table}."), volume)?);
        }
        Ok(layer)
    }

    /// The volume called `name`; its keys have this `prefix` in errors.
    fn volume(
        &self,
        name: String,
        place: ValueLocation,
        prefix: &str,
        volume: FileVolume,
    ) -> Result<VolumeLayer, ConfigError> {
        let key = |key: &str| format!("{prefix}{key}");
        let store = self.convert(&key("store"), volume.store, str::parse)?.ok_or_else(|| {
            place.error(BadValue::new(
                ConfigErrorKind::Missing,
                "the volume has no `store`",
                keys::expected(&["volume".into(), name.clone(), "store".into()]),
            ))
        })?;
        Ok(VolumeLayer {
            store,
            base: self.convert(&key("base"), volume.base, volume_name)?,
            size: volume.size.map(|size| self.located(&key("size"), size)),
            create: volume.create.map(|create| self.located(&key("create"), create)),
            encryption: self.convert(&key("encryption"), volume.encryption, str::parse)?,
            read_only: volume.read_only.map(|on| self.located(&key("read_only"), on)),
            shared: volume.shared.map(|on| self.located(&key("shared"), on)),
            allow: volume.allow.map(|list| self.allow(&key("allow"), list)).transpose()?,
            direct: self.convert(&key("direct"), volume.direct, Choice::parse)?,
            cache: self.convert(&key("cache"), volume.cache, Choice::parse)?,
            bdi: self.convert(&key("bdi"), volume.bdi, volume_name)?,
            default: volume.default.map(|default| self.located(&key("default"), default)),
            vhost_user: self.convert(&key("vhost_user"), volume.vhost_user, str::parse)?,
            max_buffer_pages: volume
                .max_buffer_pages
                .map(|n| self.located(&key("max_buffer_pages"), n)),
            buffer_squeeze_duration_ms: volume
                .buffer_squeeze_duration_ms
                .map(|n| self.located(&key("buffer_squeeze_duration_ms"), n)),
            limit_group: self.convert(&key("limit_group"), volume.limit_group, volume_name)?,
            limits: limits!(self, volume, key),
            name,
            place,
        })
    }
}

/// The name of a group of limits: as that of a volume, but not the word for no group.
fn group_name(name: &str) -> Result<String, BadValue> {
    if name == "none" {
        return Err(BadValue::new(
            ConfigErrorKind::InvalidValue,
            "`none` stands for no group",
            "choose another name",
        ));
    }
    volume_name(name)
}

fn subtable<'t, 'i>(table: &'t DeTable<'i>, name: &str) -> Option<&'t DeTable<'i>> {
    match table.get(name)?.get_ref() {
        DeValue::Table(table) => Some(table),
        _ => None,
    }
}

/// The path of the key whose own text or value covers the byte at `offset`.
///
/// The parser bounds how deep tables nest, and with them this recursion.
fn key_at(table: &DeTable<'_>, offset: usize) -> Option<Vec<String>> {
    for (key, value) in table {
        let name = key.get_ref().to_string();
        if let DeValue::Table(inner) = value.get_ref()
            && let Some(mut path) = key_at(inner, offset)
        {
            path.insert(0, name);
            return Some(path);
        }
        if key.span().contains(&offset) || value.span().contains(&offset) {
            return Some(vec![name]);
        }
    }
    None
}

/// The longest text, in bytes, of which all syntax errors are collected to find the earliest.
const RECOVER_BYTES: usize = 64 << 10;

/// The longest message of the TOML parser to repeat, in characters; it may contain text of the file.
const MESSAGE_CHARS: usize = 300;

/// `message` as one line of bounded length.
fn one_line(message: &str) -> String {
    let flat: String =
        message.chars().take(MESSAGE_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    flat.trim().to_owned()
}

#[cfg(test)]
mod tests;
