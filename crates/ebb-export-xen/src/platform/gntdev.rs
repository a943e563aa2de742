//! Grants over `/dev/xen/gntdev` (Linux, `include/uapi/xen/gntdev.h`).
//!
//! Invariants: one descriptor for each guest; a mapping is undone in the order that the device requires
//! (the memory first, then the reservation); a grant that fails only fails its own call.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::PAGE_BYTES;
use crate::platform::{CopyOp, Domain, Grants, open_device};
use ebb_guest_ring::{Mapping, Unmap};

const MAP_GRANT_REF: libc::c_ulong = 0x0018_4700;
const UNMAP_GRANT_REF: libc::c_ulong = 0x0010_4701;
const GRANT_COPY: libc::c_ulong = 0x0010_4708;

/// Grants in one call: the pages of the largest ring, or of one request's descriptors.
pub const MAX_MAP: usize = 64;
/// How often mapping a page that is paged out is retried, a millisecond apart.
const RETRIES: u32 = 10;

#[repr(C)]
struct MapArguments {
    count: u32,
    pad: u32,
    index: u64,
    refs: [[u32; 2]; MAX_MAP],
}

#[repr(C)]
struct UnmapArguments {
    index: u64,
    count: u32,
    pad: u32,
}

#[repr(C)]
struct CopyArguments {
    count: u32,
    pad: u32,
    segments: *mut CopyOp,
}

/// The device, for the grants of one guest.
#[derive(Debug)]
pub struct Gntdev {
    fd: OwnedFd,
    guest: Domain,
    itself: std::sync::Weak<Gntdev>,
}

impl Gntdev {
    /// Opens the device for the grants of `guest`.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn open(guest: Domain) -> io::Result<Arc<Gntdev>> {
        let fd = open_device("/dev/xen/gntdev", "xen-gntdev")?;
        Ok(Arc::new_cyclic(|itself| Gntdev { fd, guest, itself: itself.clone() }))
    }

    fn call<T>(&self, number: libc::c_ulong, argument: *mut T) -> io::Result<()> {
        // SAFETY: each number is called with the structure it takes, which lives for the call.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), number, argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    fn unreserve(&self, index: u64, bytes: usize) {
        let count = u32::try_from(bytes / PAGE_BYTES).unwrap_or_default();
        let mut order = UnmapArguments { index, count, pad: 0 };
        // It cannot fail for a reservation that exists, and nothing could be done about it.
        let _ = self.call(UNMAP_GRANT_REF, &raw mut order);
    }

    fn map_reserved(&self, index: u64, bytes: usize, writable: bool) -> io::Result<NonNull<u8>> {
        let offset = libc::off_t::try_from(index).map_err(io::Error::other)?;
        let protection =
            if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: the kernel chooses the place; the result is checked.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                self.fd.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn try_map(&self, grefs: &[u32], writable: bool) -> io::Result<(NonNull<u8>, usize, u64)> {
        let mut map = MapArguments {
            count: u32::try_from(grefs.len()).unwrap_or(u32::MAX),
            pad: 0,
            index: 0,
            refs: [[0; 2]; MAX_MAP],
        };
        for (place, gref) in map.refs.iter_mut().zip(grefs) {
            *place = [u32::from(self.guest), *gref];
        }
        self.call(MAP_GRANT_REF, &raw mut map)?;
        let bytes = grefs.len() * PAGE_BYTES;
        match self.map_reserved(map.index, bytes, writable) {
            Ok(base) => Ok((base, bytes, map.index)),
            Err(error) => {
                self.unreserve(map.index, bytes);
                Err(error)
            }
        }
    }
}

impl Grants for Gntdev {
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Mapping> {
        if grefs.is_empty() || grefs.len() > MAX_MAP {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut left = RETRIES;
        let (base, bytes, index) = loop {
            match self.try_map(grefs, writable) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && left > 0 => {
                    left -= 1;
                    std::thread::park_timeout(std::time::Duration::from_millis(1));
                }
                outcome => break outcome?,
            }
        };
        let owner = self.itself.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: just mapped for this `Mapping` only, page aligned, and `unmap` below ends it.
        Ok(unsafe { Mapping::new(base, bytes, index, owner) })
    }

    unsafe fn copy(&self, operations: &mut [CopyOp]) -> io::Result<()> {
        let count = u32::try_from(operations.len()).map_err(io::Error::other)?;
        let mut copies = CopyArguments { count, pad: 0, segments: operations.as_mut_ptr() };
        self.call(GRANT_COPY, &raw mut copies)
    }
}

impl Unmap for Gntdev {
    fn unmap(&self, base: NonNull<u8>, bytes: usize, cookie: u64) {
        // SAFETY: the mapping was made here, and its owner is being dropped.
        unsafe { libc::munmap(base.as_ptr().cast(), bytes) };
        self.unreserve(cookie, bytes);
    }
}

#[cfg(test)]
mod tests {
    use ebb_sandbox::{CallRule, WORKER_CALLS};

    use super::*;
    use crate::platform::evtchn::NOTIFY;

    #[test]
    fn workers_may_make_the_requests_of_their_rings() {
        let of_ioctl = WORKER_CALLS.iter().find(|call| call.name == "ioctl").map(|call| call.rule);
        let Some(CallRule::Numbers(1, allowed)) = of_ioctl else { panic!("{of_ioctl:?}") };
        for request in [MAP_GRANT_REF, UNMAP_GRANT_REF, GRANT_COPY, NOTIFY] {
            assert!(allowed.contains(&request), "{request:x}");
        }
    }
}
