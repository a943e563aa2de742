//! Each kind of damage is found at its place.

use ebb_image::{DeltaHeader, HEADER_SLOTS, Layout, Parent, map_page};

use super::common::{DELTA, Folder, MIB, image, qemu};

/// A base of this size, and what a delta above it records.
fn base(folder: &Folder) -> Parent {
    std::fs::write(folder.path("base.raw"), vec![0x5a; 4 << 20]).unwrap();
    let mut samples = 0;
    for _ in 0..33 {
        samples = map_page::checksum(samples, &[0x5a; 4096]);
    }
    // Only the name counts, wherever it was.
    let place = "/elsewhere/base.raw".to_owned();
    Parent { size: 4 * MIB, samples, place, ..Parent::default() }
}

fn sound() -> (Folder, Layout) {
    let folder = Folder::new();
    let parent = base(&folder);
    let layout = folder.delta("web.delta", 4 * MIB, &parent, &[0, 5, 6, 1023]);
    (folder, layout)
}

#[test]
fn each_damage_of_a_delta_is_found_at_its_place() {
    let (folder, layout) = sound();
    let delta = folder.file("web.delta");
    image(&["check", &delta]).check(0, "no damage found: the header and 1 page");
    let whole = std::fs::read(folder.path("web.delta")).unwrap();
    let slot = |number| layout.map_slot(0, number);
    for (at, bytes, text) in [
        (HEADER_SLOTS[0] + 70, 1, "at 0: slot 0 of the header: the header of the delta is damaged"),
        (HEADER_SLOTS[1] + 3000, 1, "at 4096: slot 1 of the header"),
        (HEADER_SLOTS[0], 1, "at 0: slot 0 of the header: it is no delta of ebbd"),
        (0, 4097, "at 0: no slot of the header is valid"),
        (
            slot(0) + 9,
            1,
            "at 65536: slot 0 of page 0 of the block map (the bytes 0 to 4194304 of the disk) is damaged",
        ),
        (slot(1) + 4095, 1, "at 69632: slot 1 of page 0 of the block map"),
        (slot(0), 4097, "no copy is valid: the bytes 0 to 4194304 of the disk cannot be read"),
    ] {
        std::fs::write(folder.path("web.delta"), &whole).unwrap();
        // Each byte up to the last one; a header slot and the beginning of the next one.
        let places = [at, at + bytes - 1];
        places[..1 + usize::from(bytes > 1)].iter().for_each(|at| folder.flip("web.delta", *at));
        let said = image(&["check", &delta]);
        said.check(5, text).check(5, "restore");
        assert!(said.out.lines().all(|line| line.starts_with(&delta)), "{said:#?}");
        if text.contains("no slot of the header") {
            assert!(!said.out.contains("the other slot counts"), "{said:#?}");
        }
    }
    // Each bit of a map page counts.
    for at in (0..4096).step_by(131) {
        std::fs::write(folder.path("web.delta"), &whole).unwrap();
        folder.flip("web.delta", slot(1) + at);
        image(&["check", &delta]).check(5, "at 69632: slot 1 of page 0");
    }
    for (length, text) in [
        (layout.store_size() - 4096, "the file ends, and its header needs"),
        (slot(1), "0 pages of the block map"),
    ] {
        let length = usize::try_from(length).unwrap();
        std::fs::write(folder.path("web.delta"), &whole[..length]).unwrap();
        image(&["check", &delta]).check(5, text).check(5, &format!("at {length}: the file ends"));
    }
}

#[test]
fn delta_with_damaged_map_page_is_not_copied_as_its_base() {
    let (folder, layout) = sound();
    let (delta, out) = (folder.file("web.delta"), folder.file("out.raw"));
    folder.flip("web.delta", layout.map_slot(0, 0));
    // The other copy of the page counts.
    image(&["export", &delta, &out, "--base", &folder.file("base.raw")]).check(0, "4M");
    std::fs::remove_file(folder.path("out.raw")).unwrap();
    folder.flip("web.delta", layout.map_slot(0, 1));
    let said = "page 0 of the block map is damaged";
    for copy in ["export", "import"] {
        let failed = image(&[copy, &delta, &out, "--base", &folder.file("base.raw")]);
        failed.check(1, said).check(1, "`ebbd image check`").check(1, "from a backup");
        assert!(!folder.path("out.raw").exists(), "an incomplete copy stays");
    }
    let map = image(&["map", &delta, "--json"]).json();
    assert_eq!(map, serde_json::json!([{"offset": 0, "length": 4 * MIB, "content": "damaged"}]));
    let info = image(&["info", &delta, "--json"]).json();
    let found = (&info["delta"]["held_blocks"], &info["delta"]["damaged_bytes"]);
    assert_eq!(found, (&serde_json::json!(0), &serde_json::json!(4 * MIB)));
    image(&["info", &delta]).check(0, "damaged        the map of 4M");
    // A torn first write: no flush has completed, and the daemon serves the base.
    folder.patch("web.delta", layout.map_slot(0, 1), &[0; map_page::BYTES]);
    image(&["check", &delta]).check(5, "4194304 of the disk read as the base");
    image(&["export", &delta, &out, "--base", &folder.file("base.raw")]).check(0, "4M");
}

#[test]
fn delta_without_a_valid_header_is_no_raw_disk() {
    let (folder, _) = sound();
    let (delta, out) = (folder.file("web.delta"), folder.file("out.raw"));
    folder.patch("web.delta", 0, &[0xa5; 8192]);
    for command in ["export", "import"] {
        let said = "the header of the delta is damaged: look at it with `ebbd image check`";
        image(&[command, &delta, &out]).check(1, said);
    }
    image(&["check", &delta]).check(5, "at 0: no slot of the header is valid");
    image(&["import", &delta, &out, "--raw"]).check(0, "");
}

#[test]
fn delta_without_header_and_map_is_restored_from_a_backup() {
    let (folder, _) = sound();
    folder.patch("web.delta", 0, &vec![0xa5; 128 << 10]);
    let said = image(&["check", &folder.file("web.delta")]);
    said.check(1, "if it was a delta, both slots of its header are gone: restore it from a backup");
}

#[test]
fn valid_checksums_do_not_hide_wrong_fields() {
    let (folder, layout) = sound();
    let delta = folder.file("web.delta");
    let whole = std::fs::read(folder.path("web.delta")).unwrap();
    let page = |generation, blocks: &[u64]| {
        let mut page = vec![0; map_page::BYTES];
        for block in blocks {
            let (byte, mask) = map_page::place(*block);
            page[byte] |= mask;
        }
        map_page::seal(&mut page, 0, DELTA, generation);
        page
    };
    let header = |number, delta, size| {
        let layout = Layout::new(size).unwrap();
        DeltaHeader::new(number, delta, layout, base(&folder)).encode()
    };
    for (at, bytes, text) in [
        (
            layout.map_slot(0, 1),
            page(1, &[]),
            "both slots of page 0 of the block map are its copy 1",
        ),
        (0, header(2, [8; 16], 4 * MIB), "the slots of the header are of two deltas"),
        (0, header(2, DELTA, 1 << 40), "the slots of the header are of two deltas"),
        (0, header(3, DELTA, 4 * MIB), "has the number 3 of the other slot"),
    ] {
        std::fs::write(folder.path("web.delta"), &whole).unwrap();
        folder.patch("web.delta", at, &bytes);
        image(&["check", &delta]).check(5, text);
    }
}

#[test]
fn another_base_is_found_and_one_that_is_absent_is_named() {
    let (folder, _) = sound();
    let delta = folder.file("web.delta");
    let other = folder.file("other.raw");
    // Found in the folder: the last 4 KiB are a sample.
    folder.patch("base.raw", 4 * MIB - 1, &[0]);
    image(&["check", &delta]).check(5, "its content is not that of the base");
    std::fs::write(folder.path("base.raw"), vec![0x5a; 5 << 20]).unwrap();
    image(&["check", &delta]).check(5, "it has 5242880 bytes, and the base had 4194304");
    std::fs::rename(folder.path("base.raw"), folder.path("moved.raw")).unwrap();
    image(&["check", &delta])
        .check(0, "not checked: the base /elsewhere/base.raw (the delta's folder has no file of that name")
        .check(0, "--base STORE");
    std::os::unix::fs::symlink(folder.path("moved.raw"), folder.path("base.raw")).unwrap();
    image(&["check", &delta]).check(0, "a symbolic link");
    // Given.
    std::fs::write(folder.path("other.raw"), vec![0x5a; 4 << 20]).unwrap();
    image(&["check", &delta, "--base", &other]).check(0, "no damage found");
    folder.flip("other.raw", 0);
    image(&["check", &delta, "--base", &other]).check(5, "its content is not that of the base");
    image(&["check", &delta, "--base", &folder.file("none")])
        .check(1, "no such file: correct the path");
}

#[test]
fn what_cannot_be_checked_is_no_damage() {
    let folder = Folder::new();
    std::fs::write(folder.path("disk.raw"), vec![1; 1 << 20]).unwrap();
    image(&["check", &folder.file("disk.raw")]).check(1, "a raw disk has nothing to check");
    image(&["check", &folder.file("none")]).check(1, "no such file: correct the path");
    let qcow2 = |name: &str| format!("qcow2:{}", folder.text(name));
    image(&["check", &qcow2("disk.raw")]).check(1, "this is no qcow2 image");
    let create = |options: &[&str], name: &str| {
        qemu(
            "qemu-img",
            &[&["create", "-q", "-f", "qcow2"], options, &[&folder.text(name), "1M"]].concat(),
        );
    };
    create(&["-b", &folder.text("disk.raw"), "-F", "raw"], "above.qcow2");
    image(&["check", &qcow2("above.qcow2")]).check(1, "the image has a backing file");
    let info = image(&["info", &qcow2("above.qcow2"), "--json"]).json();
    assert_eq!(info["qcow2"]["backing_file"], folder.text("disk.raw").as_str());
    assert!(info["qcow2"]["refused"].as_str().unwrap().contains("backing file"), "{info}");
    // A newer delta.
    let parent = base(&folder);
    let layout = Layout::new(MIB).unwrap();
    let mut header = DeltaHeader::new(2, DELTA, layout, parent).encode();
    header[12] = 3;
    let sum = map_page::checksum(0, &header[12..]);
    header[8..12].copy_from_slice(&sum.to_le_bytes());
    folder.delta("newer.delta", MIB, &Parent::default(), &[]);
    folder.patch("newer.delta", 0, &header);
    image(&["check", &folder.file("newer.delta")]).check(1, "use the ebbd that made it");
}

#[test]
fn each_damage_of_a_qcow2_image_is_found() {
    let folder = Folder::new();
    let (path, store) = (folder.text("a.qcow2"), format!("qcow2:{}", folder.text("a.qcow2")));
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", &path, "64M"]);
    qemu("qemu-io", &["-f", "qcow2", "-c", "write -q -P 3 0 256k", &path]);
    image(&["check", &store]).check(0, "1 cluster of tables and 4 clusters of data");
    let whole = std::fs::read(&path).unwrap();
    let word = |at: usize| u64::from_be_bytes(whole[at..at + 8].try_into().unwrap());
    let l1 = word(40);
    let l2 = word(usize::try_from(l1).unwrap()) & 0x00ff_ffff_ffff_fe00;
    for (at, value, text) in [
        (l1, l2 + 512, "the table for the bytes from 0 on is misplaced"),
        (l1, 1 << 40, "the table for the bytes from 0 on is misplaced"),
        (l2 + 8, (5 << 16) + 512, "the cluster of the bytes at 65536 is misplaced"),
        (l2 + 16, 1 << 50, "the bytes at 131072 are beyond the end of the file"),
        (l2 + 24, l2, "the cluster of the bytes at 196608 is one of a table"),
        (40, 1 << 60, "the L1 table is too short, misplaced or cut off"),
        (72, 2, "the image is marked as corrupt"),
    ] {
        std::fs::write(&path, &whole).unwrap();
        folder.patch("a.qcow2", at, &u64::to_be_bytes(value));
        image(&["check", &store]).check(5, text).check(5, "qemu-img");
    }
    std::fs::write(&path, &whole).unwrap();
    folder.patch("a.qcow2", l2, &u64::to_be_bytes(1 << 62));
    image(&["check", &store]).check(1, "not checked: the image has compressed clusters (at 0)");
}

#[test]
fn a_qcow2_image_that_is_named_as_a_raw_file_is_refused() {
    let folder = Folder::new();
    let (path, out) = (folder.text("golden.qcow2"), folder.file("out.raw"));
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", &path, "4M"]);
    // A raw disk has whole sectors.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(MIB).unwrap();
    let raw = folder.file("golden.qcow2");
    let said = format!("{raw} looks like a qcow2 image: write `qcow2:{path}`");
    image(&["import", &raw, &out]).check(1, &format!("{said}, or `--raw`"));
    image(&["check", &raw]).check(1, &said);
    assert_eq!(folder.names(), ["golden.qcow2"]);
    let nowhere = folder.file("none/out.raw");
    let said = format!("{}: its folder does not exist", folder.text("none/out.raw"));
    image(&["import", &raw, &nowhere, "--raw"]).check(1, &said);
    image(&["import", &raw, &out, "--raw"]).check(0, "");
    let same = std::fs::read(folder.path("out.raw")).unwrap();
    assert!(same == std::fs::read(folder.path("golden.qcow2")).unwrap());
}
