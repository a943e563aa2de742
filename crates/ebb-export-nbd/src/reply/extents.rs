//! The descriptors of a block status chunk.
//!
//! Implements `NBD_REPLY_TYPE_BLOCK_STATUS`, its extended form, and `NBD_CMD_BLOCK_STATUS` of the protocol.

use crate::proto::{EXTENTS_MAX, ExtentState, ReplyStyle};

/// Builds the descriptors of one status chunk in a buffer of the caller.
///
/// Invariants of the result: there is at least one descriptor; none is empty; adjacent ones differ in state;
/// together they cover no more than the requested range (which satisfies the rules for
/// `NBD_CMD_FLAG_REQ_ONE` and for the last extent, and 32 bits suffice where headers are compact);
/// their number does not exceed what the protocol, the maximum payload and the caller allow. They need not
/// cover the whole range: the client requests the remaining part again.
#[derive(Debug)]
pub struct ExtentList<'a> {
    out: &'a mut Vec<u8>,
    style: ReplyStyle,
    requested: u64,
    max: u32,
    written: u32,
    pending: Option<(u64, ExtentState)>,
    covered: u64,
}

impl<'a> ExtentList<'a> {
    /// An empty list for the reply to a BLOCK_STATUS of `requested` bytes, appended to `out`
    /// (which keeps its capacity from one request to the next if the caller clears it).
    ///
    /// `one` is that of [`NbdRequest::BlockStatus`](crate::decode::NbdRequest::BlockStatus); `payload_max` the maximum payload in bytes;
    /// `extents_max` the most descriptors the caller allows in one reply.
    #[must_use]
    pub fn new(
        out: &'a mut Vec<u8>,
        style: ReplyStyle,
        (requested, one): (u64, bool),
        payload_max: u32,
        extents_max: u32,
    ) -> Self {
        let size = if style == ReplyStyle::Extended { 16 } else { 8 };
        let max = extents_max.min(EXTENTS_MAX).min(payload_max / size).max(1);
        let max = if one { 1 } else { max };
        Self { out, style, requested, max, written: 0, pending: None, covered: 0 }
    }

    /// Adds the next `length` bytes, after those added before. Bytes beyond the requested range
    /// are cut off; a length of 0 adds nothing.
    ///
    /// Returns whether more extents are needed.
    pub fn push(&mut self, length: u64, state: ExtentState) -> bool {
        let length = length.min(self.requested - self.covered);
        if length > 0 && !self.is_full_for(state) {
            self.covered += length;
            match &mut self.pending {
                Some((pending, same)) if *same == state => *pending += length,
                _ => {
                    self.write_pending();
                    self.pending = Some((length, state));
                }
            }
        } else if length > 0 {
            // The list is full: a later extent would leave a gap.
            self.requested = self.covered;
        }
        self.covered < self.requested
    }

    /// Completes the list; returns the number of descriptors for [`super::Chunks::block_status`].
    ///
    /// If nothing was added, the whole range is reported as allocated, which the
    /// protocol allows for any extent.
    #[must_use]
    pub fn finish(mut self) -> u32 {
        if self.covered == 0 {
            self.pending = Some((self.requested, ExtentState::NONE));
        }
        self.write_pending();
        self.written
    }

    /// Whether an extent of this state would exceed the number of descriptors.
    fn is_full_for(&self, state: ExtentState) -> bool {
        match self.pending {
            None => false,
            Some((_, same)) => same != state && self.written + 1 >= self.max,
        }
    }

    fn write_pending(&mut self) {
        let Some((length, state)) = self.pending.take() else {
            return;
        };
        if self.style == ReplyStyle::Extended {
            self.out.extend_from_slice(&length.to_be_bytes());
            self.out.extend_from_slice(&u64::from(state.0).to_be_bytes());
        } else {
            // At most the requested length, which came in a 32-bit field.
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            self.out.extend_from_slice(&length.to_be_bytes());
            self.out.extend_from_slice(&state.0.to_be_bytes());
        }
        self.written += 1;
    }
}
