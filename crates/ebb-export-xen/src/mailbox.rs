//! Messages to the thread that uses xenstore.

use std::sync::Weak;

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
    /// Other guests may open a volume than before.
    AllowChanged,
    /// The rings of a volume are being drained: notify its guests when they have ended.
    Withdraw(Weak<Volume>),
}

/// Wakes the thread.
pub(crate) type XenstoreMailbox = ebb_export::Mailbox<Message>;
