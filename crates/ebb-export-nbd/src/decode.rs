//! Requests of the transmission phase: decoding and checking.
//!
//! Implements the sections "Request message", "Size constraints", "Command flags", "Request types"
//! and "Error values" of the protocol, with their extended forms. Pure functions of a
//! [`Session`] and bytes: no I/O, no allocation.
//!
//! # Invariants, whatever a client sends
//! - A [`RequestHeader`] is decoded only after the correct magic number, and says how many bytes of
//!   payload follow it. Those must be read from the connection **before the next header, whether
//!   the request is executed or refused**: the payload of a refused WRITE is skipped, and the connection
//!   continues.
//! - A READ or WRITE is carried out if it is no longer than the advertised maximum or 32 MiB,
//!   whichever is larger: clients that do not ask for the limit may assume 32 MiB, and Linux does.
//!   A payload beyond both limits closes the connection ([`Fatal::PayloadTooLong`]), since
//!   gigabytes would have to be skipped.
//! - An [`NbdRequest`] is made only by [`check`]: it lies within the export, is aligned, and the
//!   export supports it. Its flags and bounds need not be checked again.
//! - No sum of an offset and a length overflows.

use crate::handshake::Session;
use crate::proto::{
    Command, CommandFlags, Errno, PAYLOAD_PORTABLE, Reader, ReplyStyle, TransmissionFlags, magic,
};

/// A request header as received, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The client's cookie, which every reply carries unchanged.
    pub cookie: u64,
    /// The requested command.
    pub command: Command,
    /// Flags, known or not.
    pub flags: CommandFlags,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes; at most 32 bits unless headers are extended.
    pub length: u64,
    /// Bytes on the connection between this header and the next.
    pub payload_len: u32,
}

/// The result of decoding the front of the received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Incomplete: decode again when this many bytes are available, counted from the same start.
    NeedMore(usize),
    /// A header, and its length in bytes. Its payload follows.
    Request(RequestHeader, usize),
}

/// Why a connection must be closed at once: the start of the next request is unknown, or
/// reaching it would cost too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// The bytes do not start with the magic number of a request.
    #[error("client sent {found:#010x} where an NBD request starts ({expected:#010x})")]
    BadMagic {
        /// The magic number of requests on this connection.
        expected: u32,
        /// The number received.
        found: u32,
    },
    /// The payload is longer than any client may send.
    #[error("client announced a request payload of {length} bytes; the maximum is {max}")]
    PayloadTooLong {
        /// Announced, in bytes.
        length: u64,
        /// The most that is read or skipped, in bytes.
        max: u32,
    },
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdRequest {
    /// `NBD_CMD_READ`: send `length` bytes from `offset`.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes, 1 up to the maximum payload.
        length: u32,
        /// All in one chunk (`NBD_CMD_FLAG_DF`).
        unfragmented: bool,
    },
    /// `NBD_CMD_WRITE`: store the payload at `offset`.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes, 1 up to the maximum payload; also the length of the payload.
        length: u32,
        /// Reply when the data is stable.
        fua: bool,
    },
    /// `NBD_CMD_DISC`: complete the requests in flight and close the connection; there is no reply.
    Disconnect,
    /// `NBD_CMD_FLUSH`: make every completed write stable.
    Flush,
    /// `NBD_CMD_TRIM`: the bytes are no longer needed.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
        /// Reply when the data is stable.
        fua: bool,
    },
    /// `NBD_CMD_CACHE`: the bytes will be read soon.
    Cache {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
    },
    /// `NBD_CMD_WRITE_ZEROES`: make the bytes read as zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
        /// Reply when the data is stable.
        fua: bool,
        /// Keep the space allocated.
        no_hole: bool,
        /// Fail with [`Errno::NotSup`] unless it is faster than writing.
        fast: bool,
    },
    /// `NBD_CMD_BLOCK_STATUS`: report which parts are allocated.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        length: u64,
        /// Exactly one extent, not longer than the range (`NBD_CMD_FLAG_REQ_ONE`).
        one: bool,
    },
}

/// The longest payload of a request of a session, in bytes.
#[must_use]
pub fn payload_max(session: &Session) -> u32 {
    session.export.block.maximum_payload().max(PAYLOAD_PORTABLE)
}

/// Decodes a request header at the front of `bytes`.
///
/// # Errors
/// The connection must be closed: the start of the next request is unknown.
#[inline]
pub fn decode_request(session: &Session, bytes: &[u8]) -> Result<Decoded, Fatal> {
    let extended = session.style == ReplyStyle::Extended;
    let expected = if extended { magic::EXTENDED_REQUEST } else { magic::REQUEST };
    let needed = session.style.request_len();
    let mut reader = Reader::new(bytes);
    match reader.u32() {
        Some(found) if found != expected => return Err(Fatal::BadMagic { expected, found }),
        _ => {}
    }
    let Some((flags, command, cookie, offset, length)) = fields(&mut reader, extended) else {
        return Ok(Decoded::NeedMore(needed));
    };
    let has_payload = if extended {
        flags.contains(CommandFlags::PAYLOAD_LEN)
    } else {
        // Compact headers do not have NBD_CMD_FLAG_PAYLOAD_LEN.
        command == Command::Write
    };
    let payload_len = if has_payload {
        let max = payload_max(session);
        match u32::try_from(length) {
            Ok(fits) if fits <= max => fits,
            _ => return Err(Fatal::PayloadTooLong { length, max }),
        }
    } else {
        0
    };
    let header = RequestHeader { cookie, command, flags, offset, length, payload_len };
    Ok(Decoded::Request(header, needed))
}

/// The fields of a header after its magic number.
fn fields(
    reader: &mut Reader<'_>,
    extended: bool,
) -> Option<(CommandFlags, Command, u64, u64, u64)> {
    let flags = CommandFlags(reader.u16()?);
    let command = Command::from_wire(reader.u16()?);
    let cookie = reader.u64()?;
    let offset = reader.u64()?;
    let length = if extended { reader.u64()? } else { u64::from(reader.u32()?) };
    Some((flags, command, cookie, offset, length))
}

/// Checks whether a request may be executed.
///
/// # Errors
/// The error to reply with; then skip [`RequestHeader::payload_len`] bytes and continue. In this
/// order: `NBD_EINVAL` for an unknown command, a flag that is not valid for it, or a payload that
/// is missing or not allowed; `NBD_EPERM` for writing to a read-only export; `NBD_EINVAL` for a
/// command that was not offered, or a length of 0; beyond the end `NBD_ENOSPC` for WRITE and
/// WRITE_ZEROES, else `NBD_EINVAL`; `NBD_EINVAL` for a range that is not aligned to the minimum block
/// size; above [`payload_max`] `NBD_EOVERFLOW` for a READ with replies in chunks, else
/// `NBD_EINVAL`.
pub fn check(header: &RequestHeader, session: &Session) -> Result<NbdRequest, Errno> {
    type C = Command;
    type F = CommandFlags;
    let RequestHeader { command, flags, offset, length, .. } = *header;
    if command == C::Disconnect {
        return Ok(NbdRequest::Disconnect);
    }
    check_flags(header, session)?;
    let writes = matches!(command, C::Write | C::Trim | C::WriteZeroes);
    if writes && session.flags.contains(TransmissionFlags::READ_ONLY) {
        return Err(Errno::Perm);
    }
    if !is_offered(command, session) {
        return Err(Errno::Inval);
    }
    if command == C::Flush {
        // The protocol: "length and offset are reserved, and MUST be set to all-zero".
        return if offset == 0 && length == 0 { Ok(NbdRequest::Flush) } else { Err(Errno::Inval) };
    }
    check_range(header, session)?;
    let fua = flags.contains(F::FUA);
    Ok(match command {
        C::Read => NbdRequest::Read {
            offset,
            length: payload_sized(header, session)?,
            unfragmented: flags.contains(F::DF),
        },
        C::Write => NbdRequest::Write { offset, length: payload_sized(header, session)?, fua },
        C::Trim => NbdRequest::Trim { offset, length, fua },
        C::Cache => NbdRequest::Cache { offset, length },
        C::WriteZeroes => NbdRequest::WriteZeroes {
            offset,
            length,
            fua,
            no_hole: flags.contains(F::NO_HOLE),
            fast: flags.contains(F::FAST_ZERO),
        },
        C::BlockStatus => {
            NbdRequest::BlockStatus { offset, length, one: flags.contains(F::REQ_ONE) }
        }
        C::Disconnect => NbdRequest::Disconnect,
        C::Flush => NbdRequest::Flush,
        C::Unknown(_) => return Err(Errno::Inval),
    })
}

/// "Command flags": a flag is valid for the commands it is documented for, once offered.
fn check_flags(header: &RequestHeader, session: &Session) -> Result<(), Errno> {
    type F = CommandFlags;
    let offers = |flag| session.flags.contains(flag);
    let extended = session.style == ReplyStyle::Extended;
    // FUA is valid for all commands.
    let valid = F::NONE.with_if(offers(TransmissionFlags::SEND_FUA), F::FUA);
    let valid = match header.command {
        Command::Read => valid.with_if(offers(TransmissionFlags::SEND_DF), F::DF),
        Command::Write => valid.with_if(extended, F::PAYLOAD_LEN),
        Command::WriteZeroes => {
            valid.with(F::NO_HOLE).with_if(offers(TransmissionFlags::SEND_FAST_ZERO), F::FAST_ZERO)
        }
        Command::BlockStatus => valid.with(F::REQ_ONE),
        Command::Disconnect | Command::Flush | Command::Trim | Command::Cache => valid,
        Command::Unknown(_) => return Err(Errno::Inval),
    };
    // With extended headers, a WRITE must set NBD_CMD_FLAG_PAYLOAD_LEN.
    let payload_missing =
        header.command == Command::Write && extended && !header.flags.contains(F::PAYLOAD_LEN);
    if payload_missing || !header.flags.beyond(valid).is_none() {
        return Err(Errno::Inval);
    }
    Ok(())
}

/// Whether the server offered this command in the handshake.
fn is_offered(command: Command, session: &Session) -> bool {
    type T = TransmissionFlags;
    match command {
        Command::Read | Command::Write | Command::Disconnect => true,
        Command::Flush => session.flags.contains(T::SEND_FLUSH),
        Command::Trim => session.flags.contains(T::SEND_TRIM),
        Command::Cache => session.flags.contains(T::SEND_CACHE),
        Command::WriteZeroes => session.flags.contains(T::SEND_WRITE_ZEROES),
        Command::BlockStatus => session.context.is_some(),
        Command::Unknown(_) => false,
    }
}

/// "Size constraints": not empty, within the export, aligned.
fn check_range(header: &RequestHeader, session: &Session) -> Result<(), Errno> {
    let RequestHeader { command, offset, length, .. } = *header;
    if length == 0 {
        return Err(Errno::Inval);
    }
    let size = session.export.size;
    if offset > size || length > size - offset {
        return Err(match command {
            Command::Write | Command::WriteZeroes => Errno::NoSpc,
            _ => Errno::Inval,
        });
    }
    let minimum = u64::from(session.export.block.minimum());
    if !offset.is_multiple_of(minimum) || !length.is_multiple_of(minimum) {
        return Err(Errno::Inval);
    }
    Ok(())
}

/// The length of a request whose data is transferred over the connection.
fn payload_sized(header: &RequestHeader, session: &Session) -> Result<u32, Errno> {
    match u32::try_from(header.length) {
        Ok(length) if length <= payload_max(session) => Ok(length),
        _ if header.command == Command::Read && session.style.is_chunked() => Err(Errno::Overflow),
        _ => Err(Errno::Inval),
    }
}

/// The text of a reply to a request that [`check`] refuses.
pub(crate) fn refusal(errno: Errno) -> &'static str {
    match errno {
        Errno::Perm => "the volume is read-only",
        Errno::NoSpc => "the request extends past the end of the volume",
        Errno::Overflow => {
            "the request is longer than both 32 MiB and the maximum payload (see NBD_INFO_BLOCK_SIZE)"
        }
        _ => "invalid request: check range, alignment to 512 bytes, length, flags and command",
    }
}

#[cfg(test)]
mod tests;
