//! What the backend needs of Xen, as small traits: grants, event channels and xenstore.
//!
//! [`host`] is the real thing, over `/dev/xen/gntdev`, `/dev/xen/evtchn` and xenstore's socket or
//! device. With the feature `shm` there is another one within the process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use ebb_io::Fd;

use crate::guest_memory::Mapping;

pub mod evtchn;
pub mod gntdev;
pub mod wire;
pub mod xenbus;

/// A domain's number.
pub type Domain = u16;

/// One copy by the hypervisor between memory of ours and a page a guest granted, laid out as Xen's
/// `gnttab_copy` segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    source: u64,
    target: u64,
    len: u16,
    flags: u16,
    status: i16,
    pad: u16,
}

/// The source is a grant.
const SOURCE_IS_GRANT: u16 = 1;
/// The target is a grant.
const TARGET_IS_GRANT: u16 = 2;

/// A granted page as one side of a copy.
fn foreign(domain: Domain, gref: u32, offset: u16) -> u64 {
    u64::from(gref) | u64::from(offset) << 32 | u64::from(domain) << 48
}

impl CopyOp {
    /// From `offset` in a granted page to memory of ours.
    pub fn from_guest(domain: Domain, gref: u32, offset: u16, len: u16, to: *mut u8) -> CopyOp {
        let source = foreign(domain, gref, offset);
        let target = to.expose_provenance() as u64;
        CopyOp { source, target, len, flags: SOURCE_IS_GRANT, status: 0, pad: 0 }
    }

    /// From memory of ours to `offset` in a granted page.
    pub fn to_guest(domain: Domain, gref: u32, offset: u16, len: u16, from: *const u8) -> CopyOp {
        let target = foreign(domain, gref, offset);
        let source = from.expose_provenance() as u64;
        CopyOp { source, target, len, flags: TARGET_IS_GRANT, status: 0, pad: 0 }
    }

    /// Whether it was done.
    pub fn is_done(&self) -> bool {
        self.status == 0
    }

    /// Says how it ended; 0 is well.
    pub fn set_status(&mut self, status: i16) {
        self.status = status;
    }

    /// Its parts: grant, offset in the page, bytes, our memory, and whether it goes to the guest.
    pub fn parts(&self) -> (u32, usize, usize, *mut u8, bool) {
        let to_guest = self.flags & TARGET_IS_GRANT != 0;
        let (far, near) =
            if to_guest { (self.target, self.source) } else { (self.source, self.target) };
        let gref = u32::try_from(far & 0xffff_ffff).unwrap_or_default();
        let offset = usize::try_from(far >> 32 & 0xffff).unwrap_or_default();
        let near = std::ptr::with_exposed_provenance_mut(usize::try_from(near).unwrap_or_default());
        (gref, offset, usize::from(self.len), near, to_guest)
    }
}

/// The pages one guest granted.
pub trait Grants: Send + Sync + fmt::Debug {
    /// Maps pages, one behind the other.
    ///
    /// # Errors
    /// If one of them cannot be mapped none is.
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Mapping>;

    /// Does copies; each says how it ended.
    ///
    /// # Errors
    /// When copying as such does not work; then any may have been done.
    ///
    /// # Safety
    /// Our side of each copy must be valid for its length, and nobody else may use it meanwhile.
    unsafe fn copy(&self, operations: &mut [CopyOp]) -> io::Result<()>;
}

/// An event channel to a guest. An event stays masked from the moment it is read until the
/// [`Channel::token`] is written: whoever floods it is not heard meanwhile.
pub trait Channel: Send + fmt::Debug {
    /// Is readable while an event waits; does not block.
    fn fd(&self) -> Fd;

    /// What is written to let the next event through; as many bytes are read when one has come.
    fn token(&self) -> &[u8];

    /// Sends an event to the guest.
    ///
    /// # Errors
    /// Those of the system, or a guest that is gone.
    fn notify(&self) -> io::Result<()>;
}

/// What went wrong with xenstore.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such node.
    #[error("no such node")]
    Missing,
    /// Somebody else changed what the transaction saw: all of it must be done again.
    #[error("the transaction must be done again")]
    Again,
    /// xenstored said no.
    #[error("xenstored answered {0}")]
    Refused(String),
    /// The connection is gone, or does not speak the protocol.
    #[error("the connection to xenstored broke: is it running?")]
    Io(#[from] io::Error),
}

/// A transaction; 0 is none.
pub type Transaction = u32;

/// A connection to xenstore. Paths are absolute.
pub trait XenStore: Send {
    /// The value of a node.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, StoreError>;
    /// Sets a node, and makes it with all above it if it is not there.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), StoreError>;
    /// The names of a node's children.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, StoreError>;
    /// Removes a node and all below it.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), StoreError>;
    /// Gives a node to `owner`, with `reader` allowed to read it.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn give(
        &mut self,
        within: Transaction,
        path: &str,
        owner: Domain,
        reader: Domain,
    ) -> Result<(), StoreError>;
    /// Has changes of a node and all below it told under `token`; the first time at once.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;
    /// Ends a watch.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;
    /// Begins a transaction.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn begin(&mut self) -> Result<Transaction, StoreError>;
    /// Ends it; with `commit` all of it counts.
    ///
    /// # Errors
    /// [`StoreError::Again`] if it must be done again.
    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError>;
    /// The next watch that fired (its path and its token), without waiting.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn event(&mut self) -> Result<Option<(String, String)>, StoreError>;
    /// Is readable while something waits.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// Where grants, event channels and xenstore come from.
pub trait Platform: Send + Sync {
    /// The grants of a guest.
    ///
    /// # Errors
    /// Those of the system; the message says what is missing.
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>>;
    /// Binds to a guest's event channel.
    ///
    /// # Errors
    /// Those of the system, or a port the guest did not offer.
    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>>;
    /// A new connection to xenstore.
    ///
    /// # Errors
    /// Those of the system; the message says what is missing.
    fn xenstore(&self) -> io::Result<Box<dyn XenStore>>;
    /// A file there is once on the host and its path: the backend that serves the host's guests locks it. None by default.
    ///
    /// # Errors
    /// Those of the system; the message says what is missing.
    fn lock_file(&self) -> io::Result<Option<(File, PathBuf)>> {
        Ok(None)
    }
}

/// The machine this runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Platform for Host {
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>> {
        Ok(gntdev::Gntdev::open(guest)?)
    }

    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>> {
        Ok(Box::new(evtchn::Evtchn::bind(guest, port)?))
    }

    fn xenstore(&self) -> io::Result<Box<dyn XenStore>> {
        Ok(Box::new(xenbus::Connection::open()?))
    }

    /// A device of Xen's: each daemon has it, whatever its directories, its user and its mounts are.
    fn lock_file(&self) -> io::Result<Option<(File, PathBuf)>> {
        Ok(Some((evtchn::open()?.into(), evtchn::DEVICE.into())))
    }
}

/// Opens a device of Xen's; the error says what to do.
pub(crate) fn open_device(path: &str, module: &str) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path);
    opened.map(Into::into).map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::NotFound => {
                format!("{path} is missing: run on Xen, and load the module {module}")
            }
            io::ErrorKind::PermissionDenied => format!("{path}: give the daemon's user access"),
            _ => format!("cannot open {path}"),
        };
        io::Error::new(error.kind(), format!("{remedy} ({error})"))
    })
}
