//! Bases that a configuration leaves out while overlays above them are served.

use super::manage::Kept;
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
