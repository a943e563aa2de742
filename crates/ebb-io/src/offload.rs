//! System calls the ring has no operation for, off the worker's thread.
//!
//! For rare calls that may block (`lseek` for holes, `ioctl`, opening files): never on the path of
//! a read or a write. At most [`AT_ONCE`] run for one worker; more wait in line.

use crate::worker::Io;

/// Offloaded calls of one worker at a time.
pub(crate) const AT_ONCE: usize = 8;

impl Io {
    /// Runs `call` on a helper thread and waits for its result without blocking the worker. A
    /// dropped future does not stop a call that has begun.
    pub async fn offload<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let _turn = self.offload_budget().take(1).await;
        blocking::unblock(call).await
    }
}
