//! Discards, and requests to write zeroes: the ranges in the data of a request.
//!
//! Source: "Virtual I/O Device (VIRTIO) Version 1.2", 5.2.6. Ranges that are longer or more than what is offered are refused.
//! `discard_sector_alignment` is a hint, by which Linux splits long discards, but short ones need not be aligned: of a
//! discard the whole blocks are discarded, and the content of the rest stays, which is permitted.
//!
//! Invariant: all ranges are checked before the first one is changed.

use ebb_vhost_proto::{BlkStatus, RangeSegment, SECTOR_BYTES};
use ebb_volume::{Operation, ZeroFlags};

use crate::disk_shared::add;
use crate::features::{DISCARD_ALIGNMENT, RANGE_SECTORS_MAX, RANGES_MAX};
use crate::queue::DiskQueue;
use crate::request::HEADER_BYTES;
use crate::request_task::{ChainTask, Job, copied};

/// Bytes of the blocks that are discarded as a whole.
const BLOCK: u64 = DISCARD_ALIGNMENT as u64 * SECTOR_BYTES;

/// The whole blocks of a range within a volume: the first byte and the length, which may be 0.
fn whole_blocks(offset: u64, length: u64) -> (u64, u64) {
    // Neither the end nor the next multiple is beyond the size of a volume by more than a block.
    let (start, end) = (offset.next_multiple_of(BLOCK), (offset + length) / BLOCK * BLOCK);
    (start.min(offset + length), end.saturating_sub(start))
}

impl DiskQueue {
    /// Discards the ranges in the chain's data, or writes zeroes over them.
    pub(crate) async fn change_ranges(
        &self,
        task: &ChainTask,
        job: &Job,
        bytes: u64,
        zeroes: bool,
    ) -> Result<(), BlkStatus> {
        add(&self.disk.counters.discards, 1);
        if self.disk.is_broken() {
            return Err(BlkStatus::IoError);
        }
        let mut data = [0; RANGES_MAX * RangeSegment::BYTES];
        let wanted = usize::try_from(bytes).ok().and_then(|bytes| data.get_mut(..bytes));
        let Some(wanted) = wanted.filter(|data| data.len().is_multiple_of(RangeSegment::BYTES))
        else {
            return Err(BlkStatus::IoError);
        };
        if wanted.is_empty() {
            return Err(BlkStatus::IoError);
        }
        {
            let chain = task.scratch().chain.borrow();
            copied(job.memory.table().copy_out(&chain.readable, HEADER_BYTES, wanted))?;
        }
        let ranges =
            || wanted.as_chunks::<{ RangeSegment::BYTES }>().0.iter().map(RangeSegment::from_bytes);
        // All are checked before the first one is changed.
        for range in ranges() {
            let known = if zeroes { RangeSegment::UNMAP } else { 0 };
            if range.flags & !known != 0 {
                return Err(BlkStatus::Unsupported);
            }
            if range.count > RANGE_SECTORS_MAX {
                return Err(BlkStatus::IoError);
            }
            let offset = range.sector.checked_mul(SECTOR_BYTES).ok_or(BlkStatus::IoError)?;
            self.check_range(offset, u64::from(range.count) * SECTOR_BYTES)?;
        }
        let operation = if zeroes { Operation::WriteZeroes } else { Operation::Discard };
        self.note_queued(task, operation);
        let (volume, stable) = (&self.disk.volume, self.disk.writes_through());
        for range in ranges() {
            let offset = range.sector * SECTOR_BYTES;
            let length = u64::from(range.count) * SECTOR_BYTES;
            let result = match zeroes {
                true => {
                    let may_unmap = range.flags & RangeSegment::UNMAP != 0;
                    let flags = ZeroFlags { may_unmap, fast_only: false };
                    volume.write_zeroes(&self.io, offset, length, flags, stable).await
                }
                false => {
                    let (offset, length) = whole_blocks(offset, length);
                    volume.discard(&self.io, offset, length, stable).await
                }
            };
            self.note_loss(&result);
            self.status_of(result)?;
            self.note_unstable(stable);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discard_is_cut_to_whole_blocks() {
        for ((offset, length), expected) in [
            ((0, 4096), (0, 4096)),
            ((512, 4096), (4096, 0)),
            ((512, 8192), (4096, 4096)),
            ((4096, 8192 + 512), (4096, 8192)),
            ((512, 512), (1024, 0)),
            ((0, 0), (0, 0)),
            ((3584, 512), (4096, 0)),
        ] {
            assert_eq!(whole_blocks(offset, length), expected, "{length} at {offset}");
        }
    }
}
