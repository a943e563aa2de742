//! Zeroes that went to the store past memory: noted, and made again after a failed flush.
//!
//! As long as they are made again their pages count as on their way to the store: changes of these pages past memory
//! wait, and what becomes dirty meanwhile is written afterwards. While any is held no change is waited for.

use std::sync::Arc;

use ebb_store::{BlockError, Io, Store, ZeroFlags};

use super::frames::Turns;
use crate::inflight::Wakers;
use crate::pages::{FRAME, FRAME_PAGES, PAGE, each, runs, touched};
use crate::read::Wait;
use crate::shard::{Zero, join};
use crate::stats::Mode;
use crate::volume::{SHARDS, VolumeCache};

/// Frames that are made zeroes at a time.
const AT_ONCE: usize = 64;

/// Pages that are being made zeroes; dropping it ends that.
struct Held<'a> {
    volume: &'a VolumeCache,
    frames: Vec<(u64, u64, u16)>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for &(frame, id, _) in &self.frames {
            let mut wakers = Wakers::default();
            let mut shard = self.volume.lock(VolumeCache::shard_of(frame));
            shard.flights.end_clean(id, &mut wakers);
        }
    }
}

impl Held<'_> {
    /// Byte ranges, joined.
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

impl VolumeCache {
    /// The pages of a byte range that are whole; the short last one of a volume is.
    fn whole(&self, offset: u64, length: u64) -> std::ops::Range<u64> {
        let (start, end) = (offset.div_ceil(PAGE), offset + length);
        let end = if end == self.size() { end.div_ceil(PAGE) } else { end / PAGE };
        start..end.max(start)
    }

    /// Change `id` has made a range zeroes past memory, while there were `losses` before it began. False if that may
    /// be lost already.
    pub(crate) fn note_zeroes(
        &self,
        store: &Store,
        (id, losses): (u64, u64),
        (offset, length): (u64, u64),
        may_unmap: bool,
    ) -> bool {
        let (all, whole) = (touched(offset, length), self.whole(offset, length));
        for number in each(VolumeCache::shards_of(&all)) {
            let mut shard = self.lock(number);
            if store.losses() != losses {
                return false;
            }
            // Which of two changes the store did last is not known. A part of a page is not made zeroes alone.
            let parts = [all.start, all.end.saturating_sub(1)];
            let own = |page: &u64| VolumeCache::shard_of(page / FRAME_PAGES) == number;
            let parted = parts.iter().any(|page| own(page) && !whole.contains(page));
            if parted || shard.flights.has_clash(id) {
                shard.loose = true;
            }
            shard.note_zeroed(Zero { pages: whole.clone(), may_unmap });
        }
        true
    }

    /// A write has gone past memory and is stable: what it has written is not made zeroes again.
    pub(crate) fn note_stable(&self, offset: u64, length: u64) {
        if self.mode() != Mode::Writeback {
            return;
        }
        let (all, whole) = (touched(offset, length), self.whole(offset, length));
        for number in each(VolumeCache::shards_of(&all)) {
            self.lock(number).note_written_over(number, &all, &whole);
        }
    }

    /// Makes all zeroes again that may be lost.
    pub(super) async fn zero_again(
        self: &Arc<Self>,
        io: &Io,
        store: &Store,
    ) -> Result<(), BlockError> {
        let mut all = Vec::new();
        (0..SHARDS).for_each(|shard| self.lock(shard).zeroed_ranges(&mut all));
        join(&mut all);
        let mut turns = Turns::default();
        for Zero { pages, may_unmap } in all {
            let flags = ZeroFlags { may_unmap, fast_only: false };
            let end = pages.end.min(self.size().div_ceil(PAGE)).div_ceil(FRAME_PAGES);
            let mut frame = pages.start / FRAME_PAGES;
            while frame < end {
                let (held, busy) = self.hold_zeroed(&mut frame, end);
                self.refuse_if_loose()?;
                for (offset, end) in held.ranges() {
                    if end > offset {
                        store.write_zeroes(io, offset, end - offset, flags).await?;
                    }
                }
                drop(held);
                if let Some((shard, fill)) = busy {
                    Wait { volume: self, shard, fill, waiter: None }.await;
                }
                turns.done(io, AT_ONCE).await;
            }
        }
        Ok(())
    }

    /// Takes listed pages of the next frames, up to one with a change under way, which is to be waited for.
    fn hold_zeroed(&self, frame: &mut u64, end: u64) -> (Held<'_>, Option<(usize, u64)>) {
        let mut held = Held { volume: self, frames: Vec::with_capacity(AT_ONCE) };
        for _ in 0..AT_ONCE {
            if *frame >= end {
                break;
            }
            let number = VolumeCache::shard_of(*frame);
            let mut shard = self.lock(number);
            let listed = shard.zeroed(*frame);
            let (change, stuck) = shard.flights.changed_by(*frame, listed);
            // A change whose request was dropped may still reach the store, before or after this.
            shard.loose |= stuck;
            if let Some(change) = change {
                return (held, Some((number, change)));
            }
            let pages = listed & !shard.unstable(*frame) & !shard.unsaved(*frame);
            if pages != 0 {
                let id = shard.flights.begin_clean(*frame, pages);
                held.frames.push((*frame, id, pages));
            }
            *frame += 1;
        }
        (held, None)
    }
}
