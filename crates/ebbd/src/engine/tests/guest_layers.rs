//! Guests of overlays whose layers are exchanged when the daemon is killed.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use ebb_export_xen::abi::op;
use ebb_export_xen::device_number;
use ebb_export_xen::shm::World as Machine;
use ebb_export_xen::shm::frontend::{Frontend, FrontendConfig};

use super::guests::{ERROR, attach_volume, serve_guests, transfer};
use super::manage::Kept;
use super::overlay::MAIN;
use super::*;

/// The journals of a daemon at one time.
type Journals = Vec<(PathBuf, Vec<u8>)>;

fn read(folder: &Path) -> Journals {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file());
    files.map(|path| (path.file_name().unwrap().into(), std::fs::read(&path).unwrap())).collect()
}

/// The inode at a path, if there is a file.
fn inode(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|found| found.ino())
}

/// The guest of a volume reads as before after a kill during this operation, with the journal of
/// the last moment before files are exchanged for the last time.
fn goes_on_after_a_kill(volume: &str, snapshots: &[&str], operation: impl FnOnce(&Kept)) {
    let kept = Kept::overlays();
    for (number, name) in (1..).zip(snapshots) {
        kept.put_block("disk", 0, number);
        kept.make_snapshot(("disk", name), true).unwrap();
    }
    if let Some(newest) = snapshots.last().filter(|_| volume == "clone") {
        kept.add_clone((&format!("disk@{newest}"), "clone"), true).unwrap();
    }
    kept.put_block(volume, 0, 9);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let machine = Machine::default();
    let guest = machine.guest(1, 64).unwrap();
    serve_guests(&kept.world, &machine, Some(folder.path()));
    attach_volume(&machine, volume);
    let device = device_number("xvdb").unwrap();
    let mut disk = Frontend::new(&machine, &guest, device, FrontendConfig::default());
    disk.connect().unwrap();
    assert_eq!(transfer(&mut disk, op::READ, 0), [9; 4096]);

    let files: Vec<_> = snapshots.iter().map(|name| format!("disk.delta@{name}")).collect();
    let files: Vec<_> = files.iter().map(|name| kept.file_path(name)).collect();
    let own = kept.file_path("disk.delta");
    let inodes = move || {
        let files = std::iter::once(&own).chain(&files);
        files.map(|path| inode(path)).collect::<Vec<_>>()
    };
    let states = Arc::new(Mutex::new(vec![(read(folder.path()), inodes())]));
    let (noted, from) = (states.clone(), folder.path().to_owned());
    let note = move || lock(&noted).push((read(&from), inodes()));
    *lock(&kept.world.engine.guests.after_note) = Some(Box::new(note));
    operation(&kept);
    *lock(&kept.world.engine.guests.after_note) = None;
    assert!(kept.world.stop().is_clean());
    kept.world.engine.end_guests();

    let states = std::mem::take(&mut *lock(&states));
    let [noted @ .., end] = &states[..] else { panic!("there is no journal") };
    let killed = noted.iter().rfind(|state| state.1 != end.1).or(noted.last()).unwrap();
    let left = tempfile::tempdir_in("/dev/shm").unwrap();
    for (name, journal) in &killed.0 {
        std::fs::write(left.path().join(name), journal).unwrap();
    }
    let kept = kept.again(MAIN);
    serve_guests(&kept.world, &machine, Some(left.path()));
    assert_eq!(transfer(&mut disk, op::READ, 0), [9; 4096]);
    assert_eq!(machine.tree.get(ERROR), None);
    assert_eq!(disk.backend("state").as_deref(), Some("4"));
    transfer(&mut disk, op::WRITE, 8);
    assert_eq!(kept.blocks(volume), [8]);
    kept.world.stop();
    kept.world.engine.end_guests();
}

#[test]
fn a_guest_goes_on_after_a_kill_during_a_snapshot() {
    goes_on_after_a_kill("disk", &[], |kept| kept.snapshot("disk", "one").unwrap());
}

#[test]
fn a_guest_goes_on_after_a_kill_while_layers_are_flattened() {
    goes_on_after_a_kill("disk", &["one"], |kept| kept.flatten("disk").unwrap());
}

#[test]
fn a_guest_goes_on_after_a_kill_while_snapshots_are_deleted() {
    goes_on_after_a_kill("disk", &["one"], |kept| kept.delete_snapshot("disk", "one").unwrap());
    goes_on_after_a_kill("disk", &["one", "two"], |kept| {
        kept.delete_snapshot("disk", "one").unwrap();
    });
}

#[test]
fn guest_of_a_clone_goes_on_after_a_kill_during_a_merge() {
    goes_on_after_a_kill("clone", &["one", "two"], |kept| {
        kept.delete_snapshot("disk", "one").unwrap();
    });
    // The second merged file takes the place of the first one.
    goes_on_after_a_kill("clone", &["one", "two", "three"], |kept| {
        kept.delete_snapshot("disk", "one").unwrap();
        kept.delete_snapshot("disk", "two").unwrap();
    });
}
