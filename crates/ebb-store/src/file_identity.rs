//! The identity of an open file, by which a volume is recognised after a restart of the daemon.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use ebb_block::Identity;
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};

/// As [`try_identity_of_file`]; a file that cannot be inspected gets a unique key, so that an
/// unknown file does not pass for a known one.
pub fn identity_of_file(file: impl AsFd) -> Identity {
    try_identity_of_file(&file).unwrap_or_else(|error| Identity {
        key: format!("unknown: {error}, {:x}", ebb_block::nonce()),
        place: place_of(&file),
    })
}

/// Device, inode and creation time, since inode numbers are reused. For a block device: its number.
///
/// # Errors
/// The errors of `statx`.
pub fn try_identity_of_file(file: impl AsFd) -> io::Result<Identity> {
    let fields = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found = statx(&file, c"", AtFlags::EMPTY_PATH, fields)?;
    let key = if FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice {
        format!("block device {}:{}", found.stx_rdev_major, found.stx_rdev_minor)
    } else {
        let (major, minor, inode) = (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
        let made = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        let made = match (made, found.stx_btime) {
            (true, at) => format!(", made at {}.{:09}", at.tv_sec, at.tv_nsec),
            (false, _) => String::new(),
        };
        format!("inode {inode} of device {major}:{minor}{made}")
    };
    Ok(Identity { key, place: place_of(&file) })
}

fn place_of(file: impl AsFd) -> String {
    let place = std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    place.map(|path| path.display().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "this is a test")]

    use ebb_block::BlockStore;

    use crate::{FileStore, MemoryStore, OpenOptions, Store};

    #[test]
    fn a_file_keeps_its_identity_and_another_in_its_place_has_another() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("disk"), folder.path().join("moved"));
        let open = |path: &std::path::Path| {
            let options = OpenOptions { create: Some(1 << 20), ..OpenOptions::default() };
            Store::File(FileStore::open(path, &options).unwrap().0).identity()
        };
        let first = open(&path);
        assert_eq!(open(&path), first);
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        assert_eq!(open(&path).key, first.key, "whatever is written to it");
        std::fs::rename(&path, &other).unwrap();
        assert_ne!(open(&path).key, first.key, "a new file of that name");
        assert_eq!(open(&other).key, first.key, "wherever it lies");
        assert!(first.place.ends_with("disk"), "{first}");
    }

    #[test]
    fn each_memory_store_has_its_own_identity() {
        let one = Store::Memory(MemoryStore::new(4096));
        assert_eq!(one.identity(), one.identity());
        assert_ne!(one.identity(), Store::Memory(MemoryStore::new(4096)).identity());
    }
}
