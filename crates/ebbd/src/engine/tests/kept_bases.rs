//! Bases that a configuration leaves out while overlays above them are served.

use super::manage::{Kept, new_config, refuses};
use super::overlay::{folder, of_base};
use super::*;

const GOLDEN: &str = "[volume.golden]\nstore='file:DIR/base.raw'\nread_only=true\n";
const MIDDLE: &str = "[volume.mid]\nstore='file:DIR/mid.delta'\nbase='golden'\n";
const NOTHING: &str = "control = '/c'\n";

#[test]
fn reload_keeps_the_bases_of_an_overlay_that_stays() {
    let kept = Kept::within(&format!("{GOLDEN}{MIDDLE}create=true\n"), true, folder());
    kept.put_block("mid", 0, 1);
    let main = format!("{GOLDEN}{MIDDLE}read_only=true\n");
    for persists in [false, true] {
        let kept = Kept::within(&main, true, folder_of(&kept));
        kept.clone_of("mid", "clone").unwrap();
        kept.put_block("clone", 1, 2);
        if persists {
            kept.persist("clone").unwrap();
        }
        kept.rewrite(NOTHING);
        let told = kept.world.engine.unchanged().join("\n");
        for (base, above) in [("golden", "mid"), ("mid", "clone")] {
            let text = format!("volume {base}: not changed: it is the base of volume {above}");
            assert!(told.contains(&text), "{told}");
        }
        let all = ["clone", "golden", "mid"].map(|name| phase(name, VolumePhase::Serving));
        assert_eq!(kept.world.phases(), all);
        assert_eq!(kept.blocks("clone"), [1, 2, of_base(2)]);
        // Another reload says it again, and the overlay can be opened again.
        kept.rewrite(NOTHING);
        assert_eq!(kept.world.engine.unchanged().len(), 2);
        kept.rename("clone", "other").unwrap();
        assert_eq!(kept.blocks("other"), [1, 2, of_base(2)]);
        kept.remove("other").unwrap();
        kept.rewrite(NOTHING);
        assert!(kept.world.phases().is_empty() && kept.world.engine.unchanged().is_empty());
        assert!(kept.world.stop().is_clean());
    }
}

/// A folder with copies of the files of another one.
fn folder_of(kept: &Kept) -> tempfile::TempDir {
    let folder = folder();
    std::fs::copy(kept.file_path("mid.delta"), folder.path().join("mid.delta")).unwrap();
    folder
}

fn rewrite(kept: &Kept, main: &str) {
    kept.rewrite(&main.replace("DIR", kept.folder.path().to_str().unwrap()));
}

#[test]
fn base_that_is_left_out_stays_with_a_remedy_that_helps() {
    let above = format!("{GOLDEN}{MIDDLE}");
    for (more, flattens, remedy) in [
        ("", false, "remove or flatten that one first"),
        ("read_only=true\n", false, "remove that one first"),
        ("", true, "set `base = \"none\"` for it at "),
    ] {
        let made = Kept::within(&format!("{above}create=true\n"), true, folder());
        assert!(made.world.stop().is_clean());
        let kept = Kept::within(&format!("{above}{more}"), true, folder_of(&made));
        if flattens {
            kept.flatten("mid").unwrap();
        }
        rewrite(&kept, &format!("{MIDDLE}{more}"));
        let told = kept.world.engine.unchanged().join("\n");
        assert!(told.contains(remedy), "{told}");
        refuses(kept.remove("golden"), "configured", "no longer has volume `golden`");
        refuses(kept.remove("golden"), "configured", remedy);
    }
}

#[test]
fn settings_in_force_are_shown_after_a_reload_that_failed() {
    let volume = "[volume.x]\nstore='file:DIR/x.raw'\n";
    let kept = Kept::within(&format!("{volume}create=true\nsize='1M'\n"), true, folder());
    rewrite(&kept, "[volume.x]\nstore='file:DIR/missing.raw'\n");
    let in_force = kept.world.engine.in_force("x").unwrap();
    assert_eq!(in_force.store.to_string(), kept.path("x.raw"));
    let warnings = kept.world.engine.warnings_of("x").join("\n");
    assert!(warnings.contains("`ebbd config diff`"), "{warnings}");
}

#[test]
fn base_that_becomes_writable_is_named_as_a_layer() {
    let kept = Kept::within(GOLDEN, true, folder());
    kept.clone_of("golden", "clone").unwrap();
    rewrite(&kept, &GOLDEN.replace("read_only=true\n", ""));
    let told = kept.world.engine.unchanged().join("\n");
    assert!(told.contains("it is a layer below volume clone: set `read_only = true`"), "{told}");
    assert_eq!(kept.blocks("clone"), [of_base(0)]);
    let config = new_config("more", &kept.path("base.raw"), "none");
    let refused = kept.add("more", config, false).unwrap_err();
    assert!(refused.body.message.contains("volume golden is on the same file"), "{refused}");
}

#[test]
fn file_of_a_snapshot_is_the_one_of_its_volume() {
    let kept = Kept::within(&format!("{GOLDEN}{MIDDLE}create=true\n"), true, folder());
    kept.snapshot("mid", "one").unwrap();
    kept.clone_of("mid@one", "clone").unwrap();
    let mut config = new_config("more", &kept.path("mid.delta@one"), "none");
    config.base = Some("golden".to_owned());
    let refused = kept.add("more", config, false).unwrap_err();
    assert!(refused.body.message.contains("volume mid@one is on the same file"), "{refused}");
}
