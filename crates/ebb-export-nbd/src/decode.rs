//! Requests of the transmission phase: taken off the wire, then checked.
//!
//! Answers the sections "Request message", "Size constraints", "Command flags", "Request types"
//! and "Error values" of the protocol, with their extended forms. Pure functions of a
//! [`Session`] and bytes: no I/O, no allocation.
//!
//! What holds, whatever a client sends:
//! - A [`RequestHeader`] comes only from the right magic number, and says how many bytes of
//!   payload follow it. Those must be taken from the connection **before the next header, whether
//!   the request is carried out or refused**: a refused WRITE is skipped, not disconnected.
//! - A payload is never longer than the advertised maximum or 32 MiB, whichever is more: up to
//!   32 MiB must not count as an attack, beyond both the connection is closed
//!   ([`Fatal::PayloadTooLong`]) rather than gigabytes skipped.
//! - An [`Operation`] comes only from [`check`]: it lies within the export, is aligned, and the
//!   export offers it. Whoever holds one need not look at flags or bounds again.
//! - No sum of an offset and a length overflows.

use crate::handshake::Session;
use crate::proto::{
    Command, CommandFlags, Errno, PAYLOAD_PORTABLE, Reader, ReplyStyle, TransmissionFlags, magic,
};

/// A request as it stands on the wire, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The client's own mark, to be returned unread in every reply.
    pub cookie: u64,
    /// What is asked for.
    pub command: Command,
    /// Flags, known or not.
    pub flags: CommandFlags,
    /// First byte of the export concerned.
    pub offset: u64,
    /// Number of bytes concerned; up to 32 bits unless headers are extended.
    pub length: u64,
    /// Bytes on the connection between this header and the next.
    pub payload_len: u32,
}

/// What the front of the received bytes holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Too little: decode again when this many bytes are there, counted from the same start.
    NeedMore(usize),
    /// A header, and the bytes it took. Its payload comes next.
    Request(RequestHeader, usize),
}

/// Why a connection must be closed at once: the place where the next request starts is lost, or
/// reaching it would cost too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// The bytes do not start as a request does.
    #[error("client sent {found:#010x} where an NBD request starts ({expected:#010x})")]
    BadMagic {
        /// What a request starts with on this connection.
        expected: u32,
        /// What was there.
        found: u32,
    },
    /// The payload is longer than any client may send.
    #[error("client announced a request payload of {length} bytes; the most is {max}")]
    PayloadTooLong {
        /// Announced, in bytes.
        length: u64,
        /// The most that is read or skipped, in bytes.
        max: u32,
    },
}

/// A request that was found to be in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Send `length` bytes from `offset`.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes, 1 up to the maximum payload.
        length: u32,
        /// All in one chunk (`NBD_CMD_FLAG_DF`).
        unfragmented: bool,
    },
    /// Store the payload at `offset`.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes, 1 up to the maximum payload; the payload is as long.
        length: u32,
        /// Reply when it is durable.
        fua: bool,
    },
    /// Finish what is under way and close the connection; there is no reply.
    Disconnect,
    /// Make every completed write durable.
    Flush,
    /// The bytes are no longer needed.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
        /// Reply when it is durable.
        fua: bool,
    },
    /// The bytes will be needed soon.
    Cache {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
    },
    /// Let the bytes read as zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes, at least 1; up to the size of the export.
        length: u64,
        /// Reply when it is durable.
        fua: bool,
        /// Keep the space allocated.
        no_hole: bool,
        /// Fail with [`Errno::NotSup`] unless it is faster than writing.
        fast: bool,
    },
    /// Tell which parts are allocated.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes asked about, at least 1.
        length: u64,
        /// Exactly one extent, not longer than asked.
        one: bool,
    },
}

/// The longest request payload that is read or skipped in a session, in bytes.
#[must_use]
pub fn payload_max(session: &Session) -> u32 {
    session.export.block.maximum_payload().max(PAYLOAD_PORTABLE)
}

/// Looks for a request header at the front of `bytes`.
///
/// # Errors
/// The connection must be closed; nothing behind these bytes can be understood.
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
        // A stray NBD_CMD_FLAG_PAYLOAD_LEN means nothing to compact headers.
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

/// The fields of a header behind its magic number.
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

/// Decides whether a request may be carried out.
///
/// # Errors
/// What to answer instead; then skip [`RequestHeader::payload_len`] bytes and go on. In this
/// order: `NBD_EINVAL` for an unknown command, a flag that is not valid for it, or a payload that
/// is missing or out of place; `NBD_EPERM` for writing to a read-only export; `NBD_EINVAL` for a
/// command that was not offered, or a length of 0; beyond the end `NBD_ENOSPC` for WRITE and
/// WRITE_ZEROES, else `NBD_EINVAL`; `NBD_EINVAL` for what is not aligned to the minimum block
/// size; above the maximum payload `NBD_EOVERFLOW` for a READ answered in chunks, else
/// `NBD_EINVAL`.
pub fn check(header: &RequestHeader, session: &Session) -> Result<Operation, Errno> {
    type C = Command;
    type F = CommandFlags;
    let RequestHeader { command, flags, offset, length, .. } = *header;
    if command == C::Disconnect {
        return Ok(Operation::Disconnect);
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
        // "length and offset are reserved, and MUST be set to all-zero"
        return if offset == 0 && length == 0 { Ok(Operation::Flush) } else { Err(Errno::Inval) };
    }
    check_range(header, session)?;
    let fua = flags.contains(F::FUA);
    Ok(match command {
        C::Read => Operation::Read {
            offset,
            length: payload_sized(header, session)?,
            unfragmented: flags.contains(F::DF),
        },
        C::Write => Operation::Write { offset, length: payload_sized(header, session)?, fua },
        C::Trim => Operation::Trim { offset, length, fua },
        C::Cache => Operation::Cache { offset, length },
        C::WriteZeroes => Operation::WriteZeroes {
            offset,
            length,
            fua,
            no_hole: flags.contains(F::NO_HOLE),
            fast: flags.contains(F::FAST_ZERO),
        },
        C::BlockStatus => {
            Operation::BlockStatus { offset, length, one: flags.contains(F::REQ_ONE) }
        }
        C::Disconnect => Operation::Disconnect,
        C::Flush => Operation::Flush,
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
    // With extended headers a WRITE must say that its length is that of a payload.
    let payload_missing =
        header.command == Command::Write && extended && !header.flags.contains(F::PAYLOAD_LEN);
    if payload_missing || !header.flags.beyond(valid).is_none() {
        return Err(Errno::Inval);
    }
    Ok(())
}

/// Whether the client was told that it may send this command.
fn is_offered(command: Command, session: &Session) -> bool {
    type T = TransmissionFlags;
    match command {
        Command::Read | Command::Write | Command::Disconnect => true,
        Command::Flush => session.flags.contains(T::SEND_FLUSH),
        Command::Trim => session.flags.contains(T::SEND_TRIM),
        Command::Cache => session.flags.contains(T::SEND_CACHE),
        Command::WriteZeroes => session.flags.contains(T::SEND_WRITE_ZEROES),
        Command::BlockStatus => session.allocation_context.is_some(),
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

/// The length of a request that moves its bytes over the connection.
fn payload_sized(header: &RequestHeader, session: &Session) -> Result<u32, Errno> {
    match u32::try_from(header.length) {
        Ok(length) if length <= session.export.block.maximum_payload() => Ok(length),
        _ if header.command == Command::Read && session.style.is_chunked() => Err(Errno::Overflow),
        _ => Err(Errno::Inval),
    }
}

#[cfg(test)]
mod tests;
