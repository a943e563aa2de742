//! The lock of a file, once it is open.

use ebb_sandbox::threads;

use super::FileStore;

impl FileStore {
    /// Lets other processes open the file to read it: nothing is written to it from now on.
    ///
    /// # Errors
    /// Those of `flock`.
    pub fn share_lock(&self) -> std::io::Result<()> {
        let fd = self.fd.clone();
        // Not by a worker itself, which may not.
        let share =
            move || rustix::fs::flock(&fd, rustix::fs::FlockOperation::NonBlockingLockShared);
        Ok(threads::call(share)??)
    }

    /// Releases the lock. If that fails, it is released with the descriptor.
    pub(super) fn unlock(&self) {
        let fd = self.fd.clone();
        let unlock = move || rustix::fs::flock(&fd, rustix::fs::FlockOperation::Unlock);
        let _ = threads::call(unlock);
    }
}
