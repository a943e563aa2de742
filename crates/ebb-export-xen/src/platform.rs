//! Xen as the backend uses it, as small traits: grants, event channels and xenstore.
//!
//! [`XenHost`] is the real implementation, over `/dev/xen/gntdev`, `/dev/xen/evtchn` and xenstore's
//! socket or device. The feature `shm` adds another one within the process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use ebb_io::Fd;

use ebb_guest_ring::Mapping;

pub mod evtchn;
pub mod gntdev;
pub mod wire;
pub mod xenbus;

/// A domain's number.
pub type Domain = u16;

/// One copy by the hypervisor between local memory and a page that a guest granted, laid out as Linux's
/// `struct gntdev_grant_copy_segment` (`include/uapi/xen/gntdev.h`).
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

/// A granted page as the source or target of a copy.
fn foreign(domain: Domain, gref: u32, offset: u16) -> u64 {
    u64::from(gref) | u64::from(offset) << 32 | u64::from(domain) << 48
}

impl CopyOp {
    /// A copy from `offset` in a granted page to local memory.
    pub fn from_guest(domain: Domain, gref: u32, offset: u16, len: u16, to: *mut u8) -> CopyOp {
        let source = foreign(domain, gref, offset);
        let target = to.expose_provenance() as u64;
        CopyOp { source, target, len, flags: SOURCE_IS_GRANT, status: 0, pad: 0 }
    }

    /// A copy from local memory to `offset` in a granted page.
    pub fn to_guest(domain: Domain, gref: u32, offset: u16, len: u16, from: *const u8) -> CopyOp {
        let target = foreign(domain, gref, offset);
        let source = from.expose_provenance() as u64;
        CopyOp { source, target, len, flags: TARGET_IS_GRANT, status: 0, pad: 0 }
    }

    /// Whether it succeeded.
    pub fn is_done(&self) -> bool {
        self.status == 0
    }

    /// Sets its status; 0 is success.
    #[cfg(feature = "shm")]
    pub fn set_status(&mut self, status: i16) {
        self.status = status;
    }

    /// Its fields: grant, offset in the page, length, local memory, and whether it copies to the guest.
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

/// The pages that one guest granted.
pub trait Grants: Send + Sync + fmt::Debug {
    /// Maps pages at consecutive addresses.
    ///
    /// # Errors
    /// If one of them cannot be mapped; then none is.
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Mapping>;

    /// Carries out copies and sets the status of each.
    ///
    /// # Errors
    /// When the call fails as a whole; then any of the copies may have been done.
    ///
    /// # Safety
    /// The local memory of each copy must be valid for its length and not be used meanwhile.
    unsafe fn copy(&self, operations: &mut [CopyOp]) -> io::Result<()>;
}

/// An event channel to a guest. An event stays masked from when it is read until the
/// [`Channel::token`] is written: a guest that floods it with events causes no wakeups meanwhile.
pub trait Channel: Send + fmt::Debug {
    /// A descriptor that is readable while an event is pending; reading it does not block.
    fn fd(&self) -> Fd;

    /// What is written to unmask the next event; reading an event returns as many bytes.
    fn token(&self) -> &[u8];

    /// Sends an event to the guest.
    ///
    /// # Errors
    /// Errors of the system, also if the guest no longer exists.
    fn notify(&self) -> io::Result<()>;
}

/// Errors of xenstore.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XenstoreError {
    /// There is no such node.
    #[error("no such node")]
    Missing,
    /// The transaction conflicts with another change and has to be repeated (`EAGAIN`).
    #[error("the transaction conflicts with another one and must be repeated")]
    Again,
    /// xenstored refused the request.
    #[error("xenstored refused the request with {0}")]
    Refused(String),
    /// The connection is broken, or does not follow the protocol.
    #[error("the connection to xenstored is broken: check that xenstored is running")]
    Io(#[from] io::Error),
}

/// A transaction; 0 is none.
pub type Transaction = u32;

/// A connection to xenstore. Paths are absolute.
pub trait XenStore: Send {
    /// The value of a node.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, XenstoreError>;
    /// Sets a node; creates it and its parents if they do not exist.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), XenstoreError>;
    /// The names of a node's children.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, XenstoreError>;
    /// Removes a node and all below it.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), XenstoreError>;
    /// Sets the permissions of a node: `owner` owns it, and `reader` may read it.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn set_permissions(
        &mut self,
        within: Transaction,
        path: &str,
        owner: Domain,
        reader: Domain,
    ) -> Result<(), XenstoreError>;
    /// Watches a node and all nodes below it: changes fire events with `token`, and one is fired at once.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError>;
    /// Ends a watch.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError>;
    /// Begins a transaction.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn begin(&mut self) -> Result<Transaction, XenstoreError>;
    /// Ends a transaction; with `commit` its changes take effect.
    ///
    /// # Errors
    /// [`XenstoreError::Again`] if it must be repeated.
    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), XenstoreError>;
    /// The next watch event (its path and token), without waiting.
    ///
    /// # Errors
    /// See [`XenstoreError`].
    fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError>;
    /// A descriptor that is readable while data is pending.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// Where grants, event channels and xenstore come from.
pub trait Platform: Send + Sync {
    /// The grants of a guest.
    ///
    /// # Errors
    /// Errors of the system; the message says what is missing.
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>>;
    /// Binds a guest's event channel.
    ///
    /// # Errors
    /// Errors of the system, or a port the guest did not offer.
    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>>;
    /// A new connection to xenstore.
    ///
    /// # Errors
    /// Errors of the system; the message says what is missing.
    fn xenstore(&self) -> io::Result<Box<dyn XenStore>>;
    /// A file that exists once per host, and its path: the backend that serves the host's guests locks it. None by default.
    ///
    /// # Errors
    /// Errors of the system; the message says what is missing.
    fn lock_file(&self) -> io::Result<Option<(File, PathBuf)>> {
        Ok(None)
    }
}

/// The host this runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct XenHost;

impl Platform for XenHost {
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>> {
        Ok(gntdev::Gntdev::open(guest)?)
    }

    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>> {
        Ok(Box::new(evtchn::Evtchn::bind(guest, port)?))
    }

    fn xenstore(&self) -> io::Result<Box<dyn XenStore>> {
        Ok(Box::new(xenbus::XenbusConnection::open()?))
    }

    /// A device of Xen's: the same for all daemons, whatever their directories, users and mounts are.
    fn lock_file(&self) -> io::Result<Option<(File, PathBuf)>> {
        Ok(Some((evtchn::open()?.into(), evtchn::DEVICE.into())))
    }
}

/// Opens a device of Xen's; the error message says what to do.
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
                format!("{path} is missing: run on Xen, and load the kernel module {module}")
            }
            io::ErrorKind::PermissionDenied => {
                format!("cannot open {path}: give the daemon's user access to it")
            }
            _ => format!("cannot open {path}"),
        };
        io::Error::new(error.kind(), format!("{remedy} ({error})"))
    })
}
