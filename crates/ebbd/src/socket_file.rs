//! Unix sockets at a path: binding one where a stale one may be, and removing its file.
//!
//! A socket is bound and listens under a temporary name in the directory, and gets its name when it is complete: so no other
//! daemon finds it bound and not listening, which is what a stale socket looks like. A stale one is exchanged for it, and
//! what came out is checked once more before it is removed: another daemon may have been faster.
//!
//! Invariants: no path is followed through a symbolic link of the last component, which a user who owns the directory might
//! place; the temporary name is removed on any failure.
//!
//! Source: rename(2) on `RENAME_EXCHANGE` and `RENAME_NOREPLACE`; unix(7).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;
/// How many temporary names are tried: those of killed daemons may be left.
const NAMES: u32 = 16;

/// The file of a socket that this daemon has bound, removed when this is dropped.
///
/// # Invariants
/// - The socket is open until this is dropped: otherwise the number may be that of another daemon's file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode, which no other file can have as long as the socket is open.
    number: Option<(u64, u64)>,
}

/// The intended place of a socket's file.
#[derive(Clone, Debug)]
pub(crate) struct SocketPlace {
    path: PathBuf,
    number: (u64, u64),
}

impl SocketPlace {
    /// The path at which clients connect.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the file at the path is still the one of the socket.
    pub(crate) fn is_in_place(&self) -> bool {
        number(&self.path) == Some(self.number)
    }
}

impl SocketFile {
    /// Its place, which says whether clients find it.
    pub(crate) fn place(&self) -> Option<SocketPlace> {
        Some(SocketPlace { path: self.path.clone(), number: self.number? })
    }

    /// To be called when the socket was just bound.
    fn of(path: &Path) -> SocketFile {
        SocketFile { path: path.into(), number: number(path) }
    }

    /// Leaves the file to the daemon that the socket is handed over to, which makes it its own with [`SocketFile::left`].
    pub(crate) fn leave(mut self) -> Option<(PathBuf, (u64, u64))> {
        let number = self.number.take()?;
        Some((std::mem::take(&mut self.path), number))
    }

    /// The file that a predecessor has left.
    pub(crate) fn left(path: PathBuf, number: (u64, u64)) -> SocketFile {
        SocketFile { path, number: Some(number) }
    }
}

fn number(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another daemon may have its socket there by now.
        if self.number.is_some() && number(&self.path) == self.number {
            // It may have been removed already.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// Nothing, or nothing that can be looked at.
    Nothing,
    /// The socket of a server that has ended.
    StaleSocket,
    /// A socket that a server listens at.
    Server,
    /// A socket of a server that has ended, and whose last requests have not: the kernel keeps it open meanwhile.
    EndedServer,
    /// A file of another kind.
    OtherFile,
}

/// Finds out what is at a path.
pub(crate) fn occupant(path: &Path) -> Occupant {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => Occupant::OtherFile,
        Ok(_) => match try_connect(path) {
            Err(Errno::CONNREFUSED) => Occupant::StaleSocket,
            Ok(socket) if listener_has_ended(&socket) => Occupant::EndedServer,
            Ok(_) | Err(_) => Occupant::Server,
        },
        Err(_) => Occupant::Nothing,
    }
}

/// Whether the process that listens at the other end has ended, or is ending. Each daemon calls listen(2) for the sockets that
/// were handed over to it, so that they are its own.
fn listener_has_ended(socket: &OwnedFd) -> bool {
    let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else { return false };
    has_ended(peer.pid.as_raw_nonzero().get())
}

fn has_ended(process: i32) -> bool {
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => is_ending(&stat),
        // Where processes of other users are hidden, the first one is, too.
        Err(error) => error.kind() == io::ErrorKind::NotFound && Path::new("/proc/1/stat").exists(),
    }
}

/// Whether a line of `/proc/PID/stat` is of a process that is a zombie, dead or ending; see proc_pid_stat(5).
fn is_ending(stat: &str) -> bool {
    /// `PF_EXITING` of Linux's include/linux/sched.h.
    const EXITING: u32 = 4;
    // The name before may have any characters.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u32>().ok()).unwrap_or(0);
    matches!(state, Some("Z" | "X")) || flags & EXITING != 0
}

/// Connects to find out whether a server listens. Does not block: a busy server may have a full queue.
fn try_connect(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// A socket that listens under a temporary name. Dropping it removes the name.
pub(crate) struct UnnamedSocket {
    file: SocketFile,
    socket: OwnedFd,
}

impl UnnamedSocket {
    /// Binds a socket beside `path`. `mode`: the permissions of its file, whatever the process's mask is; without, the
    /// usual ones.
    ///
    /// # Errors
    /// Of the system calls, or if `path` is too long for a socket.
    pub(crate) fn beside(path: &Path, mode: Option<Mode>) -> io::Result<UnnamedSocket> {
        SocketAddrUnix::new(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        if let Some(mode) = mode {
            // Set before bind, so that no other user can connect at any time.
            rustix::fs::fchmod(&socket, mode)?;
        }
        let path = bind(&socket, folder, &directory)?;
        let bound = UnnamedSocket { file: SocketFile::of(&path), socket };
        if let Some(mode) = mode {
            // The process's mask may have taken the group's permission.
            set_mode(&path, mode)?;
        }
        rustix::net::listen(&bound.socket, BACKLOG)?;
        Ok(bound)
    }

    /// Gives the socket its name, where `found` was: nothing, or a stale socket. Gives itself back if something else is
    /// there by now.
    ///
    /// # Errors
    /// Of rename(2).
    pub(crate) fn publish(
        mut self,
        path: &Path,
        found: Occupant,
    ) -> io::Result<Result<(OwnedFd, SocketFile), UnnamedSocket>> {
        let stale = found == Occupant::StaleSocket;
        let flags = if stale { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let temporary = self.file.path.clone();
        match rustix::fs::renameat_with(CWD, &temporary, CWD, path, flags) {
            Ok(()) if stale && occupant(&temporary) != Occupant::StaleSocket => {
                // Another daemon's: it gets its name back.
                rustix::fs::renameat_with(CWD, &temporary, CWD, path, flags)?;
                return Ok(Err(self));
            }
            Ok(()) if stale => std::fs::remove_file(&temporary)?,
            Ok(()) => {}
            Err(Errno::EXIST | Errno::NOENT) => return Ok(Err(self)),
            // The file system has neither: there is a moment between the check and this.
            Err(Errno::INVAL | Errno::NOSYS) if occupant(path) == found => {
                rustix::fs::rename(&temporary, path)?;
            }
            Err(Errno::INVAL | Errno::NOSYS) => return Ok(Err(self)),
            Err(error) => return Err(error.into()),
        }
        self.file.path = path.into();
        Ok(Ok((self.socket, self.file)))
    }
}

/// Binds to a temporary name in a directory, and returns its path.
fn bind(socket: &OwnedFd, folder: &Path, directory: &OwnedFd) -> io::Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut tried = Err(Errno::ADDRINUSE);
    for _ in 0..NAMES {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".ebbd-{:x}-{number:x}", std::process::id());
        let path = folder.join(&name);
        // It may be longer than the final one, and too long.
        let short = format!("/proc/self/fd/{}/{name}", directory.as_raw_fd());
        let address = SocketAddrUnix::new(&path).or_else(|_| SocketAddrUnix::new(short))?;
        tried = rustix::net::bind(socket, &address);
        if tried != Err(Errno::ADDRINUSE) {
            return Ok(tried.map(|()| path)?);
        }
    }
    Ok(tried.map(|()| PathBuf::new())?)
}

/// Sets the permissions of a socket's file, and of no file that a symbolic link names.
fn set_mode(path: &Path, mode: Mode) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(file.as_fd())?;
    let own = found.st_uid == rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket || !own {
        return Err(io::Error::other("the socket was replaced by another file"));
    }
    if Mode::from_raw_mode(found.st_mode) & Mode::from_raw_mode(0o7777) == mode {
        return Ok(());
    }
    // The link of a descriptor stands for the file itself, which fchmod refuses for `O_PATH`.
    let file = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmodat(CWD, file, mode, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn names(folder: &Path) -> Vec<std::ffi::OsString> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_process_that_has_ended_is_told_from_one_that_runs() {
        assert!(!has_ended(std::process::id().cast_signed()));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let number = child.id().cast_signed();
        assert!(!has_ended(number));
        drop(child.stdin.take());
        // It is a zombie until it is waited for.
        while !has_ended(number) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(has_ended(number));
        for (stat, ending) in [
            ("7 (a) Z) S 1 7 7 0 -1 4194304 0", false),
            ("7 (a) Z 1 7 7 0 -1 4194304 0", true),
            ("7 (a b) R 1 7 7 0 -1 4194308 0", true),
            ("7", false),
        ] {
            assert_eq!(is_ending(stat), ending, "{stat}");
        }
    }

    #[test]
    fn a_socket_that_another_daemon_has_published_meanwhile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for stale in [false, true] {
            if stale {
                drop(UnixListener::bind(&path).unwrap());
            }
            let found = occupant(&path);
            assert_eq!(found == Occupant::StaleSocket, stale);
            let [first, second] = [(); 2].map(|()| UnnamedSocket::beside(&path, None).unwrap());
            let first = first.publish(&path, found).unwrap().ok().expect("the first has the name");
            let kept = number(&path);
            let second = second.publish(&path, found).unwrap();
            assert!(second.is_err(), "replaced a socket that a daemon listens at");
            assert_eq!((number(&path), occupant(&path)), (kept, Occupant::Server));
            drop(second);
            assert_eq!(names(folder.path()), ["s"]);
            drop(first.1);
            assert!(names(folder.path()).is_empty());
        }
    }

    #[test]
    fn permissions_of_what_a_symbolic_link_names_are_not_changed() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (precious, link) = (folder.path().join("precious"), folder.path().join("link"));
        let _socket = UnixListener::bind(&precious).unwrap();
        std::fs::set_permissions(&precious, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let mode = Mode::from_raw_mode(0o660);
        assert!(set_mode(&link, mode).is_err());
        let read = || std::fs::metadata(&precious).unwrap().permissions().mode() & 0o7777;
        assert_eq!(read(), 0o600);
        set_mode(&precious, mode).unwrap();
        assert_eq!(read(), 0o660);
    }

    #[test]
    fn a_path_of_the_greatest_length_can_be_used() {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let deep = folder.path().join("d".repeat(104 - folder.path().as_os_str().len()));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("s");
        let socket = UnnamedSocket::beside(&path, Some(Mode::from_raw_mode(0o660))).unwrap();
        let (_socket, file) = socket.publish(&path, Occupant::Nothing).unwrap().ok().unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop(file);
        assert!(names(&deep).is_empty());
        assert!(UnnamedSocket::beside(&deep.join("sss"), None).is_err());
    }
}
