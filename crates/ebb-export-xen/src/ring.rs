//! The ring a guest shares: numbers that run freely, requests out, responses in (reference, 4.1 and
//! 4.4).
//!
//! Invariants: a slot is copied once, and only the copy is looked at; what the guest may not write
//! (where responses go) is kept privately and never read back; a guest that claims more requests
//! than the ring has slots is caught before one of them is read.

use crate::abi::{Abi, HEADER_BYTES, Response, SLOT_BYTES, SLOT_WORDS, Slot, to_words};
use crate::guest_memory::{Mapping, full_barrier, read_barrier, write_barrier};

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// A guest claims to have sent more requests than fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the frontend claims {claimed} requests in a ring of {slots}")]
pub struct Overrun {
    /// How many.
    pub claimed: u32,
    /// How many slots there are.
    pub slots: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Ring {
    memory: Mapping,
    abi: Abi,
    slots: u32,
    /// The next request to take.
    req_cons: u32,
    /// Where the next response goes, published or not.
    rsp_prod: u32,
    /// Up to where responses were published.
    published: u32,
}

impl Ring {
    /// The ring in `memory`, with the numbers where a fresh one has them.
    pub fn new(memory: Mapping, abi: Abi) -> Ring {
        let slots = abi.slots(memory.bytes() / crate::abi::PAGE_BYTES);
        Ring { memory, abi, slots, req_cons: 0, rsp_prod: 0, published: 0 }
    }

    /// Its layout.
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// Slots in it, a power of two.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The next request to take.
    pub fn req_cons(&self) -> u32 {
        self.req_cons
    }

    /// Where the next response goes.
    pub fn rsp_prod(&self) -> u32 {
        self.rsp_prod
    }

    /// Up to where the guest has seen responses.
    pub fn published(&self) -> u32 {
        self.published
    }

    /// The numbers as they stand in the shared page: requests sent, responses published.
    pub fn shared_numbers(&self) -> (u32, u32) {
        (self.memory.load(REQ_PROD), self.memory.load(RSP_PROD))
    }

    /// Goes on from where another left off.
    pub fn resume(&mut self, req_cons: u32, rsp_prod: u32) {
        self.req_cons = req_cons;
        self.rsp_prod = rsp_prod;
        self.published = rsp_prod;
    }

    fn slot_offset(&self, index: u32) -> usize {
        let place = usize::try_from(index & (self.slots - 1)).unwrap_or_default();
        HEADER_BYTES + place * self.abi.slot_bytes()
    }

    /// Requests that wait, as the guest says.
    ///
    /// # Errors
    /// [`Overrun`] if that cannot be.
    pub fn waiting(&self) -> Result<u32, Overrun> {
        let sent = self.memory.load(REQ_PROD);
        read_barrier();
        // Counted from what the guest has seen of responses: that is what it goes by, too.
        let claimed = sent.wrapping_sub(self.published);
        if claimed > self.slots {
            return Err(Overrun { claimed, slots: self.slots });
        }
        // What was taken is part of what is claimed; one that goes back on its word has sent
        // nothing.
        let taken = self.req_cons.wrapping_sub(self.published);
        Ok(claimed.saturating_sub(taken))
    }

    /// Copies the next request out, without taking it: as many words of it as its first one says,
    /// the rest is 0. Only if one waits.
    #[inline]
    pub fn copy_next(&self) -> Slot {
        let offset = self.slot_offset(self.req_cons);
        let mut slot = [0; SLOT_WORDS];
        // Within the mapping: the place is below the number of slots.
        if self.abi.slot_bytes() == SLOT_BYTES {
            let (first, rest) = slot.split_at_mut(1);
            let _ = self.memory.read_words(offset, first);
            // Read once: what else is read goes by the copy.
            let used = self.abi.used_words(first[0]);
            let _ = self.memory.read_words(offset + 8, &mut rest[..used - 1]);
            return slot;
        }
        let mut bytes = [0; SLOT_BYTES];
        let _ = self.memory.read(offset, &mut bytes[..self.abi.slot_bytes()]);
        to_words(&bytes)
    }

    /// Takes the request that was copied.
    pub fn advance(&mut self) {
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Asks for an event at the next request; true if one is there already.
    ///
    /// # Errors
    /// As [`Ring::waiting`].
    pub fn arm(&self) -> Result<bool, Overrun> {
        self.memory.store(REQ_EVENT, self.req_cons.wrapping_add(1));
        full_barrier();
        Ok(self.waiting()? > 0)
    }

    /// Writes a response; the guest sees it once it is published. Only for a request that was taken
    /// and has no response.
    pub fn respond(&mut self, response: Response) {
        let offset = self.slot_offset(self.rsp_prod);
        if self.abi.response_bytes() == 16 {
            let _ = self.memory.write_words(offset, &response.words());
        } else {
            let _ = self.memory.write(offset, &response.encode()[..self.abi.response_bytes()]);
        }
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Shows the guest all responses written; true if it wants an event for that.
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.rsp_prod);
        if old == new {
            return false;
        }
        write_barrier();
        self.memory.store(RSP_PROD, new);
        full_barrier();
        self.published = new;
        let event = self.memory.load(RSP_EVENT);
        new.wrapping_sub(event) < new.wrapping_sub(old)
    }
}
