//! A connection to xenstore: its Unix socket, or the kernel's device.
//!
//! Invariants: requests are sent one at a time, so that the next reply belongs to the last request; watch
//! events that arrive meanwhile are queued, one for each token (for [`DIRECTORIES`]: for each device), and
//! at most [`EVENTS_MAX`] (XSA-349): beyond that, one event [`EVERYTHING`] replaces the others. Messages
//! are told apart by their type only, since the kernel's device does not set the other fields of events.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, poll};

use crate::platform::wire::{HEADER, Header, PAYLOAD, kind, refusal, watch_event};
use crate::platform::{Domain, Transaction, XenStore, XenstoreError};

/// Most queued watch events.
const EVENTS_MAX: usize = 4096;
/// The token of the event that replaces all that were not queued.
pub const EVERYTHING: &str = "*";
/// The token of watches of backend directories: one of their events is queued for each device's directory, and
/// one for each other token. So a guest takes one place for each of its devices, whatever it writes below its state.
pub const DIRECTORIES: &str = "backend";
/// Parts of the path of a device's directory: `/local/domain/D/backend/KIND/GUEST/DEVICE`.
const DIRECTORY_PARTS: usize = 8;
/// Messages that are read before an event is returned.
const MESSAGES_PER_EVENT: u32 = 256;
/// Directories of the socket unless the environment names one.
const RUN_DIRECTORIES: [&str; 2] = ["/run/xenstored", "/var/run/xenstored"];
const DEVICES: [&str; 2] = ["/dev/xen/xenbus", "/proc/xen/xenbus"];
/// How long xenstored may take to reply, milliseconds.
const REPLY_TIMEOUT_MS: i64 = 10_000;

/// See the module.
#[derive(Debug)]
pub struct XenbusConnection {
    fd: OwnedFd,
    request: u32,
    events: VecDeque<(String, String)>,
    /// Identifies the queued events: by the token, or by the path of a device's directory.
    pending: HashSet<String>,
    payload: Vec<u8>,
}

impl XenbusConnection {
    /// Connects, trying the same places in the same order as libxenstore.
    ///
    /// # Errors
    /// If there is neither a socket nor a device.
    pub fn open() -> io::Result<XenbusConnection> {
        let mut places: Vec<PathBuf> = Vec::new();
        match (std::env::var_os("XENSTORED_PATH"), std::env::var_os("XENSTORED_RUNDIR")) {
            (Some(path), _) => places.push(path.into()),
            (None, Some(folder)) => places.push(PathBuf::from(folder).join("socket")),
            (None, None) => {
                places.extend(RUN_DIRECTORIES.iter().map(|at| PathBuf::from(at).join("socket")));
            }
        }
        places.extend(DEVICES.iter().map(PathBuf::from));
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for place in places {
            match open(&place) {
                Ok(fd) => return Ok(XenbusConnection::over(fd)),
                Err(error) => last = error,
            }
        }
        let text = "cannot connect to xenstore: run on Xen with xenstored started, and give the daemon's \
                            user access to /dev/xen/xenbus (in the package a rule of udev does so)";
        Err(io::Error::new(last.kind(), format!("{text} ({last})")))
    }

    /// Uses the protocol over a descriptor.
    pub fn over(fd: OwnedFd) -> XenbusConnection {
        XenbusConnection {
            fd,
            request: 0,
            events: VecDeque::new(),
            pending: HashSet::new(),
            payload: Vec::new(),
        }
    }

    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.fd, flags)];
        let patience = rustix::time::Timespec { tv_sec: REPLY_TIMEOUT_MS / 1000, tv_nsec: 0 };
        loop {
            match poll(&mut fds, Some(&patience)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.fd, bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive(&self, mut to: &mut [u8]) -> io::Result<()> {
        while !to.is_empty() {
            match rustix::io::read(&self.fd, &mut *to) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => to = &mut to[count..],
                Err(rustix::io::Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads one message; its payload is in `self.payload`.
    fn message(&mut self) -> io::Result<Header> {
        let mut bytes = [0; HEADER];
        self.receive(&mut bytes)?;
        let header = Header::decode(&bytes);
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > 4096 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(len, 0);
        let received = self.receive(&mut payload);
        self.payload = payload;
        received.map(|()| header)
    }

    fn keep_event(&mut self) {
        let Some(mut event) = watch_event(&self.payload) else { return };
        if event.1 == DIRECTORIES {
            let end = event.0.match_indices('/').nth(DIRECTORY_PARTS - 1).map(|(at, _)| at);
            event.0.truncate(end.unwrap_or(event.0.len()));
        }
        if self.pending.contains(identity(&event)) {
            return;
        }
        if self.events.len() >= EVENTS_MAX {
            event = (String::new(), EVERYTHING.to_owned());
        }
        if self.pending.insert(identity(&event).to_owned()) {
            self.events.push_back(event);
        }
    }

    fn call(
        &mut self,
        kind: u32,
        transaction: Transaction,
        parts: &[&[u8]],
    ) -> Result<&[u8], XenstoreError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > PAYLOAD {
            return Err(XenstoreError::Refused("E2BIG".to_owned()));
        }
        self.request = self.request.wrapping_add(1);
        let header = Header {
            kind,
            request: self.request,
            transaction,
            len: u32::try_from(len).unwrap_or(u32::MAX),
        };
        let mut bytes = Vec::with_capacity(HEADER + len);
        bytes.extend_from_slice(&header.encode());
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        self.send(&bytes)?;
        loop {
            let reply = self.message()?;
            match reply.kind {
                kind::WATCH_EVENT => self.keep_event(),
                // The kernel's device replies to these itself, and without the number.
                kind::WATCH | kind::UNWATCH if reply.kind == kind && reply.request == 0 => {
                    return Ok(&self.payload);
                }
                // A late reply to an earlier request.
                _ if reply.request != self.request => {}
                kind::ERROR => return Err(refusal(&self.payload)),
                other if other == kind => return Ok(&self.payload),
                _ => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            }
        }
    }
}

fn identity((path, token): &(String, String)) -> &str {
    if token == DIRECTORIES { path } else { token }
}

fn open(place: &std::path::Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::FileTypeExt;
    if std::fs::metadata(place)?.file_type().is_socket() {
        let stream = std::os::unix::net::UnixStream::connect(place)?;
        stream.set_nonblocking(true)?;
        return Ok(stream.into());
    }
    let path = place.to_string_lossy();
    super::open_device(&path, "xenfs")
}

impl XenStore for XenbusConnection {
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, XenstoreError> {
        self.call(kind::READ, within, &[path.as_bytes(), b"\0"]).map(<[u8]>::to_vec)
    }

    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), XenstoreError> {
        let parts = [path.as_bytes(), b"\0", value.as_bytes()];
        self.call(kind::WRITE, within, &parts).map(drop)
    }

    fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, XenstoreError> {
        let names = self.call(kind::DIRECTORY, within, &[path.as_bytes(), b"\0"])?;
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), XenstoreError> {
        self.call(kind::RM, within, &[path.as_bytes(), b"\0"]).map(drop)
    }

    fn set_permissions(
        &mut self,
        within: Transaction,
        path: &str,
        owner: Domain,
        reader: Domain,
    ) -> Result<(), XenstoreError> {
        let rights = format!("n{owner}\0r{reader}\0");
        let parts = [path.as_bytes(), b"\0", rights.as_bytes()];
        self.call(kind::SET_PERMS, within, &parts).map(drop)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        let parts = [path.as_bytes(), b"\0", token.as_bytes(), b"\0"];
        self.call(kind::WATCH, 0, &parts).map(drop)
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        let parts = [path.as_bytes(), b"\0", token.as_bytes(), b"\0"];
        self.call(kind::UNWATCH, 0, &parts).map(drop)
    }

    fn begin(&mut self) -> Result<Transaction, XenstoreError> {
        let number = self.call(kind::TRANSACTION_START, 0, &[b"\0"])?;
        let text = number.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = std::str::from_utf8(text).unwrap_or_default();
        text.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData).into())
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), XenstoreError> {
        let word: &[u8] = if commit { b"T\0" } else { b"F\0" };
        self.call(kind::TRANSACTION_END, transaction, &[word]).map(drop)
    }

    fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError> {
        // Pending messages are read first, so that an event that is already queued is not queued again;
        // but a limited number, since a guest may cause events faster than this reads them.
        let mut taken = 0;
        while taken < MESSAGES_PER_EVENT && self.events.len() < EVENTS_MAX {
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            match poll(&mut fds, Some(&now)) {
                Ok(0) => break,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(io::Error::from(error).into()),
            }
            taken += 1;
            if self.message()?.kind == kind::WATCH_EVENT {
                self.keep_event();
            }
        }
        let event = self.events.pop_front();
        if let Some(event) = &event {
            self.pending.remove(identity(event));
        }
        Ok(event)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
