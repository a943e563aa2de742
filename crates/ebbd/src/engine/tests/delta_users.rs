//! Deltas that need a snapshot, and are not served by this daemon.

use super::full_disk::begin_commit;
use super::manage::{Kept, new_config, refuses};
use super::overlay::{MAIN, folder, of_base};

/// A clone that is not served, and the chain of a volume that was moved away.
#[test]
fn a_snapshot_that_another_delta_needs_is_not_deleted() {
    let kept = Kept::overlays();
    let file = |name: &str| kept.file_path(name);
    for name in ["one", "two"] {
        kept.put_block("disk", 0, 1);
        kept.snapshot("disk", name).unwrap();
        let clone = format!("above-{name}");
        kept.clone_of(&format!("disk@{name}"), &clone).unwrap();
        kept.remove(&clone).unwrap();
    }
    for (name, needs) in [("two", "above-two.delta"), ("one", "above-one.delta")] {
        let refused = kept.delete_snapshot("disk", name).unwrap_err();
        assert_eq!(refused.body.error, "in_use", "{refused}");
        assert!(refused.body.message.contains(needs), "{refused}");
        // Its volume was removed already.
        let remedy = &refused.body.remedy;
        assert!(remedy.contains("remove its volume if it has one, and then the file"), "{refused}");
        assert!(kept.world.volume(&format!("disk@{name}")).is_some(), "it was not withdrawn");
    }
    std::fs::remove_file(file("above-one.delta")).unwrap();
    // What needs it cannot be read.
    let clone = std::fs::read(file("above-two.delta")).unwrap();
    let mut damaged = clone.clone();
    (0..2).for_each(|slot| damaged[slot * 4096 + 200] ^= 1);
    std::fs::write(file("above-two.delta"), damaged).unwrap();
    let refused = kept.delete_snapshot("disk", "two").unwrap_err();
    assert!(refused.body.message.contains("above-two.delta"), "{refused}");
    std::fs::write(file("above-two.delta"), clone).unwrap();
    kept.delete_snapshot("disk", "one").unwrap();
    std::fs::remove_file(file("above-two.delta")).unwrap();
    // Another volume at the same path, above the same base.
    let away = kept.folder.path().join("away");
    std::fs::create_dir(&away).unwrap();
    std::fs::rename(file("disk.delta"), away.join("disk.delta")).unwrap();
    std::fs::remove_file(file("state/created/disk.toml")).unwrap();
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("disk"), [of_base(0)]);
    let refused = kept.delete_snapshot("disk", "two").unwrap_err();
    assert_eq!(refused.body.error, "foreign", "{refused}");
    kept.snapshot("disk", "new").unwrap();
    let refused = kept.delete_snapshot("disk", "two").unwrap_err();
    assert_eq!(refused.body.error, "foreign", "{refused}");
    assert!(kept.file_path("disk.delta@two").exists());
}

/// The base has another name since, and the overlay above it no volume.
#[test]
fn commit_finds_overlays_made_before_the_base_moved() {
    for (of_other, of_own) in [(false, false), (true, false), (false, true)] {
        // An overlay that was made later has the new name in its header.
        let own = if of_other || of_own { "disk.delta" } else { "new.delta" };
        let moved = MAIN.replace("base.raw", "golden.raw").replace("disk.delta", own);
        let (main, other) = moved.split_once("[volume.other]").unwrap();
        let with_other = format!("{main}[volume.other]{}", other.replace("create=true\n", ""));
        let kept = Kept::overlays();
        kept.put_block("other", 1, 2);
        assert!(kept.world.stop().is_clean());
        let file = |name: &str| kept.folder.path().join(name);
        std::fs::rename(file("base.raw"), file("golden.raw")).unwrap();
        match (of_other, of_own) {
            (true, _) => begin_commit(&file("other.delta")),
            (_, true) => begin_commit(&file("disk.delta")),
            _ => std::fs::remove_file(file("disk.delta")).unwrap(),
        }
        let kept = Kept::within(main, true, kept.folder);
        kept.put_block("disk", 0, 1);
        refuses(kept.commit("disk"), "in_use", "other.delta");
        // The remedies work.
        let with_other = with_other.replace("DIR", kept.folder.path().to_str().unwrap());
        if of_own {
            let away = kept.file_path("away");
            std::fs::create_dir(&away).unwrap();
            std::fs::rename(kept.file_path("other.delta"), away.join("other.delta")).unwrap();
            kept.commit("disk").unwrap();
            assert_eq!(kept.blocks("golden"), [1, of_base(1)]);
        } else if of_other {
            kept.rewrite(&with_other);
            kept.flatten("disk").unwrap();
            kept.commit("other").unwrap();
            assert_eq!(kept.blocks("golden"), [of_base(0), 2]);
            assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
        } else {
            kept.rewrite(&with_other);
            kept.flatten("other").unwrap();
            kept.commit("disk").unwrap();
            assert_eq!(kept.blocks("golden"), [1, of_base(1)]);
            assert_eq!(kept.blocks("other"), [of_base(0), 2]);
        }
    }
}

/// One has other content, and while the commit has not ended no header says the content of its
/// base. The other one is a copy.
#[test]
fn commit_ignores_overlays_above_other_bases_of_its_size() {
    let (main, _) = MAIN.split_once("[volume.other]").unwrap();
    for is_copy in [false, true] {
        let kept = Kept::overlays();
        kept.put_block("disk", 0, 1);
        assert!(kept.world.stop().is_clean());
        let file = |name: &str| kept.folder.path().join(name);
        std::fs::remove_file(file("other.delta")).unwrap();
        let mut content = std::fs::read(file("base.raw")).unwrap();
        if !is_copy {
            content.iter_mut().for_each(|byte| *byte ^= 1);
            begin_commit(&file("disk.delta"));
        }
        std::fs::write(file("second.raw"), &content).unwrap();
        let second = "[volume.second]\nstore='file:DIR/second.raw'\nread_only=true\n\
                      [volume.above]\nstore='file:DIR/above.delta'\nbase='second'\ncreate=true\n";
        let kept = Kept::within(&format!("{main}{second}"), true, kept.folder);
        kept.put_block("above", 1, 2);
        kept.commit("disk").unwrap();
        assert_eq!(kept.blocks("golden"), [1, of_base(1)]);
        assert_eq!(kept.blocks("above"), [content[0], 2]);
    }
}

/// A base and one overlay above it.
fn base_and_disk() -> Kept {
    let main = MAIN.split_once("[volume.other]").unwrap().0;
    Kept::within(main, true, folder())
}

/// The remedies lead to the commit, and destroy nothing.
#[test]
fn commit_names_what_rests_on_a_snapshot_above_its_base() {
    let kept = base_and_disk();
    kept.put_block("disk", 1, 2);
    kept.clone_of("golden", "zebra").unwrap();
    kept.put_block("zebra", 0, 1);
    kept.snapshot("zebra", "one").unwrap();
    // Its name now sorts after the one of its snapshot.
    kept.rename("zebra", "zoo").unwrap();
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.body.message.contains("`zebra@one` has the same base"), "{refused}");
    assert!(refused.body.remedy.contains("`ebbd volume delete-snapshot zoo one`"), "{refused}");
    let refused = kept.remove("zebra@one").unwrap_err();
    assert!(refused.body.message.contains("`zoo` needs its file"), "{refused}");
    // The overlay is in the folder, and no volume is on it.
    kept.remove("zoo").unwrap();
    // No other name of a snapshot would help.
    let refused = kept.snapshot("zebra", "one").unwrap_err();
    assert_eq!(refused.body.error, "unknown_volume", "{refused}");
    let refused = kept.remove("zebra@one").unwrap_err();
    assert!(refused.body.message.contains("zebra.delta needs its file"), "{refused}");
    assert!(refused.body.remedy.contains("add that file as a volume"), "{refused}");
    let mut config = new_config("zebra", &kept.path("zebra.delta"), "writethrough");
    config.base = Some("golden".to_owned());
    kept.add("zoo", config, false).unwrap();
    assert_eq!(kept.blocks("zoo"), [1, of_base(1)]);
    kept.delete_snapshot("zoo", "one").unwrap();
    kept.flatten("zoo").unwrap();
    kept.commit("disk").unwrap();
    assert_eq!(kept.blocks("golden"), [of_base(0), 2]);
    assert_eq!(kept.blocks("zoo"), [1, of_base(1)]);
}

/// Only the files of the snapshot and of its overlay are in the folder.
#[test]
fn commit_names_the_overlay_in_the_folder_above_a_snapshot() {
    let kept = base_and_disk();
    kept.clone_of("golden", "gone").unwrap();
    kept.snapshot("gone", "one").unwrap();
    // A restart ends both.
    let kept = kept.again(MAIN.split_once("[volume.other]").unwrap().0);
    let refused = kept.commit("disk").unwrap_err();
    assert!(refused.body.message.contains("gone.delta@one is an overlay above"), "{refused}");
    assert!(refused.body.remedy.contains("gone.delta is above it"), "{refused}");
}
