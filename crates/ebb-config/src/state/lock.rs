//! The lock of the state directory: one daemon at a time uses it.
//!
//! It is that of `flock(2)` on `DIR/volumes`: it belongs to the open file, ends with the process however that ends, and leaves
//! nothing to clean up. No child has it, because the descriptor is closed by exec. A killed process has it until the kernel has
//! completed its last requests.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{StateDir, StateError, StateFolder, failed};

/// The lock of a state directory, until it is dropped. See the module.
#[derive(Debug)]
pub struct StateLock {
    folder: File,
    failure: Option<StateError>,
}

impl Drop for StateLock {
    fn drop(&mut self) {
        // Closing the file would not do it while a request that hangs keeps the files of the process open. It does not fail.
        let _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

impl StateLock {
    /// Why the directory could not be made ready for this daemon. The next change of a file makes
    /// its folder stable.
    pub fn failure(&self) -> Option<&StateError> {
        self.failure.as_ref()
    }
}

impl StateDir {
    /// Creates the directory if it is absent, locks it, removes temporary files that were left
    /// over, and makes its content stable. A daemon that was killed may have changed it, and a
    /// power cut must not take back a file that this one finds. To be called at the start of the
    /// daemon. A failure after the lock is in [`StateLock::failure`]: the lock is kept, since no
    /// other daemon may use the directory then, either.
    ///
    /// # Errors
    /// [`StateError::InUse`] if another process has the lock; [`StateError::Io`].
    pub fn prepare(&self) -> Result<StateLock, StateError> {
        self.create()?;
        let folder = File::open(&self.volumes).map_err(failed("open", &self.volumes))?;
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let path = self.volumes.parent().unwrap_or(&self.volumes);
                return Err(StateError::InUse { path: path.to_owned() });
            }
            Err(error) => return Err(failed("lock", &self.volumes)(error.into())),
        }
        let failure = self.tidy().err();
        Ok(StateLock { folder, failure })
    }

    /// Removes temporary files, and makes the others stable.
    fn tidy(&self) -> Result<(), StateError> {
        self.remove_temporaries()?;
        StateFolder(&self.volumes).make_stable().map_err(failed("flush", &self.volumes))?;
        for other in [self.groups(), self.created()] {
            if other.volumes.exists() {
                other.remove_temporaries()?;
                let folder = StateFolder(&other.volumes);
                folder.make_stable().map_err(failed("flush", &other.volumes))?;
            }
        }
        Ok(())
    }
}
