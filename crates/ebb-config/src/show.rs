//! A configuration as the text of a file, with all defaults: what `ebbd config show` prints.
//!
//! # Invariants
//! - Parsed again, the text is the same configuration, except for paths that are not UTF-8.

use toml::{Table, Value};

use super::value::Choice;
use super::{BdiConfig, Config, LimitsConfig, NbdConfig, VolumeConfig};

/// The text of a configuration file as JSON; none if it is not TOML.
pub fn toml_to_json(text: &str) -> Option<serde_json::Value> {
    serde_json::to_value(text.parse::<Table>().ok()?).ok()
}

impl Config {
    /// The text of a configuration file with these settings.
    pub fn to_toml(&self) -> String {
        // Maps with string keys always serialise.
        toml::to_string(&self.table()).unwrap_or_default()
    }

    /// Each setting with its full key, such as `nbd.max_clients`, and its value as in a file.
    pub fn settings(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        flatten("", &self.table(), &mut all);
        all
    }

    fn table(&self) -> Table {
        let Config {
            listen,
            workers,
            log,
            log_format,
            control,
            state,
            web,
            web_names,
            web_tokens,
            web_tls_certificates,
            xen,
            vhost_user,
            max_buffer_pages,
            buffer_squeeze_duration_ms,
            idle_memory,
            sandbox,
            open_paths,
            connect_to,
            cache_max,
            cache_min,
            nbd,
            bdis,
            volumes,
            limit_groups,
            origins: _,
            replaced: _,
            replaced_groups: _,
            broken: _,
            broken_groups: _,
            orphans: _,
            unmounted: _,
            warnings: _,
        } = self;
        let mut table = Table::new();
        let mut put = |key: &str, value: Value| drop(table.insert(key.to_owned(), value));
        put("listen", texts(listen));
        put("workers", number(*workers));
        put("log", text(log.name()));
        put("log_format", text(log_format.name()));
        if let Some(control) = control {
            put("control", text(format!("unix:{}", control.display())));
        }
        if let Some(state) = state {
            put("state", text(state.display()));
        }
        if let Some(web) = web {
            put("web", text(format!("tcp:{web}")));
        }
        if !web_names.is_empty() {
            put("web_names", texts(web_names));
        }
        if let Some(path) = web_tokens {
            put("web_tokens", text(path.display()));
        }
        if let Some(path) = web_tls_certificates {
            put("web_tls_certificates", text(path.display()));
        }
        put("xen", Value::Boolean(*xen));
        if let Some(path) = vhost_user {
            put("vhost_user", text(path.display()));
        }
        put("max_buffer_pages", number(*max_buffer_pages));
        put("buffer_squeeze_duration_ms", number(*buffer_squeeze_duration_ms));
        put("idle_memory", text(idle_memory.name()));
        put("sandbox", text(sandbox.name()));
        if let Some(paths) = open_paths {
            put(
                "open_paths",
                Value::Array(paths.iter().map(|path| text(path.display())).collect()),
            );
        }
        if let Some(servers) = connect_to {
            put("connect_to", texts(servers));
        }
        put("cache_max", text(cache_max));
        put("cache_min", text(cache_min));
        put("nbd", Value::Table(nbd_table(nbd)));
        let groups = limit_groups
            .iter()
            .map(|(name, limits)| (name.clone(), Value::Table(limits_table(limits).collect())));
        put("limit_group", Value::Table(groups.collect()));
        let bdis = bdis.iter().map(|(name, bdi)| (name.clone(), Value::Table(bdi_table(bdi))));
        put("bdi", Value::Table(bdis.collect()));
        let volumes =
            volumes.iter().map(|(name, volume)| (name.clone(), Value::Table(volume_table(volume))));
        put("volume", Value::Table(volumes.collect()));
        table.retain(|_, value| value.as_table().is_none_or(|table| !table.is_empty()));
        table
    }
}

fn nbd_table(nbd: &NbdConfig) -> Table {
    let NbdConfig {
        max_clients,
        max_request,
        connection_memory,
        tls,
        tls_certificates,
        tls_psk,
        tls_verify_peer,
    } = nbd;
    let mut table = Table::new();
    let mut put = |key: &str, value: Value| drop(table.insert(key.to_owned(), value));
    put("max_clients", number(*max_clients));
    put("max_request", text(max_request));
    put("connection_memory", text(connection_memory));
    put("tls", text(tls.name()));
    if let Some(path) = tls_certificates {
        put("tls_certificates", text(path.display()));
    }
    if let Some(path) = tls_psk {
        put("tls_psk", text(path.display()));
    }
    if *tls_verify_peer {
        put("tls_verify_peer", Value::Boolean(true));
    }
    table
}

fn bdi_table(bdi: &BdiConfig) -> Table {
    let BdiConfig { min_ratio, max_ratio, max_bytes, strict_limit } = bdi;
    let all = [
        ("min_ratio", min_ratio.map(text)),
        ("max_ratio", max_ratio.map(text)),
        ("max_bytes", max_bytes.map(text)),
        ("strict_limit", strict_limit.map(Value::Boolean)),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// The table `[volume.NAME]` of a volume.
pub(super) fn volume_table(volume: &VolumeConfig) -> Table {
    let VolumeConfig {
        store,
        base,
        size,
        create,
        encryption,
        read_only,
        shared,
        allow,
        direct,
        cache,
        bdi,
        default,
        vhost_user,
        max_buffer_pages,
        buffer_squeeze_duration_ms,
        limits,
        limit_group,
    } = volume;
    let all = [
        ("store", Some(text(store))),
        ("base", base.as_ref().map(text)),
        ("size", size.map(text)),
        ("create", create.then_some(Value::Boolean(true))),
        ("encryption", encryption.as_ref().map(text)),
        ("read_only", Some(Value::Boolean(*read_only))),
        ("shared", Some(Value::Boolean(*shared))),
        ("allow", allow.as_ref().map(|list| texts(&list.texts().collect::<Vec<_>>()))),
        ("direct", Some(text(direct.name()))),
        ("cache", Some(text(cache.name()))),
        ("bdi", bdi.as_ref().map(text)),
        ("default", default.then_some(Value::Boolean(true))),
        ("vhost_user", vhost_user.as_ref().map(text)),
        ("max_buffer_pages", max_buffer_pages.map(number)),
        ("buffer_squeeze_duration_ms", buffer_squeeze_duration_ms.map(number)),
        ("limit_group", limit_group.as_ref().map(text)),
    ];
    let own = all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    own.chain(limits_table(limits)).collect()
}

/// The keys of limits, of a volume or a group.
pub(super) fn limits_table(limits: &LimitsConfig) -> impl Iterator<Item = (String, Value)> {
    let LimitsConfig {
        iops,
        read_iops,
        write_iops,
        bandwidth,
        read_bandwidth,
        write_bandwidth,
        burst_ms,
    } = limits;
    let all = [
        ("limit_iops", iops.map(number)),
        ("limit_read_iops", read_iops.map(number)),
        ("limit_write_iops", write_iops.map(number)),
        ("limit_bandwidth", bandwidth.map(text)),
        ("limit_read_bandwidth", read_bandwidth.map(text)),
        ("limit_write_bandwidth", write_bandwidth.map(text)),
        ("limit_burst_ms", burst_ms.map(number)),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)))
}

fn text(value: impl std::fmt::Display) -> Value {
    Value::String(value.to_string())
}

fn texts(values: &[impl std::fmt::Display]) -> Value {
    Value::Array(values.iter().map(text).collect())
}

fn number<N: TryInto<i64>>(value: N) -> Value {
    // The limits of all numbers are far below.
    Value::Integer(value.try_into().unwrap_or(i64::MAX))
}

/// Tables nest three deep at most.
fn flatten(prefix: &str, table: &Table, all: &mut Vec<(String, String)>) {
    for (key, value) in table {
        match value {
            Value::Table(inner) => flatten(&format!("{prefix}{key}."), inner, all),
            value => all.push((format!("{prefix}{key}"), value.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::ServeArgs;
    use super::*;

    #[test]
    fn a_configuration_that_is_shown_and_parsed_again_is_the_same() {
        let full = r#"
            listen = ["unix:/a", "tcp:[::1]:10809"]
            workers = 4
            log = "debug"
            log_format = "json"
            control = "unix:/c"
            state = "/state"
            web = "tcp:127.0.0.1:9477"
            web_names = ["a.example"]
            web_tokens = "/t"
            web_tls_certificates = "/w"
            xen = true
            max_buffer_pages = 7
            idle_memory = "keep"
            sandbox = "off"
            open_paths = ["/srv/a"]
            connect_to = ["10.0.0.0/8", "[fd00::1]:10809", "store.example:10809"]
            cache_max = "4G"
            cache_min = "1000000"
            [nbd]
            max_clients = 9
            tls = "require"
            tls_certificates = "/tls"
            tls_verify_peer = true
            [limit_group.gold]
            limit_iops = 5000
            limit_bandwidth = "200M"
            [bdi.array]
            min_ratio = 0.5
            max_bytes = "16M"
            strict_limit = true
            [volume.a]
            store = "file:/a b.img"
            size = "1G"
            create = true
            default = true
            max_buffer_pages = 3
            limit_group = "gold"
            limit_read_iops = 7
            limit_write_bandwidth = "64M"
            limit_burst_ms = 2000
            [volume."b c"]
            store = "nbds+unix://me@/x?socket=/s&tls-psk-file=/k&tls-hostname=h&tls-verify-peer=0&reconnect=5&silence=9&lost-writes=report"
            cache = "writeback"
            bdi = "array"
            shared = true
            allow = ["psk:alice", "cn:*.host", "uid:root", "gid:0", "net:10.0.0.0/8", "xen:guest1"]
            [volume.c]
            allow = []
            store = "null:512"
            read_only = true
            cache = "writethrough"
        "#;
        let args = ServeArgs::default();
        for text in [full, "listen = ['unix:/a']\n[volume.a]\nstore = 'memory:1M'\n"] {
            let config = Config::parse(text, Path::new("f"), &args).unwrap();
            let shown = config.to_toml();
            let again = Config::parse(&shown, Path::new("shown"), &args)
                .unwrap_or_else(|error| panic!("{error}\n{shown}"));
            // Where a volume is defined, a line of the file, is not shown.
            let again = Config { origins: config.origins.clone(), ..again };
            assert_eq!(again, config, "{shown}");
            let settings = config.settings();
            assert!(
                settings.contains(&("volume.a.cache".to_owned(), "\"none\"".to_owned())),
                "{settings:?}"
            );
        }
    }
}
