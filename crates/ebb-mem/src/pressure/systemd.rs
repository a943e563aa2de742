//! systemd's memory pressure protocol (systemd.io, "Memory Pressure Handling"):
//! `MEMORY_PRESSURE_WATCH` names a pressure file, a FIFO or a stream socket to watch, or is
//! `/dev/null` to turn monitoring off; `MEMORY_PRESSURE_WRITE` is Base64 of what to write directly
//! after opening.
//!
//! A pressure file is written, then polled for `POLLPRI`, and never read. Data from a FIFO or socket is
//! read and discarded. Tests inject notifications through a FIFO.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::files::open;
use super::parse;
use super::psi::write_once;
use super::report::SourceKind;
use super::signals::Signals;
use super::source::{Source, SourceLost};

/// The two variables of the protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// `MEMORY_PRESSURE_WATCH`: an absolute path, or `/dev/null` to turn monitoring off.
    pub watch: OsString,
    /// `MEMORY_PRESSURE_WRITE`: Base64 of the bytes to write after opening.
    pub write: Option<OsString>,
}

impl Watch {
    /// The variables of this process's environment; `None` if there is no `MEMORY_PRESSURE_WATCH`.
    #[must_use]
    pub fn from_environment() -> Option<Self> {
        let watch = std::env::var_os("MEMORY_PRESSURE_WATCH").filter(|path| !path.is_empty())?;
        Some(Self { watch, write: std::env::var_os("MEMORY_PRESSURE_WRITE") })
    }

    /// Whether monitoring is turned off.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.watch.as_bytes() == b"/dev/null"
    }

    pub(super) fn path(&self) -> &Path {
        Path::new(&self.watch)
    }
}

/// Longest accepted request: far more than any real one.
const LONGEST_WRITE: usize = 64 * 1024;

/// Blocks of 4 KiB read from a FIFO or socket at one wake-up. The remainder waits for the next.
const READS: usize = 4;

enum WatchMode {
    /// A pressure file: polled for `POLLPRI`, never read.
    Priority,
    /// A FIFO or a socket: read, and the data discarded.
    Stream,
}

pub(super) struct Systemd {
    fd: OwnedFd,
    mode: WatchMode,
    path: PathBuf,
}

impl Systemd {
    /// Opens the file that the variables name. The error states what is wrong with it.
    pub(super) fn open(watch: &Watch) -> Result<(Self, &'static str), String> {
        let path = watch.path();
        if !path.is_absolute() {
            return Err("must be an absolute path".into());
        }
        let text = watch.write.as_deref().map_or(&[][..], OsStrExt::as_bytes);
        if text.len() > LONGEST_WRITE {
            return Err(format!("MEMORY_PRESSURE_WRITE is longer than {LONGEST_WRITE} bytes"));
        }
        let Some(bytes) = parse::base64(text) else {
            return Err("MEMORY_PRESSURE_WRITE is not valid Base64".into());
        };
        let stat = rustix::fs::stat(path).map_err(|error| error.to_string())?;
        let (fd, mode, detail) = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let flags = if bytes.is_empty() { OFlags::RDONLY } else { OFlags::RDWR };
                (open(path, flags), WatchMode::Priority, "pressure file")
            }
            // Read and write: with a writing end of our own, other writers may close theirs.
            FileType::Fifo => (open(path, OFlags::RDWR), WatchMode::Stream, "FIFO"),
            FileType::Socket => (connect(path), WatchMode::Stream, "socket"),
            _ => return Err("is neither a pressure file nor a FIFO nor a socket".into()),
        };
        let fd = fd.map_err(|error| error.to_string())?;
        if !bytes.is_empty() {
            write_once(fd.as_fd(), &bytes).map_err(|error| error.to_string())?;
        }
        let source = Self { fd, mode, path: path.to_path_buf() };
        if detail == "FIFO" && !bytes.is_empty() {
            // Without another reader, this reads back what was just written: not a notification.
            let _ = source.discard();
        }
        Ok((source, detail))
    }

    /// Reads and discards. Returns whether there was any data.
    fn discard(&self) -> Result<bool, SourceLost> {
        let mut block = [0; 4096];
        let mut any = false;
        for _ in 0..READS {
            match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut block)) {
                Ok(0) => return Err(SourceLost("the other end has closed".into())),
                Ok(read) => {
                    any = true;
                    if read < block.len() {
                        break;
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(SourceLost(error.to_string())),
            }
        }
        Ok(any)
    }
}

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

impl Source for Systemd {
    fn kind(&self) -> SourceKind {
        SourceKind::Systemd
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn wait(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let flags = match self.mode {
            WatchMode::Priority => PollFlags::PRI,
            WatchMode::Stream => PollFlags::IN,
        };
        Some((self.fd.as_fd(), flags))
    }

    fn ready(&mut self, events: PollFlags, _: Instant, s: &mut Signals) -> Result<(), SourceLost> {
        let fired = match self.mode {
            WatchMode::Priority if events.intersects(PollFlags::ERR | PollFlags::NVAL) => {
                return Err(SourceLost("the kernel removed the trigger".into()));
            }
            WatchMode::Priority => events.contains(PollFlags::PRI),
            WatchMode::Stream => self.discard()?,
        };
        if fired {
            s.notices = s.notices.saturating_add(1);
        }
        Ok(())
    }
}
