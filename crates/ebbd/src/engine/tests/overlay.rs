//! Overlays on files: snapshots, clones, flattening, and what a crash in between leaves.

use ebb_cache::{CachedStore, Delta, plain_parent};
use ebb_control::Refused;

use super::manage::{Kept, new_config};
use super::*;
use crate::operations::Operations;

pub(super) const BYTES: usize = 3 << 20;
pub(super) const MAIN: &str = "[volume.golden]\nstore='file:DIR/base.raw'\nread_only=true\n\
    [volume.disk]\nstore='file:DIR/disk.delta'\nbase='golden'\ncreate=true\n\
    [volume.other]\nstore='file:DIR/other.delta'\nbase='golden'\ncreate=true\ncache='writeback'\n";

/// Blocks of the base hold their number plus 100.
pub(super) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let content: Vec<u8> =
        (0..BYTES).map(|at| u8::try_from(100 + at / 4096 % 100).unwrap()).collect();
    std::fs::write(folder.path().join("base.raw"), content).unwrap();
    folder
}

pub(super) fn of_base(block: usize) -> u8 {
    u8::try_from(100 + block % 100).unwrap()
}

impl Kept {
    pub(super) fn overlays() -> Kept {
        Kept::within(MAIN, true, folder())
    }

    pub(super) fn put_block(&self, name: &str, block: u64, byte: u8) {
        let volume = self.world.volume(name).expect("it is served");
        self.world.run(move |_, io| async move {
            let mut buf = io.pool().take(4096).await;
            buf.fill(byte);
            volume.write(&io, buf, block * 4096, false).await.0.unwrap();
            volume.flush(&io).await.unwrap();
        });
    }

    /// Why a volume is not served.
    pub(super) fn why_not(&self, name: &str) -> Option<String> {
        let state = self.world.engine.states().into_iter().find(|state| state.name == name);
        state.and_then(|state| state.failure).map(|failure| failure.reason)
    }

    /// The bytes that the first blocks of a volume hold.
    pub(super) fn blocks<const N: usize>(&self, name: &str) -> [u8; N] {
        let volume = self.world.volume(name);
        let volume = volume.unwrap_or_else(|| panic!("{name}: {:?}", self.why_not(name)));
        self.world.run(move |_, io| async move {
            let buf = io.pool().take(N * 4096).await;
            let (result, buf) = volume.read(&io, buf, 0).await;
            result.unwrap();
            std::array::from_fn(|block| {
                let bytes = &buf[block * 4096..(block + 1) * 4096];
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a mixed block");
                bytes[0]
            })
        })
    }

    pub(super) fn snapshot(&self, volume: &str, name: &str) -> Result<(), Refused> {
        self.make_snapshot((volume, name), false)
    }

    /// With `keep` it is served after a restart.
    pub(super) fn make_snapshot(
        &self,
        (volume, name): (&str, &str),
        keep: bool,
    ) -> Result<(), Refused> {
        let (volume, name) = (volume.to_owned(), name.to_owned());
        let operation = self.begin("snapshot");
        let ending = operation.clone();
        let outcome = self.world.run(move |engine, io| async move {
            engine.snapshot_volume(&io, &volume, (&name, keep), &operation).await
        });
        ending.finish(outcome.clone());
        outcome
    }

    pub(super) fn flatten(&self, volume: &str) -> Result<(), Refused> {
        let (volume, operation) = (volume.to_owned(), self.begin("flatten"));
        self.world.run(move |engine, io| async move {
            engine.flatten_volume(&io, &volume, &operation).await
        })
    }

    pub(super) fn delete_snapshot(&self, volume: &str, name: &str) -> Result<(), Refused> {
        let (volume, name) = (volume.to_owned(), name.to_owned());
        let operation = self.begin("delete snapshot");
        self.world.run(move |engine, io| async move {
            engine.delete_snapshot(&io, (&volume, &name), &operation).await
        })
    }

    pub(super) fn commit(&self, volume: &str) -> Result<(), Refused> {
        let (volume, operation) = (volume.to_owned(), self.begin("commit"));
        self.world.run(move |engine, io| async move {
            engine.commit_volume(&io, &volume, &operation).await
        })
    }

    fn clear_block(&self, name: &str, block: u64) {
        let volume = self.world.volume(name).expect("it is served");
        self.world.run(move |_, io| async move {
            let flags = ebb_block::ZeroFlags { may_unmap: true, fast_only: false };
            volume.write_zeroes(&io, block * 4096, 4096, flags, false).await.unwrap();
            volume.flush(&io).await.unwrap();
        });
    }

    pub(super) fn clone_of(&self, base: &str, name: &str) -> Result<(), Refused> {
        self.add_clone((base, name), false)
    }

    /// With `keep` it is served after a restart.
    pub(super) fn add_clone(&self, (base, name): (&str, &str), keep: bool) -> Result<(), Refused> {
        let mut config = new_config(name, &self.path(&format!("{name}.delta")), "writethrough");
        (config.base, config.create) = (Some(base.to_owned()), true);
        self.add(name, config, keep)
    }

    pub(super) fn file_path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }
}

#[test]
fn layers_have_the_names_of_their_files_after_a_snapshot() {
    let kept = Kept::overlays();
    kept.snapshot("disk", "one").unwrap();
    let place = |name: &str| kept.world.volume(name).unwrap().place();
    for (name, file) in [("disk", "disk.delta"), ("disk@one", "disk.delta@one")] {
        assert!(place(name).ends_with(&format!("/{file}")), "{name}: {}", place(name));
    }
}

#[test]
fn size_that_an_overlay_does_not_follow_is_told() {
    let kept = Kept::overlays();
    assert!(kept.world.engine.other_sizes().is_empty());
    let larger = MAIN.replace("disk.delta'\n", "disk.delta'\nsize='64M'\n");
    kept.rewrite(&larger.replace("DIR", kept.folder.path().to_str().unwrap()));
    let told = kept.world.engine.other_sizes().join("\n");
    assert!(told.contains("`ebbd volume resize disk 64M`"), "{told}");
}

#[test]
fn snapshots_and_clones_hold_what_was_there_and_survive_a_restart() {
    for volume in ["disk", "other"] {
        let kept = Kept::overlays();
        kept.put_block(volume, 0, 1);
        kept.put_block(volume, 1, 1);
        kept.snapshot(volume, "one").unwrap();
        kept.put_block(volume, 1, 2);
        kept.snapshot(volume, "two").unwrap();
        kept.put_block(volume, 2, 3);
        let (one, two) = (format!("{volume}@one"), format!("{volume}@two"));
        assert_eq!(kept.blocks(&one), [1, 1, of_base(2), of_base(3)]);
        assert_eq!(kept.blocks(&two), [1, 2, of_base(2), of_base(3)]);
        assert_eq!(kept.blocks(volume), [1, 2, 3, of_base(3)]);
        kept.clone_of(&one, "clone").unwrap();
        kept.put_block("clone", 3, 4);
        assert_eq!(kept.blocks("clone"), [1, 1, of_base(2), 4]);
        assert_eq!(kept.blocks(&one), [1, 1, of_base(2), of_base(3)]);
        let refused = kept.remove(&one).unwrap_err();
        assert!(refused.body.message.contains("`clone`"), "{refused}");
        assert_eq!(kept.snapshot(volume, "one").unwrap_err().body.error, "exists");
        let kept = kept.again(MAIN);
        assert_eq!(kept.blocks(volume), [1, 2, 3, of_base(3)]);
        kept.put_block(volume, 0, 9);
        kept.snapshot(volume, "three").unwrap();
        assert_eq!(kept.blocks(&format!("{volume}@three")), [9, 2, 3, of_base(3)]);
        assert_eq!(kept.blocks("golden"), [of_base(0), of_base(1), of_base(2), of_base(3)]);
    }
}

#[test]
fn the_number_of_layers_is_limited_and_a_flattened_volume_begins_anew() {
    let kept = Kept::overlays();
    let mut made = 0;
    let refused = loop {
        kept.put_block("disk", made, 1);
        match kept.snapshot("disk", &made.to_string()) {
            Ok(()) => made += 1,
            Err(refused) => break refused,
        }
        assert!(made < 20);
    };
    assert_eq!((made, refused.body.error.as_str()), (7, "too_deep"));
    assert_eq!(kept.blocks("disk"), [1, 1, 1, 1, 1, 1, 1, 1, of_base(8)]);
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [1, 1, 1, 1, 1, 1, 1, 1, of_base(8)]);
    kept.flatten("disk").unwrap();
    assert_eq!(kept.flatten("golden").unwrap_err().body.error, "no_overlay");
    let kept = kept.again(MAIN);
    std::fs::write(kept.file_path("base.raw"), vec![0; BYTES]).unwrap();
    for number in 0..made {
        std::fs::remove_file(kept.file_path(&format!("disk.delta@{number}"))).unwrap();
    }
    let main = MAIN.replacen("base='golden'\ncreate=true", "base='none'", 1);
    let kept = kept.again(&main);
    assert_eq!(kept.blocks("disk"), [1, 1, 1, 1, 1, 1, 1, 1, of_base(8)]);
    for number in 0..made {
        kept.put_block("disk", 8, u8::try_from(number).unwrap());
        kept.snapshot("disk", &number.to_string()).unwrap();
    }
    // As many as above a base, and no more.
    assert_eq!(kept.snapshot("disk", "more").unwrap_err().body.error, "too_deep");
    kept.put_block("disk", 8, 9);
    kept.clone_of("disk@6", "clone").unwrap();
    assert_eq!(kept.snapshot("clone", "more").unwrap_err().body.error, "too_deep");
    let kept = kept.again(&main);
    assert_eq!(kept.blocks("disk"), [1, 1, 1, 1, 1, 1, 1, 1, 9, of_base(9)]);
}

/// A kill between the steps of a snapshot: the next start serves everything, and the snapshot can be made again.
#[test]
fn an_interrupted_snapshot_loses_nothing() {
    // An empty file and a second name of the delta are left over.
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    let (own, frozen) = (kept.file_path("disk.delta"), kept.file_path("disk.delta@one"));
    std::fs::write(kept.file_path(".disk.delta.ebbd-next"), [0; 16384]).unwrap();
    std::fs::hard_link(&own, &frozen).unwrap();
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
    kept.snapshot("disk", "one").unwrap();
    kept.put_block("disk", 1, 2);
    assert_eq!(kept.blocks("disk@one"), [1, of_base(1)]);
    assert!(!kept.file_path(".disk.delta.ebbd-next").exists());
    // The files were exchanged, and then the volume wrote to the file of the snapshot: what `undo` takes back.
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [1, 2]);
    // Another file at the path is not taken for the delta.
    let moved = kept.file_path("moved");
    std::fs::rename(&own, &moved).unwrap();
    std::fs::copy(&moved, &own).unwrap();
    assert_eq!(kept.snapshot("disk", "two").unwrap_err().body.error, "moved");
    assert!(!kept.file_path("disk.delta@two").exists());
    std::fs::rename(&moved, &own).unwrap();
    kept.snapshot("disk", "two").unwrap();
    assert_eq!(kept.blocks("disk"), [1, 2]);
    let refused = kept.snapshot("disk", "a/b").unwrap_err();
    assert_eq!(refused.body.error, "invalid_value");
}

#[test]
fn a_base_with_other_content_is_refused_and_so_is_a_store_that_is_not_empty() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    let base = std::fs::read(kept.file_path("base.raw")).unwrap();
    std::fs::write(kept.file_path("base.raw"), vec![5; BYTES]).unwrap();
    let kept = kept.again(MAIN);
    assert!(kept.world.volume("disk").is_none());
    let why = kept.why_not("disk").unwrap();
    assert!(why.contains("is not that"), "{why}");
    std::fs::write(kept.file_path("base.raw"), base).unwrap();
    std::fs::write(kept.file_path("raw.delta"), vec![1; 5 << 20]).unwrap();
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
    let refused = kept.clone_of("golden", "raw").unwrap_err();
    assert_eq!(refused.body.error, "not_opened");
    assert_eq!(std::fs::read(kept.file_path("raw.delta")).unwrap(), vec![1; 5 << 20]);
    let refused = kept.clone_of("nowhere", "new").unwrap_err();
    assert!(refused.body.message.contains("`nowhere` is not configured"), "{refused}");
    let refused = kept.clone_of("disk", "new").unwrap_err();
    assert!(refused.body.message.contains("is writable"), "{refused}");
}

/// The oldest, a middle and the newest snapshot are deleted in each order, with restarts in between: everything that is left
/// reads as before, and the files are gone.
#[test]
fn a_snapshot_is_deleted_and_the_rest_reads_as_before() {
    for (round, order) in [
        ["one", "two", "three"],
        ["two", "one", "three"],
        ["two", "three", "one"],
        ["three", "two", "one"],
        ["three", "one", "two"],
        ["one", "three", "two"],
    ]
    .into_iter()
    .enumerate()
    {
        let mut kept = Kept::overlays();
        let mut expected = std::collections::BTreeMap::new();
        let mut content: [u8; 6] = std::array::from_fn(of_base);
        for (number, name) in ["one", "two", "three"].into_iter().enumerate() {
            // Each layer has a block of its own, one that the next replaces, and one that it makes zeroes.
            let stamp = u8::try_from(number + 1).unwrap();
            for block in [number, 4] {
                kept.put_block("disk", block as u64, stamp);
                content[block] = stamp;
            }
            let zero = 5 - number % 2 * 2;
            kept.clear_block("disk", zero as u64);
            content[zero] = 0;
            kept.snapshot("disk", name).unwrap();
            expected.insert(name, content);
        }
        kept.put_block("disk", 3, 9);
        content[3] = 9;
        for name in order {
            if round % 2 == 1 {
                kept = kept.again(MAIN);
            }
            kept.delete_snapshot("disk", name).unwrap();
            expected.remove(name);
            assert!(!kept.file_path(&format!("disk.delta@{name}")).exists());
            assert!(!kept.file_path(".disk.delta.ebbd-merge").exists());
            assert_eq!(kept.blocks::<6>("disk"), content, "{order:?} {name}");
            let error = kept.delete_snapshot("disk", name).unwrap_err();
            assert_eq!(error.body.error, "unknown_snapshot");
            if round % 2 == 0 {
                for (left, content) in &expected {
                    assert_eq!(kept.blocks::<6>(&format!("disk@{left}")), *content, "{order:?}");
                }
            }
        }
        let depth = kept.world.volume("disk").unwrap().layers().depth();
        assert_eq!(depth, 2, "the base and the volume's own delta");
        let kept = kept.again(MAIN);
        assert_eq!(kept.blocks::<6>("disk"), content, "{order:?}");
    }
}

/// The names of the files that operations make are taken, and those of snapshots lead elsewhere.
#[test]
fn operations_on_overlays_touch_no_file_that_is_not_theirs() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    let victim = kept.file_path("victim");
    let content = vec![7; 1 << 22];
    std::fs::write(&victim, &content).unwrap();
    let is_whole = || std::fs::read(&victim).unwrap() == content;
    let next = kept.file_path(".disk.delta.ebbd-next");
    for plant in [
        |from: &std::path::Path, to: &std::path::Path| std::os::unix::fs::symlink(from, to),
        |from: &std::path::Path, to: &std::path::Path| std::fs::hard_link(from, to),
    ] {
        plant(&victim, &next).unwrap();
        assert_eq!(kept.snapshot("disk", "one").unwrap_err().body.error, "exists");
        assert!(is_whole() && std::fs::symlink_metadata(&next).is_ok());
        std::fs::remove_file(&next).unwrap();
    }
    for name in ["one", "two", "three"] {
        kept.snapshot("disk", name).unwrap();
        kept.put_block("disk", 1, 2);
    }
    // Another file has the name of the snapshot that would be replaced.
    let (two, away) = (kept.file_path("disk.delta@two"), kept.file_path("away"));
    std::fs::rename(&two, &away).unwrap();
    std::fs::hard_link(&victim, &two).unwrap();
    assert_eq!(kept.delete_snapshot("disk", "one").unwrap_err().body.error, "moved");
    assert!(is_whole());
    std::fs::remove_file(&two).unwrap();
    std::fs::rename(&away, &two).unwrap();
    // A FIFO has no other end.
    let pipe = kept.file_path("disk.delta@pipe");
    let (cwd, fifo) = (rustix::fs::CWD, rustix::fs::FileType::Fifo);
    rustix::fs::mknodat(cwd, &pipe, fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    kept.delete_snapshot("disk", "pipe").unwrap_err();
    assert!(std::fs::symlink_metadata(&pipe).is_ok());
    kept.delete_snapshot("disk", "one").unwrap();
    assert_eq!(kept.blocks("disk"), [1, 2]);
}

#[test]
fn a_snapshot_that_is_needed_is_not_deleted() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    kept.snapshot("disk", "one").unwrap();
    kept.put_block("disk", 0, 2);
    kept.snapshot("disk", "two").unwrap();
    kept.clone_of("disk@one", "clone").unwrap();
    let refused = kept.delete_snapshot("disk", "one").unwrap_err();
    assert!(refused.body.message.contains("`clone`"), "{refused}");
    assert_eq!(kept.delete_snapshot("disk", "other").unwrap_err().body.error, "unknown_snapshot");
    assert_eq!(kept.delete_snapshot("golden", "one").unwrap_err().body.error, "unknown_snapshot");
    let refused = kept.delete_snapshot("disk", "none").unwrap_err();
    assert!(refused.body.message.ends_with("there are: two, one"), "{refused}");
    let refused = kept.delete_snapshot("clone", "one").unwrap_err();
    let told = "the volume has none; below it are snapshots of other volumes: `disk@one`";
    assert!(refused.body.message.ends_with(told), "{refused}");
    // A file that is none of a snapshot stays; one of an interrupted merge does not matter.
    std::fs::write(kept.file_path("disk.delta@gone"), b"no snapshot").unwrap();
    std::fs::write(kept.file_path(".disk.delta.ebbd-merge"), [0; 16384]).unwrap();
    kept.delete_snapshot("disk", "gone").unwrap_err();
    assert!(kept.file_path("disk.delta@gone").exists());
    // A clone of the newer one, which is in use, keeps what it reads.
    kept.clone_of("disk@two", "newer").unwrap();
    kept.remove("clone").unwrap();
    std::fs::remove_file(kept.file_path("clone.delta")).unwrap();
    let (file, copy) = (kept.file_path("disk.delta@one"), kept.file_path("copy"));
    std::fs::copy(&file, &copy).unwrap();
    kept.delete_snapshot("disk", "one").unwrap();
    // What a delete leaves that was interrupted before it removed the file.
    std::fs::rename(&copy, &file).unwrap();
    kept.delete_snapshot("disk", "one").unwrap();
    assert!(!file.exists());
    kept.put_block("disk", 1, 3);
    assert_eq!(kept.blocks("newer"), [2, of_base(1)]);
    assert_eq!(kept.blocks("disk@two"), [2, of_base(1)]);
    kept.put_block("newer", 1, 4);
    assert_eq!(kept.blocks("newer"), [2, 4]);
    assert_eq!(kept.blocks("disk"), [2, 3]);
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [2, 3]);
}

/// The snapshots of a flattened volume are served as before. One that is below another snapshot is not deleted before that.
#[test]
fn snapshots_of_a_flattened_volume_are_deleted_from_the_newest_on() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    kept.snapshot("disk", "one").unwrap();
    kept.put_block("disk", 0, 2);
    kept.snapshot("disk", "two").unwrap();
    kept.flatten("disk").unwrap();
    assert_eq!(kept.world.volume("disk").unwrap().layers().depth(), 1);
    assert_eq!(kept.blocks("disk"), [2, of_base(1)]);
    let refused = kept.delete_snapshot("disk", "one").unwrap_err();
    assert!(refused.body.message.contains("disk.delta@two"), "{refused}");
    assert_eq!(kept.blocks("disk@two"), [2, of_base(1)]);
    kept.delete_snapshot("disk", "two").unwrap();
    assert_eq!(kept.blocks("disk@one"), [1, of_base(1)]);
    kept.delete_snapshot("disk", "one").unwrap();
    assert_eq!(kept.blocks("disk"), [2, of_base(1)]);
}

#[test]
fn what_is_committed_is_in_the_base_and_the_overlay_is_empty() {
    let main = MAIN.replace(
        "[volume.other]\nstore='file:DIR/other.delta'\nbase='golden'\n",
        "[volume.other]\nstore='file:DIR/other.raw'\nsize='3M'\n",
    );
    let kept = Kept::within(&main, true, folder());
    kept.put_block("disk", 0, 1);
    kept.clear_block("disk", 2);
    kept.put_block("disk", (BYTES / 4096 - 1) as u64, 7);
    kept.snapshot("disk", "one").unwrap();
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.body.message.contains("`one`"), "{refused}");
    kept.delete_snapshot("disk", "one").unwrap();
    kept.clone_of("golden", "clone").unwrap();
    let refused = kept.commit("disk").unwrap_err();
    let told = "`clone` has the same base `golden`, and would be unreadable after the commit";
    assert!(refused.body.message.contains(told), "{refused}");
    assert!(refused.body.remedy.contains("`ebbd volume flatten clone`"), "{refused}");
    kept.remove("clone").unwrap();
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.body.message.contains("clone.delta"), "{refused}");
    std::fs::remove_file(kept.file_path("clone.delta")).unwrap();
    assert_eq!(kept.commit("golden").unwrap_err().body.error, "no_overlay");
    kept.commit("disk").unwrap();
    let now = [1, of_base(1), 0, of_base(3)];
    assert_eq!(kept.blocks("disk"), now);
    assert_eq!(kept.blocks("golden"), now);
    let raw = std::fs::read(kept.file_path("base.raw")).unwrap();
    assert_eq!(
        (raw.len(), raw[BYTES - 1], raw[BYTES - 4097]),
        (BYTES, 7, of_base(BYTES / 4096 - 2))
    );
    use std::os::unix::fs::MetadataExt;
    let allocated = std::fs::metadata(kept.file_path("disk.delta")).unwrap().blocks() * 512;
    assert!(allocated <= 16 << 10, "{allocated}");
    // It goes on as an overlay of the new base.
    kept.put_block("disk", 1, 5);
    let kept = kept.again(&main);
    assert_eq!(kept.blocks("disk"), [1, 5, 0, of_base(3)]);
    assert_eq!(kept.blocks("golden"), now);
    kept.commit("disk").unwrap();
    assert_eq!(kept.blocks("golden"), [1, 5, 0, of_base(3)]);
}

/// Its volume keeps the former name of the overlay.
#[test]
fn snapshot_of_a_renamed_overlay_is_deleted_and_not_removed() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    let mut config = new_config("renamed", &kept.path("renamed.delta"), "writethrough");
    (config.base, config.create) = (Some("golden".to_owned()), true);
    kept.add("first", config, false).unwrap();
    for name in ["one", "two", "three"] {
        kept.put_block("first", 0, 1);
        kept.snapshot("first", name).unwrap();
    }
    kept.rename("first", "second").unwrap();
    kept.clone_of("first@three", "newest").unwrap();
    kept.clone_of("first@two", "older").unwrap();
    for snapshot in ["three", "two"] {
        let refused = kept.delete_snapshot("second", snapshot).unwrap_err();
        assert_eq!(refused.body.error, "in_use", "{refused}");
        assert!(refused.body.message.contains(&format!("`first@{snapshot}`")), "{refused}");
        assert!(kept.file_path(&format!("renamed.delta@{snapshot}")).exists());
    }
    kept.remove("older").unwrap();
    std::fs::remove_file(kept.file_path("older.delta")).unwrap();
    let refused = kept.remove("first@two").unwrap_err();
    assert!(refused.body.message.contains("`second` needs its file"), "{refused}");
    assert!(refused.body.remedy.contains("delete-snapshot second two"), "{refused}");
    kept.delete_snapshot("second", "two").unwrap();
    assert!(kept.world.volume("first@two").is_none());
    assert!(!kept.file_path("renamed.delta@two").exists());
    assert_eq!(kept.blocks("newest"), [1, of_base(1)]);
    assert_eq!(kept.blocks("second"), [1, of_base(1)]);
}

#[test]
fn nothing_is_committed_into_a_file_that_another_volume_is_on() {
    let main = format!("{MAIN}[volume.alias]\nstore='file:DIR/base.raw'\nread_only=true\n");
    let main = main.replace("other.delta'\nbase='golden'", "other.delta'\nbase='alias'");
    let kept = Kept::within(&main, true, folder());
    kept.put_block("disk", 0, 1);
    kept.put_block("other", 1, 2);
    let refused = kept.commit("disk").unwrap_err();
    assert_eq!(refused.body.error, "in_use", "{refused}");
    assert!(refused.body.message.contains("`alias`"), "{refused}");
    assert_eq!(kept.blocks("golden"), [of_base(0), of_base(1)]);
    assert_eq!(kept.blocks("other"), [of_base(0), 2]);
}

/// It is refused after all was copied: the space of the copy is given back.
#[test]
fn a_merge_that_is_not_used_leaves_no_file() {
    let kept = Kept::overlays();
    for name in ["one", "two"] {
        kept.put_block("disk", 0, 1);
        kept.snapshot("disk", name).unwrap();
    }
    let busy = kept.world.engine.reserve(&["disk@one"]).unwrap();
    assert_eq!(kept.delete_snapshot("disk", "one").unwrap_err().body.error, "busy");
    assert!(!kept.file_path(".disk.delta.ebbd-merge").exists());
    drop(busy);
    kept.delete_snapshot("disk", "one").unwrap();
    assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
}

/// A delta and its base on disks that are told what to do.
pub(super) fn on_test_disks(cache: &str) -> (World, Arc<TestStore>, Arc<TestStore>) {
    let config = config(&format!(
        "[volume.golden]\nstore='file:/golden'\nread_only=true\n\
         [volume.disk]\nstore='file:/disk'\nbase='golden'\ncache='{cache}'\n"
    ));
    let world = World::new(&config, SOON);
    let base = world.store("golden");
    base.change(0, &[5; 64 << 10]);
    let bytes = ebb_image::Layout::new(SIZE).unwrap().store_size();
    let delta = Arc::new(TestStore::new(bytes, 1));
    world.stores.set("disk", Fate::Opens(delta.clone()));
    let (disk, below) = (delta.clone(), base.clone());
    world.run(move |_, io| async move {
        let [base, disk] = [below, disk].map(|disk| CachedStore::from(Store::Test(disk)));
        let parent = plain_parent(&io, &base).await.unwrap();
        Delta::create(&io, &disk, SIZE, parent, [1; 16]).await.unwrap();
    });
    world.start(config, None);
    assert!(world.volume("disk").is_some(), "{:?}", world.phases());
    (world, delta, base)
}

/// Reads of an overlay need its base.
#[test]
fn failed_reads_of_a_base_are_an_outage_of_the_overlay() {
    let (world, _, base) = on_test_disks("writethrough");
    let outages = crate::outages::Outages::default();
    let mut monitor = crate::outages::OutageMonitor::new(outages.clone());
    monitor.sample(&world.engine.volumes);
    assert_eq!(outages.of("disk"), None);
    base.faults(&ebb_store::Faults { reads: 1000, ..ebb_store::Faults::default() });
    let volume = world.volume("disk").unwrap();
    let read = world.run(move |_, io| async move {
        let buf = io.pool().take(4096).await;
        volume.read(&io, buf, 0).await.0
    });
    read.unwrap_err();
    monitor.sample(&world.engine.volumes);
    assert!(outages.of("disk").is_some_and(|outage| outage.failed > 0));
}

/// A write that waits for blocks that are being copied completes when the daemon stops.
#[test]
fn a_stop_while_a_volume_is_flattened_fails_no_write() {
    let (world, delta, _) = on_test_disks("writethrough");
    delta.hang_only(&[Operation::Write]);
    let operation = Operations::default().begin("flatten", None, "").unwrap();
    let volume = world.volume("disk").unwrap();
    let disk = delta.clone();
    let written = world.run(move |engine, io| async move {
        let (on, flattening) = (io.clone(), engine.clone());
        let flatten = io.spawn(async move {
            drop(flattening.flatten_volume(&on, "disk", &operation).await);
        });
        while disk.hanging() == 0 {
            io.yield_now().await;
        }
        let on = io.clone();
        let write = io.spawn(async move {
            let mut buf = on.pool().take(4096).await;
            buf.fill(7);
            volume.write(&on, buf, 0, false).await.0
        });
        io.yield_now().await;
        let (on, stopping) = (io.clone(), engine.clone());
        let stop = io.spawn(async move { stopping.stop(&on).await });
        flatten.await;
        disk.release();
        (write.await, stop.await)
    });
    written.0.unwrap();
    assert_eq!(written.1, StopReport::default());
}

/// A commit of a volume whose store hangs can be cancelled, and the volume goes on.
#[test]
fn a_commit_that_waits_for_a_store_that_hangs_can_be_cancelled() {
    let (world, delta, _) = on_test_disks("writeback");
    world.write("disk", 7).unwrap();
    delta.hang();
    let operations = Operations::default();
    let operation = operations.begin("commit", None, "").unwrap();
    let disk = delta.clone();
    let refused = world.run(move |engine, io| async move {
        let commit = engine.commit_volume(&io, "disk", &operation);
        let cancel = async {
            while disk.hanging() == 0 {
                io.yield_now().await;
            }
            operations.cancel(operation.id()).unwrap();
            std::future::pending().await
        };
        futures_lite::future::or(commit, cancel).await.unwrap_err()
    });
    assert_eq!(refused.body.error, "cancelled");
    assert!(world.volume("disk").is_some());
    delta.release();
    assert_eq!(world.stop(), StopReport::default());
}
