//! One queue of a device, as the frontend configures it.

use std::sync::Arc;

use ebb_guest_ring::MemoryPlace;
use ebb_io::Fd;
use ebb_vhost_proto::VringAddress;

use crate::commands::QueueCommands;
use crate::inflight::InflightRecord;

/// By what the guest notifies the backend.
#[derive(Clone, Debug, Default)]
pub(crate) enum Kick {
    /// Not configured: the queue is stopped.
    #[default]
    Unset,
    /// By nothing: the ring is polled.
    Polled,
    Event(Fd),
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    /// Descriptors; 0: not configured.
    pub(crate) size: u16,
    pub(crate) base: u32,
    pub(crate) addresses: Option<VringAddress>,
    pub(crate) kick: Kick,
    pub(crate) call: Option<Fd>,
    pub(crate) err: Option<Fd>,
    /// By `SET_VRING_ENABLE`; counts only if the protocol's features were negotiated.
    pub(crate) enabled: bool,
    /// In the inflight region, since the queue was started last.
    pub(crate) record: Option<Arc<InflightRecord>>,
    /// A ring is being served, or drained.
    pub(crate) running: Option<Arc<QueueCommands>>,
    /// The ring that it uses while it is served.
    pub(crate) place: Option<MemoryPlace>,
    /// The inflight region that it uses then.
    pub(crate) region: Option<MemoryPlace>,
    /// Its last end left requests in flight, for the next queue that is served with its region.
    pub(crate) left: bool,
    /// It was told to end.
    pub(crate) ending: bool,
    /// It was invalid: it is served again when the frontend has configured it again.
    pub(crate) broken: bool,
}

impl Vring {
    /// Whether it is to be served, and is not yet. `always_enabled`: the frontend did not negotiate the protocol's features.
    pub(crate) fn is_startable(&self, always_enabled: bool) -> bool {
        self.running.is_none()
            && !self.broken
            && self.size > 0
            && self.addresses.is_some()
            && !matches!(self.kick, Kick::Unset)
            && (self.enabled || always_enabled)
    }
}
