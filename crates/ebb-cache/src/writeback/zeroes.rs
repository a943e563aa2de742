//! Write-zeroes requests that bypass memory: recorded, and repeated after a failed flush.
//!
//! While they are repeated, their pages count as under writeback: writes that bypass memory wait for these
//! pages, and data that becomes dirty meanwhile is written afterwards. While pages are held, this does not
//! wait for in-flight writes.

use ebb_block::{BlockError, BlockStore, Io, ZeroFlags};

use super::frames::YieldCounter;
use crate::inflight::Wakers;
use crate::pages::{FRAME, FRAME_PAGES, PAGE, ZEROES, each, index, parts, runs, touched};
use crate::read::InflightWait;
use crate::shard::{SHARDS, ZeroedRange, join, shard_of};
use crate::stats::Mode;
use crate::volume::{StoreCache, VolumeCache};

/// Frames that are zeroed at a time.
const AT_ONCE: usize = 64;

/// Pages that are being zeroed; dropping it ends that.
struct HeldZeroes<'a> {
    volume: &'a VolumeCache,
    frames: Vec<(u64, u64, u16)>,
}

impl Drop for HeldZeroes<'_> {
    fn drop(&mut self) {
        for &(frame, id, _) in &self.frames {
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(shard_of(frame));
            shard.inflight.end_clean(id, &mut wakers);
        }
    }
}

impl HeldZeroes<'_> {
    /// Byte ranges, merged.
    fn ranges(&self) -> Vec<(u64, u64)> {
        let size = self.volume.size();
        let mut out: Vec<(u64, u64)> = Vec::new();
        for &(frame, _, pages) in &self.frames {
            for (start, count) in runs(pages) {
                let offset = (frame * FRAME + start as u64 * PAGE).min(size);
                let end = (frame * FRAME + (start + count) as u64 * PAGE).min(size);
                match out.last_mut() {
                    Some(last) if last.1 == offset => last.1 = end,
                    _ => out.push((offset, end)),
                }
            }
        }
        out
    }
}

impl StoreCache {
    /// A byte range as the part before its whole pages, these, and the part after them.
    pub(crate) fn divide(&self, offset: u64, length: u64) -> [std::ops::Range<u64>; 3] {
        let (whole, end) = (self.whole(offset, length), offset + length);
        let first = (whole.start * PAGE).min(end);
        let last = (whole.end * PAGE).clamp(first, end);
        [offset..first, first..last, last..end]
    }

    /// Zeroes part of a page in memory, so that the page can be written again after a loss. False
    /// if it has no room.
    pub(crate) async fn zero_in_memory(&self, io: &Io, range: std::ops::Range<u64>) -> bool {
        for part in parts(range.start, index(range.end - range.start)) {
            let Some(zeroes) = ZEROES.get(part.range()) else { return false };
            if !self.dirty_part(io, &part, zeroes).await.unwrap_or(false) {
                return false;
            }
        }
        true
    }

    /// A write that bypassed memory has failed: pages that are zeroes on the store, and not stable,
    /// may have any content there.
    pub(crate) fn note_failed(&self, offset: u64, length: u64) {
        if self.mode() != Mode::Writeback {
            return;
        }
        for part in parts(offset, index(length)) {
            let mut shard = self.lock(shard_of(part.frame));
            if shard.keep_zeroed(part.frame, part.touched()) != 0 {
                self.writeback.doubts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
        }
    }

    /// The whole pages of a byte range; the short last page of a volume counts as whole.
    pub(crate) fn whole(&self, offset: u64, length: u64) -> std::ops::Range<u64> {
        let (start, end) = (offset.div_ceil(PAGE), offset + length);
        let end = if end == self.size() { end.div_ceil(PAGE) } else { end / PAGE };
        start..end.max(start)
    }

    /// Write `id` zeroed a range bypassing memory; `losses` is the loss counter from before it began. False
    /// if that may be lost already.
    pub(crate) fn note_zeroes(
        &self,
        (id, losses): (u64, u64),
        (offset, length): (u64, u64),
        may_unmap: bool,
    ) -> bool {
        let (all, whole) = (touched(offset, length), self.whole(offset, length));
        for number in each(VolumeCache::shards_of(&all)) {
            let mut shard = self.lock(number);
            if self.store.losses() != losses {
                return false;
            }
            if shard.inflight.has_clash(id) {
                // The order in which the store did two overlapping writes is unknown.
                shard.loose = true;
                shard.note_written_over(number, &all, &all);
                continue;
            }
            // Part of a page, for which there was no room in memory, cannot be zeroed alone.
            let parts = [all.start, all.end.saturating_sub(1)];
            let own = |page: &u64| shard_of(page / FRAME_PAGES) == number;
            shard.loose |= parts.iter().any(|page| own(page) && !whole.contains(page));
            shard.note_zeroed(ZeroedRange { pages: whole.clone(), may_unmap });
        }
        true
    }

    /// A write that bypassed memory is stable: its pages are not zeroed again.
    pub(crate) fn note_stable(&self, offset: u64, length: u64) {
        if self.mode() != Mode::Writeback {
            return;
        }
        let (all, whole) = (touched(offset, length), self.whole(offset, length));
        for number in each(VolumeCache::shards_of(&all)) {
            self.lock(number).note_written_over(number, &all, &whole);
        }
    }

    /// Repeats all zeroes that may be lost.
    pub(super) async fn repeat_zeroes(&self, io: &Io) -> Result<(), BlockError> {
        let mut all = Vec::new();
        (0..SHARDS).for_each(|shard| self.lock(shard).zeroed_ranges(&mut all));
        join(&mut all);
        let mut yields = YieldCounter::default();
        for ZeroedRange { pages, may_unmap } in all {
            let flags = ZeroFlags { may_unmap, fast_only: false };
            let end = pages.end.min(self.size().div_ceil(PAGE)).div_ceil(FRAME_PAGES);
            let mut frame = pages.start / FRAME_PAGES;
            while frame < end {
                let (held, busy) = self.hold_zeroed(&mut frame, end);
                self.refuse_if_lost()?;
                for (offset, end) in held.ranges() {
                    if end > offset {
                        self.store.write_zeroes(io, offset, end - offset, flags).await?;
                    }
                }
                drop(held);
                if let Some((shard, fill)) = busy {
                    InflightWait { volume: self, shard, fill, waiter: None }.await;
                }
                yields.done(io, AT_ONCE).await;
            }
        }
        Ok(())
    }

    /// Takes the recorded pages of the next frames, up to a frame with an in-flight write, which the caller
    /// waits for.
    fn hold_zeroed(&self, frame: &mut u64, end: u64) -> (HeldZeroes<'_>, Option<(usize, u64)>) {
        let mut held = HeldZeroes { volume: self, frames: Vec::with_capacity(AT_ONCE) };
        for _ in 0..AT_ONCE {
            if *frame >= end {
                break;
            }
            let number = shard_of(*frame);
            let mut shard = self.lock(number);
            let listed = shard.zeroed(*frame);
            let (write, stuck) = shard.inflight.write_in_flight(*frame, listed);
            // A write whose future was dropped may still reach the store, before or after this.
            shard.loose |= stuck;
            if let Some(write) = write {
                return (held, Some((number, write)));
            }
            let pages = listed & !shard.unstable(*frame) & !shard.unsaved(*frame);
            if pages != 0 {
                let id = shard.inflight.begin_clean(*frame, pages);
                held.frames.push((*frame, id, pages));
            }
            *frame += 1;
        }
        (held, None)
    }
}
