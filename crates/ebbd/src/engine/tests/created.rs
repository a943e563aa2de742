//! Files are created once, never in an unmounted mount point, and never among files that the daemon
//! trusts.

use std::io::ErrorKind;
use std::path::PathBuf;

use ebb_config::{StateFaults, StateStep};

use super::manage::{Kept, new_config, refuses};
use super::*;

const EMPTY: &str = "control = '/c'\n";
const CREATED: &str = "[volume.a]\nstore = 'file:DIR/images/a'\nsize = '1M'\ncreate = true\n";

impl Kept {
    fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn reason(&self, name: &str) -> String {
        let states = self.world.engine.states();
        let state = states.into_iter().find(|state| state.name == name).unwrap();
        assert_eq!(state.phase, VolumePhase::Failed, "{name}");
        state.failure.unwrap().reason
    }
}

fn with_images() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("images")).unwrap();
    folder
}

#[test]
fn added_volume_is_not_created_again() {
    let kept = Kept::new(EMPTY, true);
    kept.add("a", kept.on_file("a", "disk"), true).unwrap();
    let base = VolumeConfig { read_only: true, ..new_config("b", &kept.path("disk2"), "none") };
    std::fs::write(kept.place("disk2"), vec![1; 1 << 20]).unwrap();
    kept.add("b", base, true).unwrap();
    let mut delta = new_config("d", &kept.path("delta"), "writethrough");
    (delta.base, delta.create) = (Some("b".to_owned()), true);
    kept.add("d", delta, true).unwrap();
    for name in ["a", "d"] {
        let (config, _) = kept.world.engine.definition(name).unwrap();
        assert!(!config.create && config.size.is_none(), "{config:?}");
        let state = std::fs::read_to_string(kept.place(&format!("state/volumes/{name}.toml")));
        assert!(!state.unwrap().contains("create"));
    }
    // A file that an earlier version wrote.
    let old = kept.place("state/volumes/a.toml");
    let text = std::fs::read_to_string(&old).unwrap();
    std::fs::write(&old, text + "size = '1M'\ncreate = true\n").unwrap();
    std::fs::remove_file(kept.place("disk")).unwrap();
    std::fs::remove_file(kept.place("delta")).unwrap();
    let kept = kept.again(EMPTY);
    for name in ["a", "d"] {
        let reason = kept.reason(name);
        assert!(reason.contains("missing") && reason.contains("volume remove"), "{reason}");
    }
    assert!(!kept.place("disk").exists() && !kept.place("delta").exists());
}

#[test]
fn missing_file_of_a_volume_being_added_was_never_created() {
    let kept = Kept::new(EMPTY, true);
    let missing = new_config("typo", &kept.path("typo.img"), "none");
    for config in [missing.clone(), VolumeConfig { read_only: true, ..missing }] {
        let refused = kept.add("typo", config.clone(), true).unwrap_err();
        let said = refused.to_string();
        assert!(said.contains("no such file"), "{said}");
        assert!(!said.contains("was created") && !said.contains("remove the volume"), "{said}");
        assert_eq!(said.contains("`create`"), !config.read_only, "{said}");
    }
    // One that is kept: nothing says that its file was created.
    std::fs::write(kept.place("disk"), vec![1; 1 << 20]).unwrap();
    let config = new_config("a", &kept.path("disk"), "none");
    kept.add("a", VolumeConfig { read_only: true, ..config }, true).unwrap();
    std::fs::remove_file(kept.place("disk")).unwrap();
    let kept = kept.again(EMPTY);
    let reason = kept.reason("a");
    assert!(reason.contains("restore it") && reason.contains("`ebbd volume remove a`"), "{reason}");
    assert!(!reason.contains("was created") && !reason.contains("new, empty"), "{reason}");
}

#[test]
fn missing_snapshot_is_not_taken_for_the_file_of_its_volume() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    kept.snapshot("disk", "one").unwrap();
    std::fs::rename(kept.place("disk.delta@one"), kept.place("away")).unwrap();
    let kept = kept.again(super::overlay::MAIN);
    let reason = kept.reason("disk");
    assert!(reason.contains("disk.delta@one: no such file"), "{reason}");
    assert!(!reason.contains("state/created") && !reason.contains("`create`"), "{reason}");
}

#[test]
fn volume_whose_file_is_gone_is_not_kept() {
    let kept = Kept::new(EMPTY, true);
    kept.add("a", kept.on_file("a", "disk"), false).unwrap();
    std::fs::rename(kept.place("disk"), kept.place("away")).unwrap();
    refuses(kept.persist("a"), "moved", "move that file back");
    assert!(kept.files().is_empty());
    std::fs::rename(kept.place("away"), kept.place("disk")).unwrap();
    kept.persist("a").unwrap();
    assert_eq!(kept.files(), ["a.toml"]);
}

#[test]
fn configured_volume_is_not_created_again() {
    let kept = Kept::within(CREATED, true, with_images());
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)]);
    std::fs::rename(kept.place("images"), kept.place("away")).unwrap();
    std::fs::create_dir(kept.place("images")).unwrap();
    let kept = kept.again(CREATED);
    let reason = kept.reason("a");
    assert!(reason.contains("missing") && reason.contains("state/created/a.toml"), "{reason}");
    assert!(!kept.place("images/a").exists());
    // Another path is another file, and the former one is not forgotten.
    let other = CREATED.replace("images/a", "images/b");
    let kept = kept.again(&other);
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)]);
    let kept = kept.again(CREATED);
    assert!(kept.reason("a").contains("missing") && !kept.place("images/a").exists());
    // The file of a volume that is still served stays open.
    assert!(kept.reason("a").contains("restart ebbd if it still has"), "{}", kept.reason("a"));
    // Without the record a new file is created.
    let record = kept.place("state/created/a.toml");
    std::fs::remove_file(&record).unwrap();
    std::fs::remove_file(kept.place("images/b")).unwrap();
    let kept = kept.again(&other);
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)]);
    assert!(kept.place("images/b").exists() && record.exists());
}

#[test]
fn file_without_a_record_is_recorded_by_the_next_start() {
    let kept = Kept::within(CREATED, true, with_images());
    let record = kept.place("state/created/a.toml");
    std::fs::remove_file(&record).unwrap();
    let kept = kept.again(CREATED);
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)]);
    assert!(record.exists());
    // The record of a file that is there is not needed, and of another one it may have been all.
    std::fs::write(&record, "stores = [").unwrap();
    let kept = kept.again(CREATED);
    assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)]);
    std::fs::remove_file(kept.place("images/a")).unwrap();
    let kept = kept.again(CREATED);
    assert!(kept.reason("a").contains("created/a.toml"), "{}", kept.reason("a"));
    assert!(!kept.place("images/a").exists());
}

#[test]
fn nothing_is_created_in_an_unmounted_mount_point() {
    let folder = with_images();
    let faults = StateFaults::of(&folder.path().join("images"));
    faults.fail(StateStep::FindMount, ErrorKind::Other);
    let kept = Kept::within(CREATED, true, folder);
    assert!(kept.reason("a").contains("nothing is mounted at"), "{}", kept.reason("a"));
    let added = kept.add("b", kept.on_file("b", "images/b"), false);
    refuses(added, "not_opened", "nothing is mounted at");
    assert_eq!(std::fs::read_dir(kept.place("images")).unwrap().count(), 0);
    faults.end();
    kept.add("b", kept.on_file("b", "images/b"), false).unwrap();
}

#[test]
fn no_volume_is_added_at_a_file_that_the_daemon_trusts() {
    let main = "control = '/c'\n[volume.secret]\nstore = 'file:DIR/secret'\nencryption = 'key-file:DIR/key'\n\
                [volume.shown]\nstore = 'file:DIR/shown'\nencryption = 'command:DIR/program --with=DIR/script'\n";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("program"), "").unwrap();
    std::fs::write(folder.path().join("script"), vec![7; 4096]).unwrap();
    std::fs::write(folder.path().join("key"), vec![7; 4096]).unwrap();
    let kept = Kept::within(main, true, folder);
    let [volumes, link, second] = ["state/volumes", "link", "second"].map(|it| kept.place(it));
    std::os::unix::fs::symlink(&volumes, &link).unwrap();
    kept.add("other", kept.on_file("other", "other"), true).unwrap();
    std::fs::hard_link(volumes.join("other.toml"), &second).unwrap();
    std::os::unix::fs::symlink(kept.place("key"), kept.place("key link")).unwrap();
    std::fs::create_dir(kept.place("images")).unwrap();
    let through_proc = format!("../../../../../../proc/self/root{}/x", volumes.display());
    for (path, what) in [
        ("state/volumes/evil.toml", "in a folder of the daemon's state"),
        ("state/created", "in a folder of the daemon's state"),
        ("images/../state/volumes/evil.toml", "in a folder of the daemon's state"),
        ("link/evil.toml", "in a folder of the daemon's state"),
        ("second", "in a folder of the daemon's state"),
        (&through_proc, "in a folder of the daemon's state"),
        ("key", "the key of a volume"),
        ("program", "part of the command that writes a key"),
        ("script", "part of the command that writes a key"),
        ("key link", "the key of a volume"),
    ] {
        for keep in [false, true] {
            let added = kept.add("evil", kept.on_file("evil", path), keep);
            refuses(added, "not_opened", what);
        }
    }
    assert_eq!(kept.files(), ["other.toml"]);
    // Packages keep images next to these folders.
    kept.add("image", kept.on_file("image", "state/disk.img"), false).unwrap();
    let mut socket = new_config("s", "memory:1M", "none");
    let path = volumes.join("s.toml").display().to_string();
    socket.vhost_user = Some(path.parse().unwrap());
    refuses(kept.add("s", socket, false), "invalid_value", "in a folder of the daemon's state");
    // A file of the state directory is not believed either.
    let evil = format!("store = 'file:{}'\n", volumes.join("other.toml").display());
    std::fs::write(volumes.join("evil.toml"), evil).unwrap();
    let socket = format!("store = 'memory:1M'\nvhost_user = '{}'\n", volumes.join("x").display());
    std::fs::write(volumes.join("socket.toml"), socket).unwrap();
    let kept = kept.again(main);
    assert!(kept.reason("evil").contains("in a folder of the daemon's state"));
    kept.world.engine.begin_sockets();
    let failure = kept.world.engine.socket_failure("socket").unwrap();
    assert!(failure.contains("in a folder of the daemon's state"), "{failure}");
    assert!(!volumes.join("x").exists());
}

#[test]
fn persisted_volume_keeps_its_base() {
    let kept = Kept::new(EMPTY, true);
    std::fs::write(kept.place("base"), vec![1; 1 << 20]).unwrap();
    let base = VolumeConfig { read_only: true, ..new_config("base", &kept.path("base"), "none") };
    kept.add("base", base, false).unwrap();
    let mut delta = new_config("top", &kept.path("delta"), "writethrough");
    (delta.base, delta.create) = (Some("base".to_owned()), true);
    kept.add("top", delta, false).unwrap();
    assert_eq!(kept.world.engine.run_time_volumes(), ["base", "top"]);
    assert!(kept.files().is_empty());
    for _ in 0..2 {
        kept.persist("top").unwrap();
        assert_eq!(kept.files(), ["base.toml", "top.toml"]);
        assert!(kept.world.engine.run_time_volumes().is_empty());
    }
    refuses(kept.persist("none"), "unknown_volume", "none");
    kept.world.reload(kept.load());
    let kept = kept.again(EMPTY);
    let serving = ["base", "top"].map(|name| phase(name, VolumePhase::Serving));
    assert_eq!(kept.world.phases(), serving);
}

#[test]
fn corrected_mistake_is_over_after_a_reload() {
    let good = "[volume.a]\nstore = 'file:DIR/images/a'\nsize = '1M'\ncreate = true\n";
    let kept = Kept::within(good, true, with_images());
    std::fs::write(kept.place("images/odd"), [1; 100]).unwrap();
    let reload = |main: &str| {
        let main = main.replace("DIR", kept.folder.path().to_str().unwrap());
        let path = kept.args.config.clone().unwrap();
        std::fs::write(path, format!("listen = ['unix:/never']\n{main}")).unwrap();
        kept.world.reload(kept.load());
        kept.world.engine.unchanged()
    };
    for (right, wrong) in [
        ("size = '1M'", "size = '2M'"),
        ("images/a", "none/a"),
        ("images/a", "images/odd"),
        ("images/a", "images"),
        ("create = true\n", "create = true\nencryption = 'key-file:DIR/no key'\n"),
        ("create = true\n", "create = true\nbase = 'absent'\n"),
    ] {
        let mistake = good.replace(right, wrong);
        assert_eq!(reload(&mistake).len(), 1, "{wrong}");
        assert_eq!(reload(good), Vec::<String>::new(), "{wrong} was corrected");
        assert_eq!(kept.world.phases(), [phase("a", VolumePhase::Serving)], "{wrong}");
        assert!(kept.world.engine.warnings_of("a").is_empty(), "{wrong}");
    }
}

/// The file belongs to another volume, and the one that is served goes on.
#[test]
fn persisting_over_a_foreign_file_does_not_advise_removal() {
    let kept = Kept::new("control = '/c'\n", false);
    kept.world.store("disk");
    kept.add("disk", new_config("disk", "file:/disk", "none"), false).unwrap();
    let path = kept.folder.path().join("state/volumes/disk.toml");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "store = 'null:1M'\n").unwrap();
    let refused = kept.persist("disk").unwrap_err();
    assert!(!refused.body.remedy.contains("remove"), "{refused}");
    refuses(kept.persist("disk"), "exists", "move that file out of the directory");
    std::fs::rename(&path, kept.folder.path().join("elsewhere")).unwrap();
    kept.persist("disk").unwrap();
    assert_eq!(kept.files(), ["disk.toml"]);
}
