//! What is offered to frontends and guests: features, the config space.

use ebb_vhost_proto::{BlkConfig, BlkTopology, ConfigSpace, ProtocolFeatures, VirtioFeatures};
use ebb_volume::Volume;

/// Most queues of a device: a frontend refuses to start with more processors than that, and an unused queue costs nothing.
pub(crate) const QUEUES_MAX: u16 = 256;
/// Data segments of a request, as offered.
const SEGMENTS_MAX: u32 = 126;
/// Ranges of one discard or request to write zeroes.
pub(crate) const RANGES_MAX: usize = 32;
/// Sectors of a range that is discarded or zeroed: 1 GiB.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// The alignment of discards, sectors.
pub(crate) const DISCARD_ALIGNMENT: u32 = 8;
/// The size of blocks that suit the cache and most stores: 4 KiB, as a power of two of sectors.
const PHYSICAL_BLOCK: u8 = 3;

/// The features offered for a volume.
pub(crate) fn offered(volume: &Volume) -> VirtioFeatures {
    let writable = !volume.read_only();
    VirtioFeatures::VERSION_1
        .with(VirtioFeatures::PROTOCOL_FEATURES)
        .with(VirtioFeatures::LOG_ALL)
        .with(VirtioFeatures::RING_INDIRECT_DESC)
        .with(VirtioFeatures::RING_EVENT_IDX)
        .with(VirtioFeatures::RING_PACKED)
        .with(VirtioFeatures::BLK_SEG_MAX)
        .with(VirtioFeatures::BLK_BLOCK_SIZE)
        .with(VirtioFeatures::BLK_TOPOLOGY)
        .with(VirtioFeatures::BLK_MULTI_QUEUE)
        .with(VirtioFeatures::BLK_FLUSH)
        .with_if(!writable, VirtioFeatures::BLK_READ_ONLY)
        .with_if(writable, VirtioFeatures::BLK_CONFIG_WCE)
        .with_if(writable, VirtioFeatures::BLK_WRITE_ZEROES)
        .with_if(writable && volume.capabilities().discard, VirtioFeatures::BLK_DISCARD)
}

/// The protocol's features that are offered.
pub(crate) fn offered_protocol() -> ProtocolFeatures {
    ProtocolFeatures::MQ
        .with(ProtocolFeatures::LOG_SHMFD)
        .with(ProtocolFeatures::REPLY_ACK)
        .with(ProtocolFeatures::BACKEND_REQ)
        .with(ProtocolFeatures::CONFIG)
        .with(ProtocolFeatures::INFLIGHT_SHMFD)
        .with(ProtocolFeatures::RESET_DEVICE)
        .with(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
}

/// The config space of a volume of `size` bytes; `volatile_cache`: the guest is to send flushes.
pub(crate) fn config_space(volume: &Volume, size: u64, volatile_cache: bool) -> ConfigSpace {
    let ranges = u32::try_from(RANGES_MAX).unwrap_or(1);
    let discard = volume.capabilities().discard;
    let config = BlkConfig {
        capacity: size / 512,
        seg_max: SEGMENTS_MAX,
        blk_size: 512,
        topology: BlkTopology {
            physical_block_exp: PHYSICAL_BLOCK,
            min_io_size: 8,
            ..BlkTopology::default()
        },
        writeback: volatile_cache,
        num_queues: QUEUES_MAX,
        max_discard_sectors: if discard { RANGE_SECTORS_MAX } else { 0 },
        max_discard_seg: if discard { ranges } else { 0 },
        discard_sector_alignment: if discard { DISCARD_ALIGNMENT } else { 0 },
        max_write_zeroes_sectors: RANGE_SECTORS_MAX,
        max_write_zeroes_seg: ranges,
        write_zeroes_may_unmap: true,
        ..BlkConfig::default()
    };
    config.space()
}
