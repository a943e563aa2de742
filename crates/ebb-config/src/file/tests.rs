//! Tests of reading the file: places, suggestions, and the table of keys against serde.

use std::fmt;

use serde::de::{self, Deserializer, Visitor, value::Error as FieldList};
use serde::forward_to_deserialize_any;

use super::*;

#[track_caller]
fn fault(text: &str) -> ConfigError {
    match parse(text, Path::new("/e.toml")) {
        Ok(_) => panic!("accepted: {text}"),
        Err(error) => error,
    }
}

#[track_caller]
fn refused(text: &str, kind: ConfigErrorKind, line: usize, key: &str, part: &str) {
    let error = fault(text);
    assert_eq!(error.kind, kind, "{error}");
    assert_eq!(error.file.as_deref(), Some(Path::new("/e.toml")), "{error}");
    assert_eq!(error.line, Some(line), "{error}");
    assert_eq!(error.key.as_deref().unwrap_or(""), key, "{error}");
    assert!(error.to_string().contains(part), "{error}");
    assert!(!error.remedy.is_empty(), "{error}");
}

/// A deserializer that only tells, as its error, which fields a struct asks for.
struct AskFields;

impl<'de> Deserializer<'de> for AskFields {
    type Error = FieldList;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, FieldList> {
        Err(de::Error::custom(fields.join(" ")))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, FieldList> {
        Err(de::Error::custom("not a struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn fields<T: for<'de> Deserialize<'de> + 'static>() -> String {
    T::deserialize(AskFields).map(|_| ()).unwrap_err().to_string()
}

fn joined(names: impl Iterator<Item = &'static str>) -> String {
    names.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_table_of_keys_is_what_serde_accepts() {
    assert_eq!(fields::<FileTop>(), joined(keys::top_names()));
    assert_eq!(fields::<FileNbd>(), joined(NBD.names()));
    assert_eq!(fields::<FileBdi>(), joined(keys::BDI.names()));
    assert_eq!(fields::<FileVolume>(), joined(VOLUME.names()));
}

#[test]
fn the_expected_values_are_accepted() {
    for section in keys::SECTIONS {
        for key in section.keys {
            let Some((_, line)) = key.expected.split_once(": ") else {
                panic!("no example for {}", key.name);
            };
            // Of several examples, take the first.
            let line = line.split("\", \"").next().unwrap();
            let line =
                if line.matches('"').count() == 1 { format!("{line}\"") } else { line.into() };
            let (header, store) = match section.header {
                "" => ("", ""),
                "nbd" => ("[nbd]\n", ""),
                "bdi.NAME" => ("[bdi.a]\n", ""),
                _ if key.name == "store" => ("[volume.a]\n", ""),
                _ => ("[volume.a]\n", "store = \"file:/a\"\n"),
            };
            let text = format!("{header}{store}{line}");
            if let Err(error) = parse(&text, Path::new("x")) {
                panic!("{text}: {error}");
            }
        }
    }
}

#[test]
fn unknown_keys_are_refused_with_a_suggestion() {
    refused("\nlisen = []", ConfigErrorKind::UnknownKey, 2, "lisen", "did you mean `listen`?");
    refused(
        "[nbd]\n\nmax-clients=1",
        ConfigErrorKind::UnknownKey,
        3,
        "nbd.max-clients",
        "`max_clients`",
    );
    refused(
        "[volume.a]\nstore='null:1G'\nreadonly=true",
        ConfigErrorKind::UnknownKey,
        3,
        "volume.a.readonly",
        "`read_only`",
    );
    refused("# c\n[volumes.a]\nstore='x'", ConfigErrorKind::UnknownKey, 2, "volumes", "`volume`");
    refused("tls='on'", ConfigErrorKind::UnknownKey, 1, "tls", "in the table [nbd]");
    refused("[nbd]\nworkers=1", ConfigErrorKind::UnknownKey, 2, "nbd.workers", "top of the file");
    refused(
        "zzzzzz=1",
        ConfigErrorKind::UnknownKey,
        1,
        "zzzzzz",
        "listen, workers, log, log_format, control,",
    );
    // The first in the file, not in the alphabet.
    refused("zoo=1\nape=1", ConfigErrorKind::UnknownKey, 1, "zoo", "");
    // Before other mistakes.
    refused("workers='x'\nlisen=1", ConfigErrorKind::UnknownKey, 2, "lisen", "");
    refused(
        "[volume.a]\n[volume.a.b]\nc=1",
        ConfigErrorKind::UnknownKey,
        2,
        "volume.a.b",
        "no such table",
    );
    refused("\"a\\nb\" = 1", ConfigErrorKind::UnknownKey, 1, "a\\nb", "");
}

#[test]
fn wrong_types_name_key_and_remedy() {
    refused("listen = 'unix:/a'", ConfigErrorKind::InvalidValue, 1, "listen", "write a list");
    refused(
        "listen = [\n'unix:/a',\n1]",
        ConfigErrorKind::InvalidValue,
        3,
        "listen",
        "write a list",
    );
    refused("\nworkers = 'x'", ConfigErrorKind::InvalidValue, 2, "workers", "from 1 to 64");
    refused("workers = 1.5", ConfigErrorKind::InvalidValue, 1, "workers", "from 1 to 64");
    refused("log = 3", ConfigErrorKind::InvalidValue, 1, "log", "log = \"info\"");
    refused("nbd = 3", ConfigErrorKind::InvalidValue, 1, "nbd", "write a table");
    refused("volume = 3", ConfigErrorKind::InvalidValue, 1, "volume", "[volume.disk]");
    refused(
        "[[volume]]\nstore='null:1G'",
        ConfigErrorKind::InvalidValue,
        1,
        "volume",
        "[volume.disk]",
    );
    refused("[volume]\na='null:1G'", ConfigErrorKind::InvalidValue, 2, "volume.a", "[volume.disk]");
    refused(
        "[nbd]\nmax_request='1KB'",
        ConfigErrorKind::InvalidValue,
        2,
        "nbd.max_request",
        "\"32M\"",
    );
    refused(
        "[nbd]\nmax_request=-1",
        ConfigErrorKind::InvalidValue,
        2,
        "nbd.max_request",
        "negative",
    );
    refused(
        "[nbd]\nmax_request=1.5",
        ConfigErrorKind::InvalidValue,
        2,
        "nbd.max_request",
        "a size",
    );
    refused(
        "nbd.tls_verify_peer='yes'",
        ConfigErrorKind::InvalidValue,
        1,
        "nbd.tls_verify_peer",
        "true",
    );
    refused(
        "[volume.a]\nstore='null:1G'\n\ncreate='true'",
        ConfigErrorKind::InvalidValue,
        4,
        "volume.a.create",
        "without quotes",
    );
}

#[test]
fn wrong_values_name_key_and_remedy() {
    refused(
        "\nlisten = [\n'unix:/a',\n'tcp:x']",
        ConfigErrorKind::InvalidValue,
        4,
        "listen",
        "10809",
    );
    refused("log = 'inof'", ConfigErrorKind::UnknownChoice, 1, "log", "did you mean `info`?");
    refused("[nbd]\ntls='yes'", ConfigErrorKind::UnknownChoice, 2, "nbd.tls", "off, on, require");
    refused("[nbd]\ntls_psk=''", ConfigErrorKind::InvalidValue, 2, "nbd.tls_psk", "empty");
    refused(
        "[volume.a]\nstore='/a'",
        ConfigErrorKind::InvalidValue,
        2,
        "volume.a.store",
        "file:/a",
    );
    refused(
        "[volume.a]\nstore='null:1G'\ndirect='yes'",
        ConfigErrorKind::UnknownChoice,
        3,
        "volume.a.direct",
        "auto, on, off",
    );
}

#[test]
fn volumes_as_a_whole() {
    refused(
        "\n[volume.a]\nread_only=true",
        ConfigErrorKind::Missing,
        2,
        "volume.a",
        "has no `store`",
    );
    refused("[volume]\n\na = {}", ConfigErrorKind::Missing, 3, "volume.a", "has no `store`");
    refused(
        "[volume.\"\"]\nstore='null:1G'",
        ConfigErrorKind::OutOfRange,
        1,
        "volume.",
        "default = true",
    );
    refused(
        "[volume.\"a\\tb\"]\nstore='null:1G'",
        ConfigErrorKind::InvalidValue,
        1,
        "volume.a\\tb",
        "",
    );
    let long = format!("[volume.{}]\nstore='null:1G'", "n".repeat(256));
    assert_eq!(fault(&long).kind, ConfigErrorKind::OutOfRange);
    assert!(fault(&long).to_string().len() < 400);
}

#[test]
fn no_toml() {
    refused("\nlisten = [", ConfigErrorKind::Syntax, 2, "", "the file is not TOML");
    refused("log = 'info'\nlog = 'info'", ConfigErrorKind::Syntax, 2, "", "duplicate key");
    refused("a = \"\nb", ConfigErrorKind::Syntax, 1, "", "");
    let deep = format!("listen = {}", "[".repeat(100_000));
    assert_eq!(fault(&deep).kind, ConfigErrorKind::Syntax);
    let dotted = format!("{}a = 1", "a.".repeat(100_000));
    assert!(fault(&dotted).to_string().len() < 1000);
}

#[test]
fn a_long_value_is_not_repeated_in_full() {
    let value = "x".repeat(100_000);
    for text in [
        format!("log = '{value}'"),
        format!("listen = ['{value}']"),
        format!("workers = '{value}'"),
        format!("{value} = 1"),
        format!("nbd.max_request = '{value}'"),
    ] {
        assert!(fault(&text).to_string().len() < 1000);
    }
}

#[test]
fn files_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let fail = |path: &Path| read(path).map(|_| ()).unwrap_err();

    let error = fail(&at("absent"));
    assert_eq!(error.kind, ConfigErrorKind::Read);
    assert_eq!(error.source.as_ref().map(io::Error::kind), Some(io::ErrorKind::NotFound));
    assert!(error.to_string().contains("absent: cannot read"), "{error}");
    assert!(error.remedy.contains("check the path"), "{error}");

    assert_eq!(fail(folder.path()).kind, ConfigErrorKind::Read);

    std::fs::write(at("latin1"), b"# ok\n# \xe9\n").unwrap();
    let error = fail(&at("latin1"));
    assert_eq!((error.kind, error.line), (ConfigErrorKind::Syntax, Some(2)), "{error}");

    let limit = usize::try_from(MAX_FILE_BYTES).unwrap();
    std::fs::write(at("large"), vec![b'\n'; limit + 1]).unwrap();
    assert_eq!(fail(&at("large")).kind, ConfigErrorKind::TooLarge);
    std::fs::write(at("largest"), vec![b'\n'; limit]).unwrap();
    assert!(read(&at("largest")).is_ok());
    assert_eq!(fail(Path::new("/dev/zero")).kind, ConfigErrorKind::TooLarge);
}

#[test]
fn many_volumes() {
    let text: String = (0..1000).fold(String::new(), |mut text, n| {
        use fmt::Write;
        writeln!(text, "[volume.v{n}]\nstore = 'memory:1G'").unwrap();
        text
    });
    assert_eq!(parse(&text, Path::new("x")).map(|layer| layer.volumes.len()).unwrap(), 1000);
}

#[test]
fn lines_are_counted_from_one() {
    let line_of = |text: &str, offset| Lines::new(text.as_bytes()).number(offset);
    assert_eq!(line_of("", 0), 1);
    assert_eq!(line_of("a\nb", 1), 1);
    assert_eq!(line_of("a\nb", 2), 2);
    assert_eq!(line_of("a\nb", 99), 2);
    assert_eq!(line_of("\n\n", 0), 1);
    assert_eq!(line_of("\n\n", 2), 3);
}

#[test]
fn a_mistake_in_an_entry_of_allow_is_in_its_line() {
    let volume = "[volume.a]\nstore = 'null:1M'\n";
    let entries = "allow = [\n'uid:root',\n'user:root',\n]";
    let kind = ConfigErrorKind::InvalidValue;
    refused(&format!("{volume}{entries}"), kind, 5, "volume.a.allow", "no such kind of client");
    let network = format!("{volume}allow = ['net:10.0.0.1/8']");
    refused(&network, kind, 3, "volume.a.allow", "write net:10.0.0.0/8");
}
