//! Notes the blocks that the top layer holds, unless their data may be lost already.
//!
//! # Invariants
//! - A write during which the store has lost data fails, and its blocks are not noted: no later
//!   flush would report that their data may be lost.
//! - A layer that may have lost data puts those above it in doubt: a write of a part of a block has
//!   copied the rest from it.
//!   So no bit of a layer is saved before the frozen layers below it are stable.

use ebb_block::{BlockError, ErrorKind, Io, Operation};

use super::touched_blocks;
use crate::delta::Delta;
use crate::lower_layers::LayerStack;
use crate::stats::Mode;

/// Bytes of memory for blocks whose bits are not stable: a write that exceeds this has them saved.
const PENDING_BYTES: usize = 512 << 10;

/// The losses that were known when a write began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KnownLosses {
    of_store: u64,
    in_doubt: bool,
}

impl LayerStack<'_> {
    /// The losses that are known now.
    pub(super) fn known_losses(self) -> KnownLosses {
        // A writeback cache writes again what its store has lost.
        let of_store = match self.top.mode() {
            Mode::Writeback => 0,
            Mode::None | Mode::Writethrough => self.top.store().losses(),
        };
        KnownLosses { of_store, in_doubt: self.lower.delta(0).is_some_and(|own| own.is_in_doubt()) }
    }

    /// Notes that the top layer holds the blocks of a range, which were written since `before`.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`]: data was lost meanwhile.
    pub(super) async fn note_held(
        self,
        io: &Io,
        offset: u64,
        length: u64,
        before: KnownLosses,
    ) -> Result<(), BlockError> {
        let blocks = touched_blocks(offset, length);
        let Some(delta) = self.lower.delta(0) else { return Ok(()) };
        if self.known_losses() != before {
            return Err(BlockError::new(ErrorKind::Lost, Operation::Write, offset, length));
        }
        if delta.note_held(blocks.start, blocks.end - blocks.start) > PENDING_BYTES {
            Box::pin(self.save_many(io, delta)).await;
        }
        Ok(())
    }

    /// Saves the blocks of the top layer because they are many. A failure is reported by the next
    /// flush.
    async fn save_many(self, io: &Io, top: &Delta) {
        match self.flush_frozen(io).await {
            Ok(()) => top.save_many(io, self.top).await,
            Err(error) => top.report_later(error),
        }
    }

    /// Makes the layers stable that were the top one until a snapshot. This comes before the layers
    /// above them, which may have copies of data that they have lost.
    pub(super) async fn flush_frozen(self, io: &Io) -> Result<(), BlockError> {
        for number in (1..=self.lower.layers.len()).rev() {
            let frozen = self.lower.delta(number).filter(|delta| delta.is_unflushed());
            let Some((frozen, store)) = frozen.zip(self.layer(number)) else { continue };
            if let Err(error) = frozen.flush_frozen(io, store).await {
                self.learn_losses_above(io, number).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Asks the stores of the layers above a frozen one, which could not be flushed, whether they
    /// have lost data, too: no flush reaches them, and reads would return what a store has in place
    /// of it.
    async fn learn_losses_above(self, io: &Io, number: usize) {
        for above in (0..number).rev() {
            let Some((delta, store)) = self.lower.delta(above).zip(self.layer(above)) else {
                continue;
            };
            if delta.has_pending() && store.mode() != Mode::Writeback {
                // The flush fails anyway.
                let _ = delta.flush_store(io, store).await;
            }
        }
    }
}
