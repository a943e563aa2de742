//! Tests of the options and of volumes on the command line.

use clap::{CommandFactory, Parser};

use super::super::keys::{NBD, TOP, VOLUME};
use super::super::{DirectMode, StoreUri};
use super::*;

/// The options as a command of their own.
#[derive(Debug, Parser)]
struct ServeCommand {
    #[command(flatten)]
    args: ServeArgs,
}

fn serve(args: &[&str]) -> Result<ServeArgs, clap::Error> {
    ServeCommand::try_parse_from(["serve"].iter().chain(args)).map(|serve| serve.args)
}

#[test]
fn every_option_is_parsed() {
    let args = serve(&[
        "--config=c.toml",
        "--volume=a=memory:1G",
        "--volume=b=null:1G,default=true",
        "--listen=unix:/a",
        "--listen=tcp:h:1",
        "--check",
        "--strict",
        "--drain=9",
        "--tls=require",
        "--tls-certificates=/c",
        "--tls-psk=/p",
        "--tls-verify-peer",
        "--max-clients=2",
        "--max-request=4K",
        "--connection-memory=5K",
        "--workers=3",
        "--control=/c",
        "--state=/s",
        "--web=h:2",
        "--web-tokens=/k",
        "--web-tls-certificates=/d",
        "--web-names=a",
        "--web-names=b",
        "--xen",
        "--max-buffer-pages=4",
        "--buffer-squeeze-duration-ms=5",
        "--idle-memory=drop",
        "--sandbox=off",
        "--open-paths=/o",
        "--connect-to=c:1",
        "--cache-max=6M",
        "--cache-min=7K",
        "--vhost-user=/v",
        "--log=debug",
        "--log-format=json",
    ])
    .unwrap();
    assert_eq!(
        args,
        ServeArgs {
            config: Some("c.toml".into()),
            check: true,
            strict: true,
            takeover: false,
            drain: 9,
            volumes: vec!["a=memory:1G".into(), "b=null:1G,default=true".into()],
            listen: vec!["unix:/a".into(), "tcp:h:1".into()],
            tls: Some(TlsSetting::Require),
            tls_certificates: Some("/c".into()),
            tls_psk: Some("/p".into()),
            tls_verify_peer: true,
            max_clients: Some(2),
            max_request: Some(Size::new(4096)),
            connection_memory: Some(Size::new(5120)),
            workers: Some(3),
            log: Some(LogLevel::Debug),
            log_format: Some(LogFormat::Json),
            control: Some("/c".into()),
            state: Some("/s".into()),
            web: Some("h:2".into()),
            web_names: vec!["a".into(), "b".into()],
            web_tokens: Some("/k".into()),
            web_tls_certificates: Some("/d".into()),
            xen: true,
            vhost_user: Some("/v".into()),
            max_buffer_pages: Some(4),
            buffer_squeeze_duration_ms: Some(5),
            idle_memory: Some(IdleMemory::Drop),
            sandbox: Some(SandboxMode::Off),
            open_paths: vec!["/o".into()],
            connect_to: vec!["c:1".into()],
            cache_max: Some(Size::new(6 << 20)),
            cache_min: Some(Size::new(7 << 10)),
            inherited_sockets: 0,
        }
    );
}

#[test]
fn without_options_the_file_applies() {
    assert_eq!(serve(&[]).unwrap(), ServeArgs { drain: 60, ..ServeArgs::default() });
}

#[test]
fn an_invalid_option_is_refused_with_a_suggestion() {
    for (args, advice) in [
        (["--tls", "required"], "'require'"),
        (["--log", "inf"], "'info'"),
        (["--max-reqest", "4K"], "'--max-request'"),
        (["--max-request", "1.5G"], "next smaller unit"),
        (["--max-request", "-4K"], "negative"),
        (["--connection-memory", "1KB"], "the units are"),
    ] {
        let text = serve(&args).unwrap_err().to_string();
        assert!(text.contains(advice), "{args:?}: {text}");
    }
}

#[test]
fn the_help_texts_and_the_keys_agree() {
    let serve = ServeCommand::command();
    for key in TOP.keys.iter().chain(NBD.keys) {
        let option = key.option_name();
        let arg = serve
            .get_arguments()
            .find(|arg| arg.get_long() == Some(&option))
            .unwrap_or_else(|| panic!("no option --{option}"));
        let help = arg.get_help().unwrap().to_string();
        if !key.default.is_empty() {
            let default = format!("[default: {}]", key.default);
            assert!(help.contains(&default), "--{option}: {help}");
        }
    }
    let volume = serve.get_arguments().find(|arg| arg.get_long() == Some("volume")).unwrap();
    let help = volume.get_long_help().unwrap().to_string();
    for key in VOLUME.keys.iter().filter(|key| key.name != "store") {
        assert!(help.contains(&format!("{}=", key.option_name())), "{}", key.name);
    }
    for arg in serve.get_arguments().filter(|arg| arg.get_long() != Some("check")) {
        let help = arg.get_help().unwrap().to_string();
        assert!(help.contains("[default: "), "{}", arg.get_id());
    }
}

fn good(text: &str) -> VolumeLayer {
    volume(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[track_caller]
fn refused(text: &str, kind: ConfigErrorKind, key: &str, part: &str) {
    let Err(error) = volume(text) else { panic!("accepted: {text}") };
    assert_eq!(error.kind, kind, "{error}");
    assert_eq!((error.file.as_ref(), error.line), (None, None));
    assert_eq!(error.key.as_deref(), Some(key), "{error}");
    assert!(error.to_string().contains(part), "{error}");
    assert!(!error.remedy.is_empty(), "{error}");
}

#[test]
fn volumes() {
    let plain = good("disk=memory:1G");
    assert_eq!(plain.name, "disk");
    assert_eq!(plain.store.value, StoreUri::Memory(Size::new(1 << 30)));
    assert!(plain.size.is_none() && plain.create.is_none() && plain.default.is_none());

    let full = good("d=file:/a=b.img,size=1G,create=true,read-only=false,direct=off,default=true");
    assert_eq!(full.store.value, StoreUri::File("/a=b.img".into()));
    assert_eq!(full.size.map(|given| given.value), Some(Size::new(1 << 30)));
    assert_eq!(full.create.map(|given| given.value), Some(true));
    assert_eq!(full.read_only.map(|given| given.value), Some(false));
    assert_eq!(full.direct.map(|given| given.value), Some(DirectMode::Off));
    assert_eq!(full.default.map(|given| given.value), Some(true));

    assert_eq!(good("a=file:/x,,y,,,,z").store.value, StoreUri::File("/x,y,,z".into()));
    assert_eq!(good("a,b=null:1G").name, "a,b");
}

#[test]
fn every_option_of_the_table_is_known() {
    for key in VOLUME.keys.iter().filter(|key| key.name != "store") {
        let text = format!("a=file:/a,{}=@", key.option_name());
        // A name may be nearly anything.
        let Err(error) = volume(&text).map(|_| ()) else { continue };
        assert_ne!(error.kind, ConfigErrorKind::UnknownKey, "{text}: {error}");
    }
}

#[test]
fn refused_volumes() {
    let bad = ConfigErrorKind::InvalidValue;
    refused("", bad, "--volume ", "--volume NAME=STORE");
    refused("disk", bad, "--volume disk", "has no store");
    refused("file:/a", bad, "--volume file:/a", "has no name");
    refused("memory:1G,default=true", bad, "--volume memory:1G,default=true", "has no name");
    refused("=null:1G", ConfigErrorKind::OutOfRange, "--volume =null:1G", "default = true");
    refused("a=/a.img", bad, "--volume a=/a.img", "write file:/a.img");
    refused("a=", bad, "--volume a=", "a store is one of");
    refused("a=null:1", bad, "--volume a=null:1", "multiple of 512");
    refused("a=null:1G,", bad, "--volume a=null:1G,", "remove the comma");
    refused(
        "a=file:/a,b.img",
        bad,
        "--volume a=file:/a,b.img",
        "a comma in a path is written twice",
    );
    refused("a=file:/a,create", bad, "--volume a=file:/a,create", "write create=true");
    let unknown = ConfigErrorKind::UnknownKey;
    refused("a=file:/a,read_only=true", unknown, "--volume a: read_only", "`read-only`");
    refused("a=file:/a,sise=1G", unknown, "--volume a: sise", "`size`");
    refused(
        "a=file:/a,zebra=1",
        unknown,
        "--volume a: zebra",
        "size, create, encryption, read-only",
    );
    refused("a=file:/a,store=x", unknown, "--volume a: store", "the options are");
    refused("a=file:/a,create=yes", bad, "--volume a: create", "write `true`");
    refused("a=file:/a,size=1.5G", bad, "--volume a: size", "smaller unit");
    refused(
        "a=file:/a,direct=no",
        ConfigErrorKind::UnknownChoice,
        "--volume a: direct",
        "auto, on, off",
    );
    refused("a=file:/a,size=1G,size=1G", ConfigErrorKind::Duplicate, "--volume a: size", "twice");
}

#[test]
fn the_clients_of_a_volume_are_between_two_commas() {
    let allowed = |text: &str| {
        let layer = volume(text)?;
        let list = layer.allow.map(|given| given.value);
        Ok(list.map(|list| list.texts().map(str::to_owned).collect::<Vec<_>>()))
    };
    for (option, entries) in [
        ("", None),
        (",allow=", Some(vec![])),
        (",allow=psk:alice", Some(vec!["psk:alice"])),
        (",allow=psk:a=b,,net:::1,size=1M", Some(vec!["psk:a=b", "net:::1"])),
    ] {
        let list = allowed(&format!("a=memory:1M{option}")).map_err(|bad: ConfigError| bad);
        let entries = entries.map(|entries| entries.into_iter().map(str::to_owned).collect());
        assert_eq!(list.unwrap(), entries, "{option}");
    }
    for option in ["allow", "allow=alice", "allow=psk:a,,", "allow=psk:a,psk:b"] {
        assert!(allowed(&format!("a=memory:1M,{option}")).is_err(), "{option}");
    }
}
