//! Files that are moved, removed and replaced while their volume is served: no reload takes another disk for them.

use std::path::PathBuf;

use super::manage::{Kept, refuses};
use super::*;

struct Disk {
    folder: tempfile::TempDir,
    world: World,
}

impl Disk {
    /// A volume whose file is made, with something in it.
    fn new() -> Disk {
        let folder = tempfile::tempdir().unwrap();
        let first = Disk::config_in(folder.path(), "image", "writeback");
        let world = World::on_files(&first);
        world.start(first, None);
        world.write("disk", 7).unwrap();
        let disk = Disk { folder, world };
        assert_eq!(disk.served(), 7);
        disk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config_in(folder: &Path, name: &str, cache: &str) -> Config {
        let path = folder.join(name);
        config(&format!(
            "[volume.disk]\nstore='file:{}'\nsize='1M'\ncreate=true\ncache='{cache}'\n",
            path.display()
        ))
    }

    fn config(&self, name: &str, cache: &str) -> Config {
        Disk::config_in(self.folder.path(), name, cache)
    }

    fn served(&self) -> u8 {
        let volume = self.world.volume("disk").expect("it is served");
        self.world.run(move |_, io| async move {
            let (outcome, buf) = volume.read(&io, io.pool().take(4096).await, 0).await;
            outcome.unwrap();
            buf[0]
        })
    }

    /// A reload that changes the entry is refused, and what was served is.
    fn refuses(&self, new: &Config, how: &str) {
        let before = self.world.volume("disk").unwrap();
        self.world.reload(new.clone());
        assert!(Arc::ptr_eq(&before, &self.world.volume("disk").unwrap()), "{how}");
        assert_eq!(self.served(), 7, "{how}");
    }
}

#[test]
fn a_reload_does_not_make_a_new_file_where_the_one_served_was() {
    for how in ["moved", "removed", "folder moved"] {
        let disk = Disk::new();
        match how {
            "moved" => std::fs::rename(disk.path("image"), disk.path("elsewhere")).unwrap(),
            "removed" => std::fs::remove_file(disk.path("image")).unwrap(),
            _ => {
                std::fs::create_dir(disk.path("folder")).unwrap();
                let inner = disk.config("folder/image", "none");
                disk.world.reload(inner);
                disk.world.write("disk", 7).unwrap();
                std::fs::rename(disk.path("folder"), disk.path("other")).unwrap();
            }
        }
        let name = if how == "folder moved" { "folder/image" } else { "image" };
        disk.refuses(&disk.config(name, "writethrough"), how);
        assert!(!disk.path(name).exists(), "{how}");
        // Another spelling of the path is no other path.
        disk.refuses(&disk.config(&format!("../{}/{name}", folder_name(&disk)), "none"), how);
        assert!(!disk.path(name).exists(), "{how}");
        assert!(disk.world.stop().is_clean());
    }
}

fn folder_name(disk: &Disk) -> String {
    disk.folder.path().file_name().unwrap().to_str().unwrap().to_owned()
}

#[test]
fn a_reload_does_not_take_another_file_for_the_one_served() {
    let disk = Disk::new();
    std::fs::rename(disk.path("image"), disk.path("elsewhere")).unwrap();
    std::fs::write(disk.path("image"), vec![9; 1 << 20]).unwrap();
    let new = disk.config("image", "none");
    disk.refuses(&new, "replaced");
    // It is where it was again: now it is changed, and the same.
    std::fs::rename(disk.path("elsewhere"), disk.path("image")).unwrap();
    let before = disk.world.volume("disk").unwrap();
    disk.world.reload(new);
    assert!(!Arc::ptr_eq(&before, &disk.world.volume("disk").unwrap()));
    drop(before);
    assert_eq!(disk.served(), 7);
    assert!(disk.world.stop().is_clean());
}

#[test]
fn a_file_that_was_moved_is_followed_by_its_new_path_and_a_swap_takes_a_volume_out_and_in() {
    let disk = Disk::new();
    std::fs::rename(disk.path("image"), disk.path("elsewhere")).unwrap();
    disk.world.reload(disk.config("elsewhere", "none"));
    assert_eq!(disk.served(), 7);
    assert!(!disk.path("image").exists());
    // Another path says that another file is meant.
    disk.world.reload(disk.config("new", "none"));
    assert_eq!(disk.served(), 0);
    std::fs::remove_file(disk.path("new")).unwrap();
    disk.world.reload(disk.config("new", "writeback"));
    assert!(!disk.path("new").exists());
    // And so do two reloads.
    disk.world.reload(config("[volume.other]\nstore='memory:1M'\n"));
    disk.world.reload(disk.config("new", "writeback"));
    assert_eq!(disk.served(), 0);
    assert!(disk.path("new").exists());
    assert!(disk.world.stop().is_clean());
}

/// Opens files, and does something at the first opening that expects a file.
struct Meanwhile(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Opener for Meanwhile {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        if expected != Expected::Any
            && let Some(act) = lock(&self.0).take()
        {
            act();
        }
        HelperThreads { workers: 1, ..HelperThreads::default() }
            .open(name, config, expected, claims)
    }

    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<StoreTarget>,
        new: &VolumeConfig,
    ) -> Comparing {
        HelperThreads { workers: 1, ..HelperThreads::default() }.compare(old, open, new)
    }
}

/// A volume that is changed, and `act` between its being looked at and its being opened anew.
fn changed_meanwhile(folder: &Path, act: impl FnOnce() + Send + 'static) -> World {
    let first = Disk::config_in(folder, "image", "none");
    let opener = Arc::new(Meanwhile(Mutex::new(Some(Box::new(act)))));
    let world = World::over(&first, SOON, None, Arc::default(), opener);
    world.start(first, None);
    world.write("disk", 7).unwrap();
    world.reload(Disk::config_in(folder, "image", "writethrough"));
    world
}

#[test]
fn a_file_removed_during_a_change_is_waited_for_and_not_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("image"), folder.path().join("other"));
    let (from, to) = (path.clone(), other.clone());
    let world = changed_meanwhile(folder.path(), move || std::fs::rename(from, to).unwrap());
    assert_eq!(world.phases(), [phase("disk", VolumePhase::Failed)]);
    let reason = world.engine.states()[0].failure.clone().unwrap().reason;
    assert!(reason.contains("no longer at its path (there is no file)"), "{reason}");
    assert!(reason.contains("move it back") && !reason.contains("a new one"), "{reason}");
    assert!(!path.exists());
    std::fs::rename(&other, &path).unwrap();
    world.wait_for("it is served", |world| world.volume("disk").is_some());
    let disk = Disk { folder, world };
    assert_eq!(disk.served(), 7);
    assert!(disk.world.stop().is_clean());
}

#[test]
fn a_file_that_is_shrunk_while_its_volume_is_changed_is_served_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let world = changed_meanwhile(folder.path(), move || {
        std::fs::File::options().write(true).open(path).unwrap().set_len(1 << 19).unwrap();
    });
    assert_eq!(world.phases(), [phase("disk", VolumePhase::Serving)]);
    assert_eq!(world.volume("disk").unwrap().size(), 1 << 19);
    assert!(world.stop().is_clean());
}

/// The merged snapshot would be of no use without the delta above it.
#[test]
fn no_snapshot_is_deleted_below_a_missing_delta() {
    let kept = Kept::overlays();
    for name in ["one", "two"] {
        kept.put_block("disk", 0, 7);
        kept.snapshot("disk", name).unwrap();
    }
    let (path, away) = (kept.file_path("disk.delta"), kept.file_path("away"));
    std::fs::rename(&path, &away).unwrap();
    for name in ["one", "two"] {
        refuses(kept.delete_snapshot("disk", name), "moved", "not the file");
    }
    std::fs::rename(&away, &path).unwrap();
    kept.delete_snapshot("disk", "one").unwrap();
    let refused = kept.delete_snapshot("disk", "none").unwrap_err();
    let message = &refused.body.message;
    assert!(message.ends_with("there are: two"), "the merged file has its name: {message}");
}

#[test]
fn file_that_is_no_longer_at_its_path_is_a_problem() {
    let disk = Disk::new();
    let problems = || {
        disk.world.engine.look_at_files();
        disk.world.engine.problems()
    };
    assert_eq!((problems().len(), problems().len()), (0, 0));
    std::fs::rename(disk.path("image"), disk.path("aside")).unwrap();
    assert!(problems().is_empty(), "an operation may exchange files");
    let [moved] = &problems()[..] else { panic!("not one problem") };
    assert_eq!((moved.volume.as_deref(), &*moved.kind), (Some("disk"), "file_moved"));
    assert!(moved.message.contains("no longer at its path (there is no file)"), "{moved:?}");
    assert!(moved.remedy.contains("mount its file system again"), "{moved:?}");
    std::fs::rename(disk.path("aside"), disk.path("image")).unwrap();
    assert!(problems().is_empty());
    assert!(disk.world.stop().is_clean());
}

/// A snapshot that another one is merged into is replaced, and its volume reads on.
#[test]
fn read_only_volume_may_have_another_file_at_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let first =
        config(&format!("[volume.disk]\nstore='file:{}'\nread_only=true\n", path.display()));
    let world = World::on_files(&first);
    world.start(first, None);
    assert!(world.volume("disk").is_some());
    std::fs::remove_file(&path).unwrap();
    world.engine.look_at_files();
    world.engine.look_at_files();
    assert!(world.engine.problems().is_empty());
    assert!(world.stop().is_clean());
}
