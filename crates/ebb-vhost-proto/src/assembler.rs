//! Puts messages together from the pieces in which a socket delivers them.
//!
//! Invariants: at most one message is held. No byte beyond the current message is asked for, since descriptors belong to
//! the message whose bytes they came with. After an error nothing more is accepted.

use crate::message::{HEADER_BYTES, MessageHeader, ProtocolError};

/// Most bytes in a message's body. The longest one of a block device is a `SET_CONFIG` of 268 bytes; a request that is not
/// supported may be longer, and is read in order to refuse it.
pub const MAX_BODY: usize = 4096;

/// The message that is being received on a connection, in a buffer of fixed size.
///
/// The caller receives into [`space`](Self::space), reports it to [`advance`](Self::advance), and takes the message when
/// there is no space any more.
#[derive(Clone, Debug)]
pub struct Assembler {
    buffer: [u8; HEADER_BYTES + MAX_BODY],
    filled: usize,
    /// That of the current message, once it is complete.
    header: Option<MessageHeader>,
    failed: Option<ProtocolError>,
}

impl Default for Assembler {
    fn default() -> Self {
        Self::new()
    }
}

impl Assembler {
    /// Without any bytes.
    #[must_use]
    pub const fn new() -> Self {
        let buffer = [0; HEADER_BYTES + MAX_BODY];
        Self { buffer, filled: 0, header: None, failed: None }
    }

    /// Where the bytes of the message end, as far as is known: the header, then the body.
    fn end(&self) -> usize {
        match (self.failed, self.header) {
            (Some(_), _) => self.filled,
            (None, None) => HEADER_BYTES,
            (None, Some(header)) => HEADER_BYTES + body_bytes(header).unwrap_or_default(),
        }
    }

    /// The space for the next bytes of the message: those of its header, or of its body. Empty when the message is complete, so
    /// that it has to be taken first, and after an error. A socket must not be read with empty space: the end of the
    /// connection would be seen where there is none.
    pub fn space(&mut self) -> &mut [u8] {
        let end = self.end();
        self.buffer.get_mut(self.filled..end).unwrap_or_default()
    }

    /// Notes that the first `received` bytes of [`space`](Self::space) were filled. More than it has do not count.
    ///
    /// # Errors
    /// If the header is wrong, or announces more than [`MAX_BODY`] bytes: as soon as it is complete, and from then on.
    pub fn advance(&mut self, received: usize) -> Result<(), ProtocolError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.filled = self.filled.saturating_add(received).min(self.end());
        if self.header.is_none() && self.filled == HEADER_BYTES {
            let parsed = self.buffer.first_chunk().map(MessageHeader::from_bytes);
            let checked = parsed.map(|header| header.and_then(bounded));
            match checked {
                Some(Ok(header)) => self.header = Some(header),
                Some(Err(error)) => {
                    self.failed = Some(error);
                    return Err(error);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// The message, if it is complete. The next call of [`space`](Self::space) is for the next message.
    pub fn take(&mut self) -> Option<(MessageHeader, &[u8])> {
        let header = self.header.filter(|_| self.filled == self.end())?;
        let body = self.buffer.get(HEADER_BYTES..self.filled)?;
        self.filled = 0;
        self.header = None;
        Some((header, body))
    }

    /// Whether no byte of a message was received: the only place where a connection ends properly.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.filled == 0
    }
}

/// Bytes in the body, if a message may have as many.
fn body_bytes(header: MessageHeader) -> Option<usize> {
    usize::try_from(header.size).ok().filter(|bytes| *bytes <= MAX_BODY)
}

fn bounded(header: MessageHeader) -> Result<MessageHeader, ProtocolError> {
    body_bytes(header).map(|_| header).ok_or(ProtocolError::TooLong(header.size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills as much space as there is, at most `piece` bytes at a time.
    fn feed(assembler: &mut Assembler, mut bytes: &[u8], piece: usize) -> usize {
        let mut fed = 0;
        loop {
            let space = assembler.space();
            let len = space.len().min(piece).min(bytes.len());
            if len == 0 {
                return fed;
            }
            space[..len].copy_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            fed += len;
            assembler.advance(len).unwrap();
        }
    }

    const TWO: [u8; 32] = [
        // SET_FEATURES, NEED_REPLY, 8 bytes.
        2, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, //
        // SET_OWNER.
        3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn every_split_gives_the_same_messages() {
        for first in 0..=20 {
            for second in first..=20 {
                let mut assembler = Assembler::new();
                for piece in [&TWO[..first], &TWO[first..second], &TWO[second..20]] {
                    assert_eq!(feed(&mut assembler, piece, usize::MAX), piece.len());
                    let complete = !assembler.is_empty() && assembler.space().is_empty();
                    assert_eq!(complete, piece.as_ptr_range().end == TWO[..20].as_ptr_range().end);
                }
                let (header, body) = assembler.take().unwrap();
                assert_eq!(header, MessageHeader { request: 2, need_reply: true, size: 8 });
                assert_eq!(body, [1, 2, 3, 4, 5, 6, 7, 8]);
                assert!(assembler.is_empty() && assembler.take().is_none());
            }
        }
    }

    #[test]
    fn no_byte_of_the_next_message_is_asked_for() {
        for piece in 1..=TWO.len() {
            let mut assembler = Assembler::new();
            assert_eq!(feed(&mut assembler, &TWO, piece), 20, "pieces of {piece}");
            assert!(assembler.take().is_some());
            assert_eq!(feed(&mut assembler, &TWO[20..], piece), 12);
            let (header, body) = assembler.take().unwrap();
            assert_eq!(header, MessageHeader { request: 3, need_reply: false, size: 0 });
            assert!(body.is_empty());
        }
    }

    #[test]
    fn a_header_is_refused_at_once_and_for_good() {
        for (flags, size, error) in [
            (1, 4097, ProtocolError::TooLong(4097)),
            (1, u32::MAX, ProtocolError::TooLong(u32::MAX)),
            (0, 0, ProtocolError::Version(0)),
            (2, 0, ProtocolError::Version(2)),
            (5, 8, ProtocolError::UnexpectedReply),
        ] {
            let mut assembler = Assembler::new();
            let header = [1u32, flags, size].map(u32::to_le_bytes).concat();
            assembler.space().copy_from_slice(&header);
            assert_eq!(assembler.advance(12), Err(error));
            assert!(assembler.space().is_empty() && assembler.take().is_none());
            assert_eq!(assembler.advance(1), Err(error));
        }
    }

    #[test]
    fn the_longest_message_fits() {
        let mut assembler = Assembler::new();
        let header = [26u32, 0xffff_fff9, 4096].map(u32::to_le_bytes).concat();
        assembler.space().copy_from_slice(&header);
        assembler.advance(12).unwrap();
        assert_eq!(assembler.space().len(), MAX_BODY);
        // More than there is space for does not count.
        assembler.advance(usize::MAX).unwrap();
        assert_eq!(assembler.take().map(|(_, body)| body.len()), Some(MAX_BODY));
    }
}
