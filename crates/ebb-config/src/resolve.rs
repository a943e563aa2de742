//! Makes the configuration from the layers: the command line overrides the file, which overrides the
//! defaults. The checks of more than one setting are here.

mod tls;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

use self::tls::{check_tls, tls_keys};
use super::error::{BadValue, ConfigError, ConfigErrorKind, Located, ValueLocation};
use super::layer::{BdiLayer, Layer, LimitGroupLayer, VolumeLayer};
use super::parameter_values::{check_limits, parameter, size};
use super::value::{Listen, must_be_absolute};
use super::vhost_sockets;
use super::volume_check::check_volume;
use super::{BdiConfig, Config, LimitsConfig, NbdConfig, VolumeConfig, VolumeOrigin};
use crate::params::{
    BUFFER_SQUEEZE_DURATION_MS, CACHE_MAX, CACHE_MIN, Key, MAX_BUFFER_PAGES, MAX_BYTES,
    MAX_CLIENTS, MAX_RATIO, MAX_REQUEST,
};
use crate::{Percent, Size};

/// The remedy when there is nothing to serve.
const HOW_TO_START: &str = "start with `ebbd serve --volume disk=memory:1G \
     --listen unix:/tmp/ebbd.sock`, or give a file with --config (see ebbd.toml(5))";

/// The values of both lists; `None` if there is neither.
fn values<T>(lists: [Option<Vec<Located<T>>>; 2]) -> Option<Vec<T>> {
    let mut present = lists.into_iter().flatten().peekable();
    present.peek()?;
    Some(present.flatten().map(|item| item.value).collect())
}

/// The configuration of `file`, overridden by `flags`. With `inherited` sockets from the service
/// manager there must be no addresses.
pub(super) fn resolve(file: Layer, flags: Layer, inherited: usize) -> Result<Config, ConfigError> {
    let (tls_certificates, tls_psk) = tls_keys(&file, &flags);
    let workers = number(flags.workers.or(file.workers), 1, 64)?;
    let max_clients = parameter(MAX_CLIENTS.key(), flags.max_clients.or(file.max_clients))?;
    let tls = flags.tls.or(file.tls);
    let idle_memory = flags.idle_memory.or(file.idle_memory);
    let verify_peer = flags.tls_verify_peer.or(file.tls_verify_peer);
    check_tls(tls.as_ref(), tls_certificates.as_ref(), tls_psk.as_ref(), verify_peer.as_ref())?;
    let (max_request, connection_memory) = memory(
        flags.max_request.or(file.max_request),
        flags.connection_memory.or(file.connection_memory),
    )?;

    let max_buffer_pages =
        parameter(MAX_BUFFER_PAGES.key(), flags.max_buffer_pages.or(file.max_buffer_pages))?;
    let buffer_squeeze_duration_ms = parameter(
        BUFFER_SQUEEZE_DURATION_MS.key(),
        flags.buffer_squeeze_duration_ms.or(file.buffer_squeeze_duration_ms),
    )?;

    let (cache_max, cache_min) = cache(
        flags.cache_max.or(file.cache_max).as_ref(),
        flags.cache_min.or(file.cache_min).as_ref(),
    )?;
    let MergedVolumes { volumes, origins, places } = merge_volumes(file.volumes, flags.volumes)?;
    let addresses = [file.listen, flags.listen].concat();
    let xen = flags.xen.or(file.xen).is_some_and(|given| given.value);
    let vhost_user = flags.vhost_user.or(file.vhost_user).map(absolute).transpose()?;
    let guests = xen || vhost_user.is_some() || volumes.values().any(VolumeConfig::has_own_socket);
    let nowhere = addresses.is_empty() && inherited == 0 && !guests;
    let control = flags.control.or(file.control);
    let state = flags.state.or(file.state);
    // With one of these, volumes are, or can be added, elsewhere.
    let no_volume = volumes.is_empty() && control.is_none() && state.is_none();
    if no_volume || nowhere {
        return Err(nothing_to_serve(volumes.is_empty(), nowhere));
    }
    check_control(control.as_ref(), &addresses)?;
    let web = flags.web.or(file.web);
    let names = file.web_names.into_iter().chain(flags.web_names);
    check_web(web.as_ref(), &addresses)?;
    let web_tokens = flags.web_tokens.or(file.web_tokens);
    let web_tls_certificates = flags.web_tls_certificates.or(file.web_tls_certificates);
    let guarded = (web_tokens.is_some(), web_tls_certificates.is_some());
    check_web_access(web.as_ref(), guarded)?;
    let default = |key: Key| key.definition().default;
    let config = Config {
        listen: check_addresses(addresses, inherited)?,
        workers: workers.unwrap_or(1),
        log: flags.log.or(file.log).map(|log| log.value).unwrap_or_default(),
        log_format: flags
            .log_format
            .or(file.log_format)
            .map(|format| format.value)
            .unwrap_or_default(),
        control: control.map(|control| control.value),
        state: state.map(|state| state.value),
        web: web.map(|web| web.value),
        web_names: names.map(|name| name.value).collect(),
        web_tokens: web_tokens.map(|path| path.value),
        web_tls_certificates: web_tls_certificates.map(|path| path.value),
        xen,
        vhost_user: vhost_user.map(|directory| directory.value),
        max_buffer_pages: max_buffer_pages.unwrap_or(default(MAX_BUFFER_PAGES.key())),
        buffer_squeeze_duration_ms: buffer_squeeze_duration_ms
            .unwrap_or(default(BUFFER_SQUEEZE_DURATION_MS.key())),
        idle_memory: idle_memory.map(|idle| idle.value).unwrap_or_default(),
        sandbox: flags.sandbox.or(file.sandbox).map(|mode| mode.value).unwrap_or_default(),
        open_paths: values([file.open_paths, flags.open_paths]),
        connect_to: values([file.connect_to, flags.connect_to]),
        cache_max,
        cache_min,
        nbd: NbdConfig {
            max_clients: max_clients
                .and_then(|clients| usize::try_from(clients).ok())
                .unwrap_or(NbdConfig::default().max_clients),
            max_request,
            connection_memory,
            tls: tls.map(|tls| tls.value).unwrap_or_default(),
            tls_certificates: tls_certificates.map(|path| path.value),
            tls_psk: tls_psk.map(|path| path.value),
            tls_verify_peer: verify_peer.is_some_and(|verify| verify.value),
        },
        bdis: check_bdis(file.bdis)?,
        limit_groups: check_groups(file.limit_groups)?,
        volumes,
        origins,
        replaced: BTreeMap::new(),
        replaced_groups: BTreeMap::new(),
        broken: BTreeMap::new(),
        broken_groups: BTreeMap::new(),
        orphans: BTreeMap::new(),
        unmounted: None,
        warnings: Vec::new(),
    };
    vhost_sockets::check(&config, &places)?;
    Ok(config)
}

fn nothing_to_serve(no_volume: bool, no_address: bool) -> ConfigError {
    let message = match (no_volume, no_address) {
        (true, true) => "there is no volume to serve and no address to listen at",
        (true, false) => "there is no volume to serve",
        _ => "there is no address to listen at",
    };
    ConfigError {
        kind: ConfigErrorKind::NothingToServe,
        file: None,
        line: None,
        key: None,
        message: message.to_owned(),
        remedy: HOW_TO_START.to_owned(),
        source: None,
    }
}

/// The number if it is from `low` to `high`.
fn number(
    given: Option<Located<i64>>,
    low: usize,
    high: usize,
) -> Result<Option<usize>, ConfigError> {
    given
        .map(|given| {
            usize::try_from(given.value).ok().filter(|n| (low..=high).contains(n)).ok_or_else(
                || {
                    given.error(
                        ConfigErrorKind::OutOfRange,
                        format!("{} is out of range", given.value),
                        format!("choose a number from {low} to {high}"),
                    )
                },
            )
        })
        .transpose()
}

/// Refuses a relative directory of sockets.
fn absolute(directory: Located<PathBuf>) -> Result<Located<PathBuf>, ConfigError> {
    must_be_absolute(&directory.value).map_err(|bad| directory.place.error(bad))?;
    Ok(directory)
}

/// Refuses a control socket at an address for clients.
fn check_control(
    control: Option<&Located<PathBuf>>,
    addresses: &[Located<Listen>],
) -> Result<(), ConfigError> {
    let Some(control) = control else { return Ok(()) };
    let at = Listen::Unix(control.value.clone());
    check_free(control, &at, addresses, "choose another path for the control socket")
}

/// Refuses a page at an address for clients.
fn check_web(
    web: Option<&Located<String>>,
    addresses: &[Located<Listen>],
) -> Result<(), ConfigError> {
    let Some(web) = web else { return Ok(()) };
    check_free(web, &Listen::Tcp(web.value.clone()), addresses, "choose another port for the page")
}

/// Off loopback the page needs tokens, and a certificate that keeps them secret.
fn check_web_access(
    web: Option<&Located<String>>,
    (tokens, certificates): (bool, bool),
) -> Result<(), ConfigError> {
    let Some(web) = web.filter(|web| !is_loopback(&web.value)) else { return Ok(()) };
    let (what, remedy) = match (tokens, certificates) {
        (true, true) => return Ok(()),
        (false, _) => (
            "other hosts can reach this address, and there is no file of tokens",
            "set `web_tokens` to a file with the lines that `ebbd token` prints and `web_tls_certificates`, or listen \
             at 127.0.0.1",
        ),
        (true, false) => (
            "other hosts can reach this address, and tokens would be sent unencrypted",
            "set `web_tls_certificates` to a directory with server-cert.pem and server-key.pem, or listen at 127.0.0.1",
        ),
    };
    Err(web.error(ConfigErrorKind::Conflict, what, remedy))
}

/// Whether only this host can reach an address `HOST:PORT`. Of names, only `localhost` is known to be one.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ip = host.parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

fn check_free<T>(
    what: &Located<T>,
    at: &Listen,
    addresses: &[Located<Listen>],
    remedy: &str,
) -> Result<(), ConfigError> {
    match addresses.iter().find(|address| address.value == *at) {
        Some(address) => Err(what.error(
            ConfigErrorKind::Conflict,
            format!("this is also an address for clients, see {}", address.place.describe()),
            remedy,
        )),
        None => Ok(()),
    }
}

/// `max_request` and `connection_memory`, checked against their limits.
fn memory(
    max_request: Option<Located<Size>>,
    connection_memory: Option<Located<Size>>,
) -> Result<(Size, Size), ConfigError> {
    let range = MAX_REQUEST.definition();
    let defaults = NbdConfig::default();
    let request = max_request.as_ref().map_or(defaults.max_request, |given| given.value);
    if let Some(given) = max_request
        && !range.allows(request.bytes())
    {
        return Err(given.error(
            ConfigErrorKind::OutOfRange,
            format!("{request} is out of range"),
            format!("choose a size from {}", range.range()),
        ));
    }
    let memory = connection_memory.as_ref().map_or(defaults.connection_memory, |given| given.value);
    // The default is enough for the largest request, so that only a given value can be too small.
    if let Some(given) = connection_memory
        && memory < request
    {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            format!("{memory} cannot hold one request of max_request, {request}"),
            format!("choose {request} or more, or a smaller max_request"),
        ));
    }
    Ok((request, memory))
}

/// The settings of backing devices, each value checked against its limits, and all ratios together.
fn check_bdis(layers: Vec<BdiLayer>) -> Result<BTreeMap<String, BdiConfig>, ConfigError> {
    let (mut bdis, mut kept) = (BTreeMap::new(), 0_u64);
    for BdiLayer { name, min_ratio, max_ratio, max_bytes, strict_limit } in layers {
        let out_of_range = |given: &Located<Percent>| {
            given.error(
                ConfigErrorKind::OutOfRange,
                format!("{} is out of range", given.value),
                format!("choose {}", MAX_RATIO.definition().range()),
            )
        };
        let most = max_ratio.as_ref().map_or(Percent::WHOLE, |given| given.value);
        if let Some(given) = max_ratio.as_ref().filter(|given| given.value.parts_per_million() == 0)
        {
            return Err(out_of_range(given));
        }
        if let Some(given) = &min_ratio {
            kept += u64::from(given.value.parts_per_million());
            let whole = u64::from(Percent::WHOLE.parts_per_million());
            if given.value > most || kept > whole {
                return Err(given.error(
                    ConfigErrorKind::Conflict,
                    if given.value > most {
                        format!("{} is more than max_ratio, {most}", given.value)
                    } else {
                        "all min_ratio together are more than 100".to_owned()
                    },
                    "choose less",
                ));
            }
        }
        let bdi = BdiConfig {
            min_ratio: min_ratio.map(|given| given.value),
            max_ratio: max_ratio.map(|given| given.value),
            max_bytes: match &max_bytes {
                Some(given) => Some(size(MAX_BYTES.key(), Some(given))?),
                None => None,
            },
            strict_limit: strict_limit.map(|given| given.value),
        };
        bdis.insert(name, bdi);
    }
    Ok(bdis)
}

/// The groups of limits.
fn check_groups(
    layers: Vec<LimitGroupLayer>,
) -> Result<BTreeMap<String, LimitsConfig>, ConfigError> {
    let checked = |group: LimitGroupLayer| Ok((group.name, check_limits(&group.limits)?));
    layers.into_iter().map(checked).collect()
}

/// `cache_max` and `cache_min`, checked against their limits.
fn cache(
    max: Option<&Located<Size>>,
    min: Option<&Located<Size>>,
) -> Result<(Size, Size), ConfigError> {
    let most = size(CACHE_MAX.key(), max)?;
    let least = size(CACHE_MIN.key(), min)?;
    if let Some(given) = min
        && most.bytes() != 0
        && least > most
    {
        return Err(given.error(
            ConfigErrorKind::Conflict,
            format!("{least} is more than cache_max, {most}"),
            format!("choose {most} or less, or a larger cache_max"),
        ));
    }
    Ok((most, least))
}

fn check_addresses(
    addresses: Vec<Located<Listen>>,
    inherited: usize,
) -> Result<Vec<Listen>, ConfigError> {
    if let Some(first) = addresses.first()
        && inherited > 0
    {
        return Err(first.error(
            ConfigErrorKind::Conflict,
            format!("the service manager already passed {inherited} listening socket(s)"),
            "take the address out here, or start without socket activation",
        ));
    }
    let mut seen: HashMap<Listen, ValueLocation> = HashMap::new();
    let mut listen = Vec::new();
    for address in addresses {
        if let Some(earlier) = seen.get(&address.value) {
            return Err(address.error(
                ConfigErrorKind::Duplicate,
                format!("{} is already given by {}", address.value, earlier.describe()),
                "keep one of them",
            ));
        }
        listen.push(address.value.clone());
        seen.insert(address.value, address.place);
    }
    Ok(listen)
}

/// The volumes, and where each is defined.
#[derive(Default)]
struct MergedVolumes {
    volumes: BTreeMap<String, VolumeConfig>,
    origins: BTreeMap<String, VolumeOrigin>,
    /// Where the socket of each is given, or else the volume.
    places: BTreeMap<String, ValueLocation>,
}

fn merge_volumes(
    file: Vec<VolumeLayer>,
    flags: Vec<VolumeLayer>,
) -> Result<MergedVolumes, ConfigError> {
    let mut names = BTreeSet::new();
    for volume in &flags {
        if !names.insert(volume.name.clone()) {
            return Err(volume.place.error(BadValue::new(
                ConfigErrorKind::Duplicate,
                "a volume of this name is already given",
                "choose another name, or keep one of them",
            )));
        }
    }
    let mut merged = MergedVolumes::default();
    let mut default: Option<ValueLocation> = None;
    let mut bases = Vec::new();
    for volume in file.into_iter().filter(|volume| !names.contains(&volume.name)).chain(flags) {
        if let Some(given) = volume.default.as_ref().filter(|given| given.value) {
            if let Some(other) = &default {
                return Err(given.error(
                    ConfigErrorKind::Duplicate,
                    format!("the default volume is already given by {}", other.describe()),
                    "keep `default` at one volume",
                ));
            }
            default = Some(given.place.clone());
        }
        let config = check_volume(&volume)?;
        bases.extend(volume.base.as_ref().map(|base| (volume.name.clone(), base.place.clone())));
        let place = match (&volume.place.file, volume.place.line) {
            (Some(file), Some(line)) => format!("{}:{line}", file.display()),
            (Some(file), None) => file.display().to_string(),
            _ => volume.place.describe(),
        };
        let socket = volume.vhost_user.as_ref().map_or(&volume.place, |given| &given.place);
        merged.places.insert(volume.name.clone(), socket.clone());
        merged.origins.insert(volume.name.clone(), VolumeOrigin::Configuration(place.into()));
        merged.volumes.insert(volume.name, config);
    }
    for (name, place) in bases {
        let volume = |name: &str| merged.volumes.get(name);
        let origin = |name: &str| merged.origins.get(name).cloned();
        crate::base_chain(&name, volume, origin).map_err(|bad| place.error(bad))?;
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ServeArgs};

    #[test]
    fn what_the_broker_may_open_is_that_of_the_file_and_of_the_command_line() {
        let parse = |text: &str, args: &ServeArgs| Config::parse(text, Path::new("x"), args);
        let mut args = ServeArgs {
            volumes: vec!["a=null:1G".into()],
            listen: vec!["unix:/a".into()],
            ..ServeArgs::default()
        };
        let config = parse("", &args).unwrap();
        assert_eq!((config.open_paths, config.connect_to), (None, None));
        let config = parse("open_paths = []\nconnect_to = []", &args).unwrap();
        assert_eq!((config.open_paths, config.connect_to), (Some(vec![]), Some(vec![])));
        args.open_paths = vec!["/b".into()];
        args.connect_to = vec!["b".into()];
        let config = parse("open_paths = ['/a']\nconnect_to = ['10.0.0.0/8']", &args).unwrap();
        assert_eq!(config.open_paths.unwrap(), [Path::new("/a"), Path::new("/b")]);
        let servers: Vec<_> = config.connect_to.unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["10.0.0.0/8", "b"]);
        for (wrong, key) in
            [("open_paths = ['a']", "open_paths"), ("connect_to = ['a b']", "connect_to")]
        {
            let error = parse(wrong, &args).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn a_page_that_other_hosts_can_reach_needs_tokens_and_a_certificate() {
        let parse = |web: &str, more: &str| {
            let text = format!(
                "listen = ['unix:/s']\nweb = '{web}'\n{more}\n[volume.disk]\nstore = 'null:1M'\n"
            );
            Config::parse(&text, Path::new("test"), &ServeArgs::default())
        };
        let (tokens, tls) = ("web_tokens = '/t'\n", "web_tls_certificates = '/d'\n");
        let loopback = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "tcp:LOCALHOST:1"];
        for web in loopback {
            parse(web, "").unwrap();
        }
        let others =
            ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "storage.example:1", "127.0.0.1.example:1"];
        for web in others {
            for (more, remedy) in
                [("", "ebbd token"), (tls, "ebbd token"), (tokens, "server-key.pem")]
            {
                let said = parse(web, more).unwrap_err().to_string();
                assert!(said.contains("other hosts can reach"), "{web}: {said}");
                assert!(said.contains(remedy) && said.contains("127.0.0.1"), "{web}: {said}");
            }
            parse(web, &format!("{tokens}{tls}")).unwrap();
        }
    }

    #[test]
    fn an_image_is_read_only_and_has_its_size() {
        let image = |line: &str| {
            let text = format!("listen = ['unix:/s']\n[volume.a]\nstore = 'qcow2:/a'\n{line}\n");
            Config::parse(&text, Path::new("test"), &ServeArgs::default())
        };
        for line in ["", "read_only = true", "cache = 'writethrough'", "direct = 'on'"] {
            assert!(image(line).unwrap().volumes["a"].read_only, "{line}");
        }
        for (line, said) in [
            ("read_only = false", "qemu-img convert"),
            ("cache = 'writeback'", "nothing to write back"),
            ("size = '1G'", "the image has the size"),
            ("create = true", "the store is `qcow2`"),
        ] {
            let error = image(line).unwrap_err().to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
    }
}
