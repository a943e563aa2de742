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
    let longest = format!("unix:/{}", "a".repeat(106));
    assert!(listen(&longest).is_ok());
}

#[test]
fn refused_addresses_come_with_a_remedy() {
    for (text, kind, remedy) in [
        ("", ErrorKind::InvalidValue, "tcp:HOST:PORT"),
        ("/run/a.sock", ErrorKind::InvalidValue, "write unix:/run/a.sock"),
        ("udp:a:1", ErrorKind::InvalidValue, "tcp:HOST:PORT"),
        ("unix:", ErrorKind::InvalidValue, "whole path"),
        ("unix:@name", ErrorKind::InvalidValue, "unix:/path"),
        ("unix:/run/", ErrorKind::InvalidValue, "unix:/run/nbd.sock"),
        ("unix:/a\0b", ErrorKind::InvalidValue, "take it out"),
        ("tcp:", ErrorKind::InvalidValue, "10809"),
        ("tcp:localhost", ErrorKind::InvalidValue, "10809"),
        ("tcp::10809", ErrorKind::InvalidValue, "tcp:0.0.0.0:10809"),
        ("tcp:*:10809", ErrorKind::InvalidValue, "tcp:0.0.0.0:10809"),
        ("tcp:::1:10809", ErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[::1:10809", ErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[x]:10809", ErrorKind::InvalidValue, "tcp:[::1]:10809"),
        ("tcp:[::1]", ErrorKind::InvalidValue, "10809"),
        ("tcp:a b:1", ErrorKind::InvalidValue, "253 letters"),
        ("tcp:a:", ErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:+80", ErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:65536", ErrorKind::InvalidValue, "0 to 65535"),
        ("tcp:a:-1", ErrorKind::InvalidValue, "0 to 65535"),
    ] {
        let error = listen(text).expect_err(text);
        assert_eq!(error.kind, kind, "{text}: {error}");
        assert!(error.remedy.contains(remedy), "{text}: {error}");
    }
    let error = listen(&format!("unix:/{}", "a".repeat(107))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::OutOfRange);
    assert!(error.to_string().contains("108 bytes") && error.remedy.contains("107 bytes"));
    assert!(listen(&format!("tcp:{}:1", "a".repeat(254))).is_err());
}

#[test]
fn stores() {
    assert_eq!(store("file:/a:b.img"), Ok(StoreUri::File("/a:b.img".into())));
    assert_eq!(store("memory:1G"), Ok(StoreUri::Memory(Size::new(1 << 30))));
    assert_eq!(store("null:512"), Ok(StoreUri::Null(Size::new(512))));
}

#[test]
fn refused_stores_come_with_a_remedy() {
    for (text, kind, remedy) in [
        ("", ErrorKind::InvalidValue, "file:, memory:, null:"),
        ("/a.img", ErrorKind::InvalidValue, "write file:/a.img"),
        ("./a.img", ErrorKind::InvalidValue, "write file:./a.img"),
        ("files:/a.img", ErrorKind::InvalidValue, "did you mean `file:`?"),
        ("mem:1G", ErrorKind::InvalidValue, "did you mean `memory:`?"),
        ("s3:bucket", ErrorKind::InvalidValue, "file:, memory:, null:"),
        ("file:", ErrorKind::InvalidValue, "whole path"),
        ("memory:", ErrorKind::InvalidValue, "such as 512"),
        ("memory:1KB", ErrorKind::InvalidValue, "the units are"),
        ("memory:1.5G", ErrorKind::InvalidValue, "smaller unit"),
        ("memory:0", ErrorKind::OutOfRange, "1G"),
        ("memory:-1G", ErrorKind::OutOfRange, "such as 512"),
        ("memory:1", ErrorKind::InvalidValue, "is 512"),
        ("null:1000", ErrorKind::InvalidValue, "is 1024"),
        ("null:16777216T", ErrorKind::OutOfRange, "16777215T"),
        ("null:8388608T", ErrorKind::OutOfRange, "below 8388608T"),
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
    assert_eq!(Tls::parse("require"), Ok(Tls::Require));
    assert_eq!(Tls::Require.to_string(), "require");
    let error = Tls::parse("required").unwrap_err();
    assert_eq!(error.kind, ErrorKind::UnknownChoice);
    assert_eq!(error.remedy, "did you mean `require`?");
    assert_eq!(LogLevel::parse("Info").unwrap_err().remedy, "did you mean `info`?");
    assert_eq!(Direct::parse("yes").unwrap_err().remedy, "the values are: auto, on, off");
}

#[test]
fn volume_names() {
    assert!(volume_name("disk").is_ok());
    assert!(volume_name("install cd/ä").is_ok());
    assert!(volume_name(&"n".repeat(255)).is_ok());
    assert_eq!(volume_name("").unwrap_err().kind, ErrorKind::OutOfRange);
    assert_eq!(volume_name(&"n".repeat(256)).unwrap_err().kind, ErrorKind::OutOfRange);
    for name in ["a\nb", "a\0", "\u{7f}", "a\u{85}"] {
        assert_eq!(volume_name(name).unwrap_err().kind, ErrorKind::InvalidValue, "{name:?}");
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
