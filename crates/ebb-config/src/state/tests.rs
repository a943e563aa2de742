use ebb_advice::{Advice, full_text};
use proptest::prelude::*;

use super::*;
use crate::value::{CacheMode, DirectMode};
use crate::{LimitsConfig, ServeArgs, Size, StoreUri};

/// Another open file of the same process is refused as another process is.
#[test]
fn one_daemon_at_a_time_uses_the_directory() {
    let kept = Kept::new();
    let lock = kept.dir().prepare().unwrap();
    let left_over = kept.dir().volumes.join(".new-1-1");
    fs::write(&left_over, "").unwrap();
    let refused = kept.dir().prepare().unwrap_err();
    assert!(matches!(refused, StateError::InUse { .. }), "{refused:?}");
    let (text, path) = (full_text(&refused), kept.folder.path().join("state"));
    assert!(text.starts_with(&format!("{}: another daemon", path.display())), "{text}");
    assert!(text.contains("stop that one"), "{text}");
    assert!(left_over.exists(), "a file that the other daemon writes was removed");
    drop(lock);
    let _lock = kept.dir().prepare().unwrap();
    assert!(!left_over.exists());
}

const MAIN: &str = "listen = ['unix:/a']\n[volume.main]\nstore = 'file:/main'\nsize = '1G'\ncreate = true\n\
                    [volume.device]\nstore = 'file:/dev/sdx'\n";

/// A state directory, and the configuration with it.
struct Kept {
    folder: tempfile::TempDir,
    args: ServeArgs,
}

impl Kept {
    fn new() -> Kept {
        let folder = tempfile::tempdir().unwrap();
        let main = folder.path().join("main.toml");
        fs::write(&main, MAIN).unwrap();
        let args = ServeArgs {
            config: Some(main),
            state: Some(folder.path().join("state")),
            ..ServeArgs::default()
        };
        Kept { folder, args }
    }

    fn dir(&self) -> StateDir {
        StateDir::new(&self.folder.path().join("state"))
    }

    /// The directory, which exists.
    fn ready(&self) -> StateDir {
        self.dir().create().unwrap();
        self.dir()
    }

    /// Puts a file into the directory.
    fn put(&self, file: &str, text: &str) {
        self.dir().create().unwrap();
        fs::write(self.dir().volumes.join(file), text).unwrap();
    }

    fn load(&self) -> Config {
        Config::load(&self.args).unwrap()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir().volumes).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn size(size: Size) -> StoredVolume {
    StoredVolume::Overrides(Box::new(VolumeOverrides {
        size: Some(size),
        ..VolumeOverrides::default()
    }))
}

fn whole(store: &str) -> VolumeConfig {
    NewVolume { name: "v".to_owned(), store: store.to_owned(), ..NewVolume::default() }
        .config()
        .unwrap()
}

#[test]
fn a_name_has_one_file_name_which_stays_in_the_directory() {
    assert_eq!(file_name("disk-1_a.b"), "disk-1_a.b.toml");
    assert_eq!(file_name("../install cd"), "%2E.%2Finstall%20cd.toml");
    assert_eq!(file_name("."), "%2E.toml");
    assert_eq!(volume_of("%2E.toml").as_deref(), Some("."));
    // Other spellings of a name, and no names.
    for foreign in
        ["%64isk.toml", "a%2f.toml", "a.tom", "a%2.toml", "a%FF.toml", ".toml", "%0A.toml"]
    {
        assert_eq!(volume_of(foreign), None, "{foreign}");
    }
    let kept = Kept::new();
    let long = kept.dir().write_atomically(&"ü".repeat(100), &size(Size::new(512)));
    assert!(long.unwrap_err().remedy().unwrap().contains("choose a shorter one"));
}

#[test]
fn a_written_volume_is_read_again_renamed_and_removed() {
    let kept = Kept::new();
    let (dir, stored) = (kept.dir(), StoredVolume::Whole(Box::new(whole("memory:1M"))));
    assert_eq!(kept.load().volumes.len(), 2, "without the directory");
    dir.prepare().unwrap();
    dir.write_atomically("added", &stored).unwrap();
    let config = kept.load();
    assert_eq!(config.volumes["added"], whole("memory:1M"));
    assert_eq!(config.origins["added"], VolumeOrigin::State);
    let VolumeOrigin::Configuration(place) = &config.origins["main"] else { panic!("{config:?}") };
    assert!(place.ends_with("main.toml:2"), "{place}");
    dir.rename("added", "a/b").unwrap();
    assert_eq!(kept.files(), ["a%2Fb.toml"]);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs::metadata(dir.path_of("a/b")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o007, 0, "{mode:o}");
    assert!(dir.remove("a/b").unwrap());
    assert!(!dir.remove("a/b").unwrap());
    assert!(kept.files().is_empty() && kept.load().volumes.len() == 2);
}

/// A file system that is no longer mounted has the file: the next start finds it.
#[test]
fn removal_without_the_directory_is_not_done() {
    let kept = Kept::new();
    kept.ready().write_atomically("added", &size(Size::new(512))).unwrap();
    let (volumes, away) = (kept.dir().volumes, kept.folder.path().join("away"));
    fs::rename(&volumes, &away).unwrap();
    let error = kept.dir().remove("added").unwrap_err();
    assert!(!error.is_applied() && !full_text(&error).contains("done"), "{error}");
    assert!(error.to_string().contains("cannot remove"), "{error}");
    fs::rename(&away, &volumes).unwrap();
    assert_eq!(kept.files(), ["added.toml"]);
}

#[test]
fn temporary_files_that_were_left_over_are_ignored_and_removed() {
    let kept = Kept::new();
    kept.put(".new-1-2", "store = 'fil");
    let config = kept.load();
    assert!(config.broken.is_empty() && config.warnings.is_empty(), "{config:?}");
    kept.dir().prepare().unwrap();
    assert!(kept.files().is_empty());
}

/// It was killed before it had synchronised the directory.
#[test]
fn what_a_killed_daemon_has_changed_is_stable_after_a_start() {
    let kept = Kept::new();
    drop(kept.dir().prepare().unwrap());
    let faults = StateFaults::of(kept.dir().root());
    let stored = StoredVolume::Whole(Box::new(whole("memory:1M")));
    faults.fail_after(5, u32::MAX, ErrorKind::Other);
    let cut_short = kept.dir().write_atomically("added", &stored).unwrap_err();
    assert!(cut_short.is_applied() && !faults.is_stable(), "{cut_short}");
    faults.end();
    faults.fail(StateStep::SyncFolder, ErrorKind::Other);
    let lock = kept.dir().prepare().unwrap();
    let failure = lock.failure().unwrap().to_string();
    assert!(failure.contains("cannot flush") && !faults.is_stable(), "{failure}");
    let other = kept.dir().prepare().unwrap_err();
    assert!(matches!(other, StateError::InUse { .. }), "the lock was dropped: {other}");
    drop(lock);
    faults.end();
    assert!(kept.dir().prepare().unwrap().failure().is_none());
    faults.cut_power().unwrap();
    assert_eq!(kept.files(), ["added.toml"]);
}

#[test]
fn a_size_replaces_that_of_a_volume_of_the_configuration() {
    let kept = Kept::new();
    for name in ["main", "device", "gone"] {
        kept.ready().write_atomically(name, &size(Size::new(2 << 30))).unwrap();
    }
    let config = kept.load();
    assert_eq!(config.volumes["main"].size, Some(Size::new(2 << 30)));
    assert_eq!(config.volumes["device"].size, None);
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].contains("gone.toml: these are settings of a volume"), "{config:?}");
}

#[test]
fn a_file_that_cannot_be_used_concerns_its_own_volume_only() {
    let kept = Kept::new();
    kept.ready()
        .write_atomically("good", &StoredVolume::Whole(Box::new(whole("null:1G"))))
        .unwrap();
    kept.dir().write_atomically("main", &StoredVolume::Whole(Box::new(whole("null:1G")))).unwrap();
    for (file, text) in [
        ("half.toml", "store = 'fi"),
        ("foreign.toml", "stor = 'null:1G'"),
        ("limits.toml", "read_only = true"),
        ("typed.toml", "store = 7"),
        ("large.toml", &"#".repeat(70_000)),
        ("default.toml", "store = 'null:1G'\ndefault = true"),
        ("default2.toml", "store = 'null:1G'\ndefault = true"),
        ("README", "?"),
    ] {
        kept.put(file, text);
    }
    fs::write(kept.dir().volumes.join("bytes.toml"), b"\xff").unwrap();
    let config = kept.load();
    let names: Vec<_> = config.broken.keys().map(String::as_str).collect();
    assert_eq!(names, ["bytes", "foreign", "half", "large", "limits", "typed"]);
    assert!(config.broken["foreign"].ends_with("there is no such key; did you mean `store`?"));
    assert!(config.broken["half"].contains("half.toml:1: "), "{}", config.broken["half"]);
    assert!(config.broken["limits"].contains("only `size` and limits are allowed"));
    assert!(config.broken.values().all(|reason| reason.lines().count() == 1));
    assert_eq!(config.volumes["main"].store.to_string(), "file:/main");
    assert!(config.volumes.contains_key("good"));
    assert_eq!(config.default_volume(), Some("default"));
    let warnings = config.warnings.join("\n");
    for part in
        ["main.toml: the volume is also defined at", "default2.toml: default: ", "README\": "]
    {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
}

#[test]
fn a_directory_that_cannot_be_read_is_a_mistake() {
    let kept = Kept::new();
    fs::create_dir(kept.folder.path().join("state")).unwrap();
    fs::write(&kept.dir().volumes, "").unwrap();
    let error = Config::load(&kept.args).unwrap_err();
    assert!(error.to_string().contains("cannot read the state directory"), "{error}");
    let write = kept.dir().write_atomically("a", &size(Size::new(512))).unwrap_err();
    assert!(write.remedy().unwrap().contains("check the state directory"), "{write}");
}

#[test]
fn a_new_volume_is_refused_with_its_key_and_a_remedy() {
    let new = |name: &str, store: &str| NewVolume {
        name: name.to_owned(),
        store: store.to_owned(),
        ..NewVolume::default()
    };
    let text = |text: &str| Some(text.to_owned());
    for (volume, part) in [
        (new("", "null:1G"), "name: a volume has an empty name"),
        (new("..", "null:1G"), "name: `..` cannot be the name"),
        (new("a\nb", "null:1G"), "control characters"),
        (new("a\u{202e}b", "null:1G"), "the character \\u{202e}, which is invisible"),
        (new("a\u{200b}", "null:1G"), "the character \\u{200b}, which is invisible"),
        (new("a", "fiel:/x"), "store: "),
        (NewVolume { size: text("1X"), ..new("a", "file:/x") }, "size: "),
        (NewVolume { size: text("1G"), ..new("a", "file:/x") }, "set `create`"),
        (NewVolume { create: Some(true), ..new("a", "file:/x") }, "needs a size"),
        (
            NewVolume { cache: text("writeback"), read_only: Some(true), ..new("a", "file:/x") },
            "cache: ",
        ),
        (NewVolume { cache: text("wrong"), ..new("a", "file:/x") }, "cache: "),
        (NewVolume { direct: text("no"), ..new("a", "file:/x") }, "direct: "),
        (NewVolume { bdi: text("b"), ..new("a", "file:/x") }, "bdi: "),
        (NewVolume { encryption: text("k"), ..new("a", "file:/x") }, "where the key is"),
        (
            NewVolume { encryption: text("command:/k"), ..new("a", "file:/x") },
            "cannot name a program",
        ),
    ] {
        let error = volume.clone().config().unwrap_err();
        assert!(error.to_string().contains(part), "{volume:?}: {error}");
        assert!(!error.remedy.is_empty() && !error.to_string().contains('\n'), "{error}");
    }
    assert!(check_name("install cd").is_ok() && check_name(".").is_err());
}

#[test]
fn limits_and_size_replace_those_of_a_volume_of_the_configuration_one_by_one() {
    let kept = Kept::new();
    kept.ready()
        .change_overrides("a", VolumeOverrides::default(), |overrides| {
            overrides.limits.iops = Some(7);
        })
        .unwrap();
    let set = |overrides: &mut VolumeOverrides| {
        overrides.limits.bandwidth = Some(Size::new(1 << 20));
        overrides.limit_group = Some("none".to_owned());
    };
    kept.ready().change_overrides("a", VolumeOverrides::default(), set).unwrap();
    let text = "[volume.a]\nstore = 'memory:1M'\nlimit_iops = 5\nlimit_read_iops = 6\nlimit_group = 'gold'\n";
    fs::write(kept.folder.path().join("main.toml"), format!("listen = ['unix:/s']\n{text}"))
        .unwrap();
    let volume = kept.load().volumes.remove("a").unwrap();
    assert_eq!(volume.limits.iops, Some(7));
    assert_eq!(volume.limits.read_iops, Some(6));
    assert_eq!(volume.limits.bandwidth, Some(Size::new(1 << 20)));
    assert_eq!(volume.limit_group.as_deref(), Some("none"));
}

#[test]
fn a_size_is_for_the_store_and_the_size_that_it_replaced() {
    let kept = Kept::new();
    let main = |text: &str| {
        let text = format!("listen = ['unix:/s']\n[volume.a]\n{text}\n");
        fs::write(kept.folder.path().join("main.toml"), text).unwrap();
    };
    let file = "store = 'file:/a'\nsize = '1M'\ncreate = true";
    main(file);
    let replaces = kept.load().volumes["a"].store_and_size();
    let set = |overrides: &mut VolumeOverrides| {
        overrides.size = Some(Size::new(2 << 20));
        overrides.size_replaces = Some(replaces);
        overrides.limits.iops = Some(7);
    };
    kept.ready().change_overrides("a", VolumeOverrides::default(), set).unwrap();
    let config = kept.load();
    assert_eq!(config.volumes["a"].size, Some(Size::new(2 << 20)));
    assert_eq!(config.replaced["a"].size, Some(Size::new(1 << 20)));
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    for changed in [file.replace("/a", "/b"), file.replace("1M", "3M")] {
        main(&changed);
        let config = kept.load();
        let volume = &config.volumes["a"];
        assert_eq!(volume.store_and_size(), config.replaced["a"].store_and_size());
        assert_eq!(volume.limits.iops, Some(7));
        assert!(config.warnings[0].contains("a.toml: its size is ignored"), "{config:?}");
    }
    // Nothing is left to be kept.
    let clear = |overrides: &mut VolumeOverrides| {
        (overrides.size, overrides.limits) = (None, LimitsConfig::default());
    };
    kept.dir().change_overrides("a", VolumeOverrides::default(), clear).unwrap();
    assert!(kept.files().is_empty());
}

#[test]
fn a_whole_volume_is_not_replaced_by_settings_of_another() {
    let kept = Kept::new();
    let stored = StoredVolume::Whole(Box::new(whole("null:1G")));
    kept.ready().write_atomically("main", &stored).unwrap();
    let change = |overrides: &mut VolumeOverrides| overrides.limits.iops = Some(7);
    let error =
        kept.dir().change_overrides("main", VolumeOverrides::default(), change).unwrap_err();
    assert!(matches!(error, StateError::DefinedTwice { .. }), "{error}");
    let left = fs::read_to_string(kept.dir().path_of("main")).unwrap();
    assert!(left.contains("null:1G"), "{left}");
}

#[test]
fn the_limits_of_a_group_are_kept_over_those_of_the_configuration() {
    let kept = Kept::new();
    let main = kept.folder.path().join("main.toml");
    fs::write(&main, format!("{MAIN}[limit_group.gold]\nlimit_iops = 5\nlimit_burst_ms = 50\n"))
        .unwrap();
    let set = |group: &str, iops| {
        kept.dir()
            .change_group(group, LimitsConfig::default(), |limits| limits.iops = iops)
            .unwrap();
    };
    set("gold", Some(7));
    set("a/b", Some(8));
    let config = kept.load();
    let gold = config.limit_groups["gold"];
    assert_eq!((gold.iops, gold.burst_ms), (Some(7), Some(50)));
    assert_eq!(config.replaced_groups["gold"].unwrap().iops, Some(5));
    assert_eq!((config.limit_groups["a/b"].iops, config.replaced_groups["a/b"]), (Some(8), None));
    assert!(config.warnings.is_empty() && config.volumes.len() == 2, "{config:?}");

    set("gold", None);
    set("a/b", None);
    let groups = kept.dir().groups().volumes;
    assert_eq!(fs::read_dir(&groups).unwrap().count(), 0, "nothing is left to be kept");
    for (bad, why) in
        [("size = '1G'", "keys other"), ("store = 'null:1M'", "keys of a volume"), ("x = 1", "x: ")]
    {
        fs::write(groups.join("gold.toml"), bad).unwrap();
        let config = kept.load();
        assert_eq!(config.limit_groups["gold"].iops, Some(5), "{bad}");
        let [warning] = &config.warnings[..] else { panic!("{config:?}") };
        assert!(warning.contains("gold.toml: the limits") && warning.contains(why), "{warning}");
        assert!(config.broken.is_empty(), "no volume is concerned");
    }
    // A file that cannot be used is replaced, and what a crash has left is removed.
    fs::write(groups.join(".new-1-1"), "").unwrap();
    set("gold", Some(9));
    kept.dir().prepare().unwrap();
    assert_eq!(kept.load().limit_groups["gold"].iops, Some(9));
    assert_eq!(fs::read_dir(&groups).unwrap().count(), 1);
}

#[test]
fn a_directory_that_was_in_use_must_be_there() {
    let kept = Kept::new();
    let error = kept.dir().found(true).unwrap_err();
    assert!(error.to_string().contains("mount or restore it"), "{error}");
    assert!(kept.dir().write_atomically("a", &size(Size::new(512))).is_err());
    kept.dir().found(false).unwrap();
    kept.dir().found(true).unwrap();
    kept.dir().write_atomically("a", &size(Size::new(512))).unwrap();
}

#[test]
fn a_file_that_is_not_a_regular_one_is_refused_at_once_and_foreign_names_are_escaped() {
    let kept = Kept::new();
    let folder = kept.ready().volumes;
    let fifo = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o600));
    rustix::fs::mknodat(rustix::fs::CWD, folder.join("fifo.toml"), fifo.0, fifo.1, 0).unwrap();
    std::os::unix::fs::symlink("fifo.toml", folder.join("link.toml")).unwrap();
    fs::create_dir(folder.join("folder.toml")).unwrap();
    kept.put("a\nb", "");
    let config = kept.load();
    let names: Vec<_> = config.broken.keys().map(String::as_str).collect();
    assert_eq!(names, ["fifo", "folder", "link"]);
    assert!(config.broken["fifo"].contains("not a regular file"), "{}", config.broken["fifo"]);
    assert!(config.warnings[0].contains("a\\nb\": this is not"), "{:?}", config.warnings);
}

proptest! {
    #[test]
    fn every_name_is_found_again(name in "\\PC{1,30}") {
        let file = file_name(&name);
        prop_assert!(!file.contains('/') && !file.starts_with('.'), "{}", file);
        // Names with invisible characters are no names of volumes.
        let expected = volume_name(&name).ok();
        prop_assert_eq!(volume_of(&file), expected);
    }

    #[test]
    fn no_file_name_and_no_text_panics(name: String, text: String) {
        let _ = volume_of(&name);
        let _ = parse("v", &text, Path::new("f"));
    }

    #[test]
    fn what_is_written_is_read_again(
        (store, file) in prop_oneof![
            "/[a-z'\" \\\\,é]{1,20}".prop_map(|path| (format!("file:{path}"), true)),
            Just(("memory:3M".to_owned(), false)),
            Just(("nbd://h:7/a%20b?reconnect=5".to_owned(), false)),
            Just((
                "rbd:p/n/i?id=me&encryption-format=luks1&encryption-passphrase-file=/k%26".to_owned(),
                false,
            )),
            Just(("nbds+unix://me@/a?socket=/s&tls-psk-file=/k%26&tls-hostname=h".to_owned(), false)),
        ],
        size in prop::option::of(1_u64..1 << 40),
        (shared, writeback, bdi, default) in any::<(bool, bool, bool, bool)>(),
        pages in prop::option::of(0_u64..1000),
    ) {
        let size = size.filter(|_| file).map(|sectors| Size::new(sectors * 512));
        let volume = VolumeConfig {
            store: store.parse().unwrap(),
            base: None,
            size,
            encryption: (file && default && size.is_none()).then(|| "credential:k".parse().unwrap()),
            create: size.is_some(),
            read_only: false,
            shared,
            allow: default.then(|| allow_list(&["cn:a\"\\b".to_owned(), "net:::1".to_owned()]).unwrap()),
            direct: if file && default { DirectMode::On } else { DirectMode::Auto },
            cache: if writeback || bdi { CacheMode::Writeback } else { CacheMode::None },
            bdi: bdi.then(|| "st\"ick".to_owned()),
            default,
            vhost_user: shared.then(|| "/v/a b".parse().unwrap()),
            max_buffer_pages: pages,
            buffer_squeeze_duration_ms: pages,
            limits: LimitsConfig { iops: pages, burst_ms: pages, ..LimitsConfig::default() },
            limit_group: shared.then(|| "gold".to_owned()),
        };
        // The file asks for no new store.
        let made = StoredVolume::Whole(Box::new(volume.made()));
        let stored = StoredVolume::Whole(Box::new(volume));
        prop_assert_eq!(parse("v", &text(&stored), Path::new("f")).unwrap(), made);
    }
}

#[test]
fn state_file_cannot_name_a_program() {
    let kept = Kept::new();
    kept.put("evil.toml", "store = 'file:/a'\nencryption = 'command:/bin/sh -c id'\n");
    kept.put("good.toml", "store = 'file:/a'\nencryption = 'key-file:/k'\n");
    let config = kept.load();
    assert!(config.volumes.contains_key("good") && !config.volumes.contains_key("evil"));
    let why = &config.broken["evil"];
    assert!(why.contains("cannot name a program") && why.contains("key-file:PATH"), "{why}");
}

#[test]
fn state_file_asks_for_no_new_file() {
    let kept = Kept::new();
    kept.put("a.toml", "store = 'file:/a'\nsize = '1M'\ncreate = true\n");
    assert!(!kept.load().volumes["a"].create);
    let new = VolumeConfig { create: true, size: Some(Size::new(512)), ..whole("file:/b") };
    kept.dir().write_atomically("b", &StoredVolume::Whole(Box::new(new))).unwrap();
    let text = fs::read_to_string(kept.dir().path_of("b")).unwrap();
    assert!(!text.contains("create") && !text.contains("size"), "{text}");
}

#[test]
fn created_stores_are_recorded_by_volume() {
    let kept = Kept::new();
    let (dir, store) = (kept.ready(), |text: &str| text.parse::<StoreUri>().unwrap());
    let [one, two, third] = ["file:/one", "file:/two words", "file:/third"].map(store);
    let signs = |volume, store| dir.signs_of_creation(volume, store).unwrap();
    assert!(signs("v", &one).is_empty());
    let record = [kept.folder.path().join("state/created/v.toml")];
    for (store, other) in [(&one, &two), (&two, &third)] {
        dir.note_created("v", store).unwrap();
        assert_eq!(signs("v", store), record);
        assert!(signs("v", other).is_empty());
        assert_eq!(signs("w", store), record, "the volume had another name");
    }
    let folder = kept.folder.path();
    std::os::unix::fs::symlink(folder, folder.join("link")).unwrap();
    let [plain, detour, link] = ["x", "./state/..//x", "link/x"]
        .map(|path| store(&format!("file:{}/{path}", folder.display())));
    dir.note_created("x", &plain).unwrap();
    for spelled in [&detour, &link] {
        assert_eq!(signs("x", spelled), [folder.join("state/created/x.toml")], "{spelled}");
    }
    assert_eq!(signs("v", &one), record, "the volume had it before");
    for number in 0..100 {
        dir.note_created("v", &store(&format!("file:/{number}"))).unwrap();
    }
    assert!(fs::metadata(&record[0]).unwrap().len() < 2048);
    assert!(kept.load().orphans.is_empty(), "it is no setting");
    fs::write(&record[0], "stores = [").unwrap();
    let unread = full_text(&dir.signs_of_creation("v", &one).unwrap_err());
    assert!(unread.contains("created/v.toml"), "{unread}");
}

/// The state directory of a version that wrote no records.
#[test]
fn resized_store_existed_without_a_record() {
    let kept = Kept::new();
    kept.put("v.toml", "size = '2M'\nsize_replaces = 'file:/a disk 1M'\n");
    kept.put("w.toml", "iops = 5\n");
    let signs = |volume: &str, store: &str| {
        kept.dir().signs_of_creation(volume, &store.parse::<StoreUri>().unwrap()).unwrap()
    };
    assert_eq!(signs("v", "file:/a disk"), [kept.dir().path_of("v")]);
    for (volume, store) in [("v", "file:/other"), ("w", "file:/a disk"), ("x", "file:/a disk")] {
        assert!(signs(volume, store).is_empty(), "{volume} {store}");
    }
}
