//! Block devices, by way of loop devices with sectors of 512 and of 4096 bytes.
//!
//! Loop devices need root. Without root these tests print a note and pass; with root, a loop device
//! that cannot be created is a failure.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

use crate::common;

use std::path::PathBuf;
use std::process::Command;

use common::{Bench, MIB, allocated, file, folder, open};
use ebb_block::BlockStore;
use ebb_store::{Direct, FileStore, OpenError, OpenOptions};

const SIZE: u64 = 8 * MIB;

struct Loop {
    device: PathBuf,
    backing: PathBuf,
    _folder: tempfile::TempDir,
}

impl Loop {
    /// `None` without root.
    fn with_sectors(bytes: u32) -> Option<Loop> {
        // SAFETY: no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("not run: loop devices need root");
            return None;
        }
        let folder = folder();
        let backing = file(&folder, "backing");
        std::fs::File::create(&backing).unwrap().set_len(SIZE).unwrap();
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size", &bytes.to_string()])
            .arg(&backing)
            .output()
            .expect("this needs `losetup` (Debian: apt install mount)");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "no loop device (modprobe loop): {error}");
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        Some(Loop { device, backing, _folder: folder })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

fn serves_as_a_store(sectors: u32, direct: Direct) {
    let Some(device) = Loop::with_sectors(sectors) else { return };
    let options = OpenOptions { direct, ..OpenOptions::default() };
    let (store, notes) = FileStore::open(&device.device, &options).unwrap();
    assert!(notes.is_empty(), "{notes:?}");
    let bench = Bench::new(store);
    let can = bench.store().capabilities();
    assert_eq!(bench.store().size(), SIZE);
    assert_eq!(can.direct, direct != Direct::Off);
    assert_eq!(can.alignment, if can.direct { sectors } else { 1 });
    assert!(matches!(open(&device.device), Err(OpenError::InUse { .. })));

    // Every request in multiples of 512 bytes is valid, whatever the sector size of the device.
    let mut expected = vec![0; 64 << 10];
    for (offset, length, fill) in [(0, 8192, 1), (512, 512, 2), (3584, 1024, 3), (40_448, 5120, 4)]
    {
        expected[offset..offset + length].fill(fill);
        bench.write(offset as u64, &vec![fill; length]).unwrap();
    }
    assert!(bench.read(0, 64 << 10).unwrap() == expected);
    assert_eq!(bench.read(3584, 512).unwrap(), [3; 512]);
    bench.flush().unwrap();

    for may_unmap in [true, false] {
        bench.write(MIB, &[5; 16 << 10]).unwrap();
        bench.zero(MIB + 512, 8192, may_unmap, false).unwrap();
        let data = bench.read(MIB, 16 << 10).unwrap();
        assert!(data[..512] == [5; 512] && data[8704..] == [5; 7680]);
        assert!(data[512..8704].iter().all(|b| *b == 0));
    }

    bench.write(2 * MIB, &vec![6; 2 << 20]).unwrap();
    bench.flush().unwrap();
    let before = allocated(&device.backing);
    // A hint: partial sectors of the device stay, and nothing outside the range changes.
    bench.discard(2 * MIB + 512, MIB).unwrap();
    bench.discard(3 * MIB + 512, 512).unwrap();
    assert!(allocated(&device.backing) <= before - MIB + 16 * 1024, "discarding frees space");
    assert_eq!(bench.read(2 * MIB, 512).unwrap(), [6; 512]);
    assert!(bench.read(3 * MIB + 1024, (1 << 20) - 1024).unwrap().iter().all(|b| *b == 6));

    // No device reports its holes: all of it counts as data.
    assert_eq!(bench.extents(512, MIB, 10).unwrap(), [(512, MIB, false)]);
}

#[test]
fn with_512_byte_sectors() {
    serves_as_a_store(512, Direct::On);
}

#[test]
fn with_512_byte_sectors_through_the_page_cache() {
    serves_as_a_store(512, Direct::Off);
}

#[test]
fn with_4096_byte_sectors() {
    serves_as_a_store(4096, Direct::On);
}

#[test]
fn with_4096_byte_sectors_through_the_page_cache() {
    serves_as_a_store(4096, Direct::Off);
}

/// A file system on a loop device, mounted.
struct Mounted {
    folder: tempfile::TempDir,
    _device: Loop,
}

impl Mounted {
    /// `None` without root.
    fn with_sectors(bytes: u32) -> Option<Mounted> {
        let device = Loop::with_sectors(bytes)?;
        let folder = folder();
        run(Command::new("mkfs.ext4").args(["-q", "-b", "4096", "-O", "^has_journal"]), &device);
        let mount = Command::new("mount").arg(&device.device).arg(folder.path()).status();
        assert!(mount.expect("this needs `mount`").success());
        Some(Mounted { folder, _device: device })
    }
}

fn run(command: &mut Command, device: &Loop) {
    let output = command.arg(&device.device).output().expect("this needs e2fsprogs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

/// A direct read of a hole needs no alignment, and one of data does: a new file is all hole.
#[test]
fn new_file_on_4096_byte_sectors_takes_all_requests() {
    let Some(mounted) = Mounted::with_sectors(4096) else { return };
    for (name, direct) in [("auto", Direct::Auto), ("on", Direct::On)] {
        let path = file(&mounted.folder, name);
        let options = OpenOptions { create: Some(MIB), direct, ..OpenOptions::default() };
        let bench = Bench::new(FileStore::open(&path, &options).unwrap().0);
        bench.write(512, &[3; 512]).unwrap();
        assert_eq!(bench.read(512, 512).unwrap(), [3; 512]);
        assert_eq!(bench.read(0, 512).unwrap(), [0; 512]);
        bench.flush().unwrap();
        assert_eq!(bench.store().capabilities().alignment, 4096, "{name}");
    }
}
