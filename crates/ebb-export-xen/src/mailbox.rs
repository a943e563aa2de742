//! What other threads tell the one that speaks to xenstore, and how they wake it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use crate::device::Key;
use crate::device_shared::DeviceShared;
use crate::served::Served;

pub(crate) enum Message {
    /// A ring has ended.
    Ended(Key, u64),
    /// All rings are being wound up: end with them. Guests stay connected.
    Leave,
    /// End now, whatever is still under way.
    GiveUp,
    /// A volume is there that was not: look at all devices again.
    Arrived,
    /// The rings of a volume are being wound up: tell its guests when they have ended.
    Withdraw(String),
}

/// Wakes the thread that polls the other end.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: Sender<Message>,
    bell: Arc<OwnedFd>,
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<(Mailbox, Receiver<Message>)> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = Arc::new(rustix::event::eventfd(0, flags)?);
        let (sender, receiver) = std::sync::mpsc::channel();
        Ok((Mailbox { sender, bell }, receiver))
    }

    pub(crate) fn send(&self, message: Message) {
        // There is no receiver any more once the thread has ended.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }

    /// Is readable while there are messages.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// What is sent from now on rings again.
    pub(crate) fn answer_bell(&self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.bell, &mut counter);
    }
}

/// Reports the end of a ring, also of one whose worker dropped it.
pub(crate) struct EndOfRing {
    pub(crate) mailbox: Mailbox,
    pub(crate) served: Arc<Served>,
    pub(crate) key: Key,
    pub(crate) disk: Arc<DeviceShared>,
    pub(crate) generation: u64,
}

impl Drop for EndOfRing {
    fn drop(&mut self) {
        self.served.ring_ended(&self.disk);
        self.mailbox.send(Message::Ended(self.key.clone(), self.generation));
    }
}
