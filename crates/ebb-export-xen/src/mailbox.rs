//! Messages to the thread that uses xenstore, and the eventfd that wakes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Weak};

use ebb_volume::Volume;

use crate::device::DeviceKey;

pub(crate) enum Message {
    /// A ring has ended.
    Ended(DeviceKey, u64),
    /// All rings are being drained: end when they have ended. Guests stay connected.
    Stop,
    /// End now, even with requests in flight.
    Abandon,
    /// An awaited volume was added: check all devices again.
    VolumeAdded,
    /// The rings of a volume are being drained: notify its guests when they have ended.
    Withdraw(Weak<Volume>),
}

/// Wakes the thread that polls the other end.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Message>,
    wakeup: Arc<OwnedFd>,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<(Mailbox, Receiver<Message>)> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wakeup = Arc::new(rustix::event::eventfd(0, flags)?);
        let (sender, receiver) = std::sync::mpsc::channel();
        Ok((Mailbox { sender, wakeup }, receiver))
    }

    pub(crate) fn send(&self, message: Message) {
        // The receiver is dropped when the thread ends.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&*self.wakeup, &1u64.to_ne_bytes());
    }

    /// A descriptor that is readable while there are messages.
    pub(crate) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Makes the descriptor unreadable until the next message.
    pub(crate) fn clear_wakeup(&self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.wakeup, &mut counter);
    }
}
