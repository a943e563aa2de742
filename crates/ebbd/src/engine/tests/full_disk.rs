//! Overlays on a full disk, and volumes that a full state directory cannot keep.

use std::io::ErrorKind;

use ebb_api::stat::ProblemStat;
use ebb_config::{CacheMode, StateStep};
use ebb_control::Refused;

use super::manage::{Kept, refuses};
use super::overlay::{BYTES, MAIN, folder, of_base};
use super::unstable_snapshot::on_file_disks;
use super::*;

/// The data of a volume that writes through is on its disk, and the map that says so is not.
#[test]
fn removed_overlay_waits_for_room_for_its_map() {
    let (kept, disks) = on_file_disks();
    let disk = disks.at(&kept.file_path("disk.delta"));
    kept.world.write("disk", 7).unwrap();
    disk.set_room(Some(0));
    let (all, (without, _)) = (kept.load(), MAIN.split_once("[volume.disk]").unwrap());
    let (_, other) = MAIN.split_once("[volume.other]").unwrap();
    let text = format!("listen = ['unix:/never']\n{without}[volume.other]{other}");
    let text = text.replace("DIR", kept.folder.path().to_str().unwrap());
    std::fs::write(kept.file_path("main.toml"), text).unwrap();
    let (engine, config) = (kept.world.engine.clone(), kept.load());
    let (sender, ended) = std::sync::mpsc::channel();
    let writes = || disk.writes.load(std::sync::atomic::Ordering::SeqCst);
    let before = writes();
    kept.world.worker.handle().spawn(move |io| async move {
        drop(engine.reload(&io, config).await);
        let _ = sender.send(());
    });
    let state = |world: &World| world.phases().into_iter().find(|(name, _)| name == "disk");
    kept.world.wait_for("it is tried again, or given up", |world| {
        writes() >= before + 3 || state(world).is_none()
    });
    assert_eq!(state(&kept.world), Some(phase("disk", VolumePhase::Closing)));
    disk.set_room(None);
    ended.recv().unwrap();
    kept.world.wait_for("it is removed", |world| state(world).is_none());
    kept.world.reload(all);
    assert_eq!(kept.blocks("disk"), [7, of_base(1)]);
    assert!(kept.world.stop().is_clean());
}

impl Kept {
    fn snapshot_to_keep(&self, volume: &str, name: &str) -> Result<(), Refused> {
        let (volume, name) = (volume.to_owned(), name.to_owned());
        let operation = self.begin("snapshot");
        self.world.run(move |engine, io| async move {
            engine.snapshot_volume(&io, &volume, (&name, true), &operation).await
        })
    }
}

#[test]
fn nothing_is_made_that_the_state_directory_cannot_keep() {
    let kept = Kept::overlays();
    let (faults, full) = (kept.faults(), ErrorKind::StorageFull);
    let add = || kept.add("new", kept.on_file("new", "new.raw"), true);
    faults.fail(StateStep::Write, full);
    refuses(kept.snapshot_to_keep("disk", "one"), "state", "check the state directory");
    refuses(add(), "state", "check the state directory");
    for file in ["disk.delta@one", "new.raw"] {
        assert!(!kept.file_path(file).exists(), "{file}");
    }
    // A later failure names the new files.
    faults.fail(StateStep::Rename, full);
    refuses(kept.snapshot_to_keep("disk", "one"), "state", "the snapshot was made");
    refuses(add(), "state", "new.raw was made, and stays");
    refuses(add(), "state", "cannot write");
    faults.end();
    add().unwrap();
    assert!(kept.world.volume("new").is_some());
}

/// A volume with dirty data, and its disk, which is full.
fn dirty_on_a_full_disk() -> (Kept, Arc<ebb_store::TestStore>) {
    let (kept, disks) = on_file_disks();
    let config = VolumeConfig { cache: CacheMode::Writeback, ..kept.on_file("new", "new.raw") };
    kept.add("new", config, true).unwrap();
    let disk = disks.at(&kept.file_path("new.raw"));
    disk.set_room(Some(0));
    kept.world.write("new", 7).unwrap();
    (kept, disk)
}

#[test]
fn rename_without_room_leaves_the_volume_in_service() {
    let (kept, disk) = dirty_on_a_full_disk();
    let served = kept.world.volume("new").unwrap();
    refuses(kept.rename("new", "moved"), "not_flushed", "`new` was not renamed");
    assert!(Arc::ptr_eq(&served, &kept.world.volume("new").unwrap()));
    assert!(kept.world.volume("moved").is_none());
    assert_eq!((kept.files(), kept.blocks("new")), (vec!["new.toml".to_owned()], [7, 0]));
    kept.world.write("new", 8).unwrap();
    drop(served);
    disk.set_room(None);
    kept.rename("new", "moved").unwrap();
    assert_eq!(kept.blocks("moved"), [8, 0]);
}

#[test]
fn removal_says_that_it_waits_for_room() {
    let (kept, disk) = dirty_on_a_full_disk();
    let operation = kept.begin("remove");
    let (engine, removing) = (kept.world.engine.clone(), operation.clone());
    kept.world.worker.handle().spawn(move |io| async move {
        removing.finish(engine.remove_volume(&io, "new", &removing).await);
    });
    let step = || kept.operations.get(operation.id()).unwrap().0.step;
    kept.world.wait_for("it says why it waits", |_| step().starts_with("cannot write the dirty"));
    assert!(step().contains("No space left on device"), "{}", step());
    assert!(!operation.ended().is_stopped());
    disk.set_room(None);
    kept.world.wait_for("it is removed", |_| operation.ended().is_stopped());
    assert_eq!(kept.operations.get(operation.id()).unwrap().1, 200);
    assert_eq!(disk.stable_bytes()[..4096], [7; 4096]);
}

/// A stop waits as long as it may.
#[test]
fn stop_waits_for_room_for_the_map_of_an_overlay() {
    let (kept, disks) = on_file_disks();
    let disk = disks.at(&kept.file_path("disk.delta"));
    kept.world.write("disk", 7).unwrap();
    disk.set_room(Some(0));
    let engine = kept.world.engine.clone();
    let (sender, ended) = std::sync::mpsc::channel();
    let writes = || disk.writes.load(std::sync::atomic::Ordering::SeqCst);
    let before = writes();
    kept.world.worker.handle().spawn(move |io| async move {
        let _ = sender.send(engine.stop(&io).await);
    });
    let report = std::cell::OnceCell::new();
    kept.world.wait_for("it is tried again, or ends", |_| {
        ended.try_recv().into_iter().for_each(|ended| report.set(ended).unwrap());
        report.get().is_some() || writes() >= before + 3
    });
    disk.set_room(None);
    let report = report.into_inner().unwrap_or_else(|| ended.recv().unwrap());
    assert!(report.is_clean(), "{report:?}");
}

/// Only the delta says that its base is a mix of old and new data.
#[test]
fn unfinished_commit_keeps_the_overlay_until_it_ends() {
    let (kept, disks) = on_file_disks();
    let (main, _) = MAIN.split_once("[volume.other]").unwrap();
    kept.rewrite(&main.replace("DIR", kept.folder.path().to_str().unwrap()));
    std::fs::remove_file(kept.file_path("other.delta")).unwrap();
    kept.put_block("disk", 1, 7);
    let base = disks.at(&kept.file_path("base.raw"));
    base.set_room(Some(0));
    refuses(kept.commit("disk"), "not_committed", "was not committed");
    let commits = || {
        kept.world.engine.problems().into_iter().filter(|found| found.kind == ProblemStat::COMMIT)
    };
    assert_eq!(commits().next().and_then(|found| found.volume).as_deref(), Some("disk"));
    for name in ["disk", "golden"] {
        let warnings = kept.world.engine.warnings_of(name).join(" ");
        assert!(warnings.contains("mix of old and new data"), "{name}: {warnings}");
        assert!(warnings.contains("ebbd volume commit disk"), "{name}: {warnings}");
    }
    for refused in [kept.snapshot("disk", "one"), kept.flatten("disk")] {
        refuses(refused, "commit_unfinished", "mix of old and new data");
    }
    base.set_room(None);
    kept.commit("disk").unwrap();
    assert_eq!(commits().count(), 0);
    assert_eq!(kept.blocks("golden"), [of_base(0), 7]);
    kept.snapshot("disk", "one").unwrap();
}

/// Nor is it removed while it is not served: its file says that the commit has not ended.
#[test]
fn unfinished_commit_keeps_an_overlay_that_is_not_served() {
    let kept = Kept::overlays();
    kept.add_clone(("golden", "new"), true).unwrap();
    kept.put_block("new", 0, 7);
    let delta = kept.file_path("new.delta");
    assert!(kept.world.stop().is_clean());
    begin_commit(&delta);
    std::fs::rename(kept.file_path("base.raw"), kept.file_path("away")).unwrap();
    let kept = Kept::within(MAIN, true, kept.folder);
    kept.world.wait_for("it cannot be opened", |_| kept.why_not("new").is_some());
    let refused = kept.remove("new");
    refuses(refused, "commit_unfinished", "mix of old and new data");
    std::fs::remove_file(&delta).unwrap();
    kept.remove("new").unwrap();
}

/// Its commit needs a volume that is no larger than the base, and a flatten would keep the mix.
#[test]
fn overlay_of_an_unfinished_commit_is_only_shrunk() {
    let (main, _) = MAIN.split_once("[volume.other]").unwrap();
    let kept = Kept::within(main, true, folder());
    kept.put_block("disk", 0, 7);
    let size = BYTES as u64;
    kept.resize("disk", 2 * size).unwrap();
    assert!(kept.world.stop().is_clean());
    begin_commit(&kept.file_path("disk.delta"));
    let kept = Kept::within(main, true, kept.folder);
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.to_string().contains("larger than its base"), "{refused}");
    assert!(!refused.body.remedy.contains("flatten"), "{refused}");
    refuses(kept.resize("disk", 3 * size), "commit_unfinished", "cannot grow");
    kept.resize("disk", size).unwrap();
    kept.commit("disk").unwrap();
    assert_eq!(kept.blocks("golden"), [7, of_base(1)]);
    kept.resize("disk", 2 * size).unwrap();
}

/// Writes the header of a commit that has begun.
pub(super) fn begin_commit(delta: &std::path::Path) {
    use std::os::unix::fs::FileExt;
    let bytes = std::fs::read(delta).unwrap();
    let slot = |at: u64| &bytes[usize::try_from(at).unwrap()..][..ebb_image::HEADER_BYTES];
    let mut header = ebb_image::DeltaHeader::decode(ebb_image::HEADER_SLOTS.map(slot)).unwrap();
    header.number += 1;
    header.parent = header.parent.mixed();
    let file = std::fs::OpenOptions::new().write(true).open(delta).unwrap();
    file.write_all_at(&header.encode(), ebb_image::HEADER_SLOTS[0]).unwrap();
}
