//! A virtio-blk request out of a descriptor chain.
//!
//! Source: "Virtual I/O Device (VIRTIO) Version 1.2", 5.2.6. The header, the data and the status may be in descriptors of
//! any layout (2.7.4): the header is the first 16 bytes that the device reads, the status the last byte that it writes.

use ebb_vhost_proto::{BlkRequestHeader, BlkRequestKind, SECTOR_BYTES};

use crate::chain::Chain;
use crate::memory::GuestMemory;

/// Bytes of a request's header.
pub(crate) const HEADER_BYTES: usize = BlkRequestHeader::BYTES;

/// A request, as far as its header and the lengths of its chain say; the ranges are checked by the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlkRequest {
    pub(crate) action: BlkAction,
    /// Bytes of the chain that the device may write, the status included; more than 0.
    pub(crate) writable: u64,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlkAction {
    Read {
        offset: u64,
        bytes: u64,
    },
    Write {
        offset: u64,
        bytes: u64,
    },
    Flush,
    GetId,
    /// Ranges are in the chain's data.
    Discard {
        bytes: u64,
    },
    WriteZeroes {
        bytes: u64,
    },
    Unsupported,
    /// A length that is not a multiple of a sector, or an offset beyond all sizes.
    Invalid,
}

/// Parses the request in a chain. `None` if the chain has no room for a status, or its header cannot be read: the guest
/// can be told nothing but that the chain was used.
#[inline]
pub(crate) fn parse(memory: &GuestMemory, chain: &Chain) -> Option<BlkRequest> {
    let (readable, writable) = (chain.readable_bytes(), chain.writable_bytes());
    let to_device = readable.checked_sub(HEADER_BYTES as u64)?;
    let from_device = writable.checked_sub(1)?;
    let mut header = [0; HEADER_BYTES];
    if !memory.copy_out(&chain.readable, 0, &mut header) {
        return None;
    }
    let BlkRequestHeader { kind, sector } = BlkRequestHeader::from_bytes(&header);
    let transfer = |bytes: u64, action: fn(u64, u64) -> BlkAction| match sector
        .checked_mul(SECTOR_BYTES)
    {
        Some(offset) if bytes.is_multiple_of(SECTOR_BYTES) && bytes > 0 => action(offset, bytes),
        _ => BlkAction::Invalid,
    };
    let action = match kind {
        BlkRequestKind::Read => {
            transfer(from_device, |offset, bytes| BlkAction::Read { offset, bytes })
        }
        BlkRequestKind::Write => {
            transfer(to_device, |offset, bytes| BlkAction::Write { offset, bytes })
        }
        BlkRequestKind::Flush => BlkAction::Flush,
        BlkRequestKind::GetId => BlkAction::GetId,
        BlkRequestKind::Discard => BlkAction::Discard { bytes: to_device },
        BlkRequestKind::WriteZeroes => BlkAction::WriteZeroes { bytes: to_device },
        _ => BlkAction::Unsupported,
    };
    Some(BlkRequest { action, writable })
}
