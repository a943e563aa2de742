//! The formats of a virtio-blk device: its config space, and what requests begin and end with.
//!
//! Source: virtio 1.2, sections 5.2.4 "Device configuration layout" and 5.2.6 "Device Operation". All numbers are
//! little-endian, also those of a legacy device, since hosts are.

use crate::wire::{NumberReader, NumberWriter};

/// Bytes of a sector, the unit of capacity, positions and counts, whatever the block size is.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of the config space that can be asked for: `VHOST_USER_MAX_CONFIG_SIZE`. What is behind the fields is zero.
pub const CONFIG_SPACE_BYTES: usize = 256;
/// Where in the config space `writeback` is, the one byte that a driver may write: 1 for a write cache, 0 for none.
pub const WRITEBACK_OFFSET: u32 = 32;
/// Bytes of the answer to [`BlkRequestKind::GetId`]: a name, filled up with zeroes.
pub const ID_BYTES: usize = 20;

/// The legacy geometry, `virtio_blk_geometry`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkGeometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads.
    pub heads: u8,
    /// Sectors of a track.
    pub sectors: u8,
}

/// Block sizes of the storage, `virtio_blk_topology`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkTopology {
    /// Logical blocks in a physical block, as a power of two.
    pub physical_block_exp: u8,
    /// The first aligned logical block.
    pub alignment_offset: u8,
    /// The least I/O that is efficient, in logical blocks.
    pub min_io_size: u16,
    /// The best I/O, in logical blocks.
    pub opt_io_size: u32,
}

/// The fields of the config space, `virtio_blk_config`. A field counts only if its feature was negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// The size in sectors of 512 bytes.
    pub capacity: u64,
    /// Most bytes in a segment.
    pub size_max: u32,
    /// Most segments in a request.
    pub seg_max: u32,
    /// The legacy geometry.
    pub geometry: BlkGeometry,
    /// The logical block size, in bytes.
    pub blk_size: u32,
    /// Block sizes of the storage.
    pub topology: BlkTopology,
    /// Whether there is a write cache, so that a write is durable only after a flush.
    pub writeback: bool,
    /// Request queues.
    pub num_queues: u16,
    /// Most sectors in a segment of a discard.
    pub max_discard_sectors: u32,
    /// Most segments in a discard.
    pub max_discard_seg: u32,
    /// The alignment of discards, in sectors.
    pub discard_sector_alignment: u32,
    /// Most sectors in a segment of a write of zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Most segments in a write of zeroes.
    pub max_write_zeroes_seg: u32,
    /// Whether a write of zeroes with [`RangeSegment::UNMAP`] may deallocate.
    pub write_zeroes_may_unmap: bool,
    /// Most sectors in a segment of a secure erase.
    pub max_secure_erase_sectors: u32,
    /// Most segments in a secure erase.
    pub max_secure_erase_seg: u32,
    /// The alignment of secure erases, in sectors.
    pub secure_erase_sector_alignment: u32,
}

impl BlkConfig {
    /// The config space with these fields.
    #[must_use]
    pub fn space(&self) -> ConfigSpace {
        let BlkGeometry { cylinders, heads, sectors } = self.geometry;
        let BlkTopology { physical_block_exp, alignment_offset, min_io_size, opt_io_size } =
            self.topology;
        let fields = NumberWriter::new().u64(self.capacity).u32(self.size_max).u32(self.seg_max);
        let fields = fields.u16(cylinders).u8(heads).u8(sectors).u32(self.blk_size);
        let fields = fields.u8(physical_block_exp).u8(alignment_offset);
        let fields = fields.u16(min_io_size).u32(opt_io_size);
        let fields = fields.u8(self.writeback.into()).u8(0).u16(self.num_queues);
        let fields = fields.u32(self.max_discard_sectors).u32(self.max_discard_seg);
        let fields = fields.u32(self.discard_sector_alignment);
        let fields = fields.u32(self.max_write_zeroes_sectors).u32(self.max_write_zeroes_seg);
        let fields = fields.u8(self.write_zeroes_may_unmap.into()).bytes(&[0; 3]);
        let fields = fields.u32(self.max_secure_erase_sectors).u32(self.max_secure_erase_seg);
        let (bytes, _) = fields.u32(self.secure_erase_sector_alignment).finish();
        ConfigSpace { bytes }
    }
}

/// The bytes of a config space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SPACE_BYTES],
}

impl ConfigSpace {
    /// `size` bytes from `offset` on; `None` if they do not end within [`CONFIG_SPACE_BYTES`].
    #[must_use]
    pub fn read(&self, offset: u32, size: u32) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(size).ok()?)?;
        self.bytes.get(start..end)
    }
}

/// What a request does, `VIRTIO_BLK_T_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlkRequestKind {
    /// `VIRTIO_BLK_T_IN`: a read.
    Read,
    /// `VIRTIO_BLK_T_OUT`: a write.
    Write,
    /// `VIRTIO_BLK_T_FLUSH`
    Flush,
    /// `VIRTIO_BLK_T_GET_ID`: the device's name, of [`ID_BYTES`].
    GetId,
    /// `VIRTIO_BLK_T_GET_LIFETIME`
    GetLifetime,
    /// `VIRTIO_BLK_T_DISCARD`
    Discard,
    /// `VIRTIO_BLK_T_WRITE_ZEROES`
    WriteZeroes,
    /// `VIRTIO_BLK_T_SECURE_ERASE`
    SecureErase,
    /// Another one, by its number.
    Unknown(u32),
}

impl BlkRequestKind {
    /// The kind for the number in a request.
    #[must_use]
    #[inline]
    pub const fn from_wire(number: u32) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            4 => Self::Flush,
            8 => Self::GetId,
            10 => Self::GetLifetime,
            11 => Self::Discard,
            13 => Self::WriteZeroes,
            14 => Self::SecureErase,
            other => Self::Unknown(other),
        }
    }

    /// The number in a request.
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::GetLifetime => 10,
            Self::Discard => 11,
            Self::WriteZeroes => 13,
            Self::SecureErase => 14,
            Self::Unknown(other) => other,
        }
    }
}

/// What a request begins with, `virtio_blk_outhdr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRequestHeader {
    /// What the request does.
    pub kind: BlkRequestKind,
    /// Where a read or a write begins, in sectors of 512 bytes. Not checked here.
    pub sector: u64,
}

impl BlkRequestHeader {
    /// Bytes of a header.
    pub const BYTES: usize = 16;

    /// Parses a header. The second number, a priority of legacy drivers, does not count.
    #[must_use]
    #[inline]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let mut reader = NumberReader::new(bytes);
        let kind = BlkRequestKind::from_wire(reader.u32().unwrap_or_default());
        let _priority = reader.u32();
        Self { kind, sector: reader.u64().unwrap_or_default() }
    }
}

/// A range of a discard, a write of zeroes or a secure erase, `virtio_blk_discard_write_zeroes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSegment {
    /// Where it begins, in sectors of 512 bytes. Not checked here.
    pub sector: u64,
    /// Sectors. Not checked here.
    pub count: u32,
    /// Bits, of which [`RangeSegment::UNMAP`] is known.
    pub flags: u32,
}

impl RangeSegment {
    /// Bytes of a segment.
    pub const BYTES: usize = 16;
    /// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`: the range may be deallocated. Only for writes of zeroes.
    pub const UNMAP: u32 = 1;

    /// Parses a segment.
    #[must_use]
    #[inline]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let mut reader = NumberReader::new(bytes);
        Self {
            sector: reader.u64().unwrap_or_default(),
            count: reader.u32().unwrap_or_default(),
            flags: reader.u32().unwrap_or_default(),
        }
    }
}

/// The last byte of a request that the device writes, `VIRTIO_BLK_S_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlkStatus {
    /// `VIRTIO_BLK_S_OK`
    Ok,
    /// `VIRTIO_BLK_S_IOERR`
    IoError,
    /// `VIRTIO_BLK_S_UNSUPP`: the device does not support the request.
    Unsupported,
}

impl BlkStatus {
    /// The byte.
    #[must_use]
    #[inline]
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::IoError => 1,
            Self::Unsupported => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte of a field is its offset in the config space.
    #[test]
    fn fields_are_where_drivers_read_them() {
        let config = BlkConfig {
            capacity: 0x0706_0504_0302_0100,
            size_max: 0x0b0a_0908,
            seg_max: 0x0f0e_0d0c,
            geometry: BlkGeometry { cylinders: 0x1110, heads: 0x12, sectors: 0x13 },
            blk_size: 0x1716_1514,
            topology: BlkTopology {
                physical_block_exp: 0x18,
                alignment_offset: 0x19,
                min_io_size: 0x1b1a,
                opt_io_size: 0x1f1e_1d1c,
            },
            writeback: true,
            num_queues: 0x2322,
            max_discard_sectors: 0x2726_2524,
            max_discard_seg: 0x2b2a_2928,
            discard_sector_alignment: 0x2f2e_2d2c,
            max_write_zeroes_sectors: 0x3332_3130,
            max_write_zeroes_seg: 0x3736_3534,
            write_zeroes_may_unmap: true,
            max_secure_erase_sectors: 0x3f3e_3d3c,
            max_secure_erase_seg: 0x4342_4140,
            secure_erase_sector_alignment: 0x4746_4544,
        };
        let space = config.space();
        let bytes = space.read(0, 256).unwrap();
        for (offset, byte) in (0u8..=255).zip(bytes.iter().copied()) {
            let expected = match offset {
                32 | 56 => 1,
                33 | 57..=59 | 72.. => 0,
                _ => offset,
            };
            assert_eq!(byte, expected, "at {offset}");
        }
        assert_eq!(space.read(WRITEBACK_OFFSET, 1), Some(&[1][..]));
        let space = BlkConfig::default().space();
        assert_eq!(space.read(0, 256), Some(&[0; 256][..]));
    }

    #[test]
    fn every_part_of_the_config_space_can_be_read_and_nothing_else() {
        let space = BlkConfig { capacity: u64::MAX, ..BlkConfig::default() }.space();
        let whole = space.read(0, 256).unwrap().to_vec();
        for offset in 0..300_u32 {
            for size in 0..300_u32 {
                let expected = whole.get(offset as usize..(offset + size) as usize);
                assert_eq!(space.read(offset, size), expected, "{size} bytes at {offset}");
            }
        }
        for (offset, size) in [(u32::MAX, 1), (1, u32::MAX), (u32::MAX, u32::MAX)] {
            assert_eq!(space.read(offset, size), None);
        }
    }

    #[test]
    fn requests_have_the_numbers_of_virtio() {
        for number in (0..1000).chain([0x8000_0000, u32::MAX]) {
            assert_eq!(BlkRequestKind::from_wire(number).to_wire(), number);
        }
        let known = (0..64).map(BlkRequestKind::from_wire);
        let known = known.filter(|kind| !matches!(kind, BlkRequestKind::Unknown(_)));
        let numbers: Vec<u32> = known.map(BlkRequestKind::to_wire).collect();
        assert_eq!(numbers, [0, 1, 4, 8, 10, 11, 13, 14]);
        let header = [13, 0, 0, 0, 9, 9, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1];
        let parsed = BlkRequestHeader::from_bytes(&header);
        assert_eq!(parsed.kind, BlkRequestKind::WriteZeroes);
        assert_eq!(parsed.sector, 0x0102_0304_0506_0708);
        let all = [BlkStatus::Ok, BlkStatus::IoError, BlkStatus::Unsupported];
        assert_eq!(all.map(BlkStatus::to_wire), [0, 1, 2]);
    }

    #[test]
    fn a_segment_is_parsed() {
        let bytes = [8, 7, 6, 5, 4, 3, 2, 1, 4, 3, 2, 1, 1, 0, 0, 0x80];
        let segment = RangeSegment::from_bytes(&bytes);
        assert_eq!((segment.sector, segment.count), (0x0102_0304_0506_0708, 0x0102_0304));
        assert_eq!(segment.flags, 0x8000_0000 | RangeSegment::UNMAP);
    }
}
