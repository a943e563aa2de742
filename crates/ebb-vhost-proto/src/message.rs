//! Messages of a frontend: header, bodies, and what is wrong with one.

mod decode;

use self::decode::MessageBody;
use crate::features::{ProtocolFeatures, VirtioFeatures};
use crate::request::frontend_request_name;
use crate::wire::NumberReader;

/// Bytes in the header of a message.
pub const HEADER_BYTES: usize = 12;
/// Most file descriptors that a message may carry: one for each region of a `SET_MEM_TABLE`.
pub const MAX_DESCRIPTORS: usize = MAX_TABLE_REGIONS;
/// Most regions in a `SET_MEM_TABLE`. More of them come one at a time, in `ADD_MEM_REG`.
pub const MAX_TABLE_REGIONS: usize = 8;

/// Bytes of a region in a message.
const REGION_BYTES: usize = 32;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Why a message is refused.
///
/// The first three are about a header: the bytes that follow have no meaning, and the connection has to end. After the others
/// the next message can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The version in the header is not 1.
    #[error("a message has version {0} of the protocol, and only version 1 is known")]
    Version(u32),
    /// The header is that of a reply, and none is expected.
    #[error("a message of the frontend is marked as a reply")]
    UnexpectedReply,
    /// The body is longer than [`MAX_BODY`](crate::MAX_BODY).
    #[error("a message announces {0} bytes, which is more than any message has")]
    TooLong(u32),
    /// The size of the body is not that of the request.
    #[error("{} has {bytes} bytes, which is not its size", request_label(*.request))]
    Size {
        /// The request's number.
        request: u32,
        /// Bytes in the body.
        bytes: u32,
    },
    /// A number in the body is outside its range, or a reserved bit is set.
    #[error("{} has a value that is not allowed: {value:#x}", request_label(*.request))]
    Value {
        /// The request's number.
        request: u32,
        /// The value.
        value: u64,
    },
    /// File descriptors are missing.
    #[error(
        "{} came with {received} file descriptors, and needs {needed}",
        request_label(*.request)
    )]
    Descriptors {
        /// The request's number.
        request: u32,
        /// How many are needed.
        needed: usize,
        /// How many came.
        received: usize,
    },
}

fn request_label(request: u32) -> &'static str {
    frontend_request_name(request).unwrap_or("an unknown request")
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// The request's number, see [`request`].
    pub request: u32,
    /// Whether the frontend asks for an acknowledgement. It counts only after `REPLY_ACK` was negotiated.
    pub need_reply: bool,
    /// Bytes in the body.
    pub size: u32,
}

impl MessageHeader {
    /// Parses the header of a request. Unknown flags are ignored.
    ///
    /// # Errors
    /// If the version is unknown, or it is a reply. The size is checked by [`Assembler`](crate::Assembler).
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ProtocolError> {
        let mut reader = NumberReader::new(bytes);
        let mut next = || reader.u32().unwrap_or_default();
        let (request, flags, size) = (next(), next(), next());
        if flags & VERSION_MASK != VERSION {
            return Err(ProtocolError::Version(flags & VERSION_MASK));
        }
        if flags & REPLY != 0 {
            return Err(ProtocolError::UnexpectedReply);
        }
        Ok(Self { request, need_reply: flags & NEED_REPLY != 0, size })
    }
}

/// The flags of a reply, and of a request of the backend that needs no reply.
pub(crate) const REPLY_FLAGS: u32 = VERSION | REPLY;
pub(crate) const REQUEST_FLAGS: u32 = VERSION;

/// A region of a guest's memory, which a frontend shares by a file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// The guest physical address.
    pub guest_address: u64,
    /// Bytes. Nothing is checked here: zero, or a sum that overflows, may be received.
    pub bytes: u64,
    /// The address in the frontend's process.
    pub user_address: u64,
    /// Where in the file the region begins, in bytes.
    pub mmap_offset: u64,
}

impl MemoryRegion {
    fn read(reader: &mut NumberReader<'_>) -> Option<Self> {
        Some(Self {
            guest_address: reader.u64()?,
            bytes: reader.u64()?,
            user_address: reader.u64()?,
            mmap_offset: reader.u64()?,
        })
    }
}

/// The regions of a `SET_MEM_TABLE`: at most [`MAX_TABLE_REGIONS`], each with the descriptor at its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryTable<'a> {
    /// Whole regions.
    bytes: &'a [u8],
}

impl<'a> MemoryTable<'a> {
    /// How many regions there are.
    #[must_use]
    pub const fn len(self) -> usize {
        self.bytes.len() / REGION_BYTES
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.bytes.is_empty()
    }

    /// The regions, in the order of their descriptors.
    pub fn regions(self) -> impl Iterator<Item = MemoryRegion> + 'a {
        let mut reader = NumberReader::new(self.bytes);
        std::iter::from_fn(move || MemoryRegion::read(&mut reader))
    }
}

/// A queue's index and a number: its size, its base, or whether it is enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    /// The queue's index. Not checked here.
    pub index: u32,
    /// The number. Not checked here.
    pub number: u32,
}

/// Where a queue's rings are: addresses in the frontend's process, except `log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddress {
    /// The queue's index. Not checked here.
    pub index: u32,
    /// Bits, of which [`VringAddress::LOG`] is known.
    pub flags: u32,
    /// The descriptor table; the descriptor ring of a packed queue.
    pub descriptor: u64,
    /// The used ring; the device event suppression of a packed queue.
    pub used: u64,
    /// The available ring; the driver event suppression of a packed queue.
    pub available: u64,
    /// The guest physical address at which writes to the used ring are logged.
    pub log: u64,
}

impl VringAddress {
    /// `VHOST_VRING_F_LOG`: writes to the used ring are logged.
    pub const LOG: u32 = 1;
}

/// The body of `SET_VRING_KICK`, `SET_VRING_CALL` and `SET_VRING_ERR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFile {
    /// The queue's index, at most 255.
    pub index: u32,
    /// Whether a descriptor came with the message. Without one the queue is polled, or signals nothing.
    pub has_descriptor: bool,
}

/// A part of the device's config space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigRange {
    /// Its start, in bytes. Not checked here.
    pub offset: u32,
    /// Bytes. Not checked here.
    pub size: u32,
    /// 0, or [`ConfigRange::MIGRATION`].
    pub flags: u32,
}

impl ConfigRange {
    /// `VHOST_SET_CONFIG_TYPE_MIGRATION`: read-only fields may be written, on a migration's destination.
    pub const MIGRATION: u32 = 1;

    fn read(reader: &mut NumberReader<'_>) -> Option<Self> {
        Some(Self { offset: reader.u32()?, size: reader.u32()?, flags: reader.u32()? })
    }
}

/// The memory in which a backend notes requests in flight, for its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// Bytes of the area. Zero in `GET_INFLIGHT_FD`; zero in the reply means that there is none.
    pub mmap_size: u64,
    /// Where in the file the area begins, in bytes. Zero in `GET_INFLIGHT_FD`.
    pub mmap_offset: u64,
    /// How many queues it is for.
    pub queues: u16,
    /// Descriptors in each queue.
    pub queue_size: u16,
}

/// The memory in which writes to guest memory are logged: a bit for each page of 4096 bytes, from guest address 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    /// Bytes of the area. Not checked here.
    pub size: u64,
    /// Where in the file the area begins, in bytes. Not checked here.
    pub offset: u64,
}

/// A request of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontendMessage<'a> {
    /// `GET_FEATURES`
    GetFeatures,
    /// `SET_FEATURES`
    SetFeatures(VirtioFeatures),
    /// `SET_OWNER`
    SetOwner,
    /// `RESET_OWNER`: deprecated, to be ignored or to disable all queues.
    ResetOwner,
    /// `SET_MEM_TABLE`, with a descriptor for each region.
    SetMemTable(MemoryTable<'a>),
    /// `SET_LOG_BASE`: the area and its descriptor, or `None` if no memory was shared.
    SetLogBase(Option<LogArea>),
    /// `SET_LOG_FD`, with one descriptor.
    SetLogFd,
    /// `SET_VRING_NUM`: the number is the queue's size.
    SetVringNum(VringState),
    /// `SET_VRING_ADDR`
    SetVringAddr(VringAddress),
    /// `SET_VRING_BASE`: the number is the next available index; of a packed queue, available index and wrap counter in its
    /// low half, used ones in its high half.
    SetVringBase(VringState),
    /// `GET_VRING_BASE` of the queue with this index.
    GetVringBase(u32),
    /// `SET_VRING_KICK`, with at most one descriptor.
    SetVringKick(VringFile),
    /// `SET_VRING_CALL`, with at most one descriptor.
    SetVringCall(VringFile),
    /// `SET_VRING_ERR`, with at most one descriptor.
    SetVringErr(VringFile),
    /// `GET_PROTOCOL_FEATURES`
    GetProtocolFeatures,
    /// `SET_PROTOCOL_FEATURES`
    SetProtocolFeatures(ProtocolFeatures),
    /// `GET_QUEUE_NUM`
    GetQueueNum,
    /// `SET_VRING_ENABLE`
    SetVringEnable {
        /// The queue's index. Not checked here.
        index: u32,
        /// Whether it is enabled, or disabled.
        enabled: bool,
    },
    /// `SET_BACKEND_REQ_FD` (formerly `SET_SLAVE_REQ_FD`), with one descriptor.
    SetBackendReqFd,
    /// `GET_CONFIG`
    GetConfig(ConfigRange),
    /// `SET_CONFIG`: the bytes are as many as the range has.
    SetConfig(ConfigRange, &'a [u8]),
    /// `GET_INFLIGHT_FD`: queues and their size count.
    GetInflightFd(InflightArea),
    /// `SET_INFLIGHT_FD`, with one descriptor.
    SetInflightFd(InflightArea),
    /// `RESET_DEVICE`
    ResetDevice,
    /// `VRING_KICK` of the queue with this index, only after `INBAND_NOTIFICATIONS` was negotiated.
    VringKick(u32),
    /// `GET_MAX_MEM_SLOTS`
    GetMaxMemSlots,
    /// `ADD_MEM_REG`, with one descriptor.
    AddMemReg(MemoryRegion),
    /// `REM_MEM_REG`. Its `mmap_offset` does not count, and a descriptor that comes with it is surplus.
    RemMemReg(MemoryRegion),
    /// `SET_STATUS`: the device status of virtio.
    SetStatus(u8),
    /// `GET_STATUS`
    GetStatus,
    /// A request that no block device needs, or an unknown one, by its number. All its descriptors are surplus.
    Unsupported(u32),
}

impl<'a> FrontendMessage<'a> {
    /// Decodes a message that came with `descriptors` file descriptors.
    ///
    /// The first [`descriptors`](Self::descriptors) of them belong to the message. The caller closes the others, and all of
    /// them after an error.
    ///
    /// # Errors
    /// If the body does not have the size of the request, a value is not allowed, or descriptors are missing. The next
    /// message can be read nevertheless.
    pub fn decode(
        header: MessageHeader,
        body: &'a [u8],
        descriptors: usize,
    ) -> Result<Self, ProtocolError> {
        let message = MessageBody { request: header.request, bytes: body }.decode(descriptors)?;
        let needed = message.descriptors();
        if descriptors < needed {
            let request = header.request;
            return Err(ProtocolError::Descriptors { request, needed, received: descriptors });
        }
        Ok(message)
    }

    /// How many file descriptors belong to the message.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        match self {
            Self::SetMemTable(table) => table.len(),
            Self::SetLogBase(Some(_))
            | Self::SetLogFd
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::AddMemReg(_) => 1,
            Self::SetVringKick(file) | Self::SetVringCall(file) | Self::SetVringErr(file) => {
                usize::from(file.has_descriptor)
            }
            _ => 0,
        }
    }

    /// Whether the frontend waits for a reply in any case. Other requests are acknowledged if `REPLY_ACK` was negotiated and
    /// the request asks for it; these are not acknowledged in addition. An unsupported request counts among the others,
    /// since a frontend sends those that have a reply only after their feature was negotiated.
    #[must_use]
    pub const fn has_reply(&self, negotiated: ProtocolFeatures) -> bool {
        match self {
            Self::GetFeatures
            | Self::GetProtocolFeatures
            | Self::GetVringBase(_)
            | Self::GetQueueNum
            | Self::GetConfig(_)
            | Self::GetInflightFd(_)
            | Self::GetMaxMemSlots
            | Self::GetStatus => true,
            Self::SetLogBase(_) => negotiated.contains(ProtocolFeatures::LOG_SHMFD),
            _ => false,
        }
    }
}
