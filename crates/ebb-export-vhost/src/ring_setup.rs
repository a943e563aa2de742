//! What describes a virtqueue: where it is, how long it is, what was negotiated, where it goes on.

use crate::inflight::{InflightFault, QueueInflight};
use crate::memory::GuestMemory;

/// Most descriptors of a queue.
pub(crate) const SIZE_MAX: u16 = 32768;

/// Where a queue is: addresses of the VMM's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAddresses {
    /// The descriptors: a table (split), or the ring (packed).
    pub(crate) descriptors: u64,
    /// What the driver writes: the available ring, or its event suppression.
    pub(crate) driver: u64,
    /// What the device writes: the used ring, or its event suppression.
    pub(crate) device: u64,
}

/// What driver and device have agreed on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RingFeatures {
    /// `VIRTIO_F_RING_PACKED`.
    pub(crate) packed: bool,
    /// `VIRTIO_F_INDIRECT_DESC`.
    pub(crate) indirect: bool,
    /// `VIRTIO_F_EVENT_IDX`.
    pub(crate) event_idx: bool,
}

/// A queue as a frontend describes it.
pub(crate) struct RingSetup<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) addresses: RingAddresses,
    /// Its descriptors.
    pub(crate) size: u16,
    pub(crate) features: RingFeatures,
    /// Of `VHOST_USER_SET_VRING_BASE`; ignored if the inflight region was in use already. A split queue: the next
    /// available index. A packed queue: bits 0 to 14 the available index, 15 its wrap counter, 16 to 30 the used index, 31
    /// its wrap counter.
    pub(crate) base: u32,
    /// Where requests in flight are noted for a successor.
    pub(crate) inflight: Option<QueueInflight>,
}

/// Why a queue cannot be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SetupFault {
    #[error("a queue has an invalid number of descriptors")]
    Size,
    #[error("a ring is not aligned, or no region of memory has all of it")]
    Address,
    #[error("the base of a ring is outside of it")]
    Base,
    #[error(transparent)]
    Inflight(#[from] InflightFault),
}
