//! The split virtqueue: a table of descriptors, a ring of available chains, a ring of used ones.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, "Split Virtqueues".
//!
//! Invariants: used elements are written before the used index, which is written once per batch. `in_flight` and what is
//! available are at most the queue's size together: a correct driver has no more descriptors.

use ebb_guest_ring::{full_barrier, is_event_due, read_barrier, write_barrier};

use crate::area::Area;
use crate::chain::{Chain, DESCRIPTOR_BYTES, Descriptor, RingFault, Step, TableOrder, Token};
use crate::memory::{GuestMemory, Region};
use crate::ring_setup::{RingAddresses, RingFeatures, RingSetup, SIZE_MAX, SetupFault};
use crate::split_inflight::SplitInflight;

/// In both rings the flags are first, then the index, then the elements.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ELEMENTS: usize = 4;
/// The flag of either ring: its writer needs no notification.
const NO_NOTIFICATION: u16 = 1;

/// The areas of a ring.
#[derive(Debug)]
struct SplitAreas {
    descriptors: Area<Region>,
    available: Area<Region>,
    used: Area<Region>,
}

impl SplitAreas {
    fn find(
        memory: &GuestMemory,
        addresses: RingAddresses,
        size: u16,
        event_idx: bool,
    ) -> Result<SplitAreas, SetupFault> {
        let (size, event) = (u32::from(size), if event_idx { 2 } else { 0 });
        let find = |address, bytes, align| {
            Area::find(memory, address, bytes, align).ok_or(SetupFault::Address)
        };
        Ok(SplitAreas {
            descriptors: find(addresses.descriptors, u32::from(DESCRIPTOR_BYTES) * size, 16)?,
            available: find(addresses.driver, 4 + 2 * size + event, 2)?,
            used: find(addresses.device, 4 + 8 * size + event, 4)?,
        })
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct SplitRing {
    areas: SplitAreas,
    addresses: RingAddresses,
    features: RingFeatures,
    size: u16,
    /// The next available chain to be taken.
    last_available: u16,
    /// The driver's index when it was read last.
    available: u16,
    /// The next used element, and as the driver knows it.
    used: u16,
    published: u16,
    /// Chains taken and not published.
    in_flight: u16,
    /// What the driver was told last: whether to notify.
    armed: Option<bool>,
    inflight: Option<SplitInflight>,
    /// Heads that a predecessor had in flight; the next one is last.
    resumed: Vec<u16>,
}

impl SplitRing {
    pub(crate) fn new(setup: RingSetup<'_>) -> Result<SplitRing, SetupFault> {
        let RingSetup { memory, addresses, size, features, base, inflight } = setup;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(SetupFault::Size);
        }
        let areas = SplitAreas::find(memory, addresses, size, features.event_idx)?;
        let used = areas.used.load_u16(INDEX);
        let mut resumed = None;
        let inflight = match inflight {
            Some(inflight) => {
                let (inflight, heads) = SplitInflight::open(inflight, size, used)?;
                resumed = heads;
                Some(inflight)
            }
            None => None,
        };
        let base = match &resumed {
            // At most the queue's size.
            Some(heads) => used.wrapping_add(u16::try_from(heads.len()).unwrap_or_default()),
            None => u16::try_from(base).map_err(|_| SetupFault::Base)?,
        };
        Ok(SplitRing {
            areas,
            addresses,
            features,
            size,
            last_available: base,
            available: base,
            used,
            published: used,
            in_flight: 0,
            armed: None,
            inflight,
            resumed: resumed.unwrap_or_default(),
        })
    }

    pub(crate) fn waiting(&mut self) -> Result<u32, RingFault> {
        let available = self.areas.available.load_u16(INDEX);
        read_barrier();
        let waiting = u32::from(available.wrapping_sub(self.last_available));
        // At most the queue's size.
        let resumed = u32::try_from(self.resumed.len()).unwrap_or(u32::MAX);
        if waiting + u32::from(self.in_flight) + resumed > u32::from(self.size) {
            return Err(RingFault::Overrun);
        }
        self.available = available;
        Ok(waiting + resumed)
    }

    pub(crate) fn arm(&mut self) -> Result<bool, RingFault> {
        if self.features.event_idx {
            let event = ELEMENTS + 8 * usize::from(self.size);
            self.areas.used.store_u16(event, self.last_available);
        } else if self.armed != Some(true) {
            self.areas.used.store_u16(FLAGS, 0);
        }
        self.armed = Some(true);
        full_barrier();
        Ok(self.waiting()? > 0)
    }

    pub(crate) fn disarm(&mut self) {
        // With an event index the driver notifies once at most: when it passes the index.
        if self.armed != Some(false) && !self.features.event_idx {
            self.areas.used.store_u16(FLAGS, NO_NOTIFICATION);
        }
        self.armed = Some(false);
    }

    pub(crate) fn take(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<Token>, RingFault> {
        if let Some(&head) = self.resumed.last() {
            self.read_chain(memory, head, chain)?;
            self.resumed.pop();
            self.in_flight += 1;
            return Ok(Some(Token { id: head, held: 1, entry: head }));
        }
        if self.available == self.last_available && self.waiting()? == 0 {
            return Ok(None);
        }
        let element = ELEMENTS + 2 * self.slot(self.last_available);
        let head = self.areas.available.load_u16(element);
        if head >= self.size {
            return Err(RingFault::HeadOutside);
        }
        self.read_chain(memory, head, chain)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(head);
        }
        self.last_available = self.last_available.wrapping_add(1);
        self.in_flight += 1;
        Ok(Some(Token { id: head, held: 1, entry: head }))
    }

    #[inline]
    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    #[inline]
    fn read_chain(
        &self,
        memory: &GuestMemory,
        head: u16,
        chain: &mut Chain,
    ) -> Result<(), RingFault> {
        chain.clear();
        let mut index = head;
        for _ in 0..self.size {
            let at = usize::from(index) * usize::from(DESCRIPTOR_BYTES);
            let (first, second) =
                (self.areas.descriptors.load_u64(at), self.areas.descriptors.load_u64(at + 8));
            let descriptor = Descriptor::of_split(first, second);
            match chain.add(memory, &descriptor, self.features.indirect, TableOrder::Linked)? {
                Step::Last => return chain.end(),
                Step::Next => index = descriptor.link,
            }
            if index >= self.size {
                return Err(RingFault::NextOutside);
            }
        }
        Err(RingFault::TooLong)
    }

    #[expect(clippy::needless_pass_by_value, reason = "a chain is completed once")]
    pub(crate) fn complete(&mut self, token: Token, written: u32) {
        let element = ELEMENTS + 8 * self.slot(self.used);
        self.areas.used.store_u32(element, token.id.into());
        self.areas.used.store_u32(element + 4, written);
        if let Some(inflight) = &mut self.inflight {
            inflight.link(token.id);
        }
        self.used = self.used.wrapping_add(1);
    }

    pub(crate) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.used);
        if new == old {
            return false;
        }
        write_barrier();
        self.areas.used.store_u16(INDEX, new);
        if let Some(inflight) = &mut self.inflight {
            inflight.settle(new);
        }
        self.published = new;
        self.in_flight = self.in_flight.saturating_sub(new.wrapping_sub(old));
        full_barrier();
        if self.features.event_idx {
            let event = self.areas.available.load_u16(ELEMENTS + 2 * usize::from(self.size));
            is_event_due(event.wrapping_add(1), old, new)
        } else {
            self.areas.available.load_u16(FLAGS) & NO_NOTIFICATION == 0
        }
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn resumed_count(&self) -> usize {
        self.resumed.len()
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.into()
    }

    pub(crate) fn base(&self) -> u32 {
        self.last_available.into()
    }

    pub(crate) fn relocate(&mut self, memory: &GuestMemory) -> Result<(), SetupFault> {
        self.areas = SplitAreas::find(memory, self.addresses, self.size, self.features.event_idx)?;
        Ok(())
    }
}
