//! The daemon as the broker sees it: its memory, and its descriptors by `/proc`.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

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
    /// By which its descriptors are taken.
    pub process_fd: OwnedFd,
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

    /// Takes the daemon's descriptor of that number: a descriptor of the same open file, whatever
    /// the daemon puts at the number meanwhile. And whether it may be read and written by it:
    /// neither if it only names a file (`O_PATH`), or if the kernel's settings keep the broker from
    /// taking it (Yama), so that the rules alone decide. One that can only append may not write
    /// elsewhere.
    ///
    /// # Errors
    /// [`Errno::BADF`] if there is no such descriptor.
    pub(crate) fn take(&self, number: i32) -> Result<(OwnedFd, [bool; 2]), Errno> {
        match pidfd_getfd(&self.process_fd, number, PidfdGetfdFlags::empty()) {
            Ok(own) => {
                let flags = rustix::fs::fcntl_getfl(&own)?;
                Ok((own, allowed(flags)))
            }
            Err(Errno::PERM | Errno::NOSYS) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let own = rustix::fs::openat(CWD, self.descriptor(number), flags, Mode::empty())?;
                Ok((own, [false; 2]))
            }
            Err(error) => Err(error),
        }
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

/// Whether a file may be read and written by a descriptor with these flags.
fn allowed(flags: OFlags) -> [bool; 2] {
    if flags.contains(OFlags::PATH) {
        return [false; 2];
    }
    let mode = flags & OFlags::ACCMODE;
    [mode != OFlags::WRONLY, mode != OFlags::RDONLY && !flags.contains(OFlags::APPEND)]
}

/// What stands for a process.
///
/// # Errors
/// If it has ended, or there is no descriptor left.
pub(crate) fn process_fd(process: u32) -> Result<OwnedFd, Errno> {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    pidfd_open(process, PidfdFlags::empty())
}

/// This process as the daemon.
#[cfg(test)]
pub(crate) fn own() -> GuardedDaemon {
    GuardedDaemon {
        process: std::process::id(),
        process_fd: process_fd(std::process::id()).unwrap(),
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
    fn a_descriptor_allows_what_its_own_file_was_opened_for() {
        let target = own();
        let folder = tempfile::tempdir().unwrap();
        let one = folder.path().join("one");
        let write = File::create(&one).unwrap();
        let read = File::open(&one).unwrap();
        let named = rustix::fs::open(&one, OFlags::PATH, Mode::empty()).unwrap();
        let append = File::options().append(true).open(&one).unwrap();
        let allows = |fd: &dyn std::os::fd::AsRawFd| target.take(fd.as_raw_fd()).unwrap().1;
        assert_eq!(allows(&write), [false, true]);
        assert_eq!(allows(&read), [true, false]);
        assert_eq!((allows(&named), allows(&append)), ([false; 2], [false; 2]));
        assert_eq!(target.take(999_999).unwrap_err(), Errno::BADF);
    }

    #[test]
    fn a_taken_descriptor_stays_that_of_its_file_when_its_number_changes() {
        let target = own();
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        std::fs::write(&one, "one").unwrap();
        let mut number = OwnedFd::from(File::open(&one).unwrap());
        let (taken, allows) = target.take(std::os::fd::AsRawFd::as_raw_fd(&number)).unwrap();
        rustix::io::dup2(File::create(&two).unwrap(), &mut number).unwrap();
        assert_eq!(allows, [true, false]);
        // It is the open file, and not its name.
        assert_eq!(rustix::fs::fcntl_getfl(&taken).unwrap() & OFlags::ACCMODE, OFlags::RDONLY);
        assert_eq!(std::io::read_to_string(File::from(taken)).unwrap(), "one");
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
