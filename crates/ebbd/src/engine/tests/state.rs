//! The state directory on a file system that fails.

use std::io::ErrorKind;

use ebb_config::params::ParameterOwner;
use ebb_config::{StateFaults, StateStep};

use super::manage::{Kept, new_config, refuses};
use super::*;

const EMPTY: &str = "control = '/c'\n";

impl Kept {
    pub(super) fn faults(&self) -> StateFaults {
        StateFaults::of(&self.folder.path().join("state"))
    }

    /// A volume on a file of 1 MiB, which is created.
    pub(super) fn on_file(&self, name: &str, image: &str) -> VolumeConfig {
        let mut config = new_config(name, &self.path(image), "none");
        (config.size, config.create) = (Some(ebb_config::Size::new(1 << 20)), true);
        config
    }

    pub(super) fn keep_limit(&self, name: &str, iops: u64) -> Result<(), ebb_control::Refused> {
        let parameters = &self.world.engine.parameters;
        let owner = ParameterOwner::Volume(name);
        parameters.set("limit_iops", owner, &iops.into()).unwrap();
        let (name, operation) = (name.to_owned(), self.begin("limit"));
        let ending = operation.clone();
        let outcome = self
            .world
            .run(move |engine, io| async move { engine.keep_limits(&io, &name, &operation).await });
        ending.finish(outcome.clone());
        outcome
    }

    /// The next start, after the daemon has ended.
    pub(super) fn again(self, main: &str) -> Kept {
        let _ = self.world.stop();
        let Kept { world, folder, .. } = self;
        drop(world);
        Kept::within(main, true, folder)
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(format!("state/volumes/{name}.toml")), text)
            .unwrap();
    }

    fn file(&self, name: &str) -> String {
        let path = self.folder.path().join(format!("state/volumes/{name}.toml"));
        std::fs::read_to_string(path).unwrap()
    }

    /// Problems that fail a reload, and the reasons why the daemon is degraded.
    fn problems(&self) -> (String, String) {
        let engine = &self.world.engine;
        let degraded = engine.problems().into_iter().map(|problem| problem.message);
        (engine.unchanged().join("\n"), degraded.collect::<Vec<_>>().join("\n"))
    }

    fn iops(&self, name: &str) -> u64 {
        let parameters = &self.world.engine.parameters;
        parameters.get("limit_iops", ParameterOwner::Volume(name)).unwrap().value
    }
}

#[test]
fn a_rename_that_cannot_be_made_stable_is_undone_or_the_volume_has_the_name_of_its_file() {
    let kept = Kept::new(EMPTY, true);
    let faults = kept.faults();
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    faults.fail(StateStep::SyncFolder, ErrorKind::Other);
    refuses(kept.rename("a", "b"), "state", "that is undone");
    faults.end();
    assert_eq!((kept.files(), kept.world.phases()), (vec!["a.toml".into()], serving(&["a"])));
    // The directory cannot be synchronised, and the file not be renamed back.
    faults.fail_after(1, 2, ErrorKind::Other);
    refuses(kept.rename("a", "b"), "state", "that is done nevertheless");
    faults.end();
    assert_eq!((kept.files(), kept.world.phases()), (vec!["b.toml".into()], serving(&["b"])));
    kept.keep_limit("b", 50).unwrap();
    kept.world.reload(kept.load());
    assert_eq!((kept.files(), kept.world.phases()), (vec!["b.toml".into()], serving(&["b"])));
    kept.remove("b").unwrap();
    assert!(kept.again(EMPTY).world.phases().is_empty());
}

fn serving(names: &[&str]) -> Vec<(String, VolumePhase)> {
    names.iter().map(|name| phase(name, VolumePhase::Serving)).collect()
}

/// Nothing is made or closed before it is known that the state file can be looked at.
#[test]
fn a_state_directory_that_cannot_be_read_fails_a_change_first() {
    let kept = Kept::new(EMPTY, true);
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    let (volumes, away) =
        (kept.folder.path().join("state/volumes"), kept.folder.path().join("away"));
    std::fs::rename(&volumes, &away).unwrap();
    std::fs::write(&volumes, "").unwrap();
    refuses(kept.add("b", kept.on_file("b", "new"), true), "state", "cannot look at");
    assert!(!kept.folder.path().join("new").exists());
    let served = kept.world.volume("a").unwrap();
    refuses(kept.rename("a", "c"), "state", "cannot look at");
    assert!(Arc::ptr_eq(&served, &kept.world.volume("a").unwrap()), "it was not closed");
    drop(served);
    std::fs::remove_file(&volumes).unwrap();
    std::fs::rename(&away, &volumes).unwrap();
    kept.rename("a", "c").unwrap();
}

#[test]
fn an_addition_that_cannot_be_made_stable_leaves_no_file_or_is_told() {
    let kept = Kept::new(EMPTY, true);
    let faults = kept.faults();
    faults.fail(StateStep::SyncFolder, ErrorKind::Other);
    refuses(kept.add("a", kept.on_file("a", "disk"), true), "state", "cannot write");
    faults.end();
    assert!(kept.files().is_empty() && kept.world.phases().is_empty());
    // The directory cannot be synchronised, and the file not be removed.
    faults.fail_after(8, 2, ErrorKind::Other);
    let added = kept.add("a", kept.on_file("a", "disk"), true);
    refuses(added, "state", "ebbd volume remove a`, or the next start serves it");
    faults.end();
    kept.world.reload(kept.load());
    assert_eq!(kept.files(), ["a.toml"]);
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Failed)]);
    refuses(kept.add("a", kept.on_file("a", "disk"), true), "exists", "ebbd volume remove a");
    refuses(kept.rename("a", "b"), "not_served", "remove it again: `ebbd volume remove a`");
    kept.remove("a").unwrap();
    assert!(kept.files().is_empty() && kept.world.phases().is_empty());
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
}

#[test]
fn persist_writes_a_file_again_that_is_missing_or_useless() {
    let kept = Kept::new(EMPTY, true);
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    let intact = kept.file("a");
    kept.put("a", "garbage = [");
    kept.world.reload(kept.load());
    assert!(kept.problems().1.contains("cannot be used"), "{:?}", kept.problems());
    kept.persist("a").unwrap();
    assert_eq!((kept.file("a"), kept.problems()), (intact.clone(), Default::default()));
    kept.put("a", "limit_iops = 5\n");
    kept.persist("a").unwrap();
    assert_eq!(kept.file("a"), intact);
    std::fs::remove_file(kept.folder.path().join("state/volumes/a.toml")).unwrap();
    kept.persist("a").unwrap();
    assert_eq!(kept.again(EMPTY).world.phases(), serving(&["a"]));
}

/// Otherwise its removal would leave the file, and the next start serve the volume.
#[test]
fn a_volume_that_is_kept_nevertheless_is_removed_with_its_file() {
    let kept = Kept::new(EMPTY, true);
    let faults = kept.faults();
    kept.add("a", kept.on_file("a", "disk"), false).unwrap();
    // The directory cannot be synchronised, and the file not be removed.
    faults.fail_after(5, 2, ErrorKind::Other);
    refuses(kept.persist("a"), "state", "that is done nevertheless");
    faults.end();
    assert_eq!(kept.files(), ["a.toml"]);
    // Trying again makes it stable, or fails again.
    faults.fail(StateStep::SyncFolder, ErrorKind::Other);
    refuses(kept.persist("a"), "state", "that is done nevertheless");
    assert!(!faults.is_stable());
    faults.end();
    kept.persist("a").unwrap();
    assert!(faults.is_stable());
    kept.rename("a", "b").unwrap();
    assert_eq!((kept.files(), kept.world.phases()), (vec!["b.toml".into()], serving(&["b"])));
    kept.persist("b").unwrap();
    kept.remove("b").unwrap();
    assert!(kept.files().is_empty() && kept.again(EMPTY).world.phases().is_empty());
}

#[test]
fn a_removal_is_repeated_until_it_is_stable_and_no_reload_undoes_it() {
    let kept = Kept::new(EMPTY, true);
    let faults = kept.faults();
    for name in ["a", "b"] {
        kept.add(name, kept.on_file(name, name), true).unwrap();
    }
    faults.fail(StateStep::SyncFolder, ErrorKind::Other);
    for _ in 0..2 {
        refuses(kept.remove("a"), "state", "try again");
        kept.world.reload(kept.load());
        assert_eq!(kept.world.phases()[0], phase("a", VolumePhase::Failed));
    }
    faults.fail(StateStep::Remove, ErrorKind::ReadOnlyFilesystem);
    refuses(
        kept.remove("b"),
        "state",
        "volume `b` is not served: it was removed, and its file was not",
    );
    kept.world.reload(kept.load());
    let failed = [phase("a", VolumePhase::Failed), phase("b", VolumePhase::Failed)];
    assert_eq!((kept.files(), kept.world.phases()), (vec!["b.toml".into()], failed.to_vec()));
    faults.end();
    for name in ["a", "b"] {
        kept.remove(name).unwrap();
    }
    faults.cut_power().unwrap();
    kept.world.reload(kept.load());
    assert!(kept.files().is_empty() && kept.world.phases().is_empty());
    // One whose file is not there was removed, and may come back with the right directory.
    kept.add("c", kept.on_file("c", "c"), true).unwrap();
    std::fs::remove_file(kept.folder.path().join("state/volumes/c.toml")).unwrap();
    refuses(kept.remove("c"), "state", "it had no file");
    assert!(kept.world.phases().is_empty());
}

#[test]
fn a_file_that_cannot_be_used_any_more_withdraws_nothing_and_fails_the_reload() {
    let main = "[volume.m]\nstore = 'memory:1M'\nlimit_iops = 5\n";
    let kept = Kept::new(main, true);
    let faults = kept.faults();
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    kept.keep_limit("m", 7).unwrap();
    kept.resize("m", 2 << 20).unwrap();
    let (a, m) = (kept.world.volume("a").unwrap(), kept.world.volume("m").unwrap());
    let unchanged = || {
        kept.world.reload(kept.load());
        assert!(Arc::ptr_eq(&a, &kept.world.volume("a").unwrap()));
        assert!(Arc::ptr_eq(&m, &kept.world.volume("m").unwrap()));
        assert_eq!(kept.iops("m"), 7);
    };
    faults.fail(StateStep::Read, ErrorKind::Other);
    unchanged();
    let (failed, degraded) = kept.problems();
    assert!(
        failed.contains("volume a: served as before") && failed.contains("volume m: "),
        "{failed}"
    );
    assert!(degraded.lines().count() == 2 && degraded.contains("a.toml"), "{degraded}");
    refuses(kept.rename("a", "b"), "state", "cannot be used");
    faults.end();
    unchanged();
    assert_eq!(kept.problems(), (String::new(), String::new()));
    // What a write that was cut off leaves.
    let (whole, overrides) = (kept.file("a"), kept.file("m"));
    for (name, text) in
        [("a", ""), ("a", "# Written"), ("a", "size = '1M'\n"), ("m", "limit_iops = ")]
    {
        kept.put(name, text);
        unchanged();
        assert!(kept.problems().0.contains(&format!("volume {name}: served as before")), "{text}");
        kept.put("a", &whole);
        kept.put("m", &overrides);
    }
    unchanged();
    assert_eq!(kept.problems(), (String::new(), String::new()));
    drop((a, m));
    kept.put("a", "");
    let again = kept.again(main);
    assert_eq!(again.world.phases()[0], phase("a", VolumePhase::Failed));
    let reason = again.world.engine.states()[0].failure.clone().unwrap().reason;
    assert!(reason.contains("a.toml: the file has no settings"), "{reason}");
    refuses(again.add("a", again.on_file("a", "disk"), true), "exists", "a.toml exists already");
}

#[test]
fn kept_limits_are_not_lost_to_a_read_error_and_settings_without_a_volume_are_told() {
    let main = "[volume.m]\nstore = 'memory:1M'\n";
    let kept = Kept::new(main, true);
    let faults = kept.faults();
    kept.resize("m", 2 << 20).unwrap();
    let before = kept.file("m");
    faults.fail(StateStep::Read, ErrorKind::Other);
    refuses(kept.keep_limit("m", 7), "state", "the limits are in force until the daemon ends");
    assert_eq!((kept.iops("m"), kept.file("m")), (7, before));
    faults.end();
    faults.fail(StateStep::Write, ErrorKind::StorageFull);
    refuses(kept.keep_limit("m", 8), "state", "cannot write");
    faults.end();
    // A file that makes no sense is replaced, by all that is in force.
    kept.put("m", "size = ");
    kept.keep_limit("m", 9).unwrap();
    let file = kept.file("m");
    assert!(file.contains("limit_iops = 9") && file.contains("size = \"2M\""), "{file}");
    // A start cannot know them.
    kept.put("m", "size = ");
    let kept = kept.again(main);
    assert_eq!(kept.world.phases(), serving(&["m"]));
    assert!(kept.problems().1.contains("m.toml:1"), "{:?}", kept.problems());
    kept.put("m", "size = '3M'");
    kept.put("gone", "size = '3M'");
    kept.world.reload(kept.load());
    let (failed, degraded) = kept.problems();
    assert!(failed.is_empty() && degraded.contains("gone.toml: these are settings"), "{degraded}");
    kept.remove("gone").unwrap();
    assert_eq!(kept.problems().1, "");
}

#[test]
fn a_state_directory_that_is_not_mounted_is_not_created_and_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let faults = StateFaults::of(&path);
    faults.fail(StateStep::FindMount, ErrorKind::Other);
    let state = StateDir::new(&path);
    let refused = state.prepare().unwrap_err().to_string();
    assert!(refused.contains("nothing is mounted at") && !path.exists(), "{refused}");
    assert!(state.found(false).unwrap_err().to_string().contains("mount it") && !path.exists());
    let text = format!("listen = ['unix:/a']\nstate = '{}'\ncontrol = '/c'\n", path.display());
    let main = folder.path().join("main.toml");
    std::fs::write(&main, text).unwrap();
    let args = ServeArgs { config: Some(main), ..ServeArgs::default() };
    let config = Config::load(&args).unwrap();
    let world = World::new(&config, SOON);
    world.start(config, None);
    assert!(world.engine.problems()[0].message.contains("nothing is mounted"));
    faults.end();
    state.found(false).unwrap();
    world.reload(Config::load(&args).unwrap());
    assert!(world.engine.problems().is_empty() && path.exists());
}
