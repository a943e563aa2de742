//! Tests of volumes on the command line.

use super::super::{DirectMode, StoreUri};
use super::*;

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
    refused("disk", bad, "--volume disk", "has no name");
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
    refused("a=file:/a,zebra=1", unknown, "--volume a: zebra", "size, create, read-only");
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
