//! Calls with paths: opening, and what changes folders.
//!
//! A path below `/proc` is special twice. `/proc/self` is the daemon's own, not the broker's. And links such as
//! `/proc/PID/fd/N` lead to what they name without looking at a path again; only those of the daemon's own descriptors are followed.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libc::c_long;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::resolve::{PROC_MAGIC, Resolved, resolve};
use crate::rules::{CurrentRules, PathAccess};
use crate::sys::Notice;
use crate::target::{GuardedDaemon, lower};

/// The flags of `openat` of Linux's include/linux/fcntl.h (`VALID_OPEN_FLAGS`), which ignores others.
const OPEN_FLAGS: u32 = 0x7f_ffc3;
/// File systems of the kernel's own files, other than `/proc`, of Linux's include/uapi/linux/magic.h: sysfs, debugfs, tracefs,
/// securityfs, configfs, efivarfs and bpf; and the two of control groups.
const KERNEL_FILES: [i64; 7] =
    [0x6265_6572, 0x6462_6720, 0x7472_6163, 0x7363_6673, 0x6265_6570, 0xde5e_81e4, 0xcafe_4a11];
const CONTROL_GROUPS: [i64; 2] = [0x6367_7270, 0x0027_e0eb];
/// What reports memory pressure of a control group is written to for that.
const PRESSURE: [&str; 2] = [".pressure", "cgroup.event_control"];
/// The bits of a mode by which a program runs as another user, which no file of the daemon has.
const SET_USER: u32 = 0o6000;
/// What other processes' folders in `/proc` have that may be read: whether a process lives, and since when.
const OF_OTHERS: [&str; 2] = ["stat", "status"];

/// A refusal, and why: the call fails with the error, and the log says the rest.
#[derive(Debug)]
pub(crate) enum Fault {
    /// By the rules, with what was wanted.
    Refused(String),
    /// By the kernel, or because the arguments are wrong.
    Failed(Errno),
}

impl From<Errno> for Fault {
    fn from(error: Errno) -> Fault {
        Fault::Failed(error)
    }
}

/// A path of the daemon: a folder, and the path from there.
#[derive(Debug)]
struct Place {
    /// `None`: the folder that both processes run in.
    folder: Option<OwnedFd>,
    path: CString,
    /// The whole path, for the rules.
    shown: PathBuf,
    /// It is the link of `/proc` to a descriptor of the daemon, of which this broker has another one: `path` is the link to that.
    descriptor: Option<Descriptor>,
}

/// A file that one of the daemon's descriptors is of.
#[derive(Debug)]
struct Descriptor {
    /// Keeps the file, whatever the daemon does with its number.
    own: OwnedFd,
    /// Whether the daemon may read and write the file by its own descriptor.
    open: [bool; 2],
}

impl Place {
    fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_ref().map_or(CWD, AsFd::as_fd)
    }

    /// Where it leads; a link at the end is followed with `follow`. A descriptor leads to its file in any case.
    fn resolve(&self, follow: bool) -> Result<Resolved, Errno> {
        if self.descriptor.is_some() {
            let folder =
                rustix::fs::openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            return Ok(Resolved { folder, name: self.path.clone(), is_folder: false });
        }
        resolve(self.folder(), self.path.as_bytes(), follow)
    }
}

/// The refusal of a path that the rules do not name.
pub(crate) fn not_named(what: &str, path: &Path) -> Fault {
    Fault::Refused(format!(
        "{what} {path:?}: it is not in `open_paths`, and the configuration does not name it"
    ))
}

/// The path without `/proc/self` or `/proc/thread-self`.
fn of_the_daemon(path: &CStr, process: u32, thread: u32) -> CString {
    let bytes = path.to_bytes();
    let own = [
        (&b"/proc/self"[..], format!("/proc/{process}")),
        (&b"/proc/thread-self"[..], format!("/proc/{process}/task/{thread}")),
    ];
    for (name, stands_for) in own {
        if let Some(rest) = bytes.strip_prefix(name)
            && matches!(rest.first(), None | Some(b'/'))
        {
            let whole = [stands_for.as_bytes(), rest].concat();
            return CString::new(whole).unwrap_or_default();
        }
    }
    path.to_owned()
}

/// The number of the descriptor of which it is the link in `/proc`.
fn descriptor(path: &[u8], process: u32) -> Option<i32> {
    let prefix = format!("/proc/{process}/fd/");
    let number = path.strip_prefix(prefix.as_bytes())?;
    if !number.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Whether the call is continued in the daemon: it only names a file. The kernel puts no such descriptor into another process.
/// That is decided by an argument that is not in memory; which file it names is looked at when it is used.
pub(crate) fn only_names(notice: &Notice) -> bool {
    let flags = match notice.number {
        libc::SYS_openat => notice.arguments[2],
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open => notice.arguments[1],
        _ => return false,
    };
    OFlags::from_bits_retain(lower(flags)).contains(OFlags::PATH)
}

/// What makes calls with paths for the daemon.
pub(crate) struct Paths<'a> {
    pub target: &'a GuardedDaemon,
    pub rules: &'a Arc<CurrentRules>,
    /// The thread that makes the call.
    pub thread: u32,
}

impl Paths<'_> {
    /// The path at `address`, from the folder that `folder` stands for.
    fn place(&self, folder: Option<u64>, address: u64) -> Result<Place, Fault> {
        let path = self.target.path(address)?;
        let path = of_the_daemon(&path, self.target.process, self.thread);
        let bytes = path.to_bytes();
        if bytes.is_empty() {
            return Err(Errno::NOENT.into());
        }
        let text = Path::new(OsStr::from_bytes(bytes));
        if let Some(number) = descriptor(bytes, self.target.process) {
            return Ok(self.by_descriptor(number)?);
        }
        let number = folder.map_or(CWD.as_raw_fd(), |folder| lower(folder).cast_signed());
        if text.is_absolute() || number == CWD.as_raw_fd() {
            let shown = self.target.folder.join(text);
            return Ok(Place { folder: None, shown, path, descriptor: None });
        }
        let folder = self.target.folder_of(number)?;
        let link = format!("/proc/self/fd/{}", folder.as_raw_fd());
        let at = rustix::fs::readlink(&link, Vec::new())?;
        let shown = Path::new(OsStr::from_bytes(at.as_bytes())).join(text);
        Ok(Place { folder: Some(folder), shown, path, descriptor: None })
    }

    /// The file that one of the daemon's descriptors is of.
    fn by_descriptor(&self, number: i32) -> Result<Place, Errno> {
        let (own, open) = self.target.take(number)?;
        let link = format!("/proc/self/fd/{}", own.as_raw_fd());
        let shown = rustix::fs::readlink(&link, Vec::new())?;
        let shown = PathBuf::from(OsStr::from_bytes(shown.as_bytes()));
        let path = CString::new(link).map_err(|_| Errno::INVAL)?;
        Ok(Place { folder: None, path, shown, descriptor: Some(Descriptor { own, open }) })
    }

    fn allow(&self, place: &Place, access: PathAccess, what: &str) -> Result<(), Fault> {
        let [reads, writes] = place.descriptor.as_ref().map_or([false; 2], |it| it.open);
        let by_descriptor = if access == PathAccess::Read { reads } else { reads && writes };
        // What may be read of processes, `check_process` decides, of the file that was opened.
        let of_process = access == PathAccess::Read && is_of_process(&place.shown);
        if by_descriptor || of_process || self.rules.path(&place.shown, access) {
            return Ok(());
        }
        Err(not_named(what, &place.shown))
    }

    /// Where a path leads that is changed, by whatever name: not to what the broker itself reads,
    /// nor, if `above`, to a folder or link above that.
    fn changes(&self, place: &Place, (follow, above): (bool, bool)) -> Result<Resolved, Fault> {
        let at = place.resolve(follow)?;
        let found = match &place.descriptor {
            Some(descriptor) => rustix::fs::fstat(&descriptor.own),
            None => rustix::fs::statat(&at.folder, &at.name, AtFlags::SYMLINK_NOFOLLOW),
        };
        let file = found.ok().map(|found| (found.st_dev, found.st_ino));
        let path = match &place.descriptor {
            Some(_) => place.shown.clone(),
            None => {
                let link = format!("/proc/self/fd/{}", at.folder.as_raw_fd());
                let folder = rustix::fs::readlink(link, Vec::new())?;
                let folder = Path::new(OsStr::from_bytes(folder.as_bytes()));
                folder.join(OsStr::from_bytes(at.name.as_bytes()))
            }
        };
        if self.rules.keeps(&path, file, above) {
            let shown = &place.shown;
            return Err(Fault::Refused(format!(
                "change {shown:?}: the broker reads its rules from it"
            )));
        }
        Ok(at)
    }

    /// Opens a path: the new descriptor, and whether a program that the daemon runs has it.
    pub(crate) fn open(&self, notice: &Notice) -> Result<(OwnedFd, bool), Fault> {
        let [first, second, third, fourth, ..] = notice.arguments;
        let (folder, path, how) = match notice.number {
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => (None, first, How::new(second, third)),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_creat => {
                let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC;
                (None, first, How::new(flags.bits().into(), second))
            }
            // A unit may not have this call either, so that all know the older one.
            libc::SYS_openat2 => return Err(Errno::NOSYS.into()),
            _ => (Some(first), second, How::new(third, fourth)),
        };
        let mut place = self.place(folder, path)?;
        let flags = OFlags::from_bits_retain(how.flags);
        // The file has no name yet, and is made in the folder.
        let nameless_in = flags.contains(OFlags::TMPFILE).then(|| place.shown.clone());
        if nameless_in.is_some() {
            place.shown.push("new");
        }
        let writes = OFlags::CREATE | OFlags::TRUNC | OFlags::TMPFILE & !OFlags::DIRECTORY;
        let reads = flags & OFlags::ACCMODE == OFlags::RDONLY && !flags.intersects(writes);
        let access = if reads { PathAccess::Read } else { PathAccess::Write };
        let what = if reads { "open" } else { "open for writing" };
        self.allow(&place, access, what).map_err(|refused| match &nameless_in {
            Some(folder) => not_named("make a file in", folder),
            None => refused,
        })?;
        let unique = OFlags::CREATE | OFlags::EXCL;
        let follow = !flags.contains(OFlags::NOFOLLOW) && !flags.contains(unique);
        let found = match access {
            PathAccess::Read => place.resolve(follow)?,
            PathAccess::Write => self.changes(&place, (follow, false))?,
        };
        let mut own = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        if place.descriptor.is_none() {
            // What was a file a moment ago may be a link.
            own |= OFlags::NOFOLLOW;
        }
        if found.is_folder {
            own |= OFlags::DIRECTORY;
        }
        let mode = Mode::from_bits_retain(how.mode);
        let opened = rustix::fs::openat(&found.folder, &found.name, own, mode)?;
        self.check_process(&opened, access)?;
        Ok((opened, flags.contains(OFlags::CLOEXEC)))
    }

    /// Refuses what `/proc` has of the broker, and of other processes, other than what says whether one lives; and settings of the kernel.
    fn check_process(&self, opened: &OwnedFd, access: PathAccess) -> Result<(), Fault> {
        let kind = rustix::fs::fstatfs(opened)?.f_type;
        let kernels = CONTROL_GROUPS.contains(&kind) || KERNEL_FILES.contains(&kind);
        if kind != PROC_MAGIC && (access == PathAccess::Read || !kernels) {
            return Ok(());
        }
        let link =
            rustix::fs::readlink(format!("/proc/self/fd/{}", opened.as_raw_fd()), Vec::new())?;
        let path = Path::new(OsStr::from_bytes(link.as_bytes()));
        let refused =
            || Fault::Refused(format!("open {path:?}: it is the kernel's, or of another process"));
        if CONTROL_GROUPS.contains(&kind) {
            let name = path.to_str().unwrap_or_default();
            let reports = PRESSURE.iter().any(|end| name.ends_with(end));
            return if reports { Ok(()) } else { Err(refused()) };
        }
        if kind != PROC_MAGIC {
            return Err(refused());
        }
        // Another mount of it numbers the processes of another namespace, or is a way around this.
        let below = path.strip_prefix("/proc").map_err(|_| refused())?;
        let mut parts =
            below.components().map(|part| part.as_os_str().to_str().unwrap_or_default());
        let first = parts.next().unwrap_or_default();
        let Ok(process) = first.parse::<u32>() else {
            // Other than what reports memory pressure, these are settings of the kernel.
            let allowed = access == PathAccess::Read || first == "pressure";
            return if allowed { Ok(()) } else { Err(refused()) };
        };
        let rest: Vec<&str> = parts.collect();
        let allowed = if process == self.target.process {
            rest.last() != Some(&"mem")
        } else {
            access == PathAccess::Read
                && process != std::process::id()
                && matches!(rest[..], [name] if OF_OTHERS.contains(&name))
        };
        if allowed { Ok(()) } else { Err(refused()) }
    }

    /// A path that is changed. None below `/proc`, where there is nothing to change, and links would be followed.
    fn changed(&self, folder: Option<u64>, address: u64, what: &str) -> Result<Place, Fault> {
        let place = self.place(folder, address)?;
        let below = |folder: &str| place.shown.starts_with(folder);
        if place.descriptor.is_none() && (below("/proc") || below("/dev/fd") || below("/sys")) {
            return Err(Errno::ACCESS.into());
        }
        // Whatever a descriptor of it allows: its name, its mode and its folder are not the file's.
        if self.rules.path(&place.shown, PathAccess::Write) {
            return Ok(place);
        }
        Err(not_named(what, &place.shown))
    }

    /// Makes a call that changes a folder, or the mode of a file.
    pub(crate) fn change(&self, notice: &Notice) -> Result<(), Fault> {
        let [a, b, c, d, e, _] = notice.arguments;
        match notice.number {
            #[cfg(target_arch = "x86_64")]
            libc::SYS_unlink => self.unlink(None, a, 0),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_rmdir => self.unlink(None, a, AtFlags::REMOVEDIR.bits().into()),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_rename => self.rename([None, None], [a, b], 0),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_renameat => self.rename([Some(a), Some(c)], [b, d], 0),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_link => self.link([None, None], [a, b], 0),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_mkdir => self.make_folder(None, a, b),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_chmod => self.change_mode(None, a, b),
            libc::SYS_unlinkat => self.unlink(Some(a), b, c),
            libc::SYS_renameat2 => self.rename([Some(a), Some(c)], [b, d], e),
            libc::SYS_linkat => self.link([Some(a), Some(c)], [b, d], e),
            libc::SYS_mkdirat => self.make_folder(Some(a), b, c),
            libc::SYS_fchmodat => self.change_mode(Some(a), b, c),
            _ => Err(Errno::NOSYS.into()),
        }
    }

    /// Refuses to move folders and symbolic links: what is below a folder, or where a link leads, may then be allowed by its new
    /// path.
    fn check_kind(&self, place: &Place, at: &Resolved, what: &str) -> Result<(), Fault> {
        let found = rustix::fs::statat(&at.folder, &at.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(found.st_mode);
        if matches!(kind, FileType::Directory | FileType::Symlink) && !self.rules.any_path() {
            let shown = &place.shown;
            return Err(Fault::Refused(format!("{what} {shown:?}: it is a folder or a link")));
        }
        Ok(())
    }

    fn unlink(&self, folder: Option<u64>, path: u64, flags: u64) -> Result<(), Fault> {
        let at = self.changed(folder, path, "delete")?;
        let at = self.changes(&at, (false, true))?;
        let flags = AtFlags::from_bits_retain(lower(flags));
        Ok(rustix::fs::unlinkat(&at.folder, &at.name, flags)?)
    }

    fn rename(&self, folders: [Option<u64>; 2], paths: [u64; 2], flags: u64) -> Result<(), Fault> {
        let from = self.changed(folders[0], paths[0], "rename")?;
        let to = self.changed(folders[1], paths[1], "rename to")?;
        let old = self.changes(&from, (false, true))?;
        let new = self.changes(&to, (false, true))?;
        let flags = RenameFlags::from_bits_retain(lower(flags));
        self.check_kind(&from, &old, "rename")?;
        if flags.contains(RenameFlags::EXCHANGE) {
            self.check_kind(&to, &new, "rename")?;
        }
        if flags.is_empty() {
            // Some file systems know this call only.
            return Ok(rustix::fs::renameat(&old.folder, &old.name, &new.folder, &new.name)?);
        }
        Ok(rustix::fs::renameat_with(&old.folder, &old.name, &new.folder, &new.name, flags)?)
    }

    fn link(&self, folders: [Option<u64>; 2], paths: [u64; 2], flags: u64) -> Result<(), Fault> {
        let from = self.changed(folders[0], paths[0], "link")?;
        let to = self.changed(folders[1], paths[1], "make")?;
        let old = self.changes(&from, (false, true))?;
        let new = self.changes(&to, (false, true))?;
        if from.descriptor.is_none() {
            self.check_kind(&from, &old, "link")?;
        }
        let flags = AtFlags::from_bits_retain(lower(flags));
        Ok(rustix::fs::linkat(&old.folder, &old.name, &new.folder, &new.name, flags)?)
    }

    fn make_folder(&self, folder: Option<u64>, path: u64, mode: u64) -> Result<(), Fault> {
        let at = self.changed(folder, path, "make")?.resolve(false)?;
        let mode = Mode::from_bits_retain(lower(mode) & !SET_USER);
        Ok(rustix::fs::mkdirat(&at.folder, &at.name, mode)?)
    }

    fn change_mode(&self, folder: Option<u64>, path: u64, mode: u64) -> Result<(), Fault> {
        let place = self.changed(folder, path, "change the mode of")?;
        let at = self.changes(&place, (true, true))?;
        let mode = Mode::from_bits_retain(lower(mode) & !SET_USER);
        Ok(rustix::fs::chmodat(&at.folder, &at.name, mode, AtFlags::empty())?)
    }
}

/// Whether a path is below the folder of a process in `/proc`, as it is written.
fn is_of_process(path: &Path) -> bool {
    let Ok(below) = path.strip_prefix("/proc") else { return false };
    let is_number = |part: &OsStr| part.as_bytes().iter().all(u8::is_ascii_digit);
    let mut parts = below.components();
    let first = parts.next().is_some_and(|part| is_number(part.as_os_str()));
    first && parts.all(|part| matches!(part, std::path::Component::Normal(_)))
}

/// How a path is opened.
struct How {
    flags: u32,
    mode: u32,
}

impl How {
    /// As the calls have it, which ignore flags that they do not know, and a mode without a file to make.
    fn new(flags: u64, mode: u64) -> How {
        let flags = lower(flags) & OPEN_FLAGS;
        let makes = OFlags::CREATE.bits() | (OFlags::TMPFILE & !OFlags::DIRECTORY).bits();
        let mode = if flags & makes == 0 { 0 } else { lower(mode) & 0o1777 };
        How { flags, mode }
    }
}

/// Whether the call opens a path.
pub(crate) fn opens(number: c_long) -> bool {
    #[cfg(target_arch = "x86_64")]
    if matches!(number, libc::SYS_open | libc::SYS_creat) {
        return true;
    }
    matches!(number, libc::SYS_openat | libc::SYS_openat2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_own_folder_of_proc_stands_for_self() {
        for (path, meant) in [
            (c"/proc/self", "/proc/7"),
            (c"/proc/self/fd/3", "/proc/7/fd/3"),
            (c"/proc/thread-self/stat", "/proc/7/task/9/stat"),
            (c"/proc/selfish", "/proc/selfish"),
            (c"/proc/self-x", "/proc/self-x"),
            (c"proc/self", "proc/self"),
        ] {
            assert_eq!(of_the_daemon(path, 7, 9).to_str().unwrap(), meant);
        }
    }

    #[test]
    fn only_links_of_the_daemons_descriptors_are_followed() {
        assert_eq!(descriptor(b"/proc/7/fd/12", 7), Some(12));
        for other in [
            "/proc/8/fd/1",
            "/proc/7/fd/",
            "/proc/7/fd/1/x",
            "/proc/7/fd/-1",
            "/proc/7/fd/+1",
            "/proc/7/fd/99999999999",
            "/proc/7/task/7/fd/1",
            "/proc/7/fdinfo/1",
        ] {
            assert_eq!(descriptor(other.as_bytes(), 7), None, "{other}");
        }
    }

    #[test]
    fn folders_of_processes_have_numbers() {
        for (path, is) in [
            ("/proc/7/status", true),
            ("/proc/7", true),
            ("/proc/7/../kmsg", false),
            ("/proc/kmsg", false),
            ("/proc", false),
            ("/srv/proc/7", false),
        ] {
            assert_eq!(is_of_process(Path::new(path)), is, "{path}");
        }
    }

    #[test]
    fn what_a_call_does_not_know_is_ignored() {
        let how = How::new(u64::MAX, u64::MAX);
        assert_eq!((how.flags, how.mode), (OPEN_FLAGS, 0o1777));
        assert_eq!(How::new(0, u64::MAX).mode, 0, "no file is made");
    }
}
