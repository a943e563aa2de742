//! The lock of a file, once it is open.

use super::FileStore;

impl FileStore {
    /// Lets other processes open the file to read it: nothing is written to it from now on.
    ///
    /// # Errors
    /// Those of `flock`.
    pub fn share_lock(&self) -> std::io::Result<()> {
        Ok(rustix::fs::flock(&self.fd, rustix::fs::FlockOperation::NonBlockingLockShared)?)
    }

    /// Releases the lock. If that fails, it is released with the descriptor.
    pub(super) fn unlock(&self) {
        let _ = rustix::fs::flock(&self.fd, rustix::fs::FlockOperation::Unlock);
    }
}
