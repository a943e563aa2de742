//! Tests of whole configurations: file and command line together.

use std::path::Path;

use proptest::prelude::*;

use super::keys::{BDI, EXAMPLE, NBD, TOP, VOLUME};
use super::*;

const FILE: &str = "/etc/ebbd/ebbd.toml";

fn flags(volumes: &[&str], listen: &[&str]) -> ServeArgs {
    ServeArgs {
        volumes: volumes.iter().map(ToString::to_string).collect(),
        listen: listen.iter().map(ToString::to_string).collect(),
        ..ServeArgs::default()
    }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new(FILE), &ServeArgs::default())
}

/// A file with the given lines in `[nbd]`, complete otherwise.
fn nbd(lines: &str) -> Result<Config, ConfigError> {
    parse(&format!("listen = ['unix:/a']\n[volume.a]\nstore = 'null:1G'\n[nbd]\n{lines}"))
}

fn volume(lines: &str) -> Result<Config, ConfigError> {
    parse(&format!("listen = ['unix:/a']\n[volume.a]\n{lines}"))
}

/// Asserts kind, line, key and a part of the text of an error.
#[track_caller]
fn refused(
    outcome: Result<Config, ConfigError>,
    kind: ConfigErrorKind,
    line: impl Into<Option<usize>>,
    key: &str,
    text: &str,
) {
    let error = outcome.unwrap_err();
    let line = line.into();
    assert_eq!(error.kind, kind, "{error}");
    assert_eq!(error.line, line, "{error}");
    assert_eq!(error.file.is_some(), line.is_some(), "{error}");
    assert_eq!(error.key.as_deref().unwrap_or(""), key, "{error}");
    assert!(error.to_string().contains(text), "{error}");
    assert!(!error.remedy.is_empty(), "{error}");
}

#[test]
fn the_example_of_the_manual() {
    let config = parse(EXAMPLE).unwrap();
    assert_eq!(
        config.listen,
        [Listen::Unix("/run/ebbd/nbd.sock".into()), Listen::Tcp("127.0.0.1:10809".into())]
    );
    assert_eq!(config.nbd.tls, TlsSetting::Require);
    assert_eq!(config.default_volume(), Some("disk"));
    assert_eq!(
        config.volumes["disk"],
        VolumeConfig {
            store: StoreUri::File("/var/lib/ebbd/disk.img".into()),
            base: None,
            size: Some(Size::new(1 << 30)),
            encryption: None,
            create: true,
            read_only: false,
            shared: false,
            allow: None,
            direct: DirectMode::Auto,
            cache: CacheMode::None,
            bdi: None,
            default: true,
            vhost_user: None,
            max_buffer_pages: None,
            buffer_squeeze_duration_ms: None,
            limits: LimitsConfig::default(),
            limit_group: None,
        }
    );
    assert!(config.volumes["install cd"].read_only);
    let scratch = &config.volumes["scratch"];
    assert_eq!(scratch.limit_group.as_deref(), Some("gold"));
    let expected =
        LimitsConfig { iops: Some(5000), burst_ms: Some(2000), ..LimitsConfig::default() };
    assert_eq!(scratch.limits, expected);
    let bandwidth = Some(Size::new(800 << 20));
    let expected = LimitsConfig { iops: Some(20_000), bandwidth, ..LimitsConfig::default() };
    assert_eq!(config.limit_groups["gold"], expected);
    let max_bytes = Some(Size::new(16 << 20));
    assert_eq!(config.bdis["stick"], BdiConfig { max_bytes, ..BdiConfig::default() });
}

#[test]
fn settings_of_backing_devices_are_parsed_and_checked() {
    let bdis = |lines: &str| {
        parse(&format!("listen = ['unix:/a']\n[volume.a]\nstore = 'null:1G'\n{lines}"))
    };
    let config = bdis("[bdi.'8:0']\nmin_ratio = 5\nmax_ratio = 12.5\nstrict_limit = true").unwrap();
    let bdi = BdiConfig {
        min_ratio: Some(Percent::new(50_000)),
        max_ratio: Some(Percent::new(125_000)),
        max_bytes: None,
        strict_limit: Some(true),
    };
    assert_eq!(config.bdis["8:0"], bdi);
    let key = "bdi.x.min_ratio";
    refused(bdis("[bdi.x]\nmin_ratio = 101"), ConfigErrorKind::InvalidValue, 5, key, "0 to 100");
    refused(bdis("[bdi.x]\nmin_ratio = true"), ConfigErrorKind::InvalidValue, 5, key, "percent");
    let text = "[bdi.x]\nmin_ratio = 6\nmax_ratio = 5";
    refused(bdis(text), ConfigErrorKind::Conflict, 5, key, "more than max_ratio, 5");
    let text = "[bdi.a]\nmin_ratio = 60\n[bdi.x]\nmin_ratio = 41";
    refused(bdis(text), ConfigErrorKind::Conflict, 7, key, "together");
    let text = "[bdi.x]\nmax_ratio = 0";
    refused(bdis(text), ConfigErrorKind::OutOfRange, 5, "bdi.x.max_ratio", "0.0001 to 100");
    let text = "[bdi.x]\nmax_bytes = '32K'";
    refused(bdis(text), ConfigErrorKind::OutOfRange, 5, "bdi.x.max_bytes", "64K to 1T");
    let text = "[bdi.x]\nmax_byte = 1";
    refused(bdis(text), ConfigErrorKind::UnknownKey, 5, "bdi.x.max_byte", "`max_bytes`");
    let text = "[bdi.x]\nstrict_limit = 1";
    refused(bdis(text), ConfigErrorKind::InvalidValue, 5, "bdi.x.strict_limit", "true or false");
}

#[test]
fn the_defaults_are_those_of_the_table() {
    let config = Config::parse("", Path::new(FILE), &flags(&["a=null:1G"], &["unix:/a"])).unwrap();
    let volume = &config.volumes["a"];
    let shown = [
        (TOP, "workers", config.workers.to_string()),
        (TOP, "log", config.log.to_string()),
        (TOP, "log_format", config.log_format.to_string()),
        (TOP, "xen", config.xen.to_string()),
        (TOP, "max_buffer_pages", config.max_buffer_pages.to_string()),
        (TOP, "buffer_squeeze_duration_ms", config.buffer_squeeze_duration_ms.to_string()),
        (TOP, "idle_memory", config.idle_memory.to_string()),
        (TOP, "sandbox", config.sandbox.to_string()),
        (TOP, "cache_max", config.cache_max.to_string()),
        (TOP, "cache_min", config.cache_min.to_string()),
        (NBD, "max_clients", config.nbd.max_clients.to_string()),
        (NBD, "max_request", config.nbd.max_request.to_string()),
        (NBD, "connection_memory", config.nbd.connection_memory.to_string()),
        (NBD, "tls", config.nbd.tls.to_string()),
        (NBD, "tls_verify_peer", config.nbd.tls_verify_peer.to_string()),
        (VOLUME, "create", volume.create.to_string()),
        (VOLUME, "read_only", volume.read_only.to_string()),
        (VOLUME, "shared", volume.shared.to_string()),
        (VOLUME, "direct", volume.direct.to_string()),
        (VOLUME, "cache", volume.cache.to_string()),
        (VOLUME, "default", volume.default.to_string()),
    ];
    // What is not said of a device is the default of its parameter; see the table of those.
    let of_bdi = BDI.keys.iter().map(|key| (BDI, key.name, key.default.to_owned()));
    // So are limits: those of a group, and of a volume.
    let limits = keys::LIMIT_GROUP.keys.iter().flat_map(|key| {
        [keys::LIMIT_GROUP, VOLUME].map(|section| (section, key.name, key.default.to_owned()))
    });
    let group = (VOLUME, "limit_group", "none".to_owned());
    let shown: Vec<_> = shown.into_iter().chain(of_bdi).chain(limits).chain([group]).collect();
    for (section, name, value) in &shown {
        assert_eq!(section.find(name).unwrap().default, value, "{name}");
    }
    let with_default = keys::SECTIONS
        .iter()
        .flat_map(|section| section.keys)
        .filter(|key| !key.default.is_empty())
        .count();
    assert_eq!(with_default, shown.len(), "a default that is not compared");
    assert_eq!(config.nbd, NbdConfig::default());
}

#[test]
fn flags_override_the_file_and_add_addresses() {
    let args = ServeArgs {
        workers: Some(3),
        log: Some(LogLevel::Debug),
        max_clients: Some(9),
        max_request: Some(Size::new(8192)),
        connection_memory: Some(Size::new(8192)),
        tls: Some(TlsSetting::On),
        tls_psk: Some("/psk".into()),
        ..flags(&["disk=memory:1M", "more=null:1M"], &["unix:/more"])
    };
    let text = EXAMPLE.replace("tls_verify_peer = true\n", "");
    let config = Config::parse(&text, Path::new(FILE), &args).unwrap();
    assert_eq!(config.workers, 3);
    assert_eq!(config.log, LogLevel::Debug);
    assert_eq!(
        config.nbd,
        NbdConfig {
            max_clients: 9,
            max_request: Size::new(8192),
            connection_memory: Size::new(8192),
            tls: TlsSetting::On,
            // The key source of the flags replaces the other kind of the file.
            tls_certificates: None,
            tls_psk: Some("/psk".into()),
            tls_verify_peer: false,
        }
    );
    assert_eq!(config.listen.len(), 3);
    let names: Vec<_> = config.volumes.keys().collect();
    assert_eq!(names, ["disk", "install cd", "more", "portable", "scratch"]);
    // The volume of the flags replaced the one of the file with all its options.
    assert_eq!(config.volumes["disk"].store, StoreUri::Memory(Size::new(1 << 20)));
    assert!(!config.volumes["disk"].default && !config.volumes["disk"].create);
    assert_eq!(config.default_volume(), None);
}

#[test]
fn nothing_to_serve_says_how_to_start() {
    for (args, text) in [
        (flags(&[], &[]), "no volume to serve and no address"),
        (flags(&["a=null:1G"], &[]), "no address to listen at"),
        (flags(&[], &["unix:/a"]), "no volume to serve"),
        (ServeArgs { inherited_sockets: 1, ..flags(&[], &[]) }, "no volume to serve"),
    ] {
        let error = Config::load(&args).unwrap_err();
        assert_eq!(error.kind, ConfigErrorKind::NothingToServe);
        assert!(error.message.contains(text), "{error}");
        assert!(
            error
                .remedy
                .contains("`ebbd serve --volume disk=memory:1G --listen unix:/tmp/ebbd.sock`")
        );
    }
    assert!(Config::load(&flags(&["disk=memory:1G"], &["unix:/tmp/ebbd.sock"])).is_ok());
    // Volumes can be added later.
    let control = ServeArgs { control: Some("/c".to_owned()), ..flags(&[], &["unix:/a"]) };
    assert!(Config::load(&control).unwrap().volumes.is_empty());
    let state = ServeArgs { state: Some("/nowhere".into()), ..flags(&[], &["unix:/a"]) };
    assert!(Config::load(&state).unwrap().volumes.is_empty());
}

#[test]
fn the_default_volume() {
    let default = |volumes: &[&str]| {
        let config = Config::load(&flags(volumes, &["unix:/a"])).unwrap();
        config.default_volume().map(str::to_owned)
    };
    assert_eq!(default(&["a=null:1G"]).as_deref(), Some("a"));
    assert_eq!(default(&["a=null:1G", "b=null:1G"]), None);
    assert_eq!(default(&["a=null:1G", "b=null:1G,default=true"]).as_deref(), Some("b"));
    // A volume that the command line replaces has no say any more.
    let args = flags(&["disk=null:1G", "b=null:1G,default=true"], &[]);
    let config = Config::parse(EXAMPLE, Path::new(FILE), &args).unwrap();
    assert_eq!(config.default_volume(), Some("b"));
    refused(
        parse(
            "listen=['unix:/a']\n[volume.a]\nstore='null:1G'\ndefault=true\n[volume.b]\nstore='null:1G'\ndefault=true",
        ),
        ConfigErrorKind::Duplicate,
        7,
        "volume.b.default",
        "volume.a.default in line 4",
    );
}

#[test]
fn sockets_from_the_service_manager() {
    let mut args = flags(&["a=null:1G"], &[]);
    args.inherited_sockets = 2;
    assert_eq!(Config::load(&args).unwrap().listen, []);
    args.listen.push("unix:/a".into());
    refused(
        Config::load(&args),
        ConfigErrorKind::Conflict,
        None,
        "--listen unix:/a",
        "2 listening socket(s)",
    );
    args.listen.clear();
    let file = Config::parse("listen = ['unix:/a']", Path::new(FILE), &args);
    refused(file, ConfigErrorKind::Conflict, 1, "listen", "socket activation");
}

#[test]
fn duplicate_addresses() {
    let listen = |list: &str| parse(&format!("listen = {list}\n[volume.a]\nstore='null:1G'"));
    assert!(listen("['unix:/a', 'unix:/b', 'tcp:h:1', 'tcp:h:2']").is_ok());
    for list in [
        "['unix:/a',\n'unix:/a']",
        "['unix:/a',\n'unix://./a']",
        "['tcp:h:1',\n'tcp:H:01']",
        "['tcp:[::1]:1',\n'tcp:[0::1]:1']",
    ] {
        refused(listen(list), ConfigErrorKind::Duplicate, 2, "listen", "listen in line 1");
    }
    let args = flags(&["a=null:1G"], &["unix:/a"]);
    let both = Config::parse("listen = ['unix:/a']", Path::new(FILE), &args);
    refused(both, ConfigErrorKind::Duplicate, None, "--listen unix:/a", "listen in line 1");
}

#[test]
fn numbers_have_limits() {
    for (line, good) in [
        ("max_clients = 1", true),
        ("max_clients = 65536", true),
        ("max_clients = 0", false),
        ("max_clients = 65537", false),
        ("max_clients = -1", false),
        ("max_request = '4K'", true),
        ("max_request = '64M'", true),
        ("max_request = 5000", true),
        ("max_request = 4095", false),
        ("max_request = 67108865", false),
        ("max_request = 0", false),
    ] {
        if good {
            nbd(line).unwrap();
        } else {
            let key = format!("nbd.{}", line.split(' ').next().unwrap());
            refused(nbd(line), ConfigErrorKind::OutOfRange, 5, &key, "choose a");
        }
    }
    for (workers, good) in [(1, true), (64, true), (0, false), (65, false), (-1, false)] {
        let args = ServeArgs { workers: Some(workers), ..flags(&["a=null:1G"], &["unix:/a"]) };
        let outcome = Config::load(&args);
        if good {
            outcome.unwrap();
        } else {
            refused(outcome, ConfigErrorKind::OutOfRange, None, "--workers", "from 1 to 64");
        }
    }
}

#[test]
fn a_connection_holds_one_request() {
    assert!(nbd("max_request='1M'\nconnection_memory='1M'").is_ok());
    refused(
        nbd("max_request='1M'\nconnection_memory='1023K'"),
        ConfigErrorKind::Conflict,
        6,
        "nbd.connection_memory",
        "choose 1M or more",
    );
    refused(
        nbd("connection_memory='31M'"),
        ConfigErrorKind::Conflict,
        5,
        "nbd.connection_memory",
        "choose 32M or more",
    );
    // The defaults go with each value allowed, else the error would have no place.
    assert!(nbd("max_request='64M'").is_ok());
}

#[test]
fn tls_needs_one_source_of_keys() {
    let keys = |key: &str| format!("nbd.{key}");
    assert!(nbd("tls='on'\ntls_psk='/p'").is_ok());
    assert!(nbd("tls='require'\ntls_certificates='/c'\ntls_verify_peer=true").is_ok());
    assert!(nbd("tls='off'\ntls_certificates='/c'\ntls_psk='/p'\ntls_verify_peer=true").is_ok());
    assert!(nbd("tls_verify_peer=false").is_ok());
    refused(nbd("tls='on'"), ConfigErrorKind::Missing, 5, &keys("tls"), "--tls-psk FILE");
    refused(
        nbd("tls='require'\ntls_certificates='/c'\ntls_psk='/p'"),
        ConfigErrorKind::Conflict,
        7,
        &keys("tls_psk"),
        "nbd.tls_certificates in line 6",
    );
    refused(
        nbd("tls='on'\ntls_psk='/p'\ntls_verify_peer=true"),
        ConfigErrorKind::Conflict,
        7,
        &keys("tls_verify_peer"),
        "no certificates to verify",
    );
    for line in ["tls_certificates='/c'", "tls_psk='/p'", "tls_verify_peer=true"] {
        let key = keys(line.split('=').next().unwrap());
        refused(nbd(line), ConfigErrorKind::Conflict, 5, &key, "while `tls` is not set");
    }
    let both = ServeArgs {
        tls: Some(TlsSetting::On),
        tls_certificates: Some("/c".into()),
        tls_psk: Some("/p".into()),
        ..flags(&["a=null:1G"], &["unix:/a"])
    };
    let outcome = Config::load(&both);
    refused(outcome, ConfigErrorKind::Conflict, None, "--tls-psk", "--tls-certificates");
    let empty = ServeArgs { tls_psk: Some("".into()), ..ServeArgs::default() };
    refused(Config::load(&empty), ConfigErrorKind::InvalidValue, None, "--tls-psk", "empty");
}

#[test]
fn options_of_a_volume_fit_together() {
    let file = "store='file:/a'\n";
    let memory = "store='memory:1G'\n";
    assert!(volume(&format!("{file}size='1G'\ncreate=true\ndirect='on'")).is_ok());
    assert!(volume(&format!("{file}read_only=true\ncreate=false")).is_ok());
    assert!(volume(&format!("{memory}read_only=true\ndirect='auto'\ncreate=false")).is_ok());
    for (text, kind, line, key, part) in [
        (format!("{file}size='1G'"), ConfigErrorKind::Conflict, 4, "size", "set `create`"),
        (
            format!("{file}size='1G'\ncreate=false"),
            ConfigErrorKind::Conflict,
            4,
            "size",
            "set `create`",
        ),
        (format!("{file}create=true"), ConfigErrorKind::Missing, 4, "create", "add a size"),
        (
            format!("{file}create=true\nsize='1G'\nread_only=true"),
            ConfigErrorKind::Conflict,
            4,
            "create",
            "stay empty",
        ),
        (
            format!("{file}create=true\nsize=1000"),
            ConfigErrorKind::InvalidValue,
            5,
            "size",
            "is 1024",
        ),
        (
            format!("{file}create=true\nsize=0"),
            ConfigErrorKind::OutOfRange,
            5,
            "size",
            "cannot be 0",
        ),
        (
            format!("{memory}size='2G'"),
            ConfigErrorKind::Conflict,
            4,
            "size",
            "write the size after the store: memory:2G",
        ),
        (
            format!("{memory}create=true"),
            ConfigErrorKind::Conflict,
            4,
            "create",
            "for file stores only",
        ),
        (
            format!("{memory}direct='on'"),
            ConfigErrorKind::Conflict,
            4,
            "direct",
            "for file stores only",
        ),
        ("store='null:1G'\ndirect='off'".into(), ConfigErrorKind::Conflict, 4, "direct", "`null`"),
        (
            "store='memory:1000'".into(),
            ConfigErrorKind::InvalidValue,
            3,
            "store",
            "multiple of 512",
        ),
    ] {
        refused(volume(&text), kind, line, &format!("volume.a.{key}"), part);
    }
}

#[test]
fn the_same_name_twice() {
    let outcome = Config::load(&flags(&["a=null:1G", "a=null:2G"], &["unix:/a"]));
    refused(outcome, ConfigErrorKind::Duplicate, None, "--volume a=null:2G", "another name");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_panics(text: String) {
        let _ = parse(&text);
    }

    #[test]
    fn no_toml_panics(lines in prop::collection::vec(line(), 0..12)) {
        let text = lines.join("\n");
        if let Err(error) = parse(&text) {
            prop_assert!(!error.remedy.is_empty());
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
            let lines = text.lines().count().max(1);
            // An unexpected end is reported at the line after the last line end.
            prop_assert!(error.line.is_none_or(|line| (1..=lines + 1).contains(&line)));
        }
    }

    #[test]
    fn what_loads_keeps_its_promises(lines in prop::collection::vec(good_line(), 0..6)) {
        let text = lines.join("\n");
        let args = flags(&["extra=file:/e,size=1G,create=true"], &["unix:/extra"]);
        if let Ok(config) = Config::parse(&text, Path::new(FILE), &args) {
            let nbd = &config.nbd;
            prop_assert!((1..=64).contains(&config.workers));
            prop_assert!((1..=65_536).contains(&nbd.max_clients));
            prop_assert!((4096..=64 << 20).contains(&nbd.max_request.bytes()));
            prop_assert!(nbd.connection_memory >= nbd.max_request);
            let keys = [&nbd.tls_certificates, &nbd.tls_psk].into_iter().flatten().count();
            prop_assert!(nbd.tls == TlsSetting::Off || keys == 1);
            for volume in config.volumes.values() {
                prop_assert_eq!(volume.create, volume.size.is_some());
            }
            prop_assert!(config.reload_diff(&config).is_empty());
        }
    }

    #[test]
    fn no_volume_option_panics(text in "[a,=]{0,2}=?(file:|memory:|null:)?\\PC{0,8}(,{1,2}(size|create|read-only|default|x)=?(true|1G|\\PC{0,4})){0,3}") {
        let _ = Config::load(&flags(&[text.as_str()], &["unix:/a"]));
    }
}

/// A line of TOML out of keys and values that mean something somewhere.
fn line() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec![
        "listen",
        "workers",
        "log",
        "nbd",
        "volume",
        "volume.a",
        "volume.a.store",
        "store",
        "size",
        "create",
        "read_only",
        "shared",
        "direct",
        "default",
        "max_clients",
        "max_request",
        "tls",
        "zebra",
        "connection_memory",
        "tls_certificates",
        "tls_psk",
        "tls_verify_peer",
        "nbd.tls",
        "\"\\n\"",
    ]);
    let value = prop::sample::select(vec![
        "1",
        "-1",
        "99999999999999999999",
        "1.5",
        "true",
        "\"on\"",
        "\"info\"",
        "\"1G\"",
        "[]",
        "[\"unix:/a\"]",
        "[1]",
        "{}",
        "{ store = 1 }",
        "\"memory:1G\"",
        "\"file:\\u0000\"",
        "nan",
        "\"",
        "[[",
        "1979-05-27",
        "\"\"\"a\nb\"\"\"",
        "\"\\u0007\"",
        "'é'",
    ]);
    let header = prop::sample::select(vec![
        "[nbd]",
        "[volume.a]",
        "[volume.\"\\u0000\"]",
        "[volume]",
        "[[volume]]",
        "[nbd.tls]",
        "[x]",
        "[volume.a.b]",
        "[volume.\"\"]",
        "# é",
        "",
    ]);
    prop_oneof![
        3 => (key, value).prop_map(|(key, value)| format!("{key} = {value}")),
        1 => header.prop_map(str::to_owned),
    ]
}

/// A line that is right by itself, most of the time.
fn good_line() -> impl Strategy<Value = String> {
    let bytes = prop_oneof![0u64..5000, (1u64 << 25)..(1 << 27)];
    prop_oneof![
        (-2i64..70).prop_map(|n| format!("workers = {n}")),
        (-2i64..70_000).prop_map(|n| format!("nbd.max_clients = {n}")),
        bytes.clone().prop_map(|n| format!("nbd.max_request = {n}")),
        bytes.prop_map(|n| format!("nbd.connection_memory = {n}")),
        prop::sample::select(vec!["off", "on", "require"]).prop_map(|m| format!("nbd.tls = '{m}'")),
        Just("nbd.tls_psk = '/p'".to_owned()),
        Just("nbd.tls_certificates = '/c'".to_owned()),
        any::<bool>().prop_map(|on| format!("volume.a = {{ store = 'file:/a', create = {on} }}")),
        any::<bool>().prop_map(|on| format!(
            "volume.b = {{ store = 'file:/b', size = 512, create = {on} }}"
        )),
    ]
}

#[test]
fn parameters_and_the_control_socket() {
    let config = parse(
        "listen = ['unix:/a']\ncontrol = 'unix:/c'\nmax_buffer_pages = 0\n[volume.a]\n\
         store = 'null:1G'\nbuffer_squeeze_duration_ms = 60000",
    )
    .unwrap();
    assert_eq!(config.control.as_deref(), Some(Path::new("/c")));
    assert_eq!((config.max_buffer_pages, config.volumes["a"].max_buffer_pages), (0, None));
    assert_eq!(config.volumes["a"].buffer_squeeze_duration_ms, Some(60_000));

    let options = ["a=null:1G,max-buffer-pages=1048576,buffer-squeeze-duration-ms=0"];
    let config = Config::parse("", Path::new(FILE), &flags(&options, &["unix:/a"])).unwrap();
    assert_eq!(config.volumes["a"].max_buffer_pages, Some(1 << 20));

    let range = |line| volume(&format!("store = 'null:1G'\n{line}"));
    let (kind, key) = (ConfigErrorKind::OutOfRange, "volume.a.max_buffer_pages");
    refused(range("max_buffer_pages = 1048577"), kind, 4, key, "0 to 1048576");
    let key = "volume.a.buffer_squeeze_duration_ms";
    refused(range("buffer_squeeze_duration_ms = -1"), kind, 4, key, "0 to 60000");
    let control = |path: &str| {
        parse(&format!("control = '{path}'\nlisten = ['unix:/a']\n[volume.a]\nstore = 'null:1G'"))
    };
    refused(control("unix:/a"), ConfigErrorKind::Conflict, 1, "control", "listen in line 2");
    refused(control("tcp:h:1"), ConfigErrorKind::InvalidValue, 1, "control", "unix:/path");
    let web = |address: &str| {
        parse(&format!("web = '{address}'\nlisten = ['tcp:h:1']\n[volume.a]\nstore = 'null:1G'"))
    };
    assert_eq!(web("tcp:[::1]:80").unwrap().web.as_deref(), Some("[::1]:80"));
    refused(web("tcp:h:1"), ConfigErrorKind::Conflict, 1, "web", "listen in line 2");
    refused(web("unix:/a"), ConfigErrorKind::InvalidValue, 1, "web", "127.0.0.1");
    let args = flags(&["a=null:1G,max-buffer-pages=many"], &["unix:/a"]);
    let outcome = Config::parse("", Path::new(FILE), &args);
    refused(outcome, ConfigErrorKind::InvalidValue, None, "--volume a: max-buffer-pages", "digits");
}

#[test]
fn writeback_and_its_backing_device() {
    let load = |volume: &str| {
        Config::parse("", Path::new(FILE), &flags(&[volume], &["unix:/a"]))
            .map(|config| config.volumes["a"].clone())
    };
    let volume = load("a=null:1G,cache=writeback,bdi=array").unwrap();
    assert_eq!((volume.cache, volume.bdi.as_deref()), (CacheMode::Writeback, Some("array")));
    for text in ["a=null:1G,cache=writeback,read-only=true", "a=null:1G,bdi=array"] {
        assert_eq!(load(text).unwrap_err().kind, ConfigErrorKind::Conflict, "{text}");
    }
}
