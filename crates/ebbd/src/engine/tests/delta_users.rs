//! Deltas that need a snapshot, and are not served by this daemon.

use super::manage::Kept;
use super::overlay::{MAIN, of_base};

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
