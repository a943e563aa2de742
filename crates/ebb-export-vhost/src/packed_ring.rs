//! The packed virtqueue: one ring, in which the driver makes descriptors available and the device uses them.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, "Packed Virtqueues".
//!
//! Invariants: a used descriptor is one store, and visible as soon as its chain is completed; the driver is notified once
//! per batch at most. The chains in flight hold at most as many descriptors as the ring has.

use ebb_guest_ring::{full_barrier, read_barrier, write_barrier};

use crate::area::Area;
use crate::chain::{Chain, DESCRIPTOR_BYTES, Descriptor, RingFault, Step, TableOrder, Token, flag};
use crate::memory::{GuestMemory, Region};
use crate::packed_inflight::PackedInflight;
use crate::position::Position;
use crate::ring_setup::{RingAddresses, RingFeatures, RingSetup, SIZE_MAX, SetupFault};

/// Event suppression: a position in the low half, one of these in the high half.
const EVENT_BYTES: u32 = 4;
const EVENT_ENABLE: u32 = 0;
const EVENT_DISABLE: u32 = 1;
const EVENT_POSITION: u32 = 2;

/// The areas of a ring.
#[derive(Debug)]
struct PackedAreas {
    ring: Area<Region>,
    driver: Area<Region>,
    device: Area<Region>,
}

impl PackedAreas {
    fn find(
        memory: &GuestMemory,
        addresses: RingAddresses,
        size: u16,
    ) -> Result<PackedAreas, SetupFault> {
        let find = |address, bytes, align| {
            Area::find(memory, address, bytes, align).ok_or(SetupFault::Address)
        };
        let bytes = u32::from(DESCRIPTOR_BYTES) * u32::from(size);
        Ok(PackedAreas {
            ring: find(addresses.descriptors, bytes, 16)?,
            driver: find(addresses.driver, EVENT_BYTES, 4)?,
            device: find(addresses.device, EVENT_BYTES, 4)?,
        })
    }

    /// The second word of a descriptor, which has its flags.
    #[inline]
    fn second_word(&self, index: u16) -> u64 {
        self.ring.load_u64(place(index) + 8)
    }

    #[inline]
    fn descriptor(&self, index: u16, second_word: u64) -> Descriptor {
        Descriptor::of_packed(self.ring.load_u64(place(index)), second_word)
    }
}

#[inline]
fn place(index: u16) -> usize {
    usize::from(index) * usize::from(DESCRIPTOR_BYTES)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PackedRing {
    areas: PackedAreas,
    addresses: RingAddresses,
    features: RingFeatures,
    size: u16,
    /// The next descriptor to be taken.
    next: Position,
    /// Where the next used descriptor is written.
    used: Position,
    /// Descriptors used since the last batch was published.
    batch: u16,
    /// Chains taken and not completed.
    chains: u16,
    /// Descriptors of chains that were taken and not completed, those of a predecessor included.
    held: u16,
    /// What the driver was told last: to notify at this position, or not to notify.
    armed: Option<u32>,
    inflight: Option<PackedInflight>,
    /// Entries of the inflight region that a predecessor had in flight; the next one is last.
    resumed: Vec<u16>,
    /// Descriptors of the chain being taken, if they are to be noted.
    taken: Vec<Descriptor>,
}

impl PackedRing {
    pub(crate) fn new(setup: RingSetup<'_>) -> Result<PackedRing, SetupFault> {
        let RingSetup { memory, addresses, size, features, base, inflight } = setup;
        if size == 0 || size > SIZE_MAX {
            return Err(SetupFault::Size);
        }
        let areas = PackedAreas::find(memory, addresses, size)?;
        let half = |shift: u32| u16::try_from(base >> shift & 0xffff).unwrap_or_default();
        let (mut next, mut used) = (Position::of_bits(half(0)), Position::of_bits(half(16)));
        let (mut held, mut resumed, mut taken) = (0, Vec::new(), Vec::new());
        let inflight = match inflight {
            Some(region) => {
                let flags = |index| areas.descriptor(index, areas.second_word(index)).flags;
                let (inflight, found) = PackedInflight::open(region, size, used, flags)?;
                if let Some(found) = found {
                    (used, held, resumed) = (found.used, found.held, found.entries);
                    next = used.after(held, size);
                }
                taken.reserve_exact(size.into());
                Some(inflight)
            }
            None => None,
        };
        if next.index >= size || used.index >= size {
            return Err(SetupFault::Base);
        }
        Ok(PackedRing {
            areas,
            addresses,
            features,
            size,
            next,
            used,
            batch: 0,
            chains: 0,
            held,
            armed: None,
            inflight,
            resumed,
            taken,
        })
    }

    /// The second word of the next descriptor, if it is available.
    #[inline]
    fn available(&self) -> Option<u64> {
        let word = self.areas.second_word(self.next.index);
        let [.., low, high] = word.to_le_bytes();
        read_barrier();
        self.next.is_available(u16::from_le_bytes([low, high])).then_some(word)
    }

    pub(crate) fn waiting(&mut self) -> Result<u32, RingFault> {
        let resumed = u32::try_from(self.resumed.len()).unwrap_or(u32::MAX);
        if self.available().is_none() {
            return Ok(resumed);
        }
        match self.size - self.held {
            0 => Err(RingFault::Overrun),
            room => Ok(resumed + u32::from(room)),
        }
    }

    pub(crate) fn arm(&mut self) -> Result<bool, RingFault> {
        let event = match self.features.event_idx {
            true => EVENT_POSITION << 16 | u32::from(self.next.bits()),
            false => EVENT_ENABLE << 16,
        };
        self.tell(event);
        full_barrier();
        Ok(self.waiting()? > 0)
    }

    pub(crate) fn disarm(&mut self) {
        self.tell(EVENT_DISABLE << 16);
    }

    fn tell(&mut self, event: u32) {
        if self.armed != Some(event) {
            self.areas.device.store_u32(0, event);
            self.armed = Some(event);
        }
    }

    pub(crate) fn take(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<Token>, RingFault> {
        if let (Some(&entry), Some(inflight)) = (self.resumed.last(), &self.inflight) {
            chain.clear();
            let (mut id, held) = (0, inflight.held(entry));
            let tables = self.features.indirect;
            for descriptor in inflight.descriptors(entry) {
                chain.add(memory, &descriptor, tables, TableOrder::Sequential)?;
                id = descriptor.link;
            }
            chain.end()?;
            self.resumed.pop();
            self.chains += 1;
            return Ok(Some(Token { id, held, entry }));
        }
        let Some(word) = self.available() else { return Ok(None) };
        let (id, held) = self.read_chain(memory, word, chain)?;
        let entry = match &mut self.inflight {
            Some(inflight) => inflight.begin(&self.taken),
            None => 0,
        };
        self.next = self.next.after(held, self.size);
        self.held += held;
        self.chains += 1;
        Ok(Some(Token { id, held, entry }))
    }

    /// Reads the chain at the next position, the second word of whose first descriptor is `word`. Returns its id, and how
    /// many descriptors it has.
    #[inline]
    fn read_chain(
        &mut self,
        memory: &GuestMemory,
        mut word: u64,
        chain: &mut Chain,
    ) -> Result<(u16, u16), RingFault> {
        chain.clear();
        self.taken.clear();
        let room = self.size - self.held;
        if room == 0 {
            return Err(RingFault::Overrun);
        }
        for count in 1..=room {
            let at = self.next.after(count - 1, self.size).index;
            if count > 1 {
                word = self.areas.second_word(at);
            }
            let descriptor = self.areas.descriptor(at, word);
            if self.inflight.is_some() {
                self.taken.push(descriptor);
            }
            let tables = self.features.indirect;
            match chain.add(memory, &descriptor, tables, TableOrder::Sequential)? {
                Step::Last => {
                    chain.end()?;
                    return Ok((descriptor.link, count));
                }
                Step::Next => {}
            }
        }
        Err(RingFault::TooLong)
    }

    #[expect(clippy::needless_pass_by_value, reason = "a chain is completed once")]
    pub(crate) fn complete(&mut self, token: Token, written: u32) {
        let flags = self.used.used_flags() | if written > 0 { flag::WRITE } else { 0 };
        let word = u64::from(written) | u64::from(token.id) << 32 | u64::from(flags) << 48;
        let at = place(self.used.index) + 8;
        let after = self.used.after(token.held, self.size);
        let ring = &self.areas.ring;
        let publish = || {
            write_barrier();
            ring.store_u64(at, word);
        };
        match &mut self.inflight {
            Some(inflight) => inflight.retire(token.entry, after, publish),
            None => publish(),
        }
        self.used = after;
        self.held -= token.held;
        self.chains -= 1;
        self.batch = self.batch.saturating_add(token.held);
    }

    pub(crate) fn publish(&mut self) -> bool {
        let batch = std::mem::take(&mut self.batch);
        if batch == 0 {
            return false;
        }
        full_barrier();
        let event = self.areas.driver.load_u32(0);
        match event >> 16 & 3 {
            EVENT_DISABLE => false,
            EVENT_POSITION if self.features.event_idx => {
                let position = Position::of_bits(u16::try_from(event & 0xffff).unwrap_or_default());
                self.has_passed(position, batch)
            }
            _ => true,
        }
    }

    /// Whether one of the last `batch` used descriptors was at `position`.
    fn has_passed(&self, position: Position, batch: u16) -> bool {
        let lap = if position.wrap == self.used.wrap { 0 } else { i32::from(self.size) };
        let ahead = i32::from(self.used.index) - (i32::from(position.index) - lap);
        // More than a lap: the driver has used the ring again meanwhile.
        batch >= self.size || (1..=i32::from(batch)).contains(&ahead)
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn resumed_count(&self) -> usize {
        self.resumed.len()
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.chains.into()
    }

    pub(crate) fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    pub(crate) fn relocate(&mut self, memory: &GuestMemory) -> Result<(), SetupFault> {
        self.areas = PackedAreas::find(memory, self.addresses, self.size)?;
        Ok(())
    }
}
