//! Blocks that an overlay has begun and whose map is not saved, when its disk loses them.

use super::{End, Entry, NEVER, Oracle};

/// Sectors of a block.
const BLOCK: usize = 8;

impl Oracle {
    /// Notes a loss of an overlay, as [`Oracle::lost`], before a flush has reported it. In each
    /// block with changes since the last flush all sectors may read as zeroes, since a write to
    /// part of a block copies the rest; with `filled` this holds for all blocks.
    pub(crate) fn lost_blocks(&mut self, filled: bool) {
        self.lost();
        self.doubt = self.loss;
        let hole = Entry {
            begun: self.loss,
            end: End::Unknown(self.loss),
            hidden: NEVER,
            stable: false,
            hole: true,
            ..Entry::ZEROES
        };
        let saved = self.flushed.max(self.life);
        let blocks = self.sectors.chunks_mut(BLOCK);
        for block in blocks.filter(|block| filled || has_changes(block, saved)) {
            for sector in block {
                if sector.is_empty() {
                    sector.push(Entry::ZEROES);
                }
                sector.retain(|entry| !entry.hole);
                sector.push(hole);
            }
        }
    }

    /// Notes that a flush has failed for a loss: blocks that an overlay has begun since the last
    /// successful flush may be lost, and read as before.
    pub(crate) fn lost_knowingly(&mut self) {
        self.lost();
        let now = self.loss;
        for entry in self.sectors.iter_mut().flatten().filter(|entry| entry.hole) {
            entry.hidden = entry.hidden.min(now);
        }
    }

    /// Forgets all holes: the volume was opened again, and no earlier read is in flight.
    pub(super) fn forget_holes(&mut self) {
        self.sectors.iter_mut().for_each(|sector| sector.retain(|entry| !entry.hole));
    }

    /// Forgets holes in blocks without changes after `begun`, when a successful flush was
    /// submitted.
    pub(super) fn forget_saved_holes(&mut self, begun: u64) {
        let now = self.now();
        for block in self.sectors.chunks_mut(BLOCK).filter(|block| !has_changes(block, begun)) {
            for entry in block.iter_mut().flatten().filter(|entry| entry.hole) {
                entry.hidden = entry.hidden.min(now);
            }
        }
    }
}

/// Returns true if a block has changes that ended later than `saved`, or have not ended.
fn has_changes(block: &[Vec<Entry>], saved: u64) -> bool {
    block.iter().flatten().any(|entry| !entry.hole && entry.over() > saved)
}
