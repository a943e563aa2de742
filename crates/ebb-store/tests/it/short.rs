//! A store that becomes shorter, or full, while it is in use: the request fails.

use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_block::ErrorKind;
use ebb_store::Direct;

use crate::common::{Bench, KIB, MIB, create, file, folder};

#[test]
fn a_file_truncated_under_the_store_is_short() {
    let folder = folder();
    for direct in [Direct::Off, Direct::Auto] {
        for left in [MIB, MIB + 512, MIB + 100, 0] {
            let path = file(&folder, &format!("{direct:?}-{left}"));
            let bench = Bench::new(create(&path, 2 * MIB, direct));
            bench.write(0, &vec![4; 2 << 20]).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(left).unwrap();
            let whole = bench.read(0, 2 << 20).unwrap_err();
            assert_eq!(whole.kind, ErrorKind::Short, "{direct:?} {left}");
            assert_eq!((whole.offset, whole.length), (0, 2 * MIB));
            let beyond = bench.read(2 * MIB - 4096, 4096).unwrap_err();
            assert_eq!(beyond.kind, ErrorKind::Short, "{direct:?} {left}");
            let across = bench.read(left / 4096 * 4096, 8192).unwrap_err();
            assert_eq!(across.kind, ErrorKind::Short, "{direct:?} {left}");
            if left > 0 {
                assert_eq!(bench.read(0, 1 << 20).unwrap(), vec![4; 1 << 20]);
            }
            // Extents beyond the new end: a hole, and the walk ends.
            let list = bench.extents(0, 2 * MIB, 100).unwrap();
            assert_eq!(list.iter().map(|(_, length, _)| length).sum::<u64>(), 2 * MIB);
            assert!(whole.to_string().contains("was it truncated?"), "{whole}");
        }
    }
}

const SMALL: &str = "EBB_STORE_SMALL_FILE_SYSTEM";

/// Runs the test called `name` with a tmpfs of 2 MiB mounted where the variable [`SMALL`] says, in
/// a mount namespace of its own.
fn on_a_small_file_system(name: &str) {
    let folder = folder();
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    let script = r#"mount -t tmpfs -o size=2M tmpfs "$0" && exec "$@""#;
    let output = Command::new("unshare")
        .args(if root { ["-m"].as_slice() } else { &["-U", "-r", "-m"] })
        .args(["sh", "-c", script])
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(SMALL, folder.path())
        .output()
        .expect("this needs `unshare` (Debian: apt install util-linux)");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "it failed, or neither root nor user namespaces are to be had here \
         (sysctl kernel.unprivileged_userns_clone=1):\n{text}"
    );
}

#[test]
fn a_full_file_system_is_no_space() {
    on_a_small_file_system("short::full_file_system");
}

#[test]
#[ignore = "run by a_full_file_system_is_no_space, where there is a small file system"]
fn full_file_system() {
    let folder = PathBuf::from(std::env::var_os(SMALL).unwrap());
    fill(&folder.join("image"));
}

fn fill(path: &Path) {
    let bench = Bench::new(create(path, 16 * MIB, Direct::Off));
    let data = vec![6; 256 << 10];
    let mut written = 0;
    let error = loop {
        match bench.write(written, &data) {
            Ok(()) => written += 256 * KIB,
            Err(error) => break error,
        }
        assert!(written <= 2 * MIB);
    };
    assert_eq!(error.kind, ErrorKind::NoSpace);
    assert!(error.to_string().contains("free space"), "{error}");
    assert!(written >= MIB);
    assert_eq!(bench.zero(8 * MIB, MIB, false, false).unwrap_err().kind, ErrorKind::NoSpace);
    for at in (0..written).step_by(256 << 10) {
        assert_eq!(bench.read(at, 256 << 10).unwrap(), data, "acknowledged data is there");
    }
    bench.discard(0, MIB).unwrap();
    bench.write(12 * MIB, &data).unwrap();
    bench.flush().unwrap();
}
