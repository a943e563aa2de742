//! The lock of the state directory: one daemon at a time uses it.
//!
//! It is that of `flock(2)` on `DIR/volumes`: it belongs to the open file, ends with the process however that ends, and leaves
//! nothing to clean up. No child has it, because the descriptor is closed by exec. A killed process has it until the kernel has
//! completed its last requests.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{StateDir, StateError, failed};

/// The lock of a state directory, until it is dropped. See the module.
#[derive(Debug)]
pub struct StateLock(File);

impl Drop for StateLock {
    fn drop(&mut self) {
        // Closing the file would not do it while a request that hangs keeps the files of the process open. It does not fail.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl StateDir {
    /// Creates the directory if it is absent, locks it, and removes temporary files that were left over. To be called at the
    /// start of the daemon.
    ///
    /// # Errors
    /// [`StateError::InUse`] if another process has the lock; [`StateError::Io`].
    pub fn prepare(&self) -> Result<StateLock, StateError> {
        self.create()?;
        let folder = File::open(&self.volumes).map_err(failed("open", &self.volumes))?;
        let lock = match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => StateLock(folder),
            Err(Errno::WOULDBLOCK) => {
                let path = self.volumes.parent().unwrap_or(&self.volumes);
                return Err(StateError::InUse { path: path.to_owned() });
            }
            Err(error) => return Err(failed("lock", &self.volumes)(error.into())),
        };
        self.remove_temporaries()?;
        for other in [self.groups(), self.created()] {
            if other.volumes.exists() {
                other.remove_temporaries()?;
            }
        }
        Ok(lock)
    }
}
