//! The description of an export, and the interface by which the handshake looks exports up.
//!
//! Implements the sections "Transmission flags" and "Size constraints" of the protocol. The server implements
//! [`Exports`] for its volumes.

use crate::proto::{ReplyStyle, TransmissionFlags};

/// Looks up exports by name. Called during option negotiation only.
pub trait Exports {
    /// Calls `visit` with the name and the description (may be empty) of each export to be listed.
    ///
    /// A name of more than 4096 bytes, or with a NUL in it, cannot be sent: such
    /// an export is omitted from the list. Descriptions are cut to 4096 bytes.
    fn list(&self, visit: &mut dyn FnMut(&str, &str));

    /// The export that `name` (at most 4096 bytes, no NUL) refers to; the empty name is the
    /// default export, if there is one. `None` becomes `NBD_REP_ERR_UNKNOWN`.
    fn lookup(&self, name: &str) -> Option<ExportInfo>;

    /// Why the export of that name, which [`Exports::lookup`] does not find, is not available now: a message for
    /// the client's user. `None`: there is no such export.
    fn refusal(&self, _name: &str) -> Option<String> {
        None
    }

    /// Why the export of that name, which [`Exports::lookup`] finds, cannot be used by a further client now: a message
    /// for the client's user. `None`: it can be used.
    fn busy(&self, _name: &str) -> Option<String> {
        None
    }
}

/// One export, as it is when a client requests it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The snapshots since which a client may ask what has changed.
    pub snapshots: Vec<String>,
    /// The server's own number for the export; passed to the session unchanged.
    pub handle: u64,
    /// Canonical name, at most 4096 bytes.
    pub name: String,
    /// Description for users; may be empty. At most 4096 bytes are sent.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// The supported commands and flags.
    pub capabilities: ExportCapabilities,
    /// The block sizes its requests must observe.
    pub block: BlockSizes,
}

impl ExportInfo {
    /// The transmission flags to advertise on a connection with replies of this style.
    #[must_use]
    pub const fn transmission_flags(&self, style: ReplyStyle) -> TransmissionFlags {
        type F = TransmissionFlags;
        let can = self.capabilities;
        let zeroes = can.write_zeroes && !can.read_only;
        F::HAS_FLAGS
            .with_if(can.read_only, F::READ_ONLY)
            .with_if(can.flush, F::SEND_FLUSH)
            .with_if(can.fua, F::SEND_FUA)
            .with_if(can.rotational, F::ROTATIONAL)
            .with_if(can.trim && !can.read_only, F::SEND_TRIM)
            .with_if(zeroes, F::SEND_WRITE_ZEROES)
            .with_if(zeroes && can.fast_zero, F::SEND_FAST_ZERO)
            .with_if(style.is_chunked(), F::SEND_DF)
            .with_if(can.multi_conn, F::CAN_MULTI_CONN)
            .with_if(can.cache, F::SEND_CACHE)
    }
}

/// The commands and flags that an export supports; each becomes a transmission flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCapabilities {
    /// WRITE, TRIM and WRITE_ZEROES are refused; takes precedence over the fields below.
    pub read_only: bool,
    /// FLUSH makes completed writes stable.
    pub flush: bool,
    /// With FUA, data is stable before the reply to a write.
    pub fua: bool,
    /// TRIM is supported.
    pub trim: bool,
    /// WRITE_ZEROES is supported, including NO_HOLE.
    pub write_zeroes: bool,
    /// FAST_ZERO is supported; has no effect without `write_zeroes`.
    pub fast_zero: bool,
    /// A flush on one connection covers the completed writes of all connections.
    pub multi_conn: bool,
    /// CACHE is supported.
    pub cache: bool,
    /// The medium is rotational: sequential requests are cheaper.
    pub rotational: bool,
}

/// The size constraints of an export, in bytes ("Size constraints").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    minimum: u32,
    preferred: u32,
    maximum_payload: u32,
}

impl BlockSizes {
    /// `None` unless the rules of the protocol hold: `minimum` is a power
    /// of two of at most 64 KiB; `preferred` is a power of two, at least 512 and `minimum`;
    /// `maximum_payload` is at least `preferred`.
    #[must_use]
    pub const fn new(minimum: u32, preferred: u32, maximum_payload: u32) -> Option<Self> {
        let valid = minimum.is_power_of_two()
            && minimum <= 1 << 16
            && preferred.is_power_of_two()
            && preferred >= 512
            && preferred >= minimum
            && maximum_payload >= preferred;
        if valid { Some(Self { minimum, preferred, maximum_payload }) } else { None }
    }

    /// Offset and length of every request are multiples of this.
    #[must_use]
    pub const fn minimum(self) -> u32 {
        self.minimum
    }

    /// Requests aligned to this need no read-modify-write.
    #[must_use]
    pub const fn preferred(self) -> u32 {
        self.preferred
    }

    /// Longest payload of one request or reply chunk.
    #[must_use]
    pub const fn maximum_payload(self) -> u32 {
        self.maximum_payload
    }
}

impl Default for BlockSizes {
    /// 512 bytes, 4 KiB, 32 MiB: what clients that do not request block sizes may assume.
    fn default() -> Self {
        Self { minimum: 512, preferred: 4096, maximum_payload: 1 << 25 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(capabilities: ExportCapabilities) -> ExportInfo {
        ExportInfo {
            snapshots: Vec::new(),
            handle: 0,
            name: String::new(),
            description: String::new(),
            size: 1 << 20,
            capabilities,
            block: BlockSizes::default(),
        }
    }

    const ALL: ExportCapabilities = ExportCapabilities {
        read_only: false,
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        multi_conn: true,
        cache: true,
        rotational: false,
    };

    #[test]
    fn df_is_offered_only_with_chunked_replies() {
        let info = export(ALL);
        let df = TransmissionFlags::SEND_DF;
        assert!(!info.transmission_flags(ReplyStyle::Simple).contains(df));
        assert!(info.transmission_flags(ReplyStyle::Structured).contains(df));
        assert!(info.transmission_flags(ReplyStyle::Extended).contains(df));
        // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO
        assert_eq!(info.transmission_flags(ReplyStyle::Simple).0, 0b1101_0110_1101);
    }

    #[test]
    fn a_read_only_export_offers_no_write_commands() {
        let flags = export(ExportCapabilities { read_only: true, ..ALL })
            .transmission_flags(ReplyStyle::Simple);
        assert_eq!(flags.0, 0b0101_0000_1111);
    }

    #[test]
    fn fast_zero_needs_write_zeroes() {
        let flags = export(ExportCapabilities { write_zeroes: false, ..ALL })
            .transmission_flags(ReplyStyle::Simple);
        assert!(!flags.contains(TransmissionFlags::SEND_FAST_ZERO));
    }

    #[test]
    fn block_sizes_that_violate_the_protocol_are_rejected() {
        assert!(BlockSizes::new(512, 4096, 1 << 25).is_some());
        assert!(BlockSizes::new(1, 512, u32::MAX).is_some());
        assert!(BlockSizes::new(0, 4096, 1 << 25).is_none());
        assert!(BlockSizes::new(513, 4096, 1 << 25).is_none());
        assert!(BlockSizes::new(1 << 17, 1 << 17, 1 << 25).is_none());
        assert!(BlockSizes::new(4096, 512, 1 << 25).is_none());
        assert!(BlockSizes::new(512, 4096, 4095).is_none());
        assert!(BlockSizes::new(1, 256, 1 << 25).is_none());
    }
}
