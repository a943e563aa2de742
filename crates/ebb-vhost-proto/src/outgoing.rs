//! What a backend sends: replies, and requests of its own.
//!
//! A reply has the number of its request. Its size is the one that frontends check for: a difference ends the connection.

use crate::blk::{CONFIG_SPACE_BYTES, ConfigSpace};
use crate::message::{
    ConfigRange, HEADER_BYTES, InflightArea, MessageHeader, REPLY_FLAGS, REQUEST_FLAGS, VringState,
};
use crate::request;
use crate::wire::NumberWriter;

/// Bytes of the longest message that a backend sends: a reply to `GET_CONFIG` for the whole config space.
const LONGEST: usize = HEADER_BYTES + 12 + CONFIG_SPACE_BYTES;
/// Bytes of an inflight area without the padding that C compilers add.
const INFLIGHT_BYTES: u32 = 20;

/// A message of the backend, ready to be sent. A descriptor that belongs to it is sent along with its first byte.
#[derive(Clone, Copy, Debug)]
pub struct OutgoingMessage {
    bytes: [u8; LONGEST],
    len: usize,
}

impl OutgoingMessage {
    fn new(request: u32, flags: u32, body: NumberWriter<LONGEST>) -> Self {
        let (body, len) = body.finish();
        let body = body.get(..len).unwrap_or_default();
        // A body was written into a longer array than is left after the header, and none is that long.
        let size = u32::try_from(len).unwrap_or(u32::MAX);
        let message = NumberWriter::new().u32(request).u32(flags).u32(size).bytes(body);
        let (bytes, len) = message.finish();
        Self { bytes, len }
    }

    fn reply(request: u32, body: NumberWriter<LONGEST>) -> Self {
        Self::new(request, REPLY_FLAGS, body)
    }

    /// The bytes to send.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// A reply with a number, to requests such as `GET_FEATURES`, by their number.
    #[must_use]
    pub fn number(request: u32, number: u64) -> Self {
        Self::reply(request, NumberWriter::new().u64(number))
    }

    /// The acknowledgement of a request that asked for one: zero if it succeeded.
    #[must_use]
    pub fn acknowledgement(request: u32, succeeded: bool) -> Self {
        Self::number(request, u64::from(!succeeded))
    }

    /// The reply to `SET_LOG_BASE`, if `LOG_SHMFD` was negotiated. Frontends do not read its number: an error is told by
    /// the end of the connection.
    #[must_use]
    pub fn log_base() -> Self {
        Self::number(request::SET_LOG_BASE, 0)
    }

    /// The reply to `GET_VRING_BASE`.
    #[must_use]
    pub fn vring_base(state: VringState) -> Self {
        let body = NumberWriter::new().u32(state.index).u32(state.number);
        Self::reply(request::GET_VRING_BASE, body)
    }

    /// The reply to `GET_CONFIG`: as many bytes as were asked for. [`config_error`](Self::config_error) if they are not in the
    /// config space.
    #[must_use]
    pub fn config(range: ConfigRange, space: &ConfigSpace) -> Self {
        let Some(payload) = space.read(range.offset, range.size) else {
            return Self::config_error();
        };
        let body = NumberWriter::new().u32(range.offset).u32(range.size).u32(range.flags);
        Self::reply(request::GET_CONFIG, body.bytes(payload))
    }

    /// The reply to a `GET_CONFIG` that fails: without a body.
    #[must_use]
    pub fn config_error() -> Self {
        Self::reply(request::GET_CONFIG, NumberWriter::new())
    }

    /// The reply to the `GET_INFLIGHT_FD` with this header, of the same size. A descriptor belongs to it, unless the area is
    /// empty.
    #[must_use]
    pub fn inflight(asked: MessageHeader, area: InflightArea) -> Self {
        let body = NumberWriter::new().u64(area.mmap_size).u64(area.mmap_offset);
        let body = body.u16(area.queues).u16(area.queue_size);
        let is_padded = asked.size > INFLIGHT_BYTES;
        Self::reply(request::GET_INFLIGHT_FD, if is_padded { body.u32(0) } else { body })
    }

    /// The reply to a `GET_INFLIGHT_FD` with this header that fails: an empty area. The frontend goes on without one.
    #[must_use]
    pub fn inflight_error(asked: MessageHeader) -> Self {
        let none = InflightArea { mmap_size: 0, mmap_offset: 0, queues: 0, queue_size: 0 };
        Self::inflight(asked, none)
    }

    /// `BACKEND_CONFIG_CHANGE_MSG`: the config space has changed. On the backend's own socket, and without `NEED_REPLY`:
    /// the frontend reads the config space before it would reply.
    #[must_use]
    pub fn config_change() -> Self {
        Self::new(request::BACKEND_CONFIG_CHANGE, REQUEST_FLAGS, NumberWriter::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::BlkConfig;

    #[test]
    fn replies_have_the_bytes_of_the_protocol() {
        let state = VringState { index: 3, number: 0x1234 };
        for (message, bytes) in [
            (
                OutgoingMessage::number(request::GET_FEATURES, 0x0807_0605_0403_0201),
                &[1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8][..],
            ),
            (
                OutgoingMessage::acknowledgement(request::SET_MEM_TABLE, true),
                &[5, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            ),
            (
                OutgoingMessage::acknowledgement(request::ADD_MEM_REG, false),
                &[37, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            ),
            (
                OutgoingMessage::log_base(),
                &[6, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            ),
            (
                OutgoingMessage::vring_base(state),
                &[11, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 3, 0, 0, 0, 0x34, 0x12, 0, 0],
            ),
            (OutgoingMessage::config_error(), &[24, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]),
            (OutgoingMessage::config_change(), &[2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
        ] {
            assert_eq!(message.as_bytes(), bytes);
        }
    }

    #[test]
    fn a_config_reply_has_as_many_bytes_as_were_asked_for() {
        let space = BlkConfig { capacity: 0x0102, ..BlkConfig::default() }.space();
        let range = |offset, size| ConfigRange { offset, size, flags: 1 };
        let reply = OutgoingMessage::config(range(1, 2), &space);
        let bytes =
            [24, 0, 0, 0, 5, 0, 0, 0, 14, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0];
        assert_eq!(reply.as_bytes(), bytes);
        assert_eq!(OutgoingMessage::config(range(0, 256), &space).as_bytes().len(), 12 + 12 + 256);
        for refused in [range(0, 257), range(256, 1), range(u32::MAX, u32::MAX)] {
            let error = OutgoingMessage::config_error();
            assert_eq!(OutgoingMessage::config(refused, &space).as_bytes(), error.as_bytes());
        }
    }

    #[test]
    fn an_inflight_reply_is_as_long_as_its_request() {
        let area = InflightArea { mmap_size: 0x1000, mmap_offset: 1, queues: 2, queue_size: 128 };
        let asked = |size| MessageHeader { request: 31, need_reply: false, size };
        let bytes = [
            31, 0, 0, 0, 5, 0, 0, 0, 24, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
            0, 2, 0, 128, 0, 0, 0, 0, 0,
        ];
        assert_eq!(OutgoingMessage::inflight(asked(24), area).as_bytes(), bytes);
        let short = OutgoingMessage::inflight(asked(20), area);
        assert_eq!((short.as_bytes()[8], short.as_bytes().len()), (20, 32));
        assert_eq!(&short.as_bytes()[12..], &bytes[12..32]);
        let error = OutgoingMessage::inflight_error(asked(24));
        assert_eq!(&error.as_bytes()[12..], [0; 24]);
    }
}
