//! The options of `ebbd serve`, and the command line as a layer, which overrides the file.
//!
//! A volume is written `NAME=STORE[,option=value]...`. The first `=` ends the name, commas
//! separate options, and a comma in a path is written twice, as in options of QEMU.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use ebb_access::AccessList;

use super::error::{BadValue, ConfigError, ConfigErrorKind, Located, ValueLocation, suggest};
use super::keys::VOLUME;
use super::layer::{Layer, LimitsLayer, VolumeLayer};
use super::shorten::shorten;
use super::value::{
    self, Choice, IdleMemory, LogFormat, LogLevel, SandboxMode, TlsSetting, volume_name,
};
use crate::{Size, SizeError};

/// The options of `ebbd serve`, and the number of inherited sockets. `None`, `false` and empty mean that the file
/// applies. clap checks the form of a value, [`Config::load`](crate::Config::load) the range and the combination, as for
/// the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct ServeArgs {
    /// Read the configuration file FILE, in the form of ebbd.toml(5); SIGHUP reads it again
    /// [default: no file]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Serve a volume, such as disk=file:/srv/disk.img,size=1G,create=true.
    /// May be given several times [default: the volumes of the file]
    ///
    /// NAME is the export name; a comma in a path is written twice.
    /// STORE is one of:
    ///   file:PATH            a file or a block device
    ///   nbd://HOST/EXPORT    an export of another NBD server
    ///   qcow2:PATH           the disk in a qcow2 image, read-only
    ///   rbd:POOL/IMAGE       an image of a Ceph cluster; @SNAPSHOT is read-only
    ///   memory:SIZE          memory of the daemon
    ///   null:SIZE            nothing: reads are zeroes
    ///
    /// The options are the keys of a volume in ebbd.toml(5):
    ///   base=VOLUME, size=SIZE, create=BOOL, read-only=BOOL, shared=BOOL, default=BOOL
    ///   vhost-user=PATH, allow=ENTRY[,,ENTRY]... (psk:, cn:, uid:, gid:, net: or xen:)
    ///   encryption=key-file:PATH|credential:NAME|command:PROGRAM
    ///   direct=auto|on|off, cache=none|writethrough|writeback, bdi=NAME
    ///   max-buffer-pages=N, buffer-squeeze-duration-ms=N
    ///   limit-iops=N, limit-read-iops=N, limit-write-iops=N
    ///   limit-bandwidth=SIZE, limit-read-bandwidth=SIZE
    ///   limit-write-bandwidth=SIZE, limit-burst-ms=N, limit-group=NAME
    #[arg(long = "volume", value_name = "NAME=STORE[,option=value]...", verbatim_doc_comment)]
    pub volumes: Vec<String>,

    /// Listen at an address: unix:/path or tcp:HOST:PORT. May be given several times. Refused if
    /// the service manager passed sockets [default: the addresses of the file]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,

    /// Check the configuration and the stores, print ok for each and all mistakes, and exit without
    /// serving
    #[arg(long)]
    pub check: bool,

    /// Refuse to start if a volume cannot be opened, instead of serving the other volumes and trying
    /// to open it again [default: false]
    #[arg(long)]
    pub strict: bool,

    /// Take over from the daemon that runs at the control socket: it writes its data and hands over its listening sockets
    /// and the connections of NBD clients, which continue. If no daemon runs, start as usual [default: false]
    #[arg(long)]
    pub takeover: bool,

    /// Encrypt connections: off, on (if the client requests it) or require (always) [default: off]
    #[arg(long, value_name = "MODE", value_parser = choice::<TlsSetting>(), hide_possible_values = true)]
    pub tls: Option<TlsSetting>,

    /// The directory with ca-cert.pem, server-cert.pem, server-key.pem and perhaps ca-crl.pem
    /// [default: none]
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,

    /// The file of pre-shared keys, one "name:hexadecimal key" a line [default: none]
    #[arg(long, value_name = "FILE")]
    pub tls_psk: Option<PathBuf>,

    /// Refuse clients without a certificate signed by ca-cert.pem [default: false]
    #[arg(long)]
    pub tls_verify_peer: bool,

    /// The maximum number of NBD connections at a time, 1 to 65536 [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_clients: Option<i64>,

    /// The largest payload of one READ or WRITE in bytes or with a unit K or M, 4K to 64M
    /// [default: 32M]
    #[arg(long, value_name = "SIZE", value_parser = size_option, allow_hyphen_values = true)]
    pub max_request: Option<Size>,

    /// The memory that the requests of one connection may hold, in bytes or with a unit K, M, G or T,
    /// at least the largest request [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size_option, allow_hyphen_values = true)]
    pub connection_memory: Option<Size>,

    /// Worker threads, each with its own io_uring, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub workers: Option<i64>,

    /// The control socket: a unix socket at PATH for ebbd get, set, stat, volume and others, and
    /// for HTTP. Root and the daemon's user may use it, members of its group may read [default: the path of the file]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,

    /// The directory in which volumes that are added with `ebbd volume add --persist` are kept, and the
    /// sizes of volumes that were resized [default: that of the file]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// Serve a web page with plots, and metrics for Prometheus, at this TCP address, such as
    /// 127.0.0.1:9477 [default: that of the file]
    #[arg(long, value_name = "HOST:PORT")]
    pub web: Option<String>,

    /// An additional host name under which browsers reach the page, such as the name of a proxy. May
    /// be given several times [default: the names of the file]
    #[arg(long, value_name = "NAME")]
    pub web_names: Vec<String>,

    /// The file of the tokens for the page, made with ebbd token; needed if other hosts can reach the page
    /// [default: that of the file]
    #[arg(long, value_name = "FILE")]
    pub web_tokens: Option<PathBuf>,

    /// The directory with server-cert.pem and server-key.pem for the page; needed if other hosts can reach it
    /// [default: that of the file]
    #[arg(long, value_name = "DIR")]
    pub web_tls_certificates: Option<PathBuf>,

    /// Serve disks of Xen guests, too: those of `ebbd xen attach` and, if the kernel's backend is not
    /// loaded, those with the script block-ebbd [default: false]
    #[arg(long)]
    pub xen: bool,

    /// Serve each volume to KVM guests, too: over vhost-user-blk at the unix socket DIR/NAME.sock, which the
    /// daemon's user and group may connect to [default: that of the file]
    #[arg(long, value_name = "DIR")]
    pub vhost_user: Option<PathBuf>,

    /// The number of free pages of 4096 bytes that each queue keeps for later requests, 0 to 1048576
    /// [default: 1024]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_buffer_pages: Option<i64>,

    /// How long page pools keep no free pages after a sign of memory pressure, in milliseconds,
    /// 0 to 60000 [default: 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub buffer_squeeze_duration_ms: Option<i64>,

    /// What happens to I/O memory that no request uses: lend (marked MADV_FREE), drop (returned on
    /// memory pressure), keep (never returned) or none (returned at once) [default: lend]
    #[arg(
        long,
        value_name = "MODE",
        value_parser = choice::<IdleMemory>(),
        hide_possible_values = true
    )]
    pub idle_memory: Option<IdleMemory>,

    /// Whether the daemon limits itself to the system calls that it needs, as far as the kernel can: on or off
    /// [default: on]
    #[arg(
        long,
        value_name = "MODE",
        value_parser = choice::<SandboxMode>(),
        hide_possible_values = true
    )]
    pub sandbox: Option<SandboxMode>,

    /// A file, device or folder with all below it that the daemon may open while it runs, beside what the configuration
    /// names; can be given several times [default: those of the file; all if it has none]
    #[arg(long, value_name = "PATH")]
    pub open_paths: Vec<String>,

    /// A server that the daemon may connect to while it runs, beside those that the configuration names: a host, an
    /// address or a network; can be given several times [default: those of the file; any if it has none]
    #[arg(long, value_name = "SERVER")]
    pub connect_to: Vec<String>,

    /// The maximum size of the cache of all volumes together, 1M to 1T; with 0 it follows the
    /// memory of the host [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size_option, allow_hyphen_values = true)]
    pub cache_max: Option<Size>,

    /// The size down to which the cache shrinks under memory pressure other than the last resort,
    /// 0 to 1T [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size_option, allow_hyphen_values = true)]
    pub cache_min: Option<Size>,

    /// How long stopping the daemon, or removing a volume, may take to write dirty data, in
    /// seconds, 1 to 3600. After that, volumes with data that is not flushed are listed, and the exit status
    /// is 1 [default: 60]
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60,
        hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub drain: u64,

    /// The level of the log on stderr: error, warn, info or debug; each level includes the ones
    /// before it [default: info]
    #[arg(
        long,
        value_name = "LEVEL",
        value_parser = choice::<LogLevel>(),
        hide_possible_values = true
    )]
    pub log: Option<LogLevel>,

    /// The form of the log's lines: text, or json with one object in each line [default: text]
    #[arg(
        long,
        value_name = "FORM",
        value_parser = choice::<LogFormat>(),
        hide_possible_values = true
    )]
    pub log_format: Option<LogFormat>,

    /// The number of listening sockets that the service manager passed (`LISTEN_FDS`). If there are any, addresses are
    /// refused.
    #[arg(skip)]
    pub inherited_sockets: usize,
}

/// The words of a choice; clap suggests the nearest one for an unknown word.
pub fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(T::names()).try_map(|word| T::parse(&word))
}

/// Parses a size on the command line; the error has its remedy.
///
/// # Errors
/// Text that is no size.
pub fn size_option(text: &str) -> Result<Size, String> {
    text.parse().map_err(|error: SizeError| format!("{error}; {}", error.remedy()))
}

fn located<T>(option: &str, value: Option<T>) -> Option<Located<T>> {
    value.map(|value| Located { value, place: ValueLocation::option(option) })
}

/// The layer of the command line.
pub(super) fn layer(args: &ServeArgs) -> Result<Layer, ConfigError> {
    let mut layer = Layer {
        workers: located("--workers", args.workers),
        log: located("--log", args.log),
        log_format: located("--log-format", args.log_format),
        xen: located("--xen", args.xen.then_some(true)),
        vhost_user: located("--vhost-user", args.vhost_user.clone()),
        max_buffer_pages: located("--max-buffer-pages", args.max_buffer_pages),
        buffer_squeeze_duration_ms: located(
            "--buffer-squeeze-duration-ms",
            args.buffer_squeeze_duration_ms,
        ),
        idle_memory: located("--idle-memory", args.idle_memory),
        sandbox: located("--sandbox", args.sandbox),
        cache_max: located("--cache-max", args.cache_max),
        cache_min: located("--cache-min", args.cache_min),
        max_clients: located("--max-clients", args.max_clients),
        max_request: located("--max-request", args.max_request),
        connection_memory: located("--connection-memory", args.connection_memory),
        tls: located("--tls", args.tls),
        tls_certificates: located("--tls-certificates", args.tls_certificates.clone()),
        tls_psk: located("--tls-psk", args.tls_psk.clone()),
        state: located("--state", args.state.clone()),
        tls_verify_peer: located("--tls-verify-peer", args.tls_verify_peer.then_some(true)),
        web_tokens: located("--web-tokens", args.web_tokens.clone()),
        web_tls_certificates: located("--web-tls-certificates", args.web_tls_certificates.clone()),
        ..Layer::default()
    };
    let own = [&layer.web_tokens, &layer.web_tls_certificates, &layer.state, &layer.vhost_user];
    for path in [&layer.tls_certificates, &layer.tls_psk].into_iter().chain(own).flatten() {
        if path.value.as_os_str().is_empty() {
            return Err(path.error(
                ConfigErrorKind::InvalidValue,
                "the path is empty",
                "write the whole path",
            ));
        }
    }
    if let Some(text) = &args.control {
        let place = ValueLocation::option("--control");
        let value = value::control_path(text).map_err(|bad| place.error(bad))?;
        layer.control = Some(Located { value, place });
    }
    if let Some(text) = &args.web {
        let place = ValueLocation::option("--web");
        let value = value::web_address(text).map_err(|bad| place.error(bad))?;
        layer.web = Some(Located { value, place });
    }
    for text in &args.web_names {
        let place = ValueLocation::option(format!("--web-names {}", shorten(text)));
        let value = value::web_name(text).map_err(|bad| place.error(bad))?;
        layer.web_names.push(Located { value, place });
    }
    for text in &args.open_paths {
        let place = ValueLocation::option(format!("--open-paths {}", shorten(text)));
        let value = value::open_path(text).map_err(|bad| place.error(bad))?;
        layer.open_paths.get_or_insert_default().push(Located { value, place });
    }
    for text in &args.connect_to {
        let place = ValueLocation::option(format!("--connect-to {}", shorten(text)));
        let value = text.parse().map_err(|bad| place.error(bad))?;
        layer.connect_to.get_or_insert_default().push(Located { value, place });
    }
    for text in &args.listen {
        let place = ValueLocation::option(format!("--listen {}", shorten(text)));
        let value = text.parse().map_err(|bad| place.error(bad))?;
        layer.listen.push(Located { value, place });
    }
    for text in &args.volumes {
        layer.volumes.push(volume(text)?);
    }
    Ok(layer)
}

/// The remedy for an invalid volume.
const FORM: &str = "write --volume NAME=STORE[,option=value]..., such as disk=memory:1G";

fn volume(text: &str) -> Result<VolumeLayer, ConfigError> {
    let place = ValueLocation::option(format!("--volume {}", shorten(text)));
    let fail = |bad: BadValue| place.error(bad);
    let lacks = |what: &str| {
        let message = format!("the volume has no {what}");
        fail(BadValue::new(ConfigErrorKind::InvalidValue, message, FORM))
    };
    // The first `=` belongs to an option if a store is before it.
    let first = text.split('=').next().unwrap_or_default();
    if value::STORES.iter().any(|scheme| first.starts_with(scheme)) {
        return Err(lacks("name"));
    }
    let (name, rest) = text.split_once('=').ok_or_else(|| lacks("store"))?;
    let name = volume_name(name).map_err(fail)?;
    let mut pieces = split_commas(rest).into_iter();
    let store: super::StoreUri = pieces.next().unwrap_or_default().parse().map_err(fail)?;
    let at = |option: &str| ValueLocation::option(format!("--volume {}: {option}", shorten(&name)));
    let mut volume = VolumeLayer {
        store: Located { value: store, place: place.clone() },
        base: None,
        size: None,
        create: None,
        encryption: None,
        read_only: None,
        shared: None,
        allow: None,
        direct: None,
        cache: None,
        bdi: None,
        default: None,
        vhost_user: None,
        max_buffer_pages: None,
        buffer_squeeze_duration_ms: None,
        limits: LimitsLayer::default(),
        limit_group: None,
        place: place.clone(),
        name: name.clone(),
    };
    for piece in pieces {
        let (option, text) = split_option(&piece).map_err(fail)?;
        let place = at(option);
        let fail = |bad: BadValue| place.error(bad);
        let size = |text: &str| text.parse().map_err(|error: SizeError| fail(error.into()));
        let fresh = match option {
            "base" => set(&mut volume.base, value::volume_name(text).map_err(fail)?, &place),
            "size" => set(&mut volume.size, size(text)?, &place),
            "create" => set(&mut volume.create, value::boolean(text).map_err(fail)?, &place),
            "encryption" => set(&mut volume.encryption, text.parse().map_err(fail)?, &place),
            "read-only" => set(&mut volume.read_only, value::boolean(text).map_err(fail)?, &place),
            "shared" => set(&mut volume.shared, value::boolean(text).map_err(fail)?, &place),
            "allow" => set(&mut volume.allow, allow(text).map_err(fail)?, &place),
            "direct" => set(&mut volume.direct, Choice::parse(text).map_err(fail)?, &place),
            "cache" => set(&mut volume.cache, Choice::parse(text).map_err(fail)?, &place),
            "bdi" => set(&mut volume.bdi, value::volume_name(text).map_err(fail)?, &place),
            "default" => set(&mut volume.default, value::boolean(text).map_err(fail)?, &place),
            "vhost-user" => set(&mut volume.vhost_user, text.parse().map_err(fail)?, &place),
            "max-buffer-pages" => {
                set(&mut volume.max_buffer_pages, value::number(text).map_err(fail)?, &place)
            }
            "buffer-squeeze-duration-ms" => {
                let number = value::number(text).map_err(fail)?;
                set(&mut volume.buffer_squeeze_duration_ms, number, &place)
            }
            limit if limit.starts_with("limit-") && limit != "limit-group" => {
                set_limit(&mut volume.limits, (limit, text), &place)?
            }
            "limit-group" => {
                set(&mut volume.limit_group, value::volume_name(text).map_err(fail)?, &place)
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

/// Sets the limit of an option `limit-…`; false if it was set before.
fn set_limit(
    limits: &mut LimitsLayer,
    (option, text): (&str, &str),
    place: &ValueLocation,
) -> Result<bool, ConfigError> {
    let fail = |bad: BadValue| place.error(bad);
    let size = |text: &str| text.parse().map_err(|error: SizeError| fail(error.into()));
    Ok(match option {
        "limit-iops" => set(&mut limits.iops, value::number(text).map_err(fail)?, place),
        "limit-read-iops" => set(&mut limits.read_iops, value::number(text).map_err(fail)?, place),
        "limit-write-iops" => {
            set(&mut limits.write_iops, value::number(text).map_err(fail)?, place)
        }
        "limit-bandwidth" => set(&mut limits.bandwidth, size(text)?, place),
        "limit-read-bandwidth" => set(&mut limits.read_bandwidth, size(text)?, place),
        "limit-write-bandwidth" => set(&mut limits.write_bandwidth, size(text)?, place),
        "limit-burst-ms" => set(&mut limits.burst_ms, value::number(text).map_err(fail)?, place),
        _ => return Err(fail(unknown_option(option))),
    })
}

/// The entries of `allow`, between commas.
fn allow(text: &str) -> Result<AccessList, BadValue> {
    let entries = text.split(',').filter(|_| !text.is_empty()).map(value::access_entry);
    value::access_list(entries.collect::<Result<_, _>>()?)
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
