//! A listening socket of one volume.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A listening socket, non-blocking, at which a volume is served.
#[derive(Debug)]
pub struct VolumeSocket {
    socket: OwnedFd,
    path: PathBuf,
    volume: Arc<str>,
}

impl VolumeSocket {
    /// `socket` listens at `path` for frontends of `volume`.
    ///
    /// # Errors
    /// If it cannot be made non-blocking.
    pub fn new(socket: OwnedFd, path: &Path, volume: &str) -> io::Result<VolumeSocket> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(VolumeSocket { socket, path: path.to_owned(), volume: volume.into() })
    }

    /// Where its file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of its volume.
    pub fn volume(&self) -> &Arc<str> {
        &self.volume
    }
}

impl AsFd for VolumeSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
