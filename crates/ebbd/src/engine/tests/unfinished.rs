//! A delta whose making was cut short.

use std::os::unix::fs::FileExt;

use super::manage::Kept;
use super::overlay::{MAIN, of_base};

/// What the daemon finds in the place of a new delta.
enum Found {
    /// The file was made, and nothing was written.
    Hole,
    HoleOfOtherSize,
    /// A part of the header was written.
    TornHeader,
    /// Anything else.
    Data,
}

#[test]
fn unfinished_delta_is_made_and_others_are_left_alone() {
    for found in [Found::Hole, Found::HoleOfOtherSize, Found::TornHeader, Found::Data] {
        let kept = Kept::overlays();
        let (path, new) = (kept.file_path("disk.delta"), kept.file_path("new"));
        let made = std::fs::read(&path).unwrap();
        let file = std::fs::File::create_new(&new).unwrap();
        let size = made.len() as u64;
        file.set_len(size).unwrap();
        match found {
            Found::Hole => {}
            Found::HoleOfOtherSize => file.set_len(size + 4096).unwrap(),
            Found::TornHeader => {
                let start = made.iter().position(|byte| *byte != 0).unwrap();
                file.write_all_at(&made[start..start + 512], start as u64).unwrap();
            }
            Found::Data => file.write_all_at(&[7], size - 4096).unwrap(),
        }
        std::fs::rename(&new, &path).unwrap();
        let before = std::fs::read(&path).unwrap();
        let kept = kept.again(MAIN);
        if matches!(found, Found::Hole) {
            assert_eq!(kept.blocks("disk"), [of_base(0), of_base(1)]);
            kept.put_block("disk", 0, 7);
            let kept = kept.again(MAIN);
            assert_eq!(kept.blocks("disk"), [7, of_base(1)]);
            continue;
        }
        let why = kept.why_not("disk").expect("it is not served");
        assert!(why.contains("delta"), "{why}");
        assert_eq!(std::fs::read(&path).unwrap(), before, "left alone");
    }
}
