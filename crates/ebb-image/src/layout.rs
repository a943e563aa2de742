//! Where header, map and data of a delta are.

use std::borrow::Cow;

use ebb_advice::Advice;

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
pub const MAP_START: u64 = 64 << 10;
/// What the data begins at a multiple of.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// The largest volume: its map has half a million pages.
const LARGEST: u64 = 64 << 40;
/// A new delta has room for the map of a volume so many times as large, so that it can grow: the data stays where it is. The
/// room takes a thousandth of the volume, in a sparse file nothing.
const GROWTH: u64 = 16;

/// Why there is no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The size of the volume.
    #[error(
        "a volume of {0} bytes cannot be an overlay: its size is a multiple of 512, up to 64 TiB"
    )]
    Size(u64),
    /// The map pages in a header.
    #[error(
        "a block map with room for {0} pages is too small for the volume, or larger than that of any"
    )]
    Room(u32),
    /// The map has no room for a larger volume.
    #[error("the block map has room for a volume of {most} bytes")]
    Full {
        /// The largest volume, bytes.
        most: u64,
    },
}

impl Advice for LayoutError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            LayoutError::Size(_) | LayoutError::Room(_) => None,
            LayoutError::Full { .. } => {
                Some("make a new overlay of the size that you need, and copy the disk".into())
            }
        }
    }
}

/// Where the parts of the delta of a volume are. Bytes, unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    size: u64,
    /// Map pages that there is room for: the data is behind them.
    room: u32,
}

/// The map pages of a volume of `size` bytes: at most 2^20.
fn pages_of(size: u64) -> u32 {
    let blocks = size.div_ceil(BLOCK);
    u32::try_from(blocks.div_ceil(BLOCKS_PER_PAGE)).unwrap_or(u32::MAX)
}

impl Layout {
    /// For a new delta of a volume of `size` bytes, with room to grow to 16 times that.
    ///
    /// # Errors
    /// [`LayoutError`]: the size is 0, above 64 TiB, or not a multiple of 512.
    pub fn new(size: u64) -> Result<Layout, LayoutError> {
        let most = pages_of(LARGEST);
        let room = pages_of(size.saturating_mul(GROWTH).min(LARGEST)).clamp(1, most);
        // What is left before the next multiple is room, too.
        let start = Layout { size, room }.data_start();
        let room = u32::try_from((start - MAP_START) / (2 * PAGE)).unwrap_or(most).min(most);
        Layout::with_room(size, room)
    }

    /// For a volume of `size` bytes in a delta with room for `room` map pages.
    ///
    /// # Errors
    /// [`LayoutError`]: as those of [`Layout::new`], or the map is larger than that, or the room larger than any volume needs.
    pub fn with_room(size: u64, room: u32) -> Result<Layout, LayoutError> {
        if size == 0 || size > LARGEST || !size.is_multiple_of(512) {
            return Err(LayoutError::Size(size));
        }
        if room < pages_of(size) || room > pages_of(LARGEST) {
            return Err(LayoutError::Room(room));
        }
        Ok(Layout { size, room })
    }

    /// The same delta when its volume has another size: map and data are where they were.
    ///
    /// # Errors
    /// [`LayoutError`]: there is no volume of this size, or the map has no room for it.
    pub fn resized(self, size: u64) -> Result<Layout, LayoutError> {
        Layout::with_room(size, self.room).map_err(|error| match error {
            LayoutError::Room(_) => LayoutError::Full { most: self.largest() },
            error => error,
        })
    }

    /// The largest size that its volume can get.
    #[must_use]
    pub fn largest(self) -> u64 {
        (u64::from(self.room) * BLOCKS_PER_PAGE * BLOCK).min(LARGEST)
    }

    /// Map pages that there is room for.
    #[must_use]
    pub fn room(self) -> u32 {
        self.room
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
        pages_of(self.size)
    }

    /// The offset of a slot (0 or 1) of a map page.
    #[must_use]
    pub fn map_slot(self, page: u32, slot: usize) -> u64 {
        MAP_START + (u64::from(page) * 2 + (slot as u64 & 1)) * PAGE
    }

    /// The offset of the volume's first byte.
    #[must_use]
    pub fn data_start(self) -> u64 {
        self.map_slot(self.room, 0).next_multiple_of(DATA_ALIGNMENT)
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
        assert!(tera.data_start() < 1100 << 20, "the map of 1 TiB takes {}", tera.data_start());
        for wrong in [0, 513, LARGEST + 512, u64::MAX] {
            assert_eq!(Layout::new(wrong), Err(LayoutError::Size(wrong)));
        }
    }
    #[test]
    fn a_volume_grows_where_its_data_is() {
        for size in [512, 1 << 30, (1 << 40) + 512, LARGEST] {
            let layout = Layout::new(size).unwrap_or_else(|error| panic!("{error}"));
            let most = layout.largest();
            assert!(most >= size.saturating_mul(GROWTH).min(LARGEST), "{size}: {most}");
            for to in [most, size, 512] {
                let resized = layout.resized(to).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(resized.data_start(), layout.data_start());
                assert!(resized.map_slot(resized.map_pages() - 1, 1) + PAGE <= layout.data_start());
                assert_eq!(Layout::with_room(to, layout.room()), Ok(resized));
            }
            let beyond = if most == LARGEST {
                LayoutError::Size(most + 512)
            } else {
                LayoutError::Full { most }
            };
            assert_eq!(layout.resized(most + 512), Err(beyond));
        }
        assert_eq!(Layout::with_room(1 << 40, 8), Err(LayoutError::Room(8)));
        assert_eq!(Layout::with_room(512, u32::MAX), Err(LayoutError::Room(u32::MAX)));
    }
}
