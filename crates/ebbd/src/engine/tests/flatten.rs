//! Flattened volumes, which need no base any more; and overlays that are refused because of what is below them.

use super::manage::{Kept, new_config, refuses};
use super::overlay::{BYTES, MAIN, folder, of_base, on_test_disks};
use super::*;
use crate::operations::Operations;

impl Kept {
    /// A read-only volume on a copy of the base, which is no part of the configuration.
    fn add_image(&self) {
        std::fs::copy(self.file_path("base.raw"), self.file_path("image.raw")).unwrap();
        let mut config = new_config("image", &self.path("image.raw"), "none");
        config.read_only = true;
        self.add("image", config, true).unwrap();
    }

    fn add_kept_clone(&self, base: &str, name: &str) {
        let mut config = new_config(name, &self.path(&format!("{name}.delta")), "writethrough");
        (config.base, config.create) = (Some(base.to_owned()), true);
        config.size = Some(ebb_config::Size::new(BYTES as u64));
        self.add(name, config, true).unwrap();
    }

    fn base_of(&self, name: &str) -> Option<String> {
        self.world.engine.definition(name).unwrap().0.base
    }
}

#[test]
fn a_flattened_volume_is_kept_as_one_without_a_base() {
    let kept = Kept::overlays();
    kept.add_image();
    kept.add_kept_clone("image", "kept");
    kept.clone_of("image", "passing").unwrap();
    kept.put_block("kept", 0, 1);
    refuses(kept.remove("image"), "in_use", "`kept`, `passing`");
    for name in ["kept", "passing"] {
        kept.flatten(name).unwrap();
        assert_eq!(kept.base_of(name).as_deref(), Some("none"));
    }
    kept.remove("image").unwrap();
    std::fs::remove_file(kept.file_path("image.raw")).unwrap();
    // A reload finds the same.
    kept.world.reload(kept.load());
    assert_eq!(kept.blocks("kept"), [1, of_base(1)]);
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("kept"), [1, of_base(1)]);
    kept.snapshot("kept", "one").unwrap();
    assert_eq!(kept.base_of("kept@one").as_deref(), Some("none"));
    // A file that is missing is not replaced by an empty one.
    std::fs::remove_file(kept.file_path("kept.delta")).unwrap();
    std::fs::remove_file(kept.file_path("kept.delta@one")).unwrap();
    let kept = kept.again(MAIN);
    assert!(kept.world.volume("kept").is_none());
    assert!(!kept.file_path("kept.delta").exists());
}

#[test]
fn a_flattened_volume_whose_file_cannot_be_written_is_flattened_again() {
    let kept = Kept::overlays();
    kept.add_image();
    kept.add_kept_clone("image", "kept");
    kept.put_block("kept", 0, 1);
    let faults = kept.faults();
    // What can be known before is found before.
    faults.fail(ebb_config::StateStep::Write, std::io::ErrorKind::StorageFull);
    refuses(kept.flatten("kept"), "state", "check the state directory");
    assert_eq!(kept.world.volume("kept").unwrap().layers().depth(), 2);
    faults.fail(ebb_config::StateStep::Rename, std::io::ErrorKind::StorageFull);
    refuses(kept.flatten("kept"), "state", "its definition still names the base");
    faults.end();
    assert_eq!(kept.base_of("kept").as_deref(), Some("image"));
    // As after a kill: the base is there still, and is not used.
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("kept"), [1, of_base(1)]);
    assert_eq!(kept.world.volume("kept").unwrap().layers().depth(), 1);
    kept.flatten("kept").unwrap();
    kept.remove("image").unwrap();
    let kept = kept.again(MAIN);
    assert_eq!(kept.blocks("kept"), [1, of_base(1)]);
}

#[test]
fn the_base_of_a_flattened_volume_is_left_out_of_the_configuration_while_it_is_in_use() {
    let kept = Kept::overlays();
    kept.put_block("disk", 0, 1);
    kept.flatten("disk").unwrap();
    assert_eq!(kept.base_of("disk").as_deref(), Some("golden"));
    let warnings = kept.world.engine.warnings_of("disk");
    assert!(warnings[0].contains("set `base = \"none\"` for it at "), "{warnings:?}");
    let served = kept.world.volume("disk").unwrap();
    let path = kept.folder.path().join("main.toml");
    let leave_out_first_base = || {
        let main = std::fs::read_to_string(&path).unwrap();
        let main = main.replacen("base='golden'\ncreate=true", "base='none'", 1);
        std::fs::write(&path, main).unwrap();
        kept.world.reload(kept.load());
    };
    leave_out_first_base();
    assert!(Arc::ptr_eq(&served, &kept.world.volume("disk").unwrap()));
    assert_eq!(kept.base_of("disk").as_deref(), Some("none"));
    assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
    assert!(kept.world.engine.warnings_of("disk").is_empty());
    // Of one that was not flattened the change is refused, as before.
    let served = kept.world.volume("other").unwrap();
    leave_out_first_base();
    assert_eq!(kept.blocks("other"), [of_base(0), of_base(1)]);
    let unchanged = kept.world.engine.unchanged().join("\n");
    assert!(unchanged.contains("base.raw, and was not flattened: name that base"), "{unchanged}");
    assert!(Arc::ptr_eq(&served, &kept.world.volume("other").unwrap()), "clients keep it");
}

/// A mistake is found before a client loses its volume, and by a check of the configuration.
#[test]
fn mistaken_base_leaves_the_volume_in_use() {
    const MORE: &str = "[volume.wrong]\nstore='file:DIR/wrong.raw'\nread_only=true\n\
        [volume.raw]\nstore='file:DIR/raw.raw'\n";
    let (dir, main) = (folder(), format!("{MAIN}{MORE}"));
    for name in ["wrong.raw", "raw.raw"] {
        std::fs::write(dir.path().join(name), vec![1; BYTES]).unwrap();
    }
    let kept = Kept::within(&main, true, dir);
    let path = kept.file_path("main.toml");
    let good = std::fs::read_to_string(&path).unwrap();
    kept.put_block("disk", 0, 1);
    kept.snapshot("disk", "one").unwrap();
    let told = |kept: &Kept| {
        let mut told = Vec::new();
        let passed = crate::check::check_config(&kept.load(), None, |line| told.push(line));
        (passed.is_ok(), told.iter().map(|line| line.parts().1).collect::<Vec<_>>().join("\n"))
    };
    assert!(told(&kept).0, "{}", told(&kept).1);
    let disk = "disk.delta'\nbase='golden'\ncreate=true";
    for (name, old, new, why) in [
        ("disk", disk, "disk.delta'\nbase='wrong'", "wrong.raw is not that"),
        ("disk", disk, "disk.delta'\nbase='none'", "was not flattened"),
        ("other", "other.delta'\nbase='golden'", "other.delta'\nbase='wrong'", "is not that"),
        ("raw", "raw.raw'", "raw.raw'\nbase='golden'", "no delta"),
    ] {
        let served = kept.world.volume(name).unwrap();
        std::fs::write(&path, good.replace(old, new)).unwrap();
        let (passed, checked) = told(&kept);
        assert!(!passed && checked.contains(why), "{new}: {checked}");
        kept.world.reload(kept.load());
        let unchanged = kept.world.engine.unchanged().join("\n");
        assert!(unchanged.contains(why), "{new}: {unchanged}");
        assert!(Arc::ptr_eq(&served, &kept.world.volume(name).unwrap()), "{new}");
        std::fs::write(&path, &good).unwrap();
        kept.world.reload(kept.load());
        assert!(kept.world.engine.unchanged().is_empty());
    }
    // Another name of the same base is none. Snapshots added at run time need the former one.
    kept.delete_snapshot("disk", "one").unwrap();
    let same = good.replace("volume.golden", "volume.gold").replace("'golden'", "'gold'");
    std::fs::write(&path, same).unwrap();
    assert!(told(&kept).0, "{}", told(&kept).1);
    kept.world.reload(kept.load());
    assert!(kept.world.engine.unchanged().is_empty(), "{:?}", kept.world.engine.unchanged());
    assert_eq!(kept.blocks("disk"), [1, of_base(1)]);
}

#[test]
fn flattened_clones_do_not_need_what_they_were_made_above() {
    let main = MAIN.replace(
        "[volume.other]\nstore='file:DIR/other.delta'\nbase='golden'\n",
        "[volume.other]\nstore='file:DIR/other.raw'\nsize='3M'\n",
    );
    let main =
        format!("{main}[volume.third]\nstore='file:DIR/third.delta'\nbase='golden'\ncreate=true\n");
    let kept = Kept::within(&main, true, folder());
    kept.put_block("disk", 0, 1);
    kept.snapshot("disk", "one").unwrap();
    kept.clone_of("disk@one", "clone").unwrap();
    refuses(kept.delete_snapshot("disk", "one"), "in_use", "flatten");
    kept.flatten("clone").unwrap();
    kept.delete_snapshot("disk", "one").unwrap();
    assert_eq!(kept.blocks("clone"), [1, of_base(1)]);
    kept.clone_of("golden", "sibling").unwrap();
    refuses(kept.commit("disk"), "in_use", "`sibling`");
    refuses(kept.flatten("golden"), "no_overlay", "only a writable volume with a `base`");
    refuses(kept.snapshot("golden", "x"), "no_overlay", "--base golden --create");
    std::fs::write(kept.file_path("plain.raw"), [0; 4096]).unwrap();
    kept.add("plain", new_config("plain", &kept.path("plain.raw"), "none"), false).unwrap();
    // A `base` for its own file would hide the data in it.
    refuses(kept.snapshot("plain", "x"), "no_overlay", "serve its file read-only");
    refuses(kept.delete_snapshot("golden", "x"), "unknown_snapshot", "");
    kept.flatten("sibling").unwrap();
    refuses(kept.commit("disk"), "in_use", "`third`");
    // Also if the configuration still names the base.
    kept.flatten("third").unwrap();
    kept.commit("disk").unwrap();
    assert_eq!(kept.blocks("golden"), [1, of_base(1)]);
    for name in ["sibling", "third"] {
        assert_eq!(kept.blocks(name), [of_base(0), of_base(1)]);
    }
    refuses(kept.remove("golden"), "in_use", "`third`");
}

#[test]
fn a_volume_that_the_next_start_cannot_open_and_a_delta_served_as_a_disk_have_warnings() {
    let kept = Kept::overlays();
    kept.snapshot("disk", "one").unwrap();
    kept.clone_of("disk@one", "passing").unwrap();
    kept.add_kept_clone("disk@one", "kept");
    kept.add("raw", new_config("raw", &kept.path("other.delta"), "none"), false).unwrap_err();
    kept.add_kept_clone("golden", "sound");
    kept.remove("passing").unwrap();
    kept.add("raw", new_config("raw", &kept.path("passing.delta"), "none"), false).unwrap();
    let warning = |name: &str| kept.world.engine.warnings_of(name).join("\n");
    assert!(warning("kept").contains("its base `disk@one` is not kept"), "{}", warning("kept"));
    assert!(warning("raw").contains("or to `none` if it was flattened"), "{}", warning("raw"));
    assert_eq!(warning("sound") + &warning("disk") + &warning("disk@one"), "");
}

/// They would fill the cache, which other volumes share.
#[test]
fn holes_of_the_base_are_not_read_by_a_flatten() {
    let folder = folder();
    let base = std::fs::File::create(folder.path().join("base.raw")).unwrap();
    base.set_len(BYTES as u64).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&base, &[7; 64 << 10], 1 << 20).unwrap();
    let kept = Kept::within(MAIN, true, folder);
    kept.put_block("disk", 0, 1);
    let shared = kept.world.volume("other").unwrap();
    assert!(shared.layers().shared_cache_bytes() < 512 << 10);
    kept.flatten("disk").unwrap();
    let cached = shared.layers().shared_cache_bytes();
    assert!((64 << 10..512 << 10).contains(&cached), "{cached}");
    assert_eq!(kept.blocks("disk"), [1, 0, 0]);
    let blocks = kept.blocks::<300>("disk");
    assert!(blocks[256..272].iter().all(|byte| *byte == 7) && blocks[272..] == [0; 28]);
}

/// Also if one of the volumes below is as deep as a volume can be.
#[test]
fn no_overlay_is_made_above_too_many_deltas() {
    let kept = Kept::overlays();
    for name in 0..7 {
        kept.snapshot("disk", &name.to_string()).unwrap();
    }
    let main = MAIN.replacen("base='golden'\ncreate=true", "base='golden'\nread_only=true", 1);
    let kept = kept.again(&main);
    let refused = kept.clone_of("disk", "clone").unwrap_err();
    assert!(refused.body.message.contains("8 deltas, snapshots included"), "{refused}");
}

/// The message names the delta that does not fit and the base that has changed, not what is below that.
#[test]
fn a_base_that_was_opened_for_writing_is_named() {
    let kept = Kept::overlays();
    let add_lower = |read_only: bool| {
        let mut config = new_config("lower", &kept.path("lower.delta"), "writethrough");
        (config.base, config.create) = (Some("golden".to_owned()), !read_only);
        config.read_only = read_only;
        kept.add("lower", config, false)
    };
    add_lower(false).unwrap();
    kept.remove("lower").unwrap();
    add_lower(true).unwrap();
    kept.clone_of("lower", "upper").unwrap();
    // What is certain to be refused is said before what the operator could change.
    kept.clone_of("lower", "beside").unwrap();
    let refused = kept.commit("upper").unwrap_err();
    assert!(refused.body.message.contains("no plain file"), "{refused}");
    kept.remove("beside").unwrap();
    std::fs::remove_file(kept.file_path("beside.delta")).unwrap();
    kept.remove("upper").unwrap();
    // The daemon keeps a base that an overlay in the folder needs, if it sees that one.
    let refused = kept.remove("lower").unwrap_err();
    assert!(refused.body.message.contains("upper.delta needs its file"), "{refused}");
    let away = kept.folder.path().join("away");
    std::fs::create_dir(&away).unwrap();
    std::fs::rename(kept.file_path("upper.delta"), away.join("upper.delta")).unwrap();
    kept.remove("lower").unwrap();
    std::fs::rename(away.join("upper.delta"), kept.file_path("upper.delta")).unwrap();
    add_lower(false).unwrap();
    kept.remove("lower").unwrap();
    add_lower(true).unwrap();
    let refused = kept.clone_of("lower", "upper").unwrap_err();
    let name = |name: &str| kept.file_path(name).display().to_string();
    let (upper, lower) = (name("upper.delta"), name("lower.delta"));
    let expected = format!("{upper} was made above {lower}, and {lower} is not that");
    assert!(refused.body.message.contains(&expected), "{refused}");
}

/// A flatten above a base that hangs can be cancelled, and leaves nothing behind that closing the volume waits for.
#[test]
fn a_flatten_that_waits_for_its_base_ends_when_it_is_cancelled() {
    let (world, _, base) = on_test_disks("writethrough");
    base.hang_only(&[Operation::Read, Operation::Extents]);
    let operations = Operations::default();
    let operation = operations.begin("flatten", None, "").unwrap();
    let hanging = base.clone();
    let refused = world.run(move |engine, io| async move {
        let flatten = engine.flatten_volume(&io, "disk", &operation);
        let cancel = async {
            while hanging.hanging() == 0 {
                io.yield_now().await;
            }
            operations.cancel(operation.id()).unwrap();
            std::future::pending().await
        };
        futures_lite::future::or(flatten, cancel).await.unwrap_err()
    });
    assert_eq!(refused.body.error, "cancelled");
    let volume = world.volume("disk").unwrap();
    world.run(move |_, io| async move {
        volume.close(&io).await.unwrap();
    });
    base.release();
}
