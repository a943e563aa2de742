//! Tests of the forms of values.

use proptest::prelude::*;

use super::*;

fn listen(text: &str) -> Result<Listen, BadValue> {
    text.parse()
}

fn store(text: &str) -> Result<StoreUri, BadValue> {
    text.parse()
}

#[test]
fn addresses() {
    assert_eq!(listen("unix:/run/a.sock"), Ok(Listen::Unix("/run/a.sock".into())));
    assert_eq!(listen("tcp:127.0.0.1:10809"), Ok(Listen::Tcp("127.0.0.1:10809".into())));
    assert_eq!(listen("tcp:[::1]:10809"), Ok(Listen::Tcp("[::1]:10809".into())));
    assert_eq!(listen("tcp:[0:0:0:0:0:0:0:1]:010809"), Ok(Listen::Tcp("[::1]:10809".into())));
    assert_eq!(listen("tcp:LocalHost:0"), Ok(Listen::Tcp("localhost:0".into())));
    assert_eq!(listen("tcp:[FE80::1%Eth0]:10809"), Ok(Listen::Tcp("[fe80::1%Eth0]:10809".into())));
    let longest = format!("unix:/{}", "a".repeat(106));
    assert!(listen(&longest).is_ok());
}

#[test]
fn refused_addresses_come_with_a_remedy() {
    for (text, kind, remedy) in [
        ("", ConfigErrorKind::InvalidValue, "tcp:HOST:PORT"),
        ("/run/a.sock", ConfigErrorKind::InvalidValue, "write unix:/run/a.sock"),
        ("udp:a:1", ConfigErrorKind::InvalidValue, "tcp:HOST:PORT"),
        ("unix:", ConfigErrorKind::InvalidValue, "whole path"),
        ("unix:@name", ConfigErrorKind::InvalidValue, "unix:/path"),
        ("unix:/run/", ConfigErrorKind::InvalidValue, "unix:/run/nbd.sock"),
        ("unix:/a\0b", ConfigErrorKind::InvalidValue, "remove it"),
        ("tcp:", ConfigErrorKind::InvalidValue, "10809"),
        ("tcp:localhost", ConfigErrorKind::InvalidValue, "10809"),
        ("tcp::10809", ConfigErrorKind::InvalidValue, "tcp:0.0.0.0:10809"),
        ("tcp:*:10809", ConfigErrorKind::InvalidValue, "tcp:0.0.0.0:10809"),
        ("tcp:::1:10809", ConfigErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[::1:10809", ConfigErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[x]:10809", ConfigErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[::1]", ConfigErrorKind::InvalidValue, "10809"),
        ("tcp:[fe80::1%]:1", ConfigErrorKind::InvalidValue, "tcp:[fe80::1%eth0]:10809"),
        ("tcp:[fe80::1%a/b]:1", ConfigErrorKind::InvalidValue, "tcp:[fe80::1%eth0]:10809"),
        ("tcp:[fe80::1%0123456789abcdef]:1", ConfigErrorKind::InvalidValue, "%eth0"),
        ("tcp:[2001:db8::1%eth0]:1", ConfigErrorKind::InvalidValue, "link-local"),
        ("tcp:a b:1", ConfigErrorKind::InvalidValue, "253 letters"),
        ("tcp:a:", ConfigErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:+80", ConfigErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:65536", ConfigErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:-1", ConfigErrorKind::InvalidValue, "0 to 65535"),
    ] {
        let error = listen(text).expect_err(text);
        assert_eq!(error.kind, kind, "{text}: {error}");
        assert!(error.remedy.contains(remedy), "{text}: {error}");
    }
    let error = listen(&format!("unix:/{}", "a".repeat(107))).unwrap_err();
    assert_eq!(error.kind, ConfigErrorKind::OutOfRange);
    assert!(error.to_string().contains("108 bytes") && error.remedy.contains("107 bytes"));
    assert!(listen(&format!("tcp:{}:1", "a".repeat(254))).is_err());
}

#[test]
fn stores() {
    assert_eq!(store("file:/a:b.img"), Ok(StoreUri::File("/a:b.img".into())));
    assert_eq!(store("qcow2:/a:b.img"), Ok(StoreUri::Qcow2("/a:b.img".into())));
    assert_eq!(store("qcow2:/a:b.img").unwrap().to_string(), "qcow2:/a:b.img");
    assert_eq!(store("memory:1G"), Ok(StoreUri::Memory(Size::new(1 << 30))));
    assert_eq!(store("null:512"), Ok(StoreUri::Null(Size::new(512))));
}

#[test]
fn refused_stores_come_with_a_remedy() {
    for (text, kind, remedy) in [
        ("", ConfigErrorKind::InvalidValue, "file:, qcow2:, memory:, null:, rbd:, nbd:"),
        ("/a.img", ConfigErrorKind::InvalidValue, "write file:/a.img"),
        ("./a.img", ConfigErrorKind::InvalidValue, "write file:./a.img"),
        ("files:/a.img", ConfigErrorKind::InvalidValue, "did you mean `file:`?"),
        ("mem:1G", ConfigErrorKind::InvalidValue, "did you mean `memory:`?"),
        ("s3:bucket", ConfigErrorKind::InvalidValue, "file:, qcow2:, memory:, null:, rbd:, nbd:"),
        ("file:", ConfigErrorKind::InvalidValue, "whole path"),
        ("qcow2:", ConfigErrorKind::InvalidValue, "whole path"),
        ("qcow:/a", ConfigErrorKind::InvalidValue, "did you mean `qcow2:`?"),
        ("memory:", ConfigErrorKind::InvalidValue, "such as 512"),
        ("memory:1KB", ConfigErrorKind::InvalidValue, "the units are"),
        ("memory:1.5G", ConfigErrorKind::InvalidValue, "smaller unit"),
        ("memory:0", ConfigErrorKind::OutOfRange, "1G"),
        ("memory:-1G", ConfigErrorKind::OutOfRange, "such as 512"),
        ("memory:1", ConfigErrorKind::InvalidValue, "is 512"),
        ("null:1000", ConfigErrorKind::InvalidValue, "is 1024"),
        ("null:16777216T", ConfigErrorKind::OutOfRange, "16777215T"),
        ("null:8388608T", ConfigErrorKind::OutOfRange, "below 8388608T"),
    ] {
        let error = store(text).expect_err(text);
        assert_eq!(error.kind, kind, "{text}: {error}");
        assert!(error.remedy.contains(remedy), "{text}: {error}");
    }
    assert!(store("null:8388607T").is_ok());
    assert!(store("null:9223372036854775296").is_ok(), "2^63 - 512 is the largest");
    assert!(store("null:18446744073709551615").is_err(), "the next multiple does not exist");
}

#[test]
fn choices() {
    assert_eq!(TlsSetting::parse("require"), Ok(TlsSetting::Require));
    assert_eq!(TlsSetting::Require.to_string(), "require");
    let error = TlsSetting::parse("required").unwrap_err();
    assert_eq!(error.kind, ConfigErrorKind::UnknownChoice);
    assert_eq!(error.remedy, "did you mean `require`?");
    assert_eq!(LogLevel::parse("Info").unwrap_err().remedy, "did you mean `info`?");
    assert_eq!(DirectMode::parse("yes").unwrap_err().remedy, "the values are: auto, on, off");
}

#[test]
fn volume_names() {
    assert!(volume_name("disk").is_ok());
    assert!(volume_name("install cd/ä").is_ok());
    assert!(volume_name(&"n".repeat(255)).is_ok());
    assert_eq!(volume_name("").unwrap_err().kind, ConfigErrorKind::OutOfRange);
    assert_eq!(volume_name(&"n".repeat(256)).unwrap_err().kind, ConfigErrorKind::OutOfRange);
    for name in ["a\nb", "a\0", "\u{7f}", "a\u{85}"] {
        assert_eq!(volume_name(name).unwrap_err().kind, ConfigErrorKind::InvalidValue, "{name:?}");
    }
}

#[test]
fn truth() {
    assert_eq!(boolean("true"), Ok(true));
    assert_eq!(boolean("false"), Ok(false));
    assert_eq!(boolean("yes").unwrap_err().remedy, "write `true`");
    assert_eq!(boolean("Off").unwrap_err().remedy, "write `false`");
    assert!(boolean("").is_err());
}

proptest! {
    #[test]
    fn no_text_panics_and_what_parses_displays(
        text in "(unix|tcp|file|memory|null|x)?:?\\[?\\PC{0,20}\\]?:?[0-9]{0,6}"
    ) {
        if let Ok(address) = listen(&text) {
            prop_assert_eq!(listen(&address.to_string()), Ok(address));
        }
        if let Ok(uri) = store(&text) {
            prop_assert_eq!(store(&uri.to_string()), Ok(uri));
        }
        let _ = volume_name(&text);
    }
}

fn nbd(text: &str) -> NbdUri {
    match store(text) {
        Ok(StoreUri::Nbd(options)) => *options,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn remote_exports() {
    use std::time::Duration;

    let tcp = |host: &str, port| NbdHost::Tcp(host.to_owned(), port);
    assert_eq!(nbd("nbd://Server").server, tcp("server", 10809));
    assert_eq!(nbd("nbd://server").export, "");
    assert_eq!(nbd("nbd://[::1]:1/a/b").server, tcp("::1", 1));
    assert_eq!(nbd("nbd://[::1]:1/a/b").export, "a/b");
    for zone in ["%eth0", "%25eth0"] {
        assert_eq!(nbd(&format!("nbd://[fe80::1{zone}]:7/a")).server, tcp("fe80::1%eth0", 7));
    }
    assert_eq!(nbd("nbd://[fe80::1%25]/").server, tcp("fe80::1%25", 10809));
    let unix = nbd("nbd+unix:///a%20%C3%A4%25?socket=/run/a%3Fb&reconnect=5&lost-writes=report");
    assert_eq!(unix.server, NbdHost::Unix("/run/a?b".into()));
    assert_eq!(unix.export, "a \u{e4}%");
    assert_eq!(unix.reconnect, Duration::from_secs(5));
    assert!(unix.report_lost_writes);
    assert_eq!(unix.silence, None);
    assert_eq!(nbd("nbd://h/x?silence=90").silence, Some(Duration::from_secs(90)));
    assert_eq!(nbd("nbd://h/x?silence=0").silence, None);
    let tls = nbd("nbds://alice@h:7/e?tls-psk-file=/k").tls.unwrap();
    assert_eq!(tls.keys, NbdUriKeys::Psk("/k".into(), "alice".to_owned()));
    let tls = nbd("nbds+unix:///e?socket=/s&tls-certificates=/d&tls-verify-peer=0").tls.unwrap();
    assert_eq!(tls.keys, NbdUriKeys::Certificates("/d".into()));
    assert!(!tls.verify);
    for text in [
        "nbd://server:10809/",
        "nbd://[::1]:1/a/b",
        "nbd://[fe80::1%25eth0]:1/a",
        "nbd://[fe80::1%2525]:1/a",
        "nbd+unix:///a%20b?socket=/run/a%3Fb&reconnect=5&lost-writes=report",
        "nbd://h:10809/x?reconnect=5&silence=90",
        "nbds://al%40ice@h:7/e?tls-psk-file=/k",
        "nbds://h:7/e?tls-certificates=/d&tls-hostname=x.y&tls-verify-peer=false",
    ] {
        assert_eq!(store(text).unwrap().to_string(), text);
    }
}

#[test]
fn refused_remote_exports_come_with_a_remedy() {
    for (text, remedy) in [
        ("nbd:server", "write nbd://HOST"),
        ("nbd://", "write nbd://HOST"),
        ("nbd://a b/", "write nbd://HOST"),
        ("nbd://::1/x", "nbd://[::1]"),
        ("nbd://[::1/x", "write nbd://HOST"),
        ("nbd://[::1%lo]/x", "write nbd://HOST"),
        ("nbd://[fe80::1%]/x", "write nbd://HOST"),
        ("nbd://h:0/x", "1 to 65535"),
        ("nbd://h:65536/x", "1 to 65535"),
        ("nbd://h:+1/x", "1 to 65535"),
        ("nbd://h/x#y", "%23"),
        ("nbd://h/%2", "two hexadecimal digits"),
        ("nbd://h/%zz", "two hexadecimal digits"),
        ("nbd://h/%00", "two hexadecimal digits"),
        ("nbd://h/%ff", "two hexadecimal digits"),
        ("nbd://h/x?socket=/s", "nbd+unix://"),
        ("nbd://u@h/x", "nbds://"),
        ("nbd://h/x?tls-certificates=/d", "nbds://"),
        ("nbd+unix:///x", "?socket="),
        ("nbd+unix://h/x?socket=/s", "three slashes"),
        ("nbd+unix:///x?sockt=/s", "did you mean `socket`?"),
        ("nbd+unix:///x?socket=/s&socket=/t", "keep one"),
        ("nbd+unix:///x?socket", "write nbd://HOST"),
        ("nbds://h/x?tls-psk-file=/k", "NAME@HOST"),
        ("nbds://h/x?tls-psk-file=/k&tls-certificates=/d", "keep one"),
        ("nbds://h/x?tls-verify-peer=maybe", "tls-verify-peer=true"),
        ("nbd://h/x?reconnect=1m", "0 to 86400"),
        ("nbd://h/x?reconnect=86401", "0 to 86400"),
        ("nbd://h/x?silence=86401", "silence=60"),
        ("nbd://h/x?lost-writes=keep", "lost-writes=report"),
        ("ndb://h/x", "did you mean `nbd:`?"),
    ] {
        let error = store(text).expect_err(text);
        assert!(error.remedy.contains(remedy), "{text}: {error}");
    }
    let long = format!("nbd://h/{}", "x".repeat(4097));
    assert!(store(&long).unwrap_err().remedy.contains("4096"));
    assert!(store(&format!("nbd+unix:///?socket=/{}", "x".repeat(107))).is_err());
}

#[test]
fn a_password_in_a_uri_is_refused_and_shown_nowhere() {
    for text in [
        "nbds://alice:s3cret@host/disk",
        "nbds://alice:s3cret@host/disk?tls-psk-file=/k",
        "nbd://alice:s3cret@host/disk",
        "nbds+unix://alice:s3cret@/disk?socket=/s",
        "http://alice:s3cret@host/disk",
        "http://alice:s3:cr@s3cret@host",
    ] {
        let refused = text.parse::<StoreUri>().unwrap_err().to_string();
        assert!(!refused.contains("s3cret"), "{text}: {refused}");
        assert!(refused.contains("password") || refused.contains("alice:***@host"), "{refused}");
    }
    // The name of a key may have a colon.
    let text = "nbds://a%3Ab@host:10809/disk?tls-psk-file=/k";
    let uri: StoreUri = text.parse().unwrap();
    assert_eq!(uri.to_string(), text);
    assert_eq!(uri.to_string().parse::<StoreUri>().unwrap(), uri);
}
