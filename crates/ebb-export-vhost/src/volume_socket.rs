//! A listening socket of one volume.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_volume::LogLimit;

/// Logged connections to one volume per period.
const CONNECTED_LINES: u32 = 20;
const CONNECTED_PERIOD: Duration = Duration::from_secs(10);

/// A listening socket, non-blocking, at which a volume is served.
#[derive(Debug)]
pub struct VolumeSocket {
    socket: OwnedFd,
    path: PathBuf,
    volume: Arc<str>,
    /// Limits the log lines about connections: a frontend that connects again and again must not fill the log.
    pub(crate) log_limit: Arc<LogLimit>,
}

impl VolumeSocket {
    /// `socket` listens at `path` for frontends of `volume`.
    ///
    /// # Errors
    /// If it cannot be made non-blocking.
    pub fn new(socket: OwnedFd, path: &Path, volume: &str) -> io::Result<VolumeSocket> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let log_limit = Arc::new(LogLimit::new(CONNECTED_LINES, CONNECTED_PERIOD));
        Ok(VolumeSocket { socket, path: path.to_owned(), volume: volume.into(), log_limit })
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
