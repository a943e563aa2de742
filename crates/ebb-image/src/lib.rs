//! The format of a *delta*: the store that holds what an overlay volume has written above its base.
//!
//! A delta is a header, a block map and the data. A block of the volume is at a fixed place in the delta
//! ([`Layout`]), so that a write needs no allocation and a sparse file holds what was written and little more. The map has one
//! bit per block: whether the delta holds the block, or a layer below does. A block of zeroes is held like any other; its
//! space may be deallocated.
//!
//! | place | what |
//! |---|---|
//! | 0 and 4 KiB | the header ([`DeltaHeader`]), in two slots |
//! | 64 KiB | the map: for each map page ([`map_page`]) two slots of 4 KiB |
//! | a multiple of 1 MiB | the data, block after block |
//!
//! # Invariants
//! - No I/O: this crate encodes, decodes and checks. Every field that is read is checked before it is used.
//! - Header and map pages are written to the slot that does not hold the newest stable copy. A torn or lost write leaves
//!   that copy, which its checksum proves; of two valid copies the one with the higher number is the newer one.
//! - A bit is written only after its block is stable, and a flush succeeds only after the bit is stable
//!   ([`PendingBlocks`]).

mod header;
mod layout;
pub mod map_page;
mod pending;
mod slots;

pub use header::{
    DeltaHeader, HEADER_BYTES, HeaderError, Parent, is_shown, is_snapshot_name, shown_text,
};
pub use layout::{BLOCK, BLOCKS_PER_PAGE, HEADER_SLOTS, Layout, LayoutError, MAP_START, PAGE};
pub use pending::{BlockRun, PendingBlocks};
pub use slots::{MapCopy, MapSlot, header_in_slot};
