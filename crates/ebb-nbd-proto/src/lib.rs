//! Constants of the NBD protocol: magic numbers, flags, options, commands, errors.
//!
//! The source of every value is the published protocol, `doc/proto.md` of
//! NetworkBlockDevice/nbd; the section is named at each group. Values for extended headers
//! are from the same file in the `extension-ext-header` branch, to which the main text refers.
//!
//! Sets that a peer may extend (options, information types) are plain numbers in a module, since
//! an unknown value may be received. Sets of which this program sends only known values (errors, reply styles)
//! are enums. All numbers are in network byte order on the wire. No I/O, no state: used by the server
//! (`ebb-export-nbd`) and the client (`ebb-store`).

/// A set of bits as sent on the wire, with names for the known ones.
macro_rules! bit_set {
    (
        $(#[$set_doc:meta])* $set:ident($int:ty);
        $($(#[$bit_doc:meta])* $bit:ident = $shift:literal;)*
    ) => {
        $(#[$set_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $set(pub $int);

        impl $set {
            /// No bit set.
            pub const NONE: Self = Self(0);
            $($(#[$bit_doc])* pub const $bit: Self = Self(1 << $shift);)*

            /// Whether every bit of `other` is set here.
            #[must_use]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The bits of both.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// The bits of both if `condition` holds, else these only.
            #[must_use]
            pub const fn with_if(self, condition: bool, other: Self) -> Self {
                if condition { self.with(other) } else { self }
            }

            /// The bits that are set here and not in `known`.
            #[must_use]
            pub const fn beyond(self, known: Self) -> Self {
                Self(self.0 & !known.0)
            }

            /// Whether no bit is set.
            #[must_use]
            pub const fn is_none(self) -> bool {
                self.0 == 0
            }
        }
    };
}

/// Magic numbers, sections "Newstyle negotiation", "Fixed newstyle negotiation", "Transmission".
pub mod magic {
    /// `NBDMAGIC` in ASCII: the first eight bytes a server sends (`INIT_PASSWD`).
    pub const INIT: u64 = 0x4e42_444d_4147_4943;
    /// `IHAVEOPT` in ASCII: follows [`INIT`], and starts each option of the client.
    pub const OPTION: u64 = 0x4948_4156_454f_5054;
    /// Starts each reply to an option.
    pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
    /// `NBD_REQUEST_MAGIC`: starts a compact request of [`super::REQUEST_LEN`] bytes.
    pub const REQUEST: u32 = 0x2560_9513;
    /// `NBD_EXTENDED_REQUEST_MAGIC`: starts a request of [`super::EXTENDED_REQUEST_LEN`] bytes.
    pub const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
    /// `NBD_SIMPLE_REPLY_MAGIC`.
    pub const SIMPLE_REPLY: u32 = 0x6744_6698;
    /// `NBD_STRUCTURED_REPLY_MAGIC`.
    pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;
    /// `NBD_EXTENDED_REPLY_MAGIC`.
    pub const EXTENDED_REPLY: u32 = 0x6e8a_278c;
}

/// Bytes in the server's greeting: two magic numbers and the handshake flags.
pub const GREETING_LEN: usize = 18;
/// Bytes in the header of an option: magic, option, length.
pub const OPTION_HEADER_LEN: usize = 16;
/// Bytes in a compact request header ("Request message").
pub const REQUEST_LEN: usize = 28;
/// Bytes in an extended request header ("Request message", extended form).
pub const EXTENDED_REQUEST_LEN: usize = 32;
/// Bytes in a simple reply header ("Simple reply message").
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Bytes in a structured reply chunk before its payload ("Structured reply chunk message").
pub const STRUCTURED_REPLY_LEN: usize = 20;
/// Bytes in an extended reply chunk before its payload ("Extended reply chunk message").
pub const EXTENDED_REPLY_LEN: usize = 32;
/// Zeroes that follow the reply to `NBD_OPT_EXPORT_NAME` unless `NBD_FLAG_C_NO_ZEROES` was negotiated.
pub const EXPORT_NAME_PADDING: usize = 124;
/// The longest string, in bytes ("Conventions").
pub const STRING_MAX: usize = 4096;
/// A payload of up to this many bytes must not be treated as an attack, whatever maximum was advertised
/// ("Size constraints").
pub const PAYLOAD_PORTABLE: u32 = 1 << 25;
/// A read with `NBD_CMD_FLAG_DF` of up to this many bytes must be served in one chunk
/// (`NBD_CMD_READ`).
pub const UNFRAGMENTED_READ_MIN: u32 = 65_536;
/// A block status chunk should not have more descriptors (`NBD_REPLY_TYPE_BLOCK_STATUS`).
pub const EXTENTS_MAX: u32 = 1 << 20;

bit_set! {
    /// Handshake flags, section "Handshake flags": 16 bits in the greeting.
    HandshakeFlags(u16);
    /// `NBD_FLAG_FIXED_NEWSTYLE`
    FIXED_NEWSTYLE = 0;
    /// `NBD_FLAG_NO_ZEROES`
    NO_ZEROES = 1;
}

bit_set! {
    /// Client flags, section "Client flags": 32 bits, the client's first message.
    ClientFlags(u32);
    /// `NBD_FLAG_C_FIXED_NEWSTYLE`
    FIXED_NEWSTYLE = 0;
    /// `NBD_FLAG_C_NO_ZEROES`
    NO_ZEROES = 1;
}

impl ClientFlags {
    /// The flags this server supports.
    pub const KNOWN: Self = Self::FIXED_NEWSTYLE.with(Self::NO_ZEROES);
}

bit_set! {
    /// Transmission flags, section "Transmission flags": what an export offers.
    TransmissionFlags(u16);
    /// `NBD_FLAG_HAS_FLAGS`: always set.
    HAS_FLAGS = 0;
    /// `NBD_FLAG_READ_ONLY`
    READ_ONLY = 1;
    /// `NBD_FLAG_SEND_FLUSH`: `NBD_CMD_FLUSH` is served.
    SEND_FLUSH = 2;
    /// `NBD_FLAG_SEND_FUA`: `NBD_CMD_FLAG_FUA` is obeyed.
    SEND_FUA = 3;
    /// `NBD_FLAG_ROTATIONAL`
    ROTATIONAL = 4;
    /// `NBD_FLAG_SEND_TRIM`: `NBD_CMD_TRIM` is served.
    SEND_TRIM = 5;
    /// `NBD_FLAG_SEND_WRITE_ZEROES`: `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE`.
    SEND_WRITE_ZEROES = 6;
    /// `NBD_FLAG_SEND_DF`: `NBD_CMD_FLAG_DF`; only with replies in chunks.
    SEND_DF = 7;
    /// `NBD_FLAG_CAN_MULTI_CONN`: a flush on one connection covers writes of all.
    CAN_MULTI_CONN = 8;
    /// `NBD_FLAG_SEND_RESIZE` (experimental, not served).
    SEND_RESIZE = 9;
    /// `NBD_FLAG_SEND_CACHE`: `NBD_CMD_CACHE` is served.
    SEND_CACHE = 10;
    /// `NBD_FLAG_SEND_FAST_ZERO`: `NBD_CMD_FLAG_FAST_ZERO` is obeyed.
    SEND_FAST_ZERO = 11;
    /// `NBD_FLAG_BLOCK_STATUS_PAYLOAD` (extended headers): not offered by this server.
    BLOCK_STATUS_PAYLOAD = 12;
}

bit_set! {
    /// Command flags, section "Command flags": 16 bits in each request.
    CommandFlags(u16);
    /// `NBD_CMD_FLAG_FUA`: reply only when the data is on stable storage.
    FUA = 0;
    /// `NBD_CMD_FLAG_NO_HOLE`: write zeroes without deallocating.
    NO_HOLE = 1;
    /// `NBD_CMD_FLAG_DF`: at most one content chunk.
    DF = 2;
    /// `NBD_CMD_FLAG_REQ_ONE`: one extent only.
    REQ_ONE = 3;
    /// `NBD_CMD_FLAG_FAST_ZERO`: fail rather than zero slowly.
    FAST_ZERO = 4;
    /// `NBD_CMD_FLAG_PAYLOAD_LEN` (extended headers): the length is that of a payload.
    PAYLOAD_LEN = 5;
}

/// Option types, section "Option types".
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`
    pub const LIST: u32 = 3;
    /// `NBD_OPT_PEEK_EXPORT` (withdrawn)
    pub const PEEK_EXPORT: u32 = 4;
    /// `NBD_OPT_STARTTLS`
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Option reply types, section "Option reply types". Errors have bit 31 set.
pub mod option_reply {
    /// `NBD_REP_ACK`
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// `NBD_REP_ERR_UNSUP`
    pub const ERR_UNSUP: u32 = ERROR_BIT + 1;
    /// `NBD_REP_ERR_POLICY`
    pub const ERR_POLICY: u32 = ERROR_BIT + 2;
    /// `NBD_REP_ERR_INVALID`
    pub const ERR_INVALID: u32 = ERROR_BIT + 3;
    /// `NBD_REP_ERR_PLATFORM`
    pub const ERR_PLATFORM: u32 = ERROR_BIT + 4;
    /// `NBD_REP_ERR_TLS_REQD`
    pub const ERR_TLS_REQD: u32 = ERROR_BIT + 5;
    /// `NBD_REP_ERR_UNKNOWN`
    pub const ERR_UNKNOWN: u32 = ERROR_BIT + 6;
    /// `NBD_REP_ERR_SHUTDOWN`
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT + 7;
    /// `NBD_REP_ERR_BLOCK_SIZE_REQD`
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT + 8;
    /// `NBD_REP_ERR_TOO_BIG`
    pub const ERR_TOO_BIG: u32 = ERROR_BIT + 9;
    /// `NBD_REP_ERR_EXT_HEADER_REQD` (extended headers)
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT + 10;
}

/// Information types, section "Option reply types", `NBD_REP_INFO`.
pub mod info {
    /// `NBD_INFO_EXPORT`
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`
    pub const BLOCK_SIZE: u16 = 3;
}

/// Chunk types, section "Structured reply types". Errors have bit 15 set.
pub mod chunk {
    /// `NBD_REPLY_FLAG_DONE`, section "Structured reply flags": the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1;
    /// `NBD_REPLY_TYPE_NONE`
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_OFFSET_HOLE`
    pub const OFFSET_HOLE: u16 = 2;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT` (extended headers)
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// `NBD_REPLY_TYPE_ERROR`
    pub const ERROR: u16 = (1 << 15) + 1;
    /// `NBD_REPLY_TYPE_ERROR_OFFSET`
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Metadata contexts, section "The `base:` metadata namespace".
pub mod context {
    /// The namespace the protocol itself defines, with its colon.
    pub const BASE: &str = "base:";
    /// The one context served: which extents are allocated.
    pub const ALLOCATION: &str = "base:allocation";
    /// The context ID of [`ALLOCATION`].
    pub const ALLOCATION_ID: u32 = 1;
    /// The namespace of QEMU, with its colon (the document "QEMU NBD protocol support").
    pub const QEMU: &str = "qemu:";
    /// What has changed since the snapshot whose name follows.
    pub const BITMAP: &str = "qemu:dirty-bitmap:";
    /// The context ID of a [`BITMAP`]: one is selected at a time.
    pub const BITMAP_ID: u32 = 2;
    /// State of an extent of a [`BITMAP`], `NBD_STATE_DIRTY`: it has changed. It has the bit of
    /// [`ExtentState::HOLE`](super::ExtentState::HOLE).
    pub const DIRTY: super::ExtentState = super::ExtentState(1);
}

bit_set! {
    /// State of an extent in `base:allocation`, section "`base:allocation` metadata context".
    ExtentState(u32);
    /// `NBD_STATE_HOLE`: no space is allocated.
    HOLE = 0;
    /// `NBD_STATE_ZERO`: reads as zeroes.
    ZERO = 1;
}

/// Request types, section "Request types".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read,
    /// `NBD_CMD_WRITE`
    Write,
    /// `NBD_CMD_DISC`
    Disconnect,
    /// `NBD_CMD_FLUSH`
    Flush,
    /// `NBD_CMD_TRIM`
    Trim,
    /// `NBD_CMD_CACHE`
    Cache,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`
    BlockStatus,
    /// A type this server does not support, such as `NBD_CMD_RESIZE` (8).
    Unknown(u16),
}

impl Command {
    /// The command for the number on the wire.
    #[must_use]
    pub const fn from_wire(number: u16) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            other => Self::Unknown(other),
        }
    }

    /// The number on the wire.
    #[must_use]
    pub const fn to_wire(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
            Self::Unknown(other) => other,
        }
    }
}

/// Errors a reply may carry, section "Error values".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// `NBD_EPERM`: a write to a read-only export.
    Perm = 1,
    /// `NBD_EIO`
    Io = 5,
    /// `NBD_ENOMEM`: the protocol recommends to avoid it.
    NoMem = 12,
    /// `NBD_EINVAL`
    Inval = 22,
    /// `NBD_ENOSPC`: also a write past the end.
    NoSpc = 28,
    /// `NBD_EOVERFLOW`: a read that is longer than the maximum reply.
    Overflow = 75,
    /// `NBD_ENOTSUP`: only for a write-zeroes with `NBD_CMD_FLAG_FAST_ZERO`.
    NotSup = 95,
    /// `NBD_ESHUTDOWN`
    Shutdown = 108,
}

impl Errno {
    /// The number on the wire, never 0.
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// The error to report for a Linux error number from a store.
    ///
    /// `EDQUOT` and `EFBIG` become `NBD_ENOSPC` as the protocol requires. `EOPNOTSUPP` and `EOVERFLOW`
    /// become `NBD_EINVAL`, since the protocol reserves the errors of the same names for specific cases.
    /// An error without counterpart becomes `NBD_EIO`.
    #[must_use]
    pub const fn from_linux(code: i32) -> Self {
        match code {
            // EPERM, EACCES, EROFS
            1 | 13 | 30 => Self::Perm,
            // ENOMEM
            12 => Self::NoMem,
            // EINVAL, EOVERFLOW, EOPNOTSUPP
            22 | 75 | 95 => Self::Inval,
            // EFBIG, ENOSPC, EDQUOT
            27 | 28 | 122 => Self::NoSpc,
            // ESHUTDOWN
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

/// The format of headers and replies on a connection; negotiated in the handshake and constant afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplyStyle {
    /// Compact requests, simple replies: nothing was negotiated.
    #[default]
    Simple,
    /// Compact requests, replies with a payload in structured chunks
    /// (`NBD_OPT_STRUCTURED_REPLY`).
    Structured,
    /// Extended requests, every reply in extended chunks (`NBD_OPT_EXTENDED_HEADERS`).
    Extended,
}

impl ReplyStyle {
    /// Whether a reply with a payload is sent in chunks.
    #[must_use]
    pub const fn is_chunked(self) -> bool {
        !matches!(self, Self::Simple)
    }

    /// Bytes in a request header.
    #[must_use]
    pub const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_LEN,
            Self::Extended => EXTENDED_REQUEST_LEN,
        }
    }
}

/// Parses numbers and byte strings from the front of a slice; `None` when too few bytes remain.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// From the front of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether no bytes remain.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    /// The next 16 bits.
    #[inline]
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    #[inline]
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    #[inline]
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its 32-bit length.
    pub fn counted(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        self.bytes(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magic_numbers_spell_their_words() {
        assert_eq!(&magic::INIT.to_be_bytes(), b"NBDMAGIC");
        assert_eq!(&magic::OPTION.to_be_bytes(), b"IHAVEOPT");
        assert_eq!(magic::OPTION_REPLY, 0x3e889045565a9);
        assert_eq!(magic::REQUEST, 0x25609513);
        assert_eq!(magic::SIMPLE_REPLY, 0x67446698);
        assert_eq!(magic::STRUCTURED_REPLY, 0x668e33ef);
        assert_eq!(magic::EXTENDED_REQUEST, 0x21e41c71);
        assert_eq!(magic::EXTENDED_REPLY, 0x6e8a278c);
    }

    #[test]
    fn commands_keep_their_number() {
        for number in 0..=u16::MAX {
            assert_eq!(Command::from_wire(number).to_wire(), number);
        }
        assert_eq!(Command::from_wire(8), Command::Unknown(8));
    }

    #[test]
    fn store_errors_become_errors_the_protocol_allows() {
        for (linux, wire) in [(1, 1), (5, 5), (12, 12), (22, 22), (28, 28), (108, 108)] {
            assert_eq!(Errno::from_linux(linux).to_wire(), wire);
        }
        assert_eq!(Errno::from_linux(122), Errno::NoSpc, "EDQUOT");
        assert_eq!(Errno::from_linux(27), Errno::NoSpc, "EFBIG");
        assert_eq!(Errno::from_linux(95), Errno::Inval, "ENOTSUP is for fast zeroes only");
        assert_eq!(Errno::from_linux(75), Errno::Inval, "EOVERFLOW is for long reads only");
        assert_eq!(Errno::from_linux(-1), Errno::Io);
        assert_eq!(Errno::from_linux(i32::MAX), Errno::Io);
    }

    #[test]
    fn a_reader_never_reads_past_the_end() {
        let mut reader = Reader::new(&[0, 0, 0, 9, b'x']);
        assert_eq!(reader.counted(), None);
        let mut reader = Reader::new(&[0, 0, 0, 1, b'x', 7]);
        assert_eq!(reader.counted(), Some(&b"x"[..]));
        assert_eq!(reader.u16(), None);
        assert!(!reader.is_empty());
    }
}
