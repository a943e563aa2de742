//! Replies in the transmission phase: from bytes to frames, by value.
//!
//! Implements "Simple reply message" and "Structured reply chunk message" of the protocol document.
//! A frame is a header with the fixed part of its payload; the length of what follows (data,
//! descriptors, text) is then known and limited. This module knows no requests: `slots` does.

use ebb_nbd_proto::{EXTENTS_MAX, Reader, SIMPLE_REPLY_LEN, STRING_MAX, chunk, magic};

/// The most bytes that [`decode`] needs: header and fixed payload.
pub(crate) const FRAME_MAX: usize = 20 + 12;
/// The most separate ranges of one read that may have been received.
const PIECES_MAX: usize = 256;

/// A violation of the protocol by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProtocolViolation(pub(crate) &'static str);

/// One reply, or one chunk of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplyFrame {
    pub(crate) cookie: u64,
    /// The last one of its reply.
    pub(crate) done: bool,
    pub(crate) content: FrameContent,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameContent {
    /// A simple reply; the data of a read without error follows.
    Simple { error: u32 },
    /// No payload.
    None,
    /// `length` bytes of the export at `offset` follow.
    Data { offset: u64, length: u32 },
    /// Zeroes.
    Hole { offset: u64, length: u32 },
    /// This many descriptors of eight bytes follow.
    Status { context: u32, entries: u32 },
    /// The request failed; `rest` bytes of text follow.
    Error { error: u32, rest: u32 },
}

/// The frame at the front of `bytes` and its length there; `None` when more bytes are needed.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(ReplyFrame, usize)>, ProtocolViolation> {
    let mut reader = Reader::new(bytes);
    match reader.u32() {
        Some(magic::SIMPLE_REPLY) => {
            let (Some(error), Some(cookie)) = (reader.u32(), reader.u64()) else {
                return Ok(None);
            };
            let frame = ReplyFrame { cookie, done: true, content: FrameContent::Simple { error } };
            Ok(Some((frame, SIMPLE_REPLY_LEN)))
        }
        Some(magic::STRUCTURED_REPLY) => structured(reader, bytes.len()),
        Some(_) => Err(ProtocolViolation("a reply without a reply magic")),
        None => Ok(None),
    }
}

fn structured(
    mut reader: Reader<'_>,
    have: usize,
) -> Result<Option<(ReplyFrame, usize)>, ProtocolViolation> {
    let (Some(flags), Some(kind), Some(cookie), Some(length)) =
        (reader.u16(), reader.u16(), reader.u64(), reader.u32())
    else {
        return Ok(None);
    };
    // The fixed part of each kind of payload.
    let fixed: u32 = match kind {
        chunk::NONE => 0,
        chunk::OFFSET_DATA => 8,
        chunk::OFFSET_HOLE => 12,
        chunk::BLOCK_STATUS => 4,
        _ if kind & 0x8000 != 0 => 6,
        _ => return Err(ProtocolViolation("a chunk of a type that was not negotiated")),
    };
    let rest =
        length.checked_sub(fixed).ok_or(ProtocolViolation("a chunk too short for its type"))?;
    let used = 20 + usize::try_from(fixed).unwrap_or(0);
    if have < used {
        return Ok(None);
    }
    let content = match kind {
        chunk::NONE if rest == 0 => FrameContent::None,
        chunk::OFFSET_DATA if rest > 0 => {
            FrameContent::Data { offset: reader.u64().unwrap_or(0), length: rest }
        }
        chunk::OFFSET_HOLE if rest == 0 => FrameContent::Hole {
            offset: reader.u64().unwrap_or(0),
            length: reader.u32().unwrap_or(0),
        },
        chunk::BLOCK_STATUS if rest > 0 && rest.is_multiple_of(8) && rest / 8 <= EXTENTS_MAX => {
            FrameContent::Status { context: reader.u32().unwrap_or(0), entries: rest / 8 }
        }
        chunk::NONE | chunk::OFFSET_DATA | chunk::OFFSET_HOLE | chunk::BLOCK_STATUS => {
            return Err(ProtocolViolation("a chunk with a length that its type does not permit"));
        }
        _ => {
            let error = reader.u32().unwrap_or(0);
            // A message, and at most an offset or what a later kind of error adds.
            if error == 0 || rest > 2 * u32::try_from(STRING_MAX).unwrap_or(0) {
                return Err(ProtocolViolation("an error chunk is malformed"));
            }
            FrameContent::Error { error, rest }
        }
    };
    let done = flags & chunk::FLAG_DONE != 0;
    Ok(Some((ReplyFrame { cookie, done, content }, used)))
}

/// Which bytes of a read were received: each exactly once.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Ranges that were received, relative to the request, sorted and disjoint.
    runs: Vec<(u32, u32)>,
}

impl Coverage {
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
    }

    /// Records `start..end`, which is within the request.
    pub(crate) fn add(&mut self, start: u32, end: u32) -> Result<(), ProtocolViolation> {
        if start >= end {
            return Err(ProtocolViolation("a chunk of no bytes"));
        }
        let at = self.runs.partition_point(|run| run.1 < start);
        // The first range that ends at `start` or later.
        let (mut first, mut last) = (start, end);
        let mut until = at;
        while let Some(run) = self.runs.get(until) {
            if run.0 > end {
                break;
            }
            if run.0 < end && start < run.1 {
                return Err(ProtocolViolation("a byte of a read was sent twice"));
            }
            first = first.min(run.0);
            last = last.max(run.1);
            until += 1;
        }
        self.runs.splice(at..until, [(first, last)]);
        if self.runs.len() > PIECES_MAX {
            return Err(ProtocolViolation("a read was sent in too many pieces out of order"));
        }
        Ok(())
    }

    /// Whether all of `length` bytes were received.
    pub(crate) fn is_whole(&self, length: u32) -> bool {
        self.runs == [(0, length)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk_bytes(kind: u16, length: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = magic::STRUCTURED_REPLY.to_be_bytes().to_vec();
        bytes.extend(1u16.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn frames_need_all_their_bytes_and_no_more() {
        let mut bytes = chunk_bytes(chunk::OFFSET_HOLE, 12, &[0; 12]);
        bytes[31] = 9;
        for cut in 0..32 {
            assert_eq!(decode(&bytes[..cut]), Ok(None), "{cut}");
        }
        let content = FrameContent::Hole { offset: 0, length: 9 };
        assert_eq!(decode(&bytes), Ok(Some((ReplyFrame { cookie: 7, done: true, content }, 32))));
    }

    #[test]
    fn lengths_a_kind_cannot_have_are_refused() {
        for (kind, length) in [
            (chunk::NONE, 1),
            (chunk::OFFSET_DATA, 8),
            (chunk::OFFSET_DATA, 7),
            (chunk::OFFSET_HOLE, 13),
            (chunk::BLOCK_STATUS, 4),
            (chunk::BLOCK_STATUS, 13),
            (chunk::BLOCK_STATUS, u32::MAX),
            (chunk::ERROR, 5),
            (chunk::ERROR, u32::MAX),
            (chunk::BLOCK_STATUS_EXT, 20),
            (99, 20),
        ] {
            let bytes = chunk_bytes(kind, length, &[1; 12]);
            assert!(decode(&bytes).is_err(), "{kind} {length}");
        }
    }

    proptest! {
        #[test]
        fn coverage_agrees_with_a_list_of_bytes(
            pieces in prop::collection::vec((0u32..64, 0u32..16), 1..40)
        ) {
            let mut coverage = Coverage::default();
            let mut bytes = [false; 80];
            for (start, length) in pieces {
                let range = start as usize..(start + length) as usize;
                let fresh = length > 0 && bytes[range.clone()].iter().all(|came| !came);
                prop_assert_eq!(coverage.add(start, start + length).is_ok(), fresh);
                if !fresh {
                    break;
                }
                bytes[range].fill(true);
                let whole = bytes.iter().position(|came| !came).unwrap_or(80);
                let alone = bytes.iter().filter(|came| **came).count() == whole;
                prop_assert_eq!(
                    coverage.is_whole(u32::try_from(whole).unwrap()), alone && whole > 0);
            }
        }
    }
}
