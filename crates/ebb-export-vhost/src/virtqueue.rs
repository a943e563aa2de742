//! A virtqueue in either format: the same interface for both.
//!
//! Invariants: a chain that was taken is completed once at most ([`Token`]); the driver sees completions after
//! [`Virtqueue::publish`] at the latest, in the order of completion. No more chains are in flight than the queue has
//! descriptors. Nothing is allocated per chain.

use crate::chain::{Chain, RingFault, Token};
use crate::memory::GuestMemory;
use crate::packed_ring::PackedRing;
use crate::ring_setup::{RingSetup, SetupFault};
use crate::split_ring::SplitRing;

/// See the module.
#[derive(Debug)]
pub(crate) enum Virtqueue {
    Split(SplitRing),
    Packed(PackedRing),
}

macro_rules! either {
    ($queue:expr, $ring:ident => $do:expr) => {
        match $queue {
            Virtqueue::Split($ring) => $do,
            Virtqueue::Packed($ring) => $do,
        }
    };
}

impl Virtqueue {
    /// Sets a queue up. What a predecessor had in flight is taken first, and counts as waiting.
    pub(crate) fn new(setup: RingSetup<'_>) -> Result<Virtqueue, SetupFault> {
        Ok(match setup.features.packed {
            false => Virtqueue::Split(SplitRing::new(setup)?),
            true => Virtqueue::Packed(PackedRing::new(setup)?),
        })
    }

    /// Chains that wait to be taken: 0 exactly if there are none. A packed queue does not tell how many; then it is the
    /// number that fits.
    #[inline]
    pub(crate) fn waiting(&mut self) -> Result<u32, RingFault> {
        either!(self, ring => ring.waiting())
    }

    /// Asks the driver to notify of the next chain; true if one waits already.
    pub(crate) fn arm(&mut self) -> Result<bool, RingFault> {
        either!(self, ring => ring.arm())
    }

    /// Tells the driver that it need not notify.
    #[inline]
    pub(crate) fn disarm(&mut self) {
        either!(self, ring => ring.disarm());
    }

    /// Takes the next chain. After a fault the queue is as before the call.
    #[inline]
    pub(crate) fn take(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<Token>, RingFault> {
        either!(self, ring => ring.take(memory, chain))
    }

    /// Completes a chain of which the device has written `written` bytes, its status included. The data and the status
    /// must be in guest memory.
    #[inline]
    pub(crate) fn complete(&mut self, token: Token, written: u32) {
        either!(self, ring => ring.complete(token, written));
    }

    /// Makes sure that the driver sees what was completed; true if it has to be notified.
    #[inline]
    #[must_use]
    pub(crate) fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Chains that were taken and not completed; of a split queue also those that were not published.
    pub(crate) fn in_flight(&self) -> u32 {
        either!(self, ring => ring.in_flight())
    }

    /// Its descriptors.
    pub(crate) fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Chains that a predecessor had in flight and that were not taken again.
    pub(crate) fn resumed_count(&self) -> usize {
        either!(self, ring => ring.resumed_count())
    }

    /// Whether all chains that were taken, here or by a predecessor, were completed and published.
    pub(crate) fn is_complete(&self) -> bool {
        self.in_flight() == 0 && self.resumed_count() == 0
    }

    /// What `VHOST_USER_GET_VRING_BASE` replies, when nothing is in flight: as in [`RingSetup::base`].
    pub(crate) fn base(&self) -> u32 {
        either!(self, ring => ring.base())
    }

    /// Continues in another table of memory, which has the same rings at the same addresses. After a fault the queue is
    /// as before.
    pub(crate) fn relocate(&mut self, memory: &GuestMemory) -> Result<(), SetupFault> {
        either!(self, ring => ring.relocate(memory))
    }
}
