//! Volumes that are added, removed, renamed and resized at run time.

use ebb_config::params::ParameterOwner;
use ebb_config::{NewVolume, StoredVolume};
use ebb_control::Refused;
use ebb_volume::Resize;

use super::*;
use crate::operations::{LongOperation, Operations};

/// A state directory, a configuration file beside it, and an engine with both.
pub(super) struct Kept {
    pub(super) world: World,
    pub(super) args: ServeArgs,
    pub(super) operations: Arc<Operations>,
    pub(super) folder: tempfile::TempDir,
}

pub(super) fn new_config(name: &str, store: &str, cache: &str) -> VolumeConfig {
    let new = NewVolume {
        name: name.to_owned(),
        store: store.to_owned(),
        cache: Some(cache.to_owned()),
        ..NewVolume::default()
    };
    new.config().unwrap()
}

impl Kept {
    /// On stores that are told what to do, or on `files`.
    pub(super) fn new(main: &str, files: bool) -> Kept {
        Kept::within(main, files, tempfile::tempdir().unwrap())
    }

    pub(super) fn within(main: &str, files: bool, folder: tempfile::TempDir) -> Kept {
        let stores = Arc::<Stores>::default();
        let opener: Arc<dyn Opener> = if files {
            Arc::new(HelperThreads { workers: 1, ..HelperThreads::default() })
        } else {
            stores.clone()
        };
        Kept::over(main, folder, (stores, opener))
    }

    pub(super) fn over(
        main: &str,
        folder: tempfile::TempDir,
        (stores, opener): (Arc<Stores>, Arc<dyn Opener>),
    ) -> Kept {
        let path = folder.path().join("main.toml");
        let main = main.replace("DIR", folder.path().to_str().unwrap());
        std::fs::write(&path, format!("listen = ['unix:/never']\n{main}")).unwrap();
        let args = ServeArgs {
            config: Some(path),
            state: Some(folder.path().join("state")),
            ..ServeArgs::default()
        };
        let config = Config::load(&args).unwrap();
        let state = StateDir::new(&folder.path().join("state"));
        state.prepare().unwrap();
        let world = World::over(&config, SOON, Some(state), stores, opener);
        let kept = Kept { world, args, operations: Arc::default(), folder };
        kept.start();
        kept
    }

    fn start(&self) {
        self.world.start(self.load(), None);
    }

    pub(super) fn load(&self) -> Config {
        Config::load(&self.args).unwrap()
    }

    pub(super) fn path(&self, name: &str) -> String {
        format!("file:{}", self.folder.path().join(name).display())
    }

    pub(super) fn begin(&self, kind: &'static str) -> Arc<LongOperation> {
        self.operations.begin(kind, None, "uid:0").unwrap()
    }

    pub(super) fn add(&self, name: &str, config: VolumeConfig, keep: bool) -> Result<(), Refused> {
        let (name, operation) = (name.to_owned(), self.begin("add"));
        let ending = operation.clone();
        let outcome = self.world.run(move |engine, io| async move {
            engine.add_volume(&io, &name, (config, keep), &operation).await
        });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), Refused> {
        let (name, operation) = (name.to_owned(), self.begin("remove"));
        let ending = operation.clone();
        let outcome = self.world.run(move |engine, io| async move {
            engine.remove_volume(&io, &name, &operation).await
        });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> Result<(), Refused> {
        let (from, to, operation) = (from.to_owned(), to.to_owned(), self.begin("rename"));
        let ending = operation.clone();
        let outcome = self.world.run(move |engine, io| async move {
            engine.rename_volume(&io, (&from, &to), &operation).await
        });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn persist(&self, name: &str) -> Result<(), Refused> {
        let (name, operation) = (name.to_owned(), self.begin("persist"));
        let ending = operation.clone();
        let outcome = self
            .world
            .run(move |engine, _| async move { engine.persist_volume(&name, &operation).await });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn resize(&self, name: &str, to: u64) -> Result<(), Refused> {
        let (name, operation) = (name.to_owned(), self.begin("resize"));
        let order = Resize { to: Some(to), shrink: true };
        let ending = operation.clone();
        let outcome = self.world.run(move |engine, io| async move {
            engine.resize_volume(&io, (&name, order), &operation).await
        });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn files(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.folder.path().join("state/volumes")) else {
            return Vec::new();
        };
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[track_caller]
pub(super) fn refuses(outcome: Result<(), Refused>, kind: &str, text: &str) {
    let refused = outcome.unwrap_err();
    assert_eq!(refused.body.error, kind, "{refused}");
    assert!(refused.to_string().contains(text), "{refused}");
    assert!(
        !refused.body.remedy.is_empty() && refused.to_string().lines().count() == 1,
        "{refused}"
    );
}

const MAIN: &str = "[volume.main]\nstore = 'file:/main'\n";

#[test]
fn an_added_volume_is_served_and_only_a_persistent_one_is_kept() {
    let kept = Kept::new("control = '/c'\n", false);
    let world = &kept.world;
    for name in ["one", "two"] {
        world.store(name);
    }
    kept.add("one", new_config("one", "file:/one", "none"), true).unwrap();
    kept.add("two", new_config("two", "file:/two", "none"), false).unwrap();
    world.write("one", 1).unwrap();
    world.write("two", 2).unwrap();
    assert_eq!(kept.files(), ["one.toml"]);
    assert_eq!(kept.load().volumes["one"].store.to_string(), "file:/one");
    let parameters = &world.engine.parameters;
    assert!(parameters.list(ebb_config::params::ParameterOwner::Volume("two")).is_ok());
    // A reload removes neither.
    world.reload(kept.load());
    let origins: Vec<_> =
        world.engine.states().iter().map(|state| (state.name.clone(), state.origin)).collect();
    assert_eq!(
        origins,
        [("one".to_owned(), DefinedIn::State), ("two".to_owned(), DefinedIn::RunTime)]
    );
    world.write("two", 3).unwrap();
    kept.remove("one").unwrap();
    kept.remove("two").unwrap();
    assert!(kept.files().is_empty() && world.engine.states().is_empty());
    assert_eq!(world.volumes.count(), 0);
    assert!(parameters.list(ebb_config::params::ParameterOwner::Volume("two")).is_err());
    assert!(world.stop().is_clean());
}

#[test]
fn mistakes_in_changes_are_refused_with_a_remedy_and_change_nothing() {
    let kept = Kept::new(MAIN, false);
    let world = &kept.world;
    for name in ["main", "one"] {
        world.store(name);
    }
    world.wait_for("main is served", |world| world.volume("main").is_some());
    let none = |name: &str, store: &str| new_config(name, store, "none");
    kept.add("one", none("one", "file:/one"), true).unwrap();
    let before = (kept.files(), world.phases());
    refuses(kept.add("main", none("main", "file:/x"), true), "exists", "main.toml:2");
    refuses(kept.add("one", none("one", "file:/x"), false), "exists", "another name");
    world.stores.set("two", Fate::Fails);
    refuses(kept.add("two", none("two", "nbd://h/x"), true), "not_opened", "not today");
    refuses(kept.add(&"é".repeat(99), none("x", "file:/x"), true), "invalid_value", "shorter");
    refuses(kept.remove("main"), "configured", "main.toml:2");
    refuses(kept.remove("ones"), "unknown_volume", "did you mean `one`?");
    refuses(kept.rename("main", "x"), "configured", "rename it there");
    refuses(kept.rename("one", "main"), "exists", "another name");
    // Not by the advice to remove the volume, whose file it is.
    refuses(kept.rename("one", "one"), "invalid_value", "has this name already");
    refuses(kept.add("one", none("one", "file:/x"), true), "exists", "another name");
    refuses(kept.rename("ones", "x"), "unknown_volume", "`one`");
    refuses(kept.resize("ones", 512), "unknown_volume", "`one`");
    std::fs::write(kept.folder.path().join("state/volumes/two.toml"), "store='null:1G'").unwrap();
    refuses(kept.add("two", none("two", "null:1G"), true), "exists", "remove it with");
    std::fs::remove_file(kept.folder.path().join("state/volumes/two.toml")).unwrap();
    assert_eq!((kept.files(), world.phases()), before);
    // Nothing is left of what was refused: the names are free.
    world.store("two");
    kept.add("two", none("two", "file:/two"), true).unwrap();
    let alone = World::new(&volumes(&["a"], "none"), SOON);
    alone.store("a");
    alone.start(volumes(&["a"], "none"), None);
    let operation = kept.begin("add");
    let config = none("b", "null:1G");
    let refused = alone.run(move |engine, io| async move {
        engine.add_volume(&io, "b", (config, true), &operation).await
    });
    refuses(refused, "no_state", "omit --persist");
}

#[test]
fn two_volumes_cannot_be_added_on_one_file() {
    let kept = Kept::new("control = '/c'\n", true);
    std::fs::write(kept.folder.path().join("disk"), [0; 4096]).unwrap();
    let config = new_config("a", &kept.path("disk"), "none");
    kept.add("a", config.clone(), true).unwrap();
    refuses(kept.add("b", config.clone(), true), "same_file", "volume a is on the same file");
    refuses(
        kept.add("b", new_config("b", "file:/no/such", "none"), true),
        "not_opened",
        "/no/such",
    );
    kept.remove("a").unwrap();
    kept.add("b", config, true).unwrap();
    assert_eq!(kept.files(), ["b.toml"]);
}

#[test]
fn an_addition_that_is_cancelled_while_its_store_is_opened_leaves_nothing() {
    let kept = Kept::new("control = '/c'\n", false);
    let world = &kept.world;
    world.stores.set("slow", Fate::Hangs);
    let operation = kept.begin("add");
    let (adding, ended) = (operation.clone(), operation.ended());
    let engine = world.engine.clone();
    world.worker.handle().spawn(move |io| async move {
        let config = new_config("slow", "file:/slow", "none");
        adding.finish(engine.add_volume(&io, "slow", (config, true), &adding).await);
    });
    world.wait_for("it is being opened", |world| !lock(&world.stores.opened).is_empty());
    refuses(
        kept.add("slow", new_config("slow", "null:1G", "none"), true),
        "busy",
        "operation list",
    );
    kept.operations.cancel(operation.id()).unwrap();
    world.wait_for("it is gone", |world| world.engine.states().is_empty());
    assert!(ended.is_stopped() && kept.files().is_empty());
    world.wait_for("the name is free", |_| {
        world.store("slow");
        kept.add("slow", new_config("slow", "file:/slow", "none"), true).is_ok()
    });
}

#[test]
fn the_file_of_a_removed_volume_is_kept_until_its_data_is_stable() {
    let kept = Kept::new("control = '/c'\n", false);
    let world = &kept.world;
    let store = world.store("disk");
    kept.add("disk", new_config("disk", "file:/disk", "writeback"), true).unwrap();
    store.hang_only(&[Operation::Flush]);
    world.write("disk", 7).unwrap();
    let operation = kept.begin("remove");
    let (engine, removing) = (world.engine.clone(), operation.clone());
    world.worker.handle().spawn(move |io| async move {
        removing.finish(engine.remove_volume(&io, "disk", &removing).await);
    });
    world.wait_for("the flush hangs", |_| store.hanging() > 0);
    assert_eq!(kept.files(), ["disk.toml"]);
    assert!(!operation.ended().is_stopped() && kept.operations.cancel(operation.id()).is_err());
    // A reload meanwhile finds the file, and does not bring the volume back.
    world.worker.handle().spawn({
        let (engine, config) = (world.engine.clone(), kept.load());
        |io| async move { drop(engine.reload(&io, config).await) }
    });
    store.release();
    world.wait_for("it is removed", |_| operation.ended().is_stopped());
    assert!(kept.files().is_empty());
    world.wait_for("nothing is left", |world| world.engine.states().is_empty());
    assert_eq!(store.stable_bytes()[0], 7);
    assert_eq!(kept.operations.get(operation.id()).unwrap().1, 200);
}

#[test]
fn volume_whose_data_is_lost_is_removed_and_not_renamed() {
    let kept = Kept::new("control = '/c'\n", false);
    let store = kept.world.store("disk");
    kept.add("disk", new_config("disk", "file:/disk", "none"), true).unwrap();
    kept.world.write("disk", 7).unwrap();
    store.faults(&ebb_store::Faults { flushes: 1000, ..ebb_store::Faults::default() });
    let served = kept.world.volume("disk").unwrap();
    refuses(kept.rename("disk", "new"), "not_flushed", "not renamed");
    assert_eq!(kept.files(), ["disk.toml"]);
    assert!(Arc::ptr_eq(&served, &kept.world.volume("disk").unwrap()));
    drop(served);
    kept.world.write("disk", 8).unwrap();
    let refused = kept.remove("disk").unwrap_err();
    assert!(!refused.to_string().contains("reopen"), "it is removed: {refused}");
    refuses(Err(refused), "data_lost", "the volume was removed");
    assert!(kept.files().is_empty() && kept.world.engine.states().is_empty());
}

#[test]
fn a_renamed_volume_has_its_data_and_its_file_under_the_new_name() {
    let kept = Kept::new("control = '/c'\n", true);
    std::fs::write(kept.folder.path().join("disk"), vec![0; 1 << 20]).unwrap();
    kept.add("a", new_config("a", &kept.path("disk"), "writeback"), true).unwrap();
    kept.world.write("a", 9).unwrap();
    let parameters = kept.world.engine.parameters.clone();
    let owner = ebb_config::params::ParameterOwner::Volume;
    parameters.set("max_buffer_pages", owner("a"), &serde_json::json!(3)).unwrap();
    kept.rename("a", "b/c").unwrap();
    assert_eq!(kept.files(), ["b%2Fc.toml"]);
    assert_eq!(std::fs::read(kept.folder.path().join("disk")).unwrap()[0], 9);
    assert_eq!(parameters.get("max_buffer_pages", owner("b/c")).unwrap().value, 3);
    kept.world.reload(kept.load());
    assert_eq!(kept.world.phases(), [phase("b/c", VolumePhase::Serving)]);
    assert!(kept.world.volumes.refusal("a").is_none());
    kept.world.write("b/c", 1).unwrap();
    let memory = new_config("m", "memory:1M", "none");
    kept.add("m", memory, false).unwrap();
    refuses(kept.rename("m", "n"), "not_renamed", "in memory");
}

#[test]
fn a_new_size_is_remembered_for_the_next_start() {
    let main = "[volume.main]\nstore = 'file:DIR/main'\nsize = '1M'\ncreate = true\n\
                [volume.plain]\nstore = 'file:DIR/plain'\n[volume.ram]\nstore = 'memory:1M'\n";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("plain"), vec![0; 1 << 20]).unwrap();
    let kept = Kept::within(main, true, folder);
    let mut config = new_config("kept", &kept.path("kept"), "none");
    (config.size, config.create) = (Some(ebb_config::Size::new(1 << 20)), true);
    kept.add("kept", config.clone(), true).unwrap();
    config.store = kept.path("short").parse().unwrap();
    kept.add("short", config, false).unwrap();
    for name in ["main", "plain", "ram", "kept", "short"] {
        kept.resize(name, 2 << 20).unwrap();
        kept.resize(name, 512 << 10).unwrap();
        refuses(kept.resize(name, 513), "invalid_value", "multiple of");
    }
    assert_eq!(kept.files(), ["kept.toml", "main.toml", "ram.toml"]);
    kept.world.write("ram", 4).unwrap();
    // A reload changes nothing: the data in memory is there.
    let ram = kept.world.volume("ram").unwrap();
    kept.world.reload(kept.load());
    assert!(Arc::ptr_eq(&ram, &kept.world.volume("ram").unwrap()));
    drop(ram);
    assert!(kept.world.stop().is_clean());
    let Kept { world, folder, .. } = kept;
    drop(world);
    let again = Kept::within(main, true, folder);
    let sizes: Vec<_> = again
        .world
        .engine
        .states()
        .iter()
        .map(|state| (state.name.clone(), state.volume.as_ref().map(|volume| volume.size() >> 10)))
        .collect();
    let names = ["kept", "main", "plain", "ram"];
    let expected: Vec<_> = names.iter().map(|name| ((*name).to_owned(), Some(512))).collect();
    assert_eq!(sizes, expected);
}

#[test]
fn a_resize_whose_size_cannot_be_remembered_is_not_begun() {
    let main = "[volume.main]\nstore = 'file:DIR/main'\nsize = '1M'\ncreate = true\n";
    let kept = Kept::new(main, true);
    // A file in place of the directory.
    std::fs::remove_dir_all(kept.folder.path().join("state")).unwrap();
    std::fs::write(kept.folder.path().join("state"), "").unwrap();
    refuses(kept.resize("main", 512 << 10), "state", "check the state directory");
    assert_eq!(kept.world.volume("main").unwrap().size(), 1 << 20);
    refuses(kept.resize("main", 2 << 20), "state", "check the state directory");
    assert_eq!(kept.world.volume("main").unwrap().size(), 1 << 20);
    refuses(
        kept.add("new", new_config("new", "null:1G", "none"), true),
        "state",
        "check the state directory",
    );
    assert!(kept.world.volume("new").is_none());
}

#[test]
fn a_configuration_that_was_read_before_a_change_does_not_undo_it() {
    let kept = Kept::new("control = '/c'\n", false);
    let (world, engine) = (&kept.world, kept.world.engine.clone());
    for name in ["added", "removed"] {
        world.store(name);
    }
    kept.add("removed", new_config("removed", "file:/removed", "none"), true).unwrap();
    engine.begin_reading();
    let read = kept.load();
    kept.add("added", new_config("added", "file:/added", "none"), true).unwrap();
    kept.remove("removed").unwrap();
    world.reload(read);
    assert_eq!(world.phases(), [phase("added", VolumePhase::Serving)]);
    // A file that was removed by hand is noticed by the next one.
    std::fs::remove_file(kept.folder.path().join("state/volumes/added.toml")).unwrap();
    engine.begin_reading();
    world.reload(kept.load());
    assert!(world.phases().is_empty());
}

#[test]
fn a_volume_whose_file_cannot_be_removed_can_be_removed_again() {
    let kept = Kept::new("control = '/c'\n", false);
    kept.world.store("a");
    kept.add("a", new_config("a", "file:/a", "none"), true).unwrap();
    // A directory in place of the file cannot be removed as a file.
    let path = kept.folder.path().join("state/volumes/a.toml");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let began = ebb_mem::clock::now();
    refuses(kept.remove("a"), "state", "cannot remove");
    let failure = || kept.world.engine.states()[0].failure.clone().unwrap();
    let first = failure();
    assert!(first.removed && first.reason.starts_with("it was removed"), "{first:?}");
    assert!(first.since >= began, "it is removed since then");
    refuses(kept.remove("a"), "state", "cannot remove");
    assert_eq!(failure().since, first.since);
    std::fs::remove_dir(&path).unwrap();
    kept.remove("a").unwrap();
    assert!(kept.world.engine.states().is_empty());
}

#[test]
fn settings_of_a_volume_that_the_configuration_lost_are_removed_with_its_name() {
    let kept = Kept::new("[volume.m]\nstore = 'memory:1M'\n", true);
    kept.resize("m", 2 << 20).unwrap();
    let main = kept.folder.path().join("main.toml");
    std::fs::write(&main, "listen = ['unix:/never']\n").unwrap();
    kept.world.reload(kept.load());
    assert_eq!(kept.files(), ["m.toml"]);
    let again = new_config("m", "memory:1M", "none");
    refuses(kept.add("m", again.clone(), true), "exists", "m.toml exists already");
    kept.remove("m").unwrap();
    assert!(kept.files().is_empty());
    kept.add("m", again, true).unwrap();
    refuses(kept.remove("unknown"), "unknown_volume", "there is no volume");
}

#[test]
fn only_limits_that_were_set_are_kept_and_they_are_forgotten_on_request() {
    let main = "[volume.m]\nstore = 'memory:1M'\nlimit_iops = 5\nlimit_bandwidth = '10M'\n";
    let kept = Kept::new(main, true);
    kept.add("s", new_config("s", "memory:1M", "none"), true).unwrap();
    let (m, s) = (ParameterOwner::Volume("m"), ParameterOwner::Volume("s"));
    let limits = |keep: bool, name: &str| {
        let (name, operation) = (name.to_owned(), kept.begin("limit"));
        kept.world.run(move |engine, io| async move {
            match keep {
                true => engine.keep_limits(&io, &name, &operation).await,
                false => engine.forget_limits(&io, &name, &operation).await,
            }
        })
    };
    let parameters = &kept.world.engine.parameters;
    let value = |owner, name: &str| {
        let reading = parameters.get(name, owner).unwrap();
        (reading.value, reading.origin.as_str())
    };
    for (owner, name) in [(m, "m"), (s, "s")] {
        parameters.set("limit_iops", owner, &7.into()).unwrap();
        limits(true, name).unwrap();
        assert_eq!(value(owner, "limit_iops"), (7, "configuration"));
    }
    let file = std::fs::read_to_string(kept.folder.path().join("state/volumes/m.toml")).unwrap();
    assert!(file.contains("limit_iops = 7") && !file.contains("bandwidth"), "{file}");
    // What was not set follows the file.
    let main = kept.folder.path().join("main.toml");
    let text = std::fs::read_to_string(&main).unwrap();
    std::fs::write(&main, text.replace("10M", "50M")).unwrap();
    kept.world.reload(kept.load());
    assert_eq!(value(m, "limit_iops"), (7, "configuration"));
    assert_eq!(value(m, "limit_bandwidth"), (50 << 20, "configuration"));
    // One that was set afterwards stays.
    parameters.set("limit_read_iops", m, &3.into()).unwrap();
    limits(false, "m").unwrap();
    limits(false, "s").unwrap();
    assert_eq!(value(m, "limit_iops"), (5, "configuration"));
    assert_eq!(value(m, "limit_read_iops"), (3, "run-time"));
    assert_eq!(value(s, "limit_iops").0, 0);
    assert_eq!(kept.files(), ["s.toml"]);
    let file = std::fs::read_to_string(kept.folder.path().join("state/volumes/s.toml")).unwrap();
    assert!(!file.contains("limit_"), "{file}");
}

#[test]
fn limits_of_a_group_are_kept_until_they_are_forgotten() {
    let kept =
        Kept::new("[volume.m]\nstore = 'memory:1M'\n[limit_group.gold]\nlimit_iops = 5\n", true);
    let limits = |keep: bool, group: &'static str| {
        let operation = kept.begin("limit");
        kept.world.run(move |engine, io| async move {
            match keep {
                true => engine.keep_group_limits(&io, group, &operation).await,
                false => engine.forget_group_limits(&io, group, &operation).await,
            }
        })
    };
    let parameters = &kept.world.engine.parameters;
    let (gold, silver) = (ParameterOwner::LimitGroup("gold"), ParameterOwner::LimitGroup("silver"));
    let value = |owner, name: &str| {
        let reading = parameters.get(name, owner).unwrap();
        (reading.value, reading.origin.as_str())
    };
    refuses(limits(true, "silver"), "unknown_limit_group", "silver");
    for (owner, group) in [(gold, "gold"), (silver, "silver")] {
        parameters.set("limit_iops", owner, &7.into()).unwrap();
        limits(true, group).unwrap();
        assert_eq!(value(owner, "limit_iops"), (7, "configuration"));
    }
    // The next start, or a reload, has them, too; also what is kept while the file is read.
    kept.world.engine.begin_reading();
    let before = kept.load();
    assert_eq!(before.limit_groups["silver"].iops, Some(7));
    parameters.set("limit_bandwidth", gold, &"1M".into()).unwrap();
    limits(true, "gold").unwrap();
    kept.world.reload(before);
    assert_eq!(value(gold, "limit_bandwidth"), (1 << 20, "configuration"));
    assert_eq!(value(silver, "limit_iops"), (7, "configuration"));

    parameters.set("limit_read_iops", gold, &3.into()).unwrap();
    limits(false, "gold").unwrap();
    limits(false, "silver").unwrap();
    assert_eq!(value(gold, "limit_iops"), (5, "configuration"));
    assert_eq!(value(gold, "limit_bandwidth"), (0, "default"));
    assert_eq!(value(gold, "limit_read_iops"), (3, "run-time"), "what was set stays");
    assert_eq!(value(silver, "limit_iops"), (0, "default"));
    let config = kept.load();
    assert!(config.replaced_groups.is_empty(), "{:?}", config.replaced_groups);
    let alone = World::new(&volumes(&["a"], "none"), SOON);
    let operations = Operations::default();
    let operation = operations.begin("limit", None, "").unwrap();
    alone.engine.parameters.set("limit_iops", gold, &7.into()).unwrap();
    let outcome = alone.run(move |engine, io| async move {
        engine.keep_group_limits(&io, "gold", &operation).await
    });
    refuses(outcome, "no_state", "no state directory");
}

#[test]
fn a_broken_state_file_fails_its_own_volume_until_it_is_corrected_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateDir::new(&folder.path().join("state"));
    state.prepare().unwrap();
    state
        .write_atomically(
            "good",
            &StoredVolume::Whole(Box::new(new_config("good", "null:1G", "none"))),
        )
        .unwrap();
    for name in ["bad", "worse"] {
        std::fs::write(state.path_of(name), "store = 'nul").unwrap();
    }
    let kept = Kept::within("control = '/c'\n", true, folder);
    let world = &kept.world;
    assert_eq!(
        world.phases(),
        [
            phase("bad", VolumePhase::Failed),
            phase("good", VolumePhase::Serving),
            phase("worse", VolumePhase::Failed)
        ]
    );
    let failure = world.engine.states()[0].failure.clone().unwrap();
    assert!(failure.reason.contains("bad.toml:1"), "{failure:?}");
    assert_eq!(failure.next, None, "only a reload reads it again");
    assert_eq!(world.engine.states()[0].failure.clone().unwrap().since, failure.since);
    assert!(world.volumes.refusal("bad").unwrap().contains("bad.toml:1"));
    refuses(kept.add("bad", new_config("bad", "null:1G", "none"), true), "exists", "bad.toml");
    std::fs::write(state.path_of("bad"), "store = 'null:2G'").unwrap();
    kept.remove("worse").unwrap();
    world.reload(kept.load());
    assert_eq!(
        world.phases(),
        [phase("bad", VolumePhase::Serving), phase("good", VolumePhase::Serving)]
    );
    assert!(world.volumes.refusal("worse").is_none());
    assert_eq!(kept.files(), ["bad.toml", "good.toml"]);
}

#[test]
fn a_volume_added_at_run_time_gives_way_to_the_configuration() {
    let kept = Kept::new("control = '/c'\n", true);
    kept.add("a", new_config("a", "null:1G", "none"), false).unwrap();
    let path = kept.args.config.clone().unwrap();
    std::fs::write(path, "listen = ['unix:/never']\n[volume.a]\nstore = 'null:2G'\n").unwrap();
    kept.world.engine.begin_reading();
    kept.world.reload(kept.load());
    assert_eq!(kept.world.volume("a").unwrap().size(), 2 << 30);
    refuses(kept.remove("a"), "configured", "main.toml:2");
}

#[test]
fn changes_of_one_volume_exclude_each_other_and_end_with_the_daemon() {
    let kept = Kept::new("control = '/c'\n", false);
    let world = &kept.world;
    let store = world.store("disk");
    kept.add("disk", new_config("disk", "file:/disk", "writeback"), true).unwrap();
    world.write("disk", 1).unwrap();
    store.hang_only(&[Operation::Flush]);
    let operation = kept.begin("remove");
    let (engine, removing) = (world.engine.clone(), operation.clone());
    world.worker.handle().spawn(move |io| async move {
        removing.finish(engine.remove_volume(&io, "disk", &removing).await);
    });
    world.wait_for("the flush hangs", |_| store.hanging() > 0);
    refuses(kept.remove("disk"), "busy", "another operation");
    refuses(kept.add("disk", new_config("disk", "null:1G", "none"), true), "busy", "disk");
    world.engine.hurry(Duration::from_millis(50));
    let report = world.stop();
    assert_eq!(report.unflushed.len(), 1, "{report:?}");
    world.wait_for("it has ended", |_| operation.ended().is_stopped());
    assert_eq!(kept.files(), ["disk.toml"], "the next start serves it");
    refuses(kept.remove("disk"), "stopping", "");
    store.release();
}
