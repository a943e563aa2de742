//! A check of the configuration says of a volume what a start says.

use super::manage::Kept;
use super::*;
use crate::check::{CheckLine, check};

const MAIN: &str = "control = 'DIR/control'\n[volume.base]\nstore = 'file:DIR/base'\n\
    [volume.own]\nstore = 'file:DIR/main.toml'\n";
/// Volumes of the state directory, and a part of the reason why none is served.
const KEPT: [(&str, &str, &str); 6] = [
    ("missing", "store = 'file:DIR/missing'", "the file of the volume is missing"),
    ("again", "store = 'file:DIR/again'\nsize = '1M'\ncreate = true", "volume remove again"),
    ("writable", "store = 'file:DIR/a'\nbase = 'base'", "`base` is writable"),
    ("baseless", "store = 'file:DIR/b'\nbase = 'other'", "is not configured"),
    ("state", "store = 'file:DIR/state/volumes/state.toml'", "folder of the daemon's state"),
    ("control", "store = 'file:DIR/control'", "it is the control socket"),
];

#[test]
fn check_says_of_each_volume_what_a_start_says() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap().to_owned();
    std::fs::write(folder.path().join("base"), vec![1; 1 << 20]).unwrap();
    std::fs::create_dir_all(folder.path().join("state/volumes")).unwrap();
    for (name, text, _) in KEPT {
        let path = folder.path().join(format!("state/volumes/{name}.toml"));
        std::fs::write(path, text.replace("DIR", &dir)).unwrap();
    }
    let config_file = Some(folder.path().join("main.toml"));
    let opener = HelperThreads { workers: 1, config_file, ..HelperThreads::default() };
    let kept = Kept::over(MAIN, folder, (Arc::default(), Arc::new(opener)));
    let mut said = Vec::new();
    let _ = check(&kept.args, |line| said.push(line));
    let own = ("own", "", "it is the configuration file");
    for (name, _, part) in KEPT.into_iter().chain([own]) {
        let states = kept.world.engine.states();
        let state = states.into_iter().find(|state| state.name == name).unwrap();
        let reason = state.failure.unwrap_or_else(|| panic!("{name} is served")).reason;
        assert!(reason.contains(part), "{reason}");
        let line = CheckLine::Mistake(format!("volume {name}: {reason}"));
        assert!(said.contains(&line), "{line:?} is not among {said:#?}");
    }
    let (base, begin) = (said.iter(), "volume base: ");
    let base: Vec<_> = base.filter(|line| line.parts().1.starts_with(begin)).collect();
    assert!(matches!(base[..], [CheckLine::Ok(_)]), "{base:?}");
    assert!(!said.iter().any(|line| line.parts().1.contains("set `create`")), "{said:#?}");
}

#[test]
fn entry_that_admits_no_client_is_a_warning_of_its_volume() {
    let main = "control = 'DIR/control'\n[volume.a]\nstore = 'null:1M'\nallow = ['psk:x']\n";
    let kept = Kept::new(main, true);
    let warnings = kept.world.engine.warnings_of("a");
    assert!(warnings.iter().any(|text| text.contains("`psk:x` admits no client")), "{warnings:?}");
}
