//! The ring that a guest shares: free-running indices, requests in, responses out
//! (`xen/include/public/io/ring.h`).
//!
//! Invariants: a slot is copied once, and only the copy is used; indices that the guest must not write
//! (where responses go) are kept privately and not read back; a guest that claims more requests than
//! the ring has slots is detected before one of them is read.

use crate::abi::{Abi, HEADER_BYTES, Response, SLOT_BYTES, SLOT_WORDS, Slot, to_words};
use crate::shared_stores::SharedStores;
use ebb_guest_ring::{Mapping, full_barrier, is_event_due, read_barrier, write_barrier};

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// A guest claims to have sent more requests than the ring has slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the frontend claims {claimed} requests in flight in a ring of {slots} slots")]
pub(crate) struct Overrun {
    /// How many it claims.
    pub claimed: u32,
    /// The slots of the ring.
    pub slots: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct BlkifRing {
    memory: SharedStores,
    abi: Abi,
    slots: u32,
    /// The index of the next request to consume.
    req_cons: u32,
    /// The index of the next response, published or not.
    rsp_prod: u32,
    /// The index below which responses were published.
    published: u32,
}

impl BlkifRing {
    /// The ring in `memory`, with the indices of a new ring.
    pub(crate) fn new(memory: Mapping, abi: Abi) -> BlkifRing {
        let slots = abi.slots(memory.bytes() / crate::abi::PAGE_BYTES);
        let memory = SharedStores(memory);
        BlkifRing { memory, abi, slots, req_cons: 0, rsp_prod: 0, published: 0 }
    }

    /// Its layout.
    pub(crate) fn abi(&self) -> Abi {
        self.abi
    }

    /// Its number of slots, a power of two.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// The index of the next request to consume.
    pub(crate) fn req_cons(&self) -> u32 {
        self.req_cons
    }

    /// The index of the next response.
    pub(crate) fn rsp_prod(&self) -> u32 {
        self.rsp_prod
    }

    /// The indices in the shared page: requests sent, responses published.
    pub(crate) fn shared_numbers(&self) -> (u32, u32) {
        (self.memory.load(REQ_PROD), self.memory.load(RSP_PROD))
    }

    /// Continues at the indices of a predecessor.
    pub(crate) fn resume(&mut self, req_cons: u32, rsp_prod: u32) {
        self.req_cons = req_cons;
        self.rsp_prod = rsp_prod;
        self.published = rsp_prod;
    }

    fn slot_offset(&self, index: u32) -> usize {
        let place = usize::try_from(index & (self.slots - 1)).unwrap_or_default();
        HEADER_BYTES + place * self.abi.slot_bytes()
    }

    /// How many requests are to be consumed, by the guest's index.
    ///
    /// # Errors
    /// [`Overrun`] if the index is invalid.
    pub(crate) fn waiting(&self) -> Result<u32, Overrun> {
        let sent = self.memory.load(REQ_PROD);
        read_barrier();
        // Counted from the published responses, which is what the guest goes by as well.
        let claimed = sent.wrapping_sub(self.published);
        if claimed > self.slots {
            return Err(Overrun { claimed, slots: self.slots });
        }
        // The claimed requests include consumed ones. A guest that moves its index back has sent
        // nothing.
        let taken = self.req_cons.wrapping_sub(self.published);
        Ok(claimed.saturating_sub(taken))
    }

    /// Copies the next request without consuming it: as many words as its first one says, the rest is 0. Call
    /// this only if a request is waiting.
    #[inline]
    pub(crate) fn copy_next(&self) -> Slot {
        let offset = self.slot_offset(self.req_cons);
        let mut slot = [0; SLOT_WORDS];
        // Within the mapping: the index is masked to the number of slots.
        if self.abi.slot_bytes() == SLOT_BYTES {
            let (first, rest) = slot.split_at_mut(1);
            let _ = self.memory.read_words(offset, first);
            // Read once: the length of the rest is taken from the copy.
            let used = self.abi.used_words(first[0]);
            let _ = self.memory.read_words(offset + 8, &mut rest[..used - 1]);
            return slot;
        }
        let mut bytes = [0; SLOT_BYTES];
        let _ = self.memory.read(offset, &mut bytes[..self.abi.slot_bytes()]);
        to_words(&bytes)
    }

    /// Consumes the request that was copied.
    pub(crate) fn advance(&mut self) {
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Requests an event for the next request; true if there is one already.
    ///
    /// # Errors
    /// As [`BlkifRing::waiting`].
    pub(crate) fn arm(&self) -> Result<bool, Overrun> {
        self.memory.store(REQ_EVENT, self.req_cons.wrapping_add(1));
        full_barrier();
        Ok(self.waiting()? > 0)
    }

    /// Writes a response, which the guest sees when it is published. Only for a consumed request without a
    /// response.
    pub(crate) fn respond(&mut self, response: Response) {
        let offset = self.slot_offset(self.rsp_prod);
        if self.abi.response_bytes() == 16 {
            let _ = self.memory.write_words(offset, &response.words());
        } else {
            let _ = self.memory.write(offset, &response.encode()[..self.abi.response_bytes()]);
        }
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Publishes all responses written; true if the guest requested an event for that.
    pub(crate) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.rsp_prod);
        if old == new {
            return false;
        }
        write_barrier();
        self.memory.store(RSP_PROD, new);
        full_barrier();
        self.published = new;
        let event = self.memory.load(RSP_EVENT);
        is_event_due(event, old, new)
    }
}
