//! Blocks are noted as held by the top layer after a first write, unless their data may be lost
//! already.
//!
//! # Invariants
//! - If the store loses data during a first write, the write fails and its blocks are not noted:
//!   no later flush would report that loss.
//! - If a layer may have lost data, the layers above it are in doubt: a write to part of a block
//!   copied the rest of the block from below. So the bits of a layer are saved only after the
//!   frozen layers below it are stable.

use ebb_block::{BlockError, ErrorKind, Io, Operation};

use super::touched_blocks;
use crate::delta::Delta;
use crate::lower_layers::LayerStack;
use crate::stats::Mode;

/// The most memory for blocks whose bits are not stable, bytes. A write that exceeds it saves them.
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
        // A writeback cache writes data again that its store has lost.
        let of_store = match self.top.mode() {
            Mode::Writeback => 0,
            Mode::None | Mode::Writethrough => self.top.store().losses(),
        };
        KnownLosses { of_store, in_doubt: self.lower.delta(0).is_some_and(|own| own.is_in_doubt()) }
    }

    /// Notes that the top layer holds the blocks of a range, which were written since `before`.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if data was lost since `before`.
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

    /// Saves the bits of the top layer because there are many. The next flush reports a failure.
    async fn save_many(self, io: &Io, top: &Delta) {
        match self.flush_frozen(io).await {
            Ok(()) => top.save_many(io, self.top).await,
            Err(error) => top.report_later(error),
        }
    }

    /// Makes the frozen layers stable, each of which was the top layer until a snapshot. The layers
    /// above them come later: they may have copied data that a frozen layer has lost.
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

    /// Flushes the stores of the layers above a frozen layer that could not be flushed, to learn of
    /// their losses: no other flush reaches them, and reads would return other data than was
    /// written.
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
