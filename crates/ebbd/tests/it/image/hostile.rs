//! Images that were made to mislead: neither memory nor time without bound, and no file that they name.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use ebb_image::{DeltaHeader, HEADER_SLOTS, Layout, Parent};
use seeded::Random;

use super::common::{DELTA, Folder, MIB, Running, image};

/// Peak memory of a process, KiB.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

#[test]
fn a_map_is_printed_in_bounded_memory() {
    let folder = Folder::new();
    // 2^22 entries of the L1 table lead to one L2 table of 64 entries, every other one of which has data.
    let mut file = vec![0; 40 << 20];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &9u32.to_be_bytes());
    put(24, &(1u64 << 37).to_be_bytes());
    put(36, &(1u32 << 22).to_be_bytes());
    put(40, &8192u64.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    for number in 0..1 << 22 {
        put(8192 + number * 8, &4096u64.to_be_bytes());
    }
    for number in (0..64).step_by(2) {
        put(4096 + number * 8, &2048u64.to_be_bytes());
    }
    std::fs::write(folder.path("a.qcow2"), &file).unwrap();
    let store = format!("qcow2:{}", folder.text("a.qcow2"));
    let mut map = Command::new(env!("CARGO_BIN_EXE_ebbd"));
    map.args(["image", "map", &store]).stdout(Stdio::piped());
    let mut map = Running(map.spawn().unwrap());
    let mut lines = BufReader::new(map.0.stdout.take().unwrap()).lines();
    let mut peaks = [10_000, 300_000].into_iter().map(|count| {
        assert_eq!(lines.by_ref().take(count).filter(Result::is_ok).count(), count);
        peak(map.0.id())
    });
    let (first, second) = (peaks.next().unwrap(), peaks.next().unwrap());
    assert!(second < first + 4096, "{first} KiB, then {second} KiB");
    drop(peaks);
    drop(lines);
    let said = image(&["check", &store]);
    said.check(5, "the table for the bytes from 32768 on is also in use for other bytes");
    said.check(5, "4193303 more are not shown");
    assert!(said.out.lines().count() < 1100);
}

#[test]
fn a_large_and_empty_delta_is_looked_at_in_no_time() {
    let folder = Folder::new();
    let size = 8 << 40;
    folder.delta("large.delta", size, &Parent::default(), &[3]);
    let delta = folder.file("large.delta");
    image(&["check", &delta]).check(0, "66577 pages of the block map");
    let map = image(&["map", &delta, "--json"]).json();
    let expected = serde_json::json!([
        {"offset": 0, "length": 12288, "content": "zero"},
        {"offset": 12288, "length": 4096, "content": "data"},
        {"offset": 16384, "length": size - 16384, "content": "zero"},
    ]);
    assert_eq!(map, expected);
    assert_eq!(image(&["info", &delta, "--json"]).json()["delta"]["held_blocks"], 1);
}

#[test]
fn no_name_in_a_header_leads_out_of_the_folder() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("in")).unwrap();
    folder.delta("secret.delta", MIB, &Parent::default(), &[1]);
    for place in ["../secret.delta", "/..", "", "/a/\n", &folder.text("secret.delta")] {
        let parent =
            Parent { size: MIB, delta: DELTA, number: 2, place: place.to_owned(), samples: 0 };
        let _ = std::fs::remove_file(folder.path("in/web.delta"));
        folder.delta("in/web.delta", MIB, &parent, &[]);
        let delta = folder.file("in/web.delta");
        let info = image(&["info", &delta, "--json"]).json();
        assert_eq!(info["delta"]["chain"][0]["file"], serde_json::Value::Null, "{info}");
        let out = folder.file("out.raw");
        image(&["export", &delta, &out]).check(1, "is not found in its folder");
        image(&["check", &delta]).check(0, "not checked: the base");
        assert!(!image(&["info", &delta]).out.contains("\n\n"));
    }
    // A delta that is its own base.
    let own =
        Parent { size: MIB, delta: DELTA, number: 2, place: "own.delta".to_owned(), samples: 0 };
    folder.delta("own.delta", MIB, &own, &[]);
    let delta = folder.file("own.delta");
    image(&["export", &delta, &folder.file("out.raw")]).check(1, "are above each other");
    let chain = image(&["info", &delta, "--json"]).json();
    assert_eq!(chain["delta"]["chain"].as_array().unwrap().len(), 8);
    assert!(!folder.path("out.raw").exists());
}

/// Headers with random fields and right checksums.
#[test]
fn random_headers_and_maps_are_found_or_read() {
    let folder = Folder::new();
    let delta = folder.file("a.delta");
    let mut random = Random::new(1);
    let mut next = || random.next() >> 33;
    for _ in 0..40 {
        let _ = std::fs::remove_file(folder.path("a.delta"));
        folder.delta("a.delta", 2 * MIB, &Parent::default(), &[1, 9]);
        let layout = Layout::new((1 + next() % (1 << 36)) * 512).unwrap();
        let parent = Parent { size: next(), number: next(), ..Parent::default() };
        let header = DeltaHeader::new(3 + next() % 9, DELTA, layout, parent);
        folder.patch("a.delta", HEADER_SLOTS[header.slot()], &header.encode());
        for _ in 0..next() % 4 {
            folder.flip("a.delta", next() % (80 << 10));
        }
        for command in ["check", "map", "info"] {
            let said = image(&[command, &delta]);
            let is_known = matches!(said.code, Some(0 | 1 | 5));
            assert!(is_known && !said.err.contains("panicked"), "{command}: {said:#?}");
        }
    }
}
