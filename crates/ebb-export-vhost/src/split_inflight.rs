//! The region of a split queue: per head whether it is in flight, and a list of the last batch.
//!
//! Order of the stores of a batch: when a chain is taken, its counter, then its mark (`begin`). When it completes, `next`, then
//! `last_batch_head` (`link`). Then the ring's used index; then the marks are cleared, and `used_idx` follows (`settle`).
//!
//! Invariant: the in-flight marks of the heads that were used between `used_idx` here and in the ring may be out of date,
//! and those heads are the first of the list.

use ebb_guest_ring::{SharedMemory, write_barrier};

use crate::area::Area;
use crate::inflight::{
    InflightFault, QueueInflight, SPLIT_LAYOUT, VERSION, in_order, quarters, word_of,
};

/// Header: features (u64), version, size, `last_batch_head`, `used_idx`. Entry: inflight
/// (u8), padding, `next` (u16, at 6), counter (u64).
const HEADER: usize = 8;
const LAST_BATCH_HEAD: usize = 12;
const USED_INDEX: usize = 14;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// See the module. The region is only written.
#[derive(Debug)]
pub(crate) struct SplitInflight {
    area: Area<SharedMemory>,
    counter: u64,
    last_batch_head: u16,
    /// Heads that were linked since the last batch was settled.
    batch: Vec<u16>,
}

#[inline]
fn entry(head: u16) -> usize {
    SPLIT_LAYOUT.0 + SPLIT_LAYOUT.1 * usize::from(head)
}

impl SplitInflight {
    /// Opens the region of a queue whose used index is `used`. Returns the heads in flight, the next one last, if the
    /// region was in use; else it is initialised.
    pub(crate) fn open(
        region: QueueInflight,
        size: u16,
        used: u16,
    ) -> Result<(SplitInflight, Option<Vec<u16>>), InflightFault> {
        let QueueInflight { area, .. } = region;
        let [version, entries, last_batch_head, used_index] = quarters(area.load_u64(HEADER));
        let batch = Vec::with_capacity(size.into());
        if version == 0 {
            for head in 0..size {
                area.store_u64(entry(head), 0);
                area.store_u64(entry(head) + COUNTER, 0);
            }
            area.store_u64(0, 0);
            write_barrier();
            area.store_u64(HEADER, word_of([VERSION, size, 0, used]));
            return Ok((SplitInflight { area, counter: 0, last_batch_head: 0, batch }, None));
        }
        if version != VERSION {
            return Err(InflightFault::Version);
        }
        if entries != size {
            return Err(InflightFault::Size);
        }
        forget_batch(&area, size, last_batch_head, used.wrapping_sub(used_index))?;
        write_barrier();
        area.store_u16(USED_INDEX, used);
        let in_flight = |head: &u16| area.load_u16(entry(*head)) & 0xff != 0;
        let heads = (0..size).filter(in_flight);
        let heads = heads.map(|head| (area.load_u64(entry(head) + COUNTER), head)).collect();
        let (heads, counter) = in_order(heads);
        Ok((SplitInflight { area, counter, last_batch_head, batch }, Some(heads)))
    }

    /// Notes a chain that is being taken.
    #[inline]
    pub(crate) fn begin(&mut self, head: u16) {
        self.area.store_u64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        write_barrier();
        self.area.store_u16(entry(head), 1);
    }

    /// Notes a chain whose used element was written. The used index has to follow.
    #[inline]
    pub(crate) fn link(&mut self, head: u16) {
        self.area.store_u16(entry(head) + NEXT, self.last_batch_head);
        write_barrier();
        self.area.store_u16(LAST_BATCH_HEAD, head);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// Notes that the ring's used index, which includes all linked chains, is `used`.
    #[inline]
    pub(crate) fn settle(&mut self, used: u16) {
        write_barrier();
        for head in self.batch.drain(..) {
            self.area.store_u16(entry(head), 0);
        }
        write_barrier();
        self.area.store_u16(USED_INDEX, used);
    }
}

/// Takes the marks of the last `count` chains of the list away: the driver has got them.
fn forget_batch(
    area: &Area<SharedMemory>,
    size: u16,
    first: u16,
    count: u16,
) -> Result<(), InflightFault> {
    if count > size {
        return Err(InflightFault::Corrupt);
    }
    let mut head = first;
    for _ in 0..count {
        if head >= size {
            return Err(InflightFault::Corrupt);
        }
        area.store_u16(entry(head), 0);
        head = area.load_u16(entry(head) + NEXT);
    }
    Ok(())
}
