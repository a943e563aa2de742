//! The vhost-user protocol, as a backend receives and answers it, and the formats of virtio-blk. No I/O.
//!
//! Sources: QEMU's `interop/vhost-user.rst` for messages, and virtio 1.2, section 5.2 "Block Device", for the config
//! space and requests. What the documents leave open follows the C structures of QEMU and libvhost-user.
//!
//! All numbers of vhost-user are in the byte order of the host, since both ends are on one machine. This code supports
//! little-endian hosts only. Those of virtio 1.x are little-endian everywhere.
//!
//! Invariants: nothing here allocates, and no bytes of a frontend or a guest lead to a panic or an unchecked sum.

#[cfg(not(target_endian = "little"))]
compile_error!(
    "vhost-user messages are in the host's byte order, and only little-endian hosts are supported"
);

mod assembler;
mod blk;
mod features;
mod message;
mod outgoing;
pub mod request;
mod wire;

pub use assembler::{Assembler, MAX_BODY};
pub use blk::{
    BlkConfig, BlkGeometry, BlkRequestHeader, BlkRequestKind, BlkStatus, BlkTopology,
    CONFIG_SPACE_BYTES, ConfigSpace, ID_BYTES, RangeSegment, SECTOR_BYTES, WRITEBACK_OFFSET,
};
pub use features::{ProtocolFeatures, VirtioFeatures};
pub use message::{
    ConfigRange, FrontendMessage, HEADER_BYTES, InflightArea, LogArea, MAX_DESCRIPTORS,
    MAX_TABLE_REGIONS, MemoryRegion, MemoryTable, MessageHeader, ProtocolError, VringAddress,
    VringFile, VringState,
};
pub use outgoing::OutgoingMessage;
