//! Where header, map and data of a delta are.

/// Bytes of a block: what one bit of the map stands for.
pub const BLOCK: u64 = 4096;
/// Bytes of a map page and of a header.
pub const PAGE: u64 = 4096;
/// Blocks whose bits a map page holds: what its header leaves, 126 MiB of the volume.
pub const BLOCKS_PER_PAGE: u64 = (PAGE - MAP_HEADER) * 8;
/// Bytes of a map page before its bits.
pub(crate) const MAP_HEADER: u64 = 64;
/// The offsets of the two slots of the header.
pub const HEADER_SLOTS: [u64; 2] = [0, PAGE];

/// Where the map begins.
const MAP_START: u64 = 64 << 10;
/// What the data begins at a multiple of.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// The largest volume: its map has half a million pages.
const LARGEST: u64 = 64 << 40;

/// Why there is no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The size of the volume.
    #[error(
        "a volume of {0} bytes cannot be an overlay: its size is a multiple of 512, up to 64 TiB"
    )]
    Size(u64),
}

/// Where the parts of the delta of a volume are. Bytes, unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u64,
}

impl Layout {
    /// For a volume of `size` bytes.
    ///
    /// # Errors
    /// [`LayoutError`]: the size is 0, above 64 TiB, or not a multiple of 512.
    pub fn new(size: u64) -> Result<Layout, LayoutError> {
        if size == 0 || size > LARGEST || !size.is_multiple_of(512) {
            return Err(LayoutError::Size(size));
        }
        Ok(Layout { size })
    }

    /// The size of the volume.
    #[must_use]
    pub fn size(self) -> u64 {
        self.size
    }

    /// Blocks of the volume; the last one may be a part.
    #[must_use]
    pub fn blocks(self) -> u64 {
        self.size.div_ceil(BLOCK)
    }

    /// Map pages: at most 2^20.
    #[must_use]
    pub fn map_pages(self) -> u32 {
        u32::try_from(self.blocks().div_ceil(BLOCKS_PER_PAGE)).unwrap_or(u32::MAX)
    }

    /// The offset of a slot (0 or 1) of a map page.
    #[must_use]
    pub fn map_slot(self, page: u32, slot: usize) -> u64 {
        MAP_START + (u64::from(page) * 2 + (slot as u64 & 1)) * PAGE
    }

    /// The offset of the volume's first byte.
    #[must_use]
    pub fn data_start(self) -> u64 {
        self.map_slot(self.map_pages(), 0).next_multiple_of(DATA_ALIGNMENT)
    }

    /// The size that the delta's store must have.
    #[must_use]
    pub fn store_size(self) -> u64 {
        self.data_start() + self.blocks() * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_do_not_overlap() {
        for size in [512, 4096, 126 << 20, (126 << 20) + 512, 1 << 40, LARGEST] {
            let layout = Layout::new(size).unwrap_or_else(|error| panic!("{error}"));
            let pages = layout.map_pages();
            assert!(layout.map_slot(0, 0) >= HEADER_SLOTS[1] + PAGE);
            assert!(layout.map_slot(pages - 1, 1) + PAGE <= layout.data_start());
            assert!(u64::from(pages) * BLOCKS_PER_PAGE >= layout.blocks());
            assert!(layout.store_size() >= layout.data_start() + size);
            assert!(layout.data_start().is_multiple_of(DATA_ALIGNMENT));
        }
        let tera = Layout::new(1 << 40).unwrap_or_else(|error| panic!("{error}"));
        assert!(tera.data_start() < 67 << 20, "the map of 1 TiB takes {}", tera.data_start());
        for wrong in [0, 513, LARGEST + 512, u64::MAX] {
            assert_eq!(Layout::new(wrong), Err(LayoutError::Size(wrong)));
        }
    }
}
