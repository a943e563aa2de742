//! The daemon as the broker sees it: its memory, and its descriptors by `/proc`.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

/// The longest path, with its final zero, bytes.
const PATH_MAX: usize = 4096;
/// What is read at once: reading beyond a mapped page would fail.
const PAGE: u64 = 4096;

/// The half of an argument that the kernel looks at for numbers of descriptors, flags, modes and lengths.
pub(crate) fn lower(argument: u64) -> u32 {
    u32::try_from(argument & u64::from(u32::MAX)).unwrap_or(0)
}

/// The daemon.
#[derive(Debug)]
pub(crate) struct GuardedDaemon {
    pub process: u32,
    /// Its `/proc/self/mem`, which it opened itself.
    pub memory: File,
    /// The folder that both run in. The daemon cannot change its own.
    pub folder: PathBuf,
}

impl GuardedDaemon {
    /// Copies bytes of the daemon's memory.
    ///
    /// # Errors
    /// [`Errno::FAULT`] if they are not mapped.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.memory.read_exact_at(bytes, address).map_err(|_| Errno::FAULT)
    }

    /// Copies bytes into the daemon's memory.
    ///
    /// # Errors
    /// [`Errno::FAULT`] if they are not mapped.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.memory.write_all_at(bytes, address).map_err(|_| Errno::FAULT)
    }

    /// Copies a path.
    ///
    /// # Errors
    /// [`Errno::FAULT`], [`Errno::NAMETOOLONG`].
    pub(crate) fn path(&self, address: u64) -> Result<CString, Errno> {
        let mut path = vec![0; PATH_MAX];
        let mut length = 0;
        while length < PATH_MAX {
            let at = address.checked_add(length as u64).ok_or(Errno::FAULT)?;
            let left = usize::try_from(PAGE - at % PAGE).unwrap_or(1).min(PATH_MAX - length);
            let part = &mut path[length..length + left];
            self.read(at, part)?;
            if let Some(end) = part.iter().position(|byte| *byte == 0) {
                path.truncate(length + end);
                return CString::new(path).map_err(|_| Errno::INVAL);
            }
            length += left;
        }
        Err(Errno::NAMETOOLONG)
    }

    /// Whether this is one of the daemon's threads.
    pub(crate) fn has_thread(&self, thread: u32) -> bool {
        Path::new(&format!("/proc/{}/task/{thread}", self.process)).exists()
    }

    /// Where `/proc` shows one of the daemon's descriptors.
    pub(crate) fn descriptor(&self, number: i32) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{number}", self.process))
    }

    /// Whether the daemon may read and write the file of which `own` is a descriptor, by its own descriptor of that number: neither if that
    /// only names a file (`O_PATH`). One that can only append may not write elsewhere.
    ///
    /// # Errors
    /// [`Errno::BADF`] if there is no such descriptor, or if it has become one of another file meanwhile.
    pub(crate) fn access(&self, number: i32, own: &OwnedFd) -> Result<[bool; 2], Errno> {
        // All lines are of one file: the kernel writes them at once.
        let path = format!("/proc/{}/fdinfo/{number}", self.process);
        let text = std::fs::read_to_string(path).map_err(|_| Errno::BADF)?;
        let value = |name: &str, radix| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(line.trim(), radix).ok()
        };
        let found =
            rustix::fs::statx(own, "", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let same = value("ino:", 10) == Some(found.stx_ino)
            && value("mnt_id:", 10) == Some(found.stx_mnt_id);
        let flags = value("flags:", 8).filter(|_| same).ok_or(Errno::BADF)?;
        let flags = OFlags::from_bits_retain(lower(flags));
        if flags.contains(OFlags::PATH) {
            return Ok([false; 2]);
        }
        let mode = flags & OFlags::ACCMODE;
        Ok([mode != OFlags::WRONLY, mode != OFlags::RDONLY && !flags.contains(OFlags::APPEND)])
    }

    /// The folder that one of the daemon's descriptors stands for.
    ///
    /// # Errors
    /// [`Errno::BADF`] if there is no such descriptor, [`Errno::NOTDIR`] if it is no folder.
    pub(crate) fn folder_of(&self, number: i32) -> Result<OwnedFd, Errno> {
        if number < 0 {
            return Err(Errno::BADF);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(CWD, self.descriptor(number), flags, Mode::empty()) {
            Err(Errno::NOENT) => Err(Errno::BADF),
            opened => opened,
        }
    }
}

/// This process as the daemon.
#[cfg(test)]
pub(crate) fn own() -> GuardedDaemon {
    GuardedDaemon {
        process: std::process::id(),
        memory: File::options().read(true).write(true).open("/proc/self/mem").unwrap(),
        folder: std::env::current_dir().unwrap(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_copied_to_their_end_and_no_further() {
        let target = own();
        let address = |bytes: &[u8]| bytes.as_ptr().expose_provenance() as u64;
        let path = b"/srv/disk\0beyond";
        assert_eq!(target.path(address(path)).unwrap().as_bytes(), b"/srv/disk");
        let long = vec![b'a'; 2 * PATH_MAX];
        assert_eq!(target.path(address(&long)), Err(Errno::NAMETOOLONG));
        for wrong in [0, 8, u64::MAX, u64::MAX - 4095, 1 << 63] {
            assert_eq!(target.path(wrong), Err(Errno::FAULT), "{wrong:#x}");
        }
    }

    #[test]
    fn what_a_descriptor_allows_is_found_for_its_own_file_only() {
        let target = own();
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::write(&two, "").unwrap();
        let write = File::create(&one).unwrap();
        let read = File::open(&one).unwrap();
        let named = |path: &Path| rustix::fs::open(path, OFlags::PATH, Mode::empty()).unwrap();
        let number = |fd: &dyn std::os::fd::AsRawFd| fd.as_raw_fd();
        assert_eq!(target.access(number(&write), &named(&one)), Ok([false, true]));
        assert_eq!(target.access(number(&read), &named(&one)), Ok([true, false]));
        assert_eq!(target.access(number(&named(&one)), &named(&one)), Ok([false; 2]));
        let append = File::options().append(true).open(&one).unwrap();
        assert_eq!(target.access(number(&append), &named(&one)), Ok([false; 2]));
        assert_eq!(target.access(number(&write), &named(&two)), Err(Errno::BADF));
        assert_eq!(target.access(999_999, &named(&two)), Err(Errno::BADF));
    }

    #[test]
    fn only_folders_and_threads_that_exist_are_found() {
        let target = own();
        assert!(target.has_thread(std::process::id()) && !target.has_thread(1));
        let folder = File::open("/").unwrap();
        let file = File::open("/dev/null").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd;
        assert!(target.folder_of(number(&folder)).is_ok());
        assert_eq!(target.folder_of(number(&file)).unwrap_err(), Errno::NOTDIR);
        assert_eq!(target.folder_of(-7).unwrap_err(), Errno::BADF);
        assert_eq!(target.folder_of(999_999).unwrap_err(), Errno::BADF);
    }
}
