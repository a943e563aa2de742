//! Messages to a thread that polls descriptors, and the eventfd that wakes it: for the control thread of an export.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// Sends messages to the thread that has the other end. Cheap to clone.
pub struct Mailbox<M> {
    sender: Sender<M>,
    wakeup: Arc<OwnedFd>,
}

impl<M> Mailbox<M> {
    /// A mailbox, and the end from which its thread takes the messages.
    ///
    /// # Errors
    /// Of the system call.
    pub fn new() -> std::io::Result<(Mailbox<M>, Receiver<M>)> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wakeup = Arc::new(rustix::event::eventfd(0, flags)?);
        let (sender, receiver) = std::sync::mpsc::channel();
        Ok((Mailbox { sender, wakeup }, receiver))
    }

    /// Sends a message and wakes the thread; without effect once the thread has ended.
    pub fn send(&self, message: M) {
        // The receiver is dropped when the thread ends.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&*self.wakeup, &1u64.to_ne_bytes());
    }

    /// A descriptor that is readable while there are messages.
    #[must_use]
    pub fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Makes the descriptor unreadable until the next message.
    pub fn clear_wakeup(&self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.wakeup, &mut counter);
    }
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Mailbox<M> {
        Mailbox { sender: self.sender.clone(), wakeup: self.wakeup.clone() }
    }
}

impl<M> fmt::Debug for Mailbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").finish_non_exhaustive()
    }
}
