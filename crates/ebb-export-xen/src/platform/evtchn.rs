//! Event channels over `/dev/xen/evtchn` (Linux, `include/uapi/xen/evtchn.h`), one descriptor for each.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use ebb_io::{Fd, fd_from};

use crate::platform::{Channel, Domain, open_device};

const BIND_INTERDOMAIN: libc::c_ulong = 0x0008_4501;
pub(super) const NOTIFY: libc::c_ulong = 0x0004_4504;
const RESTRICT_DOMID: libc::c_ulong = 0x0002_4506;

#[repr(C)]
struct BindArguments {
    domain: u32,
    port: u32,
}

/// The device.
pub(crate) const DEVICE: &str = "/dev/xen/evtchn";

/// Opens the device.
pub(crate) fn open() -> io::Result<OwnedFd> {
    open_device(DEVICE, "xen-evtchn")
}

/// A bound event channel. Dropping it unbinds.
#[derive(Debug)]
pub struct Evtchn {
    fd: Fd,
    port: u32,
    /// The port's bytes.
    token: [u8; 4],
}

impl Evtchn {
    /// Binds to `port` of `guest`.
    ///
    /// # Errors
    /// Errors of the system, also if the guest has not allocated the port for this domain.
    pub fn bind(guest: Domain, port: u32) -> io::Result<Evtchn> {
        let fd = fd_from(open()?);
        if guest != 0 {
            // Restricts the descriptor to this guest. Kernels without this ioctl work without the restriction.
            // SAFETY: takes a pointer to 16 bits, which live for the call.
            unsafe { libc::ioctl(fd.as_raw_fd(), RESTRICT_DOMID, &raw const guest) };
        }
        let mut order = BindArguments { domain: guest.into(), port };
        // SAFETY: takes this structure, which lives for the call.
        let local = unsafe { libc::ioctl(fd.as_raw_fd(), BIND_INTERDOMAIN, &raw mut order) };
        let port = u32::try_from(local).map_err(|_| io::Error::last_os_error())?;
        Ok(Evtchn { fd, port, token: port.to_ne_bytes() })
    }
}

impl Channel for Evtchn {
    fn fd(&self) -> Fd {
        self.fd.clone()
    }

    fn token(&self) -> &[u8] {
        &self.token
    }

    fn notify(&self) -> io::Result<()> {
        let mut port = self.port;
        // SAFETY: takes a pointer to 32 bits, which live for the call.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), NOTIFY, &raw mut port) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}
