//! What the control thread tells a running queue, and what a queue tells the control thread.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ebb_io::Fd;
use ebb_volume::Volume;
use event_listener::Event;

use crate::memory::GuestMemory;
use crate::volume_socket::VolumeSocket;

/// A change of a running queue.
#[derive(Debug)]
pub(crate) enum QueueCommand {
    /// Notify the guest through this descriptor, or not at all.
    SetCall(Option<Fd>),
    /// Use this table for further requests.
    SetMemory(Arc<GuestMemory>),
    /// Consume no more requests; end when those in flight have completed.
    Stop,
}

/// The commands of one queue, in order.
#[derive(Debug, Default)]
pub(crate) struct QueueCommands {
    list: Mutex<Vec<QueueCommand>>,
    /// [`QueueCommand::Stop`] was sent: seen before the command is taken, so that a frontend that has the reply to its
    /// message sees no further request consumed.
    stopped: AtomicBool,
    event: Event,
}

impl QueueCommands {
    /// Passes a command to the queue. It replaces one of its kind that the queue has not taken, so that a frontend that sends
    /// more than the queue can follow fills no memory.
    pub(crate) fn send(&self, command: QueueCommand) {
        if matches!(command, QueueCommand::Stop) {
            self.stopped.store(true, Ordering::Release);
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|other| std::mem::discriminant(other) != std::mem::discriminant(&command));
        list.push(command);
        drop(list);
        self.event.notify(usize::MAX);
    }

    /// Whether the queue is to consume no more requests.
    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn take(&self) -> Vec<QueueCommand> {
        std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for commands.
    pub(crate) async fn next(&self) -> Vec<QueueCommand> {
        loop {
            let listener = self.event.listen();
            let commands = self.take();
            if !commands.is_empty() {
                return commands;
            }
            listener.await;
        }
    }
}

/// Identifies a frontend's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost-{}", self.0)
    }
}

/// How a queue ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEnd {
    pub(crate) connection: ConnectionId,
    pub(crate) index: u16,
    /// The base from which another backend continues, as GET_VRING_BASE returns it.
    pub(crate) base: u32,
    /// Nothing is left in flight.
    pub(crate) complete: bool,
}

pub(crate) enum ControlMessage {
    /// A queue has ended: its requests have completed.
    Ended(QueueEnd),
    /// A ring of this connection is not served any more.
    Broken(ConnectionId, u16),
    /// A notification of this connection's guest held a worker: end it.
    NotifyFailed(ConnectionId),
    /// The guest's memory was truncated.
    MemoryLost(ConnectionId),
    /// A request or a queue has released a table of regions that was replaced.
    MemoryReleased(ConnectionId),
    /// The queues of a volume are being drained: end its connections when they have ended.
    Withdraw(Weak<Volume>),
    /// Drain the queues of this connection, and end it when they have ended.
    Disconnect(ConnectionId),
    /// Other frontends may open a volume than before: end the connections of those that may not.
    AllowChanged,
    /// Volumes were resized: tell their guests.
    Resized,
    /// Accept frontends at this socket.
    Listen(VolumeSocket),
    /// Serve the volume of this name to the frontend at the other end.
    Connected(OwnedFd, Arc<str>),
    /// Close the socket at this path.
    Unlisten(PathBuf),
    /// All queues are being drained: end when they have ended.
    Stop,
    /// End now, even with requests in flight.
    Abandon,
}

/// Wakes the control thread.
pub(crate) type ControlMailbox = ebb_export::Mailbox<ControlMessage>;
