//! A chain of descriptors, resolved to spans of guest memory: what the device reads, then what it writes.
//!
//! The driver may change descriptors at any time: each is read once, and the copy is checked. What is refused:
//! - a chain of more descriptors than the queue has, a table of more than [`TABLE_MAX`] entries (drivers use tables that
//!   are longer than the queue), of none, or with a part of an entry; a table that no region has all of;
//! - a table within a table, a table followed by another descriptor, a table if the feature was not negotiated;
//! - a descriptor that the device reads behind one that it writes;
//! - more than 4 GiB in all; more than [`SPANS_MAX`] spans;
//! - a table, or a last byte to be written, outside of memory.
//!
//! A buffer outside of memory fails its request only: the chain has no span for it
//! ([`Chain::outside`]), and the status, which is the last byte to be written, can be.
//!
//! A buffer across regions that are adjacent in the guest becomes several spans. A descriptor of length 0 is counted and
//! adds no span: virtio does not forbid it. Its address does not matter.

use std::cell::Cell;

use crate::memory::{GuestMemory, GuestSpan};

/// Most entries of an indirect table.
pub(crate) const TABLE_MAX: u32 = 2048;
/// Most spans of a chain: a table whose buffers each cross regions once.
pub(crate) const SPANS_MAX: usize = 4096;
/// Most bytes of a chain, by the virtio specification.
const BYTES_MAX: u64 = 1 << 32;

/// Descriptors that take as long to read as a page takes to copy.
const DESCRIPTORS_PER_COST: u32 = 32;

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: u16 = 16;

/// Flags of descriptors.
pub(crate) mod flag {
    /// Another one follows.
    pub(crate) const NEXT: u16 = 1;
    /// The device writes it; otherwise reads it.
    pub(crate) const WRITE: u16 = 2;
    /// It is a table of descriptors.
    pub(crate) const INDIRECT: u16 = 4;
}

/// The remedy where a guest names memory that its VMM does not share.
pub(crate) const SHARE_ALL: &str = "have the VMM share all memory of the guest, also memory that is plugged in later (QEMU: share=on)";

/// Why a queue is not served any more: what its driver may not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingFault {
    /// Of the ring: its indices are of no use.
    #[error("more requests are available than the queue has descriptors")]
    Overrun,
    /// Of the ring.
    #[error("the head of a chain is not a descriptor of the queue")]
    HeadOutside,
    #[error("a descriptor is followed by one that its table does not have")]
    NextOutside,
    #[error("a chain has more descriptors than the queue")]
    TooLong,
    #[error("a descriptor is a table, which was not negotiated")]
    NoTables,
    #[error("a descriptor of a table is a table")]
    NestedTable,
    #[error("a table is followed by a descriptor")]
    TableNotLast,
    #[error("a table of descriptors has an invalid length")]
    BadTable,
    #[error("a descriptor to be read follows one to be written")]
    ReadableAfterWritable,
    #[error(
        "a table of descriptors, or the status of a request, is outside of the shared memory: {SHARE_ALL}"
    )]
    OutsideMemory,
    #[error("a chain has more than 4 GiB or {SPANS_MAX} parts")]
    TooLarge,
}

/// A chain that was taken, to be completed once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// What names it to the driver: the head's index (split), or the buffer id (packed).
    pub(crate) id: u16,
    /// Descriptors of the ring that it holds.
    pub(crate) held: u16,
    /// Its entry of the inflight region, if there is one.
    pub(crate) entry: u16,
}

/// The copy of a descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    /// The next one (split), or the buffer id (packed).
    pub(crate) link: u16,
}

impl Descriptor {
    /// From the words of a split queue.
    #[inline]
    pub(crate) fn of_split(address: u64, word: u64) -> Descriptor {
        let (len, flags, link) = fields(word);
        Descriptor { address, len, flags, link }
    }

    /// From the words of a packed queue.
    #[inline]
    pub(crate) fn of_packed(address: u64, word: u64) -> Descriptor {
        let (len, link, flags) = fields(word);
        Descriptor { address, len, flags, link }
    }

    #[inline]
    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The second word of a descriptor.
#[inline]
fn fields(word: u64) -> (u32, u16, u16) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]))
}

/// How the entries of a table follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableOrder {
    /// By their links, as in a split queue.
    Linked,
    /// One after the other, as in a packed queue.
    Sequential,
}

/// Whether a chain goes on after a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Next,
    Last,
}

/// See the module. Used again for the next chain, so that it does not grow.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// What the device reads, in order.
    pub(crate) readable: Vec<GuestSpan>,
    /// What the device writes, in order.
    pub(crate) writable: Vec<GuestSpan>,
    readable_bytes: u64,
    writable_bytes: u64,
    /// Descriptors that were read, those of tables included.
    descriptors: u32,
    /// A descriptor to be written was there.
    writes: bool,
    /// The first address of a buffer that is not in memory.
    outside: Option<u64>,
    /// The last buffer to be written, which has the status, is not in memory.
    no_status: bool,
    /// The region found last.
    last_region: Cell<u32>,
}

impl Chain {
    /// Bytes that the device reads, at most 4 GiB.
    #[inline]
    pub(crate) fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Bytes that the device writes, at most 4 GiB.
    #[inline]
    pub(crate) fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Begins another chain.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes, self.writes) = (0, 0, false);
        self.descriptors = 0;
        (self.outside, self.no_status) = (None, true);
    }

    /// The address of a buffer that is not in memory, if there is one: the request must fail.
    #[inline]
    pub(crate) fn outside(&self) -> Option<u64> {
        self.outside
    }

    /// To be called when all descriptors were added: fails if a request that must fail cannot be
    /// told so. A driver takes a status that was not written for an earlier request's.
    #[inline]
    pub(crate) fn end(&self) -> Result<(), RingFault> {
        if self.outside.is_some() && self.no_status {
            return Err(RingFault::OutsideMemory);
        }
        Ok(())
    }

    /// What reading its descriptors has cost, in copies of a page.
    #[inline]
    pub(crate) fn cost(&self) -> usize {
        usize::try_from(self.descriptors / DESCRIPTORS_PER_COST).unwrap_or_default()
    }

    /// Adds a descriptor of the ring, with its table if it is one. `tables`: that is permitted.
    #[inline]
    pub(crate) fn add(
        &mut self,
        memory: &GuestMemory,
        descriptor: &Descriptor,
        tables: bool,
        order: TableOrder,
    ) -> Result<Step, RingFault> {
        let next = if descriptor.has(flag::NEXT) { Step::Next } else { Step::Last };
        if !descriptor.has(flag::INDIRECT) {
            self.add_buffer(memory, descriptor)?;
            return Ok(next);
        }
        match (tables, next) {
            (false, _) => Err(RingFault::NoTables),
            (true, Step::Next) => Err(RingFault::TableNotLast),
            (true, Step::Last) => self.add_table(memory, descriptor, order).map(|()| Step::Last),
        }
    }

    #[inline]
    fn add_buffer(
        &mut self,
        memory: &GuestMemory,
        descriptor: &Descriptor,
    ) -> Result<(), RingFault> {
        self.descriptors = self.descriptors.saturating_add(1);
        let writes = descriptor.has(flag::WRITE);
        if self.writes && !writes {
            return Err(RingFault::ReadableAfterWritable);
        }
        self.writes = writes;
        let &Descriptor { address, len, .. } = descriptor;
        if len == 0 {
            return Ok(());
        }
        // No overflow: the first two are at most `BYTES_MAX` together.
        if self.readable_bytes + self.writable_bytes + u64::from(len) > BYTES_MAX {
            return Err(RingFault::TooLarge);
        }
        *if writes { &mut self.writable_bytes } else { &mut self.readable_bytes } += u64::from(len);
        self.no_status &= !writes;
        let spans = if writes { self.writable.len() } else { self.readable.len() };
        match memory.find(&self.last_region, address, len) {
            Some(span) => self.push(span),
            None => match self.add_across(memory, address, len) {
                Err(RingFault::OutsideMemory) => {
                    self.leave_out(descriptor, spans);
                    Ok(())
                }
                added => added,
            },
        }
    }

    /// Leaves out a buffer that is not in memory: there were `spans` spans of its kind before it.
    #[cold]
    fn leave_out(&mut self, descriptor: &Descriptor, spans: usize) {
        let &Descriptor { address, len, .. } = descriptor;
        self.outside.get_or_insert(address);
        self.no_status |= self.writes;
        let (list, bytes) = match self.writes {
            true => (&mut self.writable, &mut self.writable_bytes),
            false => (&mut self.readable, &mut self.readable_bytes),
        };
        list.truncate(spans);
        *bytes -= u64::from(len);
    }

    /// Adds a buffer that begins in one region and ends in another.
    #[cold]
    fn add_across(
        &mut self,
        memory: &GuestMemory,
        mut address: u64,
        mut len: u32,
    ) -> Result<(), RingFault> {
        while len > 0 {
            let after = memory.regions().partition_point(|region| region.guest <= address);
            let region = after.checked_sub(1).and_then(|index| memory.regions().get(index));
            let region = region.ok_or(RingFault::OutsideMemory)?;
            // A region does not end beyond the address space: neither sum overflows.
            let left = region.memory.bytes() as u64;
            let left = (region.guest + left).saturating_sub(address);
            let part = u32::try_from(left).map_or(len, |left| left.min(len));
            if part == 0 {
                return Err(RingFault::OutsideMemory);
            }
            let span = memory.find(&self.last_region, address, part);
            self.push(span.ok_or(RingFault::OutsideMemory)?)?;
            (address, len) = (address + u64::from(part), len - part);
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, span: GuestSpan) -> Result<(), RingFault> {
        if self.readable.len() + self.writable.len() >= SPANS_MAX {
            return Err(RingFault::TooLarge);
        }
        if self.writes { &mut self.writable } else { &mut self.readable }.push(span);
        Ok(())
    }

    fn add_table(
        &mut self,
        memory: &GuestMemory,
        table: &Descriptor,
        order: TableOrder,
    ) -> Result<(), RingFault> {
        let entries = table.len / u32::from(DESCRIPTOR_BYTES);
        let whole = table.len.is_multiple_of(DESCRIPTOR_BYTES.into());
        if entries == 0 || entries > TABLE_MAX || !whole {
            return Err(RingFault::BadTable);
        }
        let span = memory.find(&self.last_region, table.address, table.len);
        let span = span.ok_or(RingFault::OutsideMemory)?;
        let region = memory.region(span.region).ok_or(RingFault::OutsideMemory)?;
        let mut index = 0;
        for _ in 0..entries {
            let at = usize::try_from(index * u32::from(DESCRIPTOR_BYTES)).unwrap_or_default();
            let [address, word] = read_entry(&region.memory, span.offset + at);
            let entry = match order {
                TableOrder::Linked => Descriptor::of_split(address, word),
                TableOrder::Sequential => Descriptor::of_packed(address, word),
            };
            if entry.has(flag::INDIRECT) {
                return Err(RingFault::NestedTable);
            }
            self.add_buffer(memory, &entry)?;
            match order {
                TableOrder::Sequential => index += 1,
                TableOrder::Linked if !entry.has(flag::NEXT) => return Ok(()),
                TableOrder::Linked => index = entry.link.into(),
            }
            if index >= entries && order == TableOrder::Linked {
                return Err(RingFault::NextOutside);
            }
        }
        match order {
            TableOrder::Sequential => Ok(()),
            TableOrder::Linked => Err(RingFault::TooLong),
        }
    }
}

/// Both words of an entry. A table need not be aligned.
#[inline]
fn read_entry(memory: &ebb_guest_ring::Mapping, offset: usize) -> [u64; 2] {
    let mut words = [0; 2];
    if !memory.read_words(offset, &mut words) {
        let mut bytes = [0; 16];
        let read = memory.read(offset, &mut bytes);
        debug_assert!(read, "the table is within its region");
        let whole = u128::from_le_bytes(bytes);
        let half = |shift: u32| u64::try_from(whole >> shift & u128::from(u64::MAX));
        words = [half(0).unwrap_or_default(), half(64).unwrap_or_default()];
    }
    words
}
