//! xenstore's messages (Xen, `xen/include/public/io/xs_wire.h`), without I/O.

use crate::platform::XenstoreError;

/// Bytes of a header.
pub const HEADER: usize = 16;
/// Bytes of the longest payload; through the kernel's device, header and payload must fit a page.
pub const PAYLOAD: usize = 4080;

/// Kinds of messages.
#[allow(missing_docs, reason = "the names of the protocol say it")]
pub mod kind {
    pub const DIRECTORY: u32 = 1;
    pub const READ: u32 = 2;
    pub const WATCH: u32 = 4;
    pub const UNWATCH: u32 = 5;
    pub const TRANSACTION_START: u32 = 6;
    pub const TRANSACTION_END: u32 = 7;
    pub const WRITE: u32 = 11;
    pub const RM: u32 = 13;
    pub const SET_PERMS: u32 = 14;
    pub const WATCH_EVENT: u32 = 15;
    pub const ERROR: u32 = 16;
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// See [`kind`].
    pub kind: u32,
    /// The request's number, repeated in the reply.
    pub request: u32,
    /// The transaction.
    pub transaction: u32,
    /// Bytes of the payload.
    pub len: u32,
}

impl Header {
    /// Encodes it.
    pub fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [self.kind, self.request, self.transaction, self.len];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes it.
    pub fn decode(bytes: &[u8; HEADER]) -> Header {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Header { kind: word(0), request: word(4), transaction: word(8), len: word(12) }
    }
}

/// An error reply.
pub fn refusal(payload: &[u8]) -> XenstoreError {
    let name = payload.split(|byte| *byte == 0).next().unwrap_or_default();
    match name {
        b"ENOENT" => XenstoreError::Missing,
        b"EAGAIN" => XenstoreError::Again,
        other => {
            let text = String::from_utf8_lossy(other);
            XenstoreError::Refused(text.chars().take(32).collect())
        }
    }
}

/// The first two strings of a watch event: path and token.
pub fn watch_event(payload: &[u8]) -> Option<(String, String)> {
    let mut parts = payload.split(|byte| *byte == 0);
    let path = std::str::from_utf8(parts.next()?).ok()?;
    let token = std::str::from_utf8(parts.next()?).ok()?;
    Some((path.to_owned(), token.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_watch_events_are_decoded() {
        let header = Header { kind: kind::WATCH_EVENT, request: 2, transaction: 3, len: 4 };
        assert_eq!(Header::decode(&header.encode()), header);
        assert_eq!(watch_event(b"/a/b\0t\0"), Some(("/a/b".into(), "t".into())));
        assert_eq!(watch_event(b"/a"), None);
        assert_eq!(watch_event(b"\xff\0t\0"), None);
        assert!(matches!(refusal(b"EAGAIN\0"), XenstoreError::Again));
        assert!(matches!(refusal(b"ENOENT\0"), XenstoreError::Missing));
        assert!(matches!(refusal(b""), XenstoreError::Refused(_)));
    }
}
